"""Runs with methods and models of a user's own: the same to the bit, and executed only if named."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from methods.test_your_own import METHOD
from torch import nn
from typer.testing import CliRunner

from fedala import run
from fedala.cells.running import _continue_config
from fedala.cli.app import app
from fedala.data import Dataset, federate, load, write_partition
from fedala.errors import UserError
from fedala.methods import catalogue, list_methods
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.own_code import fit_model

SOURCE = METHOD.replace("@register\n", "").replace('"fedsim"', '"mine"')
MODEL = """
from torch import nn

def make(classes, shape, hidden=6):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape.numel() if hasattr(shape, "numel") else 784, hidden),
        nn.ReLU(), nn.Linear(hidden, classes),
    )
"""
OPTIONS = {
    "clients": 3, "partition": "dir:0.5", "batch_size": 100, "device": "cpu",
    "checkpoint_every": 1, "model": "net.py:make",
}  # fmt: skip


@pytest.fixture
def files(own_code):
    (own_code / "mine.py").write_text(SOURCE)
    (own_code / "net.py").write_text(MODEL)
    return own_code


def results(folder):
    """Return the results of a run to the bit: its history without seconds, and its models."""
    rows = sorted(
        RunFolder(folder).rows("history.csv"), key=lambda row: (row["method"], row["round"])
    )
    models = {
        file.relative_to(folder): file.read_bytes()
        for file in folder.rglob("*.safetensors")
        if "models" in file.parts
    }
    return [{key: row[key] for key in row if key != "seconds"} for row in rows], models


def call(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments], prog_name="fedala")


def test_a_resumed_run_is_the_same_to_the_bit_and_needs_its_code_named(files):
    methods = {"method": "mine,fedavg", "imports": "mine.py", "set": {"mine.layers": 1}}
    run(**OPTIONS, **methods, rounds=3, out="whole")
    run(**OPTIONS, **methods, rounds=2, out="parts")
    assert RunFolder(Path("parts")).config().imports == "mine.py"
    call_again = r"fedala.run\(resume='parts', imports='mine.py', model='net.py:make'\)"
    for named in ({}, {"imports": "mine.py"}, {"model": "net.py:make"}):
        with pytest.raises(UserError, match=call_again):
            run(resume="parts", rounds=3, **named)
    command = "fedala run --resume parts --import mine.py --model net.py:make"
    assert f"use {command} if you trust it" in call("run", "--resume", "parts").stderr
    answer = call(*command.split()[1:], "--rounds", 3)
    assert answer.exit_code == 0, answer.output
    assert results(files / "parts") == results(files / "whole")
    [row] = RunFolder(Path("parts")).rows("resumed.csv")
    assert row["changed"] == "rounds: 2 → 3"


def test_other_code_is_noted_and_another_place_is_not_another_run(files):
    run(**OPTIONS, method="mine", imports=["mine.py"], rounds=1, out="one")
    versions = json.loads((files / "one" / "summary.json").read_text())["versions"]
    assert versions["method mine"].startswith("sha256:")
    assert versions["model"].startswith("sha256:")
    (files / "moved").mkdir()
    (files / "mine.py").rename(files / "moved" / "mine.py")
    (files / "net.py").write_text(MODEL + "# another line\n")
    del sys.modules["mine"]
    answer = call(
        "run", "--resume", "one", "--import", "moved/mine.py", "--model", "net.py:make",
        "--rounds", 2,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    assert "The run continues with another version (model: sha256:" in answer.stderr
    [row] = RunFolder(Path("one")).rows("resumed.csv")
    assert "imports: mine.py → moved/mine.py" in row["changed"]
    assert "model: sha256:" in row["changed"]
    assert "method mine" not in row["changed"]  # the same source


def test_a_run_folder_that_is_read_executes_nothing(files):
    """Report, resume and further methods: the code that a folder names is not executed."""
    run(**OPTIONS, method="mine", imports="mine.py", rounds=1, out="theirs")
    trap = "from pathlib import Path\nPath('executed').touch()\n"
    (files / "mine.py").write_text(trap)
    (files / "net.py").write_text(trap)
    for module in ("mine", "net"):
        del sys.modules[module]
    assert call("report", "theirs").exit_code == 0
    assert call("run", "--resume", "theirs").exit_code == 2
    assert call("run", "--resume", "theirs", "--rounds", 2).exit_code == 2
    assert call("run", "--resume", "theirs", "--method", "+fedavg", "--model", "cnn").exit_code == 2
    config = Config.from_values(Config.read(files / "theirs" / "config.toml"))
    options = SimpleNamespace(device="cpu", data_dir=None, imports=None)
    with pytest.raises(UserError, match="executed only if you name it"):
        _continue_config(config, options, 2, files / "theirs")  # as fedala paper run does
    assert not Path("executed").exists()
    assert call("run", "--import", "mine.py").exit_code == 2
    assert Path("executed").exists()  # the trap works


def test_own_methods_are_swept_and_added_and_all_includes_them(files):
    answer = call(
        "run", "--import", "mine.py", "--method", "mine", "--model", "net.py:make", "--rounds", 1,
        "--clients", 3, "--batch-size", 100, "--sweep", "mine.layers=1,2", "--out", "swept",
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    history = RunFolder(Path("swept")).history()
    assert list(history) == ["mine[mine.layers=1]", "mine[mine.layers=2]"]
    assert "mine" in list_methods()
    listed = call("methods", "--import", "mine.py,mine.py").stdout
    assert "mine.layers" in listed
    run(**OPTIONS, method="fedavg", rounds=1, out="avg")
    run(resume="avg", method="+mine", imports="mine.py", model="net.py:make")
    assert list(RunFolder(Path("avg")).history()) == ["fedavg", "mine"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"mine"', '"fedavg"'), "There is a method fedavg already"),
        (('"mine"', '"Mine"'), "FedSim has the name 'Mine': a name has lower-case letters"),
        (('"mine"', '"ala"'), "is not all or ala"),
        (("@dataclass(frozen=True)\n", ""), "FedSim lacks @dataclass"),
        (('    title = "FedSim"\n', ""), "FedSim lacks its title"),
        (
            ("layers: int = option(1, ", "layers: int\n    other: int = option(1, "),
            "layers needs a def",
        ),
        (("(Method)", ""), "mine.py has no method"),
    ],
)
def test_a_method_with_a_mistake_is_refused(files, change, says):
    (files / "mine.py").write_text(SOURCE.replace(*change))
    before = dict(catalogue())
    with pytest.raises(UserError) as error:
        run(method="mine", imports="mine.py")
    assert says in str(error.value)
    assert dict(catalogue()) == before


def test_a_model_gets_the_facts_of_the_data():
    data = Dataset("mine", torch.zeros(4, 3), torch.arange(4) % 2, 2)
    seen = {}

    def everything(dataset, classes, shape, other=7, vocabulary=9, *rest, **more):
        seen.update(locals())
        return nn.Linear(3, 2)

    fit_model(everything, data)()
    assert seen["dataset"] is data
    assert (seen["classes"], seen["shape"], seen["other"]) == (2, (3,), 7)
    assert seen["vocabulary"] == 9  # there are no texts, so it keeps its default
    with pytest.raises(UserError, match="takes a vocabulary, and mine has no texts"):
        fit_model(lambda vocabulary: nn.Linear(3, 2), data)
    with pytest.raises(UserError, match="takes width, and what it can get is classes, shape"):
        fit_model(lambda width: nn.Linear(3, 2), data)
    with pytest.raises(UserError, match=r"must return an nn\.Module, not int"):
        fit_model(lambda: 3, data)()


def test_a_named_model_is_the_model_that_python_would_be_given(files):
    named = run(**OPTIONS, method="fedavg", rounds=1)

    def make():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.ReLU(), nn.Linear(6, 10))

    given = run(**{**OPTIONS, "model": make}, method="fedavg", rounds=1)
    ours, theirs = (one.methods["fedavg"].models[0, None] for one in (named, given))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (named.config.model, given.config.model) == ("net.py:make", "own")


def test_lists_are_lists_in_a_config_file(tmp_path):
    (tmp_path / "my.toml").write_text(
        'method = ["fedala", "fedavg"]\nevaluate = ["trained", "global"]\naugment = ["flip"]\n'
        'class_weights = [1, 2.5]\nimports = ["a.py", "b"]\n'
        "normalize = [[0.4, 0.5, 0.6], [0.1, 0.2, 0.3]]\n"
    )
    config = Config.from_values(Config.read(tmp_path / "my.toml"))
    assert config.methods == ("fedala", "fedavg")
    assert (config.evaluate, config.augment) == ("trained,global", "flip")
    assert (config.class_weights, config.import_names) == ("1,2.5", ("a.py", "b"))
    assert config.normalize == "0.4,0.5,0.6/0.1,0.2,0.3"
    assert Config.from_values({"normalize": [0.1, 0.3]}).normalize == "0.1/0.3"
    for wrong in ([True], [["a"], {}], [None]):
        with pytest.raises(UserError, match="texts or numbers"):
            Config.from_values({"method": wrong})
    with pytest.raises(UserError, match="seeds must be a whole number"):
        Config.from_values({"seeds": [1, 2]})


def test_an_option_is_given_or_swept(files):
    with pytest.raises(UserError, match="lr is both given and swept"):
        run(lr=0.1, sweep={"lr": [0.1, 0.2]})
    Path("my.toml").write_text("[sweep]\nlr = [0.1, 0.2]\n")
    answer = call("run", "--config", "my.toml", "--lr", 0.3)
    assert (answer.exit_code, "lr is both given and swept" in answer.stderr) == (2, True)


AVERAGE = """
from dataclasses import dataclass
from fedala.methods import Method

