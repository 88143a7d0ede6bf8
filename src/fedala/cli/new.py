"""`fedala new method`: a method of your own and its tests, to start from."""

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedala.cli.output import keep_lines, print_line
from fedala.errors import UserError
from fedala.io.files import write_folder
from fedala.methods import catalogue

app = typer.Typer(no_args_is_help=True, help="Write a method of your own to start from.")

METHOD = Template('''\
"""$title: authors. Title of the paper. Where and when it was published."""

from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Params, State, Task, align
from fedala.methods import Method, register
from fedala.options import option


@register
@dataclass(frozen=True)
class $title(Method):
    """A client starts from r + k·(w − r): the received model r, and its own last model w."""

    name = "$name"
    title = "$title"
    summary = "FedAvg that starts from a mixture of the global model and the client's own"
    # False for a variant of FedAvg: absent clients are then tested with the global model.
    has_personal_models = True
    lane_numbers = frozenset({"keep"})  # the points of a sweep over keep run side by side

    keep: float = option(0.5, "k: share of the client's own model", least=0, most=1)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}  # before its first round, a client's own model is the initial one

    # $name+ala replaces this function, so `keep` has no effect there. To refuse that, say why:
    # refuses_ala = "it replaces the mixture, which is all that $title is"
    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        initialized = dict(received.model)
        for name, own in state["local"].items():
            if own.is_floating_point():  # counters stay as they were received
                r = received.model[name]
                initialized[name] = r + align(self.keep, own) * (own - r)
        return initialized, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(trained), {"local": trained}
''')

TEST = Template('''\
"""$title: a value worked out by hand, lanes against one lane, resumed against undisturbed."""

import pytest
import torch
from fedala import run
from fedala.data import Dataset
from fedala.lanes import Message
from torch import nn

from $module import $title

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.arange(120) % 3
SAMPLES = torch.randn(120, 4, generator=GENERATOR) + LABELS.unsqueeze(1)
DATA = Dataset("made up", SAMPLES, LABELS, 3)
OPTIONS = {
    "method": "$name", "dataset": DATA, "partition": "dir:0.5", "clients": 5, "join_ratio": 0.6,
    "batch_size": 8, "lr": 0.1, "precision": "float64", "device": "cpu",
}  # fmt: skip


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_client_starts_between_the_received_model_and_its_own():
    """Two lanes with k = 0.25: 1 + 0.25·(3 − 1) = 1.5, and 2 + 0.25·(−2 − 2) = 1."""
    received = Message({"w": torch.tensor([[1.0], [2.0]]), "steps": torch.tensor([[7], [7]])})
    state = {"local": {"w": torch.tensor([[3.0], [-2.0]]), "steps": torch.tensor([[9], [9]])}}
    initialized, _ = $title(keep=0.25).initialize(None, received, state)
    assert initialized["w"].tolist() == [[1.5], [1.0]]
    assert initialized["steps"].tolist() == [[7], [7]]


def test_lanes_are_independent():
    """Clients side by side get the same models as one client after another."""
    together = run(**OPTIONS, model=make_model, rounds=3, seeds=2, lanes="all")
    one_by_one = run(**OPTIONS, model=make_model, rounds=3, seeds=2, lanes=1)
    models, expected = (one.methods["$name"].models for one in (together, one_by_one))
    assert models.keys() == expected.keys()
    for key, model in models.items():
        for name, value in model.items():
            assert (value - expected[key][name]).abs().max() < 1e-10


def interrupt(method, row):
    """Stop a run in its third round, as Ctrl-C does."""
    if row.round == 2:
        raise KeyboardInterrupt


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    """All that a client keeps is in its state, so a run continues as if it had never stopped."""
    options = {**OPTIONS, "model": make_model, "rounds": 4, "checkpoint_every": 1}
    whole = run(**options, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(**options, out=tmp_path / "parts", on_row=interrupt)
    rounds = []
    parts = run(
        resume=tmp_path / "parts", dataset=DATA, model=make_model,
        on_row=lambda method, row: rounds.append(row.round),
    )  # fmt: skip
    assert rounds == [2, 3, 4]  # it has not begun again
    losses = [[row.loss for row in one.methods["$name"].history] for one in (whole, parts)]
    assert losses[0] == losses[1]
    files = sorted((tmp_path / "whole" / "models").rglob("*.safetensors"))
    assert files
    for file in files:
        other = tmp_path / "parts" / file.relative_to(tmp_path / "whole")
        assert file.read_bytes() == other.read_bytes()
''')


@app.callback()
def new() -> None:
    """Write a method of your own to start from."""


@app.command(
    epilog=keep_lines("""Examples:
  fedala new method FedMine --out mine
  pytest mine
  fedala run --import mine/fedmine.py --method fedmine,fedmine+ala,fedavg""")
)
def method(
    *,
    name: Annotated[str, typer.Argument(help="its name, such as FedMine", metavar="NAME")],
    out: Annotated[
        Path, typer.Option(help="the folder to write to", metavar="DIR", show_default="here")
    ] = Path(),
) -> None:
    """Write a method with one hyperparameter, and tests of it that pass."""
    title, module = _make_names(name)
    words = {"title": title, "module": module, "name": module.replace("_", "-")}
    _check_name(name, words["name"], module)
    files = {out / f"{module}.py": METHOD, out / f"test_{module}.py": TEST}
    for path in files:
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} exists already: choose another --out or another name.")
    write_folder(out, {path.name: text.substitute(words).encode() for path, text in files.items()})
    path = next(iter(files))
    print_line(f"Written: {', '.join(map(str, files))}")
    print_line(f"Test it with pytest {out}; run it with")
    print_line(f"  fedala run --import {path} --method {words['name']},fedavg")


def _make_names(name: str) -> tuple[str, str]:
    """Return the class and the module of a method: `FedMine` and `fedmine`."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name):
        raise UserError(
            f"{name!r} is not a name for a method: use letters, digits and hyphens, as in FedMine."
        )
    parts = re.split("[-_]", name)
    is_lower = name == name.lower()
    title = "".join(part[:1].upper() + part[1:] for part in parts) if is_lower else "".join(parts)
    return title, "_".join(parts).lower()


def _check_name(given: str, name: str, module: str) -> None:
    if name in catalogue() or name in ("all", "ala"):
        raise UserError(f"There is a method {name} already: give yours another name than {given}.")
    if keyword.iskeyword(module) or importlib.util.find_spec(module):
        raise UserError(
            f"There is a Python module {module} already: give your method another name."
        )