@dataclass(frozen=True)
class Average(Method):
    name = "average"
    title = "Average"
    summary = "FedAvg"
"""


def test_a_method_says_whether_clients_have_models_of_their_own(own_code):
    """With few participants, FedAvg under another name scores like FedAvg, or is refused."""
    options = {**OPTIONS, "model": "mlp", "join_ratio": 0.4, "clients": 5, "rounds": 2}
    (own_code / "average.py").write_text(AVERAGE)
    with pytest.raises(UserError, match="has_personal_models = False"):
        run(method="average", imports="average.py", **options)
    run(method="average+ala", imports="average.py", **options)  # ALA keeps the clients' models
    (own_code / "average.py").write_text(AVERAGE + "    has_personal_models = False\n")
    result = run(method="average,fedavg", imports="average.py", **options)
    own, fedavg = (one.history for one in result.methods.values())
    assert [row.score for row in own] == [row.score for row in fedavg]


def test_every_hyperparameter_is_recorded_and_a_changed_default_is_said(own_code):
    (own_code / "mine.py").write_text(SOURCE)
    options = {**OPTIONS, "model": "mlp"}
    run(method="mine,ditto+ala,fedprox", imports="mine.py", rounds=1, out="run", **options)
    methods = json.loads(Path("run/summary.json").read_text())["methods"]
    assert methods["mine"]["hyperparameters"] == {"mine.layers": 1}
    assert methods["fedprox"]["hyperparameters"] == {"fedprox.mu": 0.001}
    assert methods["ditto+ala"]["hyperparameters"].keys() >= {"ditto.lam", "ala.eta", "ala.layers"}
    assert "mine: mine.layers = 1" in Path("run/report.html").read_text()
    (own_code / "mine.py").write_text(SOURCE.replace("option(1,", "option(2,"))
    run(resume="run", imports="mine.py", rounds=2)
    assert "mine.layers: 1 → 2" in Path("run/resumed.csv").read_text()


def test_data_may_move_and_must_not_change(own_code):
    """The data and the lists of clients lie elsewhere: the run continues to the bit."""
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(60, 4)).astype("f4"), "y": np.arange(60) % 3}
    np.savez("one.npz", **data)
    write_partition(federate(load("one.npz"), "iid", 2), "lists.json")
    options = {"model": "mlp", "partition": "lists.json", "batch_size": 10, "device": "cpu"}
    options |= {"method": "fedala", "checkpoint_every": 1, "dataset": "one.npz"}
    run(rounds=3, out="whole", **options)
    run(rounds=1, out="parts", **options)
    Path("one.npz").rename("two.npz")
    Path("lists.json").rename("other.json")
    answer = call("run", "--resume", "parts", "--rounds", "2")
    assert "is not there: if it has moved, name its new place with --dataset" in answer.stderr
    moved = ["--dataset", "two.npz", "--partition", "other.json"]
    assert call("run", "--resume", "parts", "--rounds", "2", *moved).exit_code == 0
    assert "dataset: one.npz → two.npz" in Path("parts/resumed.csv").read_text()
    assert call("run", "--resume", "parts", "--rounds", "3").exit_code == 0
    assert results(Path("parts")) == results(Path("whole"))
    data["x"][0, 0] += 1
    np.savez("three.npz", **data)
    answer = call("run", "--resume", "parts", "--rounds", "4", "--dataset", "three.npz")
    assert answer.exit_code == 2
    assert "belongs to a run with other data" in answer.stderr
    answer = call("run", "--resume", "parts", "--dataset", "digits")
    assert "would change dataset (two.npz → digits)" in answer.stderr
