"""A refused command changes nothing, byte for byte: every refusal of the command line.

To add one, add a line to `REFUSALS`: the command, a part of its message, and a function that
prepares the folder.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from corrupt.judge import changed, snapshot
from corrupt.worlds import link_or_copy, mnist, must, stopping_after
from fuzz.bounded import Outcome, attempt
from small import Net

from fedala import run
from fedala.data import Dataset
from fedala.io import files
from fedala.options import flag_of
from fedala.runs.config import Config
from fedala.runs.resumable_options import CHANGEABLE

#: Abbreviations in the commands below.
SHORT = {
    "RUN": "run --dataset d.npz --clients 3 --partition iid --rounds 4 --method fedala "
    "--set fedala.max_epochs=2 --checkpoint-every 1 --device cpu",
    "PAPER": "paper run table2 --columns mnist-pathological --method fedavg --rounds 1 --seeds 1 "
    "--data-dir data --out out",
}

#: A model in a run folder.
MODEL = "models/fedala/seed-0/client-00001.safetensors"

Prepare = Callable[[Path], None]


def images(path: Path, pixel: int | None = None) -> None:
    """Write 240 images of 16×16 in four classes; `pixel` replaces one pixel of the first."""
    random = np.random.default_rng(0)
    y = np.arange(240) % 4
    x = (random.integers(0, 120, (240, 16, 16)) + y[:, None, None] * 30).astype(np.uint8)
    if pixel is not None:
        x[0, 0, 0] = pixel
    np.savez(path, x=x, y=y)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Make a folder with run folders of every kind, to be copied.

    f1 is finished, f2 has not kept its checkpoint, f3 never had one, and stopped has two. Every
    command is a fork of this process, so the imports here happen once.
    """
    for name in ("matplotlib.figure", "torch._dynamo", "fedala.flower.demo", "fedala.flower.new"):
        importlib.import_module(name)
    here = tmp_path_factory.mktemp("places") / "here"
    here.mkdir()
    images(here / "d.npz")
    images(here / "other.npz", pixel=255)
    must(here, words("RUN --out f1"))
    must(here, words("RUN --out f2 --no-keep-checkpoint"))
    must(here, words("RUN --out f3 --checkpoint-every 0"))
    must(here, words("RUN --out stopped"), stop_after=3, code=143)
    must(
        here,
        words(
            "run --dataset d.npz --clients 3 --partition iid --rounds 1 --method fedphp --out ahead"
        ),
    )
    mnist(here)
    must(here, words("PAPER"))
    random = np.random.default_rng(0)
    own = Dataset(
        "own", torch.from_numpy(random.normal(size=(40, 1, 6, 6))).float(), torch.arange(40) % 3, 3
    )
    run(
        dataset=own,
        model=Net,
        method="fedavg",
        rounds=1,
        clients=2,
        partition="iid",
        out=here / "own",
        device="cpu",
    )
    (here / "notes").mkdir()
    (here / "notes" / "diary.txt").write_text("mine\n")
    (here / "empty").mkdir()
    (here / "my.toml").write_text('lr = 0.1\nmethod = "fedavg"\n')
    (here / "marks.md").write_text("no marks here\n")
    return here


@pytest.fixture
def here(places, tmp_path):
    """Copy these folders, so that a test may damage them."""
    target = tmp_path / "here"
    shutil.copytree(places, target, copy_function=link_or_copy)
    return target


def words(text: str) -> list[str]:
    """Split a command as a shell does, with `RUN` and `PAPER` written out."""
    first, _, rest = text.partition(" ")
    return f"{SHORT.get(first, first)} {rest}".split()


def refused(here: Path, command: str, match: str = "") -> Outcome:
    """Check that a command ends with 2 and one sentence, and changes nothing in the folder."""
    before = snapshot(here)
    found = attempt(words(command), here)
    assert found.code == 2, found.says
    assert found.fault == ""
    assert match.lower() in found.says.lower()
    assert changed(before, snapshot(here)) == ""
    return found


def put(name: str, text: str) -> Prepare:
    """Write a file."""

    def prepare(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).unlink(missing_ok=True)
        (here / name).write_text(text)

    prepare.__name__ = f"with {name}"
    return prepare


def other_data(here: Path) -> None:
    os.replace(here / "other.npz", here / "d.npz")


def restore_data(here: Path, sound: bytes) -> None:
    """Put the data back in a new file: the old one may be a link to a file of other tests."""
    (here / "d.npz").unlink()
    (here / "d.npz").write_bytes(sound)


def fewer_samples(here: Path) -> None:
    with np.load(here / "data" / "mnist.npz") as found:
        x, y = found["x"][:200], found["y"][:200]
    (here / "data" / "mnist.npz").unlink()
    np.savez(here / "data" / "mnist.npz", x=x, y=y)


def no_data(here: Path) -> None:
    (here / "d.npz").unlink()


def link_to_f1(here: Path) -> None:
    (here / "link").symlink_to("f1")


def link_inside(here: Path) -> None:
    (here / "f1" / "history.csv").unlink()
    (here / "f1" / "history.csv").symlink_to("../f2/history.csv")


def short_manifests(here: Path) -> None:
    """Truncate both checkpoints of the stopped run."""
    manifests = sorted((here / "stopped" / "checkpoint" / "0").glob("*.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        manifest.write_bytes(manifest.read_bytes()[:-20])


def their_folder(name: str) -> Prepare:
    """Make a folder that no run has written, with a single file in it."""
    return put(name, "theirs\n")


def no_history(here: Path) -> None:
    (here / "f1" / "history.csv").unlink()


#: The options that cannot change when a run is resumed, each with another value. Methods and seeds
#: can be added, but not taken away.
OTHERS = {
    "method": "fedavg", "set": "fedala.eta=0.5", "dataset": "other.npz", "model": "resnet18",
    "partition": "dir:0.5", "partition_seed": "2", "clients": "4", "join_ratio": "0.5",
    "batch_size": "5", "lr": "0.1", "local_epochs": "2", "shuffle": None, "seeds": "0", "seed": "1",
    "eval_every": "2", "eval_clients": "joined", "evaluate": "trained", "validation": "0.1",
    "split": "pooled", "feature_shift": "rotate:90", "clients_by": "user", "label_column": "kind",
    "drop_columns": "a,b",
    "precision": "float64", "resize": "8", "normalize": "mnist", "augment": "flip",
    "loss": "cross_entropy", "label_smoothing": "0.1", "class_weights": "balanced",
    "optimizer": "adam", "momentum": "0.5", "nesterov": "", "weight_decay": "0.1",
    "beta2": "0.9", "clip": "1", "keep_optimizer": "", "schedule": "cosine", "warmup": "1",
    "decay": "0.5", "decay_every": "2", "local_steps": "3", "sweep": "lr=0.1,0.2", "trials": "3",
    "server_optimizer": "adam", "server_lr": "0.1", "server_momentum": "0.5",
    "server_beta2": "0.5", "server_tau": "0.1", "patience": "3",
    "pick_by": "loss",
    "holdout_clients": "0.4", "holdout_epochs": "0,2", "holdout_every": "2",
}  # fmt: skip
#: The options that can change, each with an invalid value.
WRONG = {
    "rounds": "0", "device": "tpu", "lanes": "0", "client_memory": "-1", "feature_memory": "much",
    "on_divergence": "hope", "imports": "nowhere.py", "record_weights": "-1", "metrics_every": "-1",
    "checkpoint_every": "-1",
}  # fmt: skip


def _flag(name: str, value: str | None) -> str:
    flag = flag_of(name)
    return f"--no-{flag[2:]}" if value is None else f"{flag} {value}".strip()


@dataclass(frozen=True)
class Refusal:
    command: str
    match: str
    """A part of the sentence."""
    prepare: Prepare | None = None

    def __str__(self) -> str:
        return f"{self.command} ({self.prepare.__name__})" if self.prepare else self.command


REFUSALS = [
    # run --resume
    *(Refusal(f"run --resume f1 {_flag(name, value)}", name) for name, value in OTHERS.items()),
    *(Refusal(f"run --resume f1 {_flag(name, value)}", name) for name, value in WRONG.items()),
    Refusal("RUN --out new --evaluate trained,best", "evaluate: there is no model 'best'"),
    Refusal("flower new app --evaluate global", "the initialised personal model only"),
    Refusal("flower new app --holdout-clients 0.2", "without detailed metrics or held-out clients"),
    Refusal("RUN --out new --holdout-clients 3", "at least one must take part"),
    Refusal("RUN --out new --holdout-clients half", "holdout_clients must be a share"),
    Refusal("RUN --out new --holdout-epochs 0,2", "no effect without holdout_clients"),
    # one of several GPUs; several processes
    Refusal("RUN --out new --device cuda:999", "CUDA device"),
    Refusal("run --resume stopped --device cuda:999", "CUDA device"),
    Refusal("RUN --out new --device cuda:01", "device must be one of auto, cpu, cuda and cuda:"),
    Refusal("PAPER --device cuda:999", "CUDA device"),
    Refusal("bench --quick --device cuda:999", "CUDA device"),
    Refusal("onboard f1 --data d.npz --device cuda:999", "CUDA device"),
    Refusal("RUN --out new --jobs 0", "--jobs"),
    Refusal("run --resume stopped --jobs -1", "--jobs"),
    # onboard
    Refusal("onboard nowhere --data d.npz", "nowhere"),
    Refusal("onboard f1 --data nowhere.npz", "nowhere.npz"),
    Refusal("onboard f1 --data d.npz --method ditto", "it has fedala"),
    Refusal("onboard f1 --data d.npz --number 2", "number must be at least 3"),
    Refusal("onboard f1 --data d.npz --out d.npz", "d.npz"),
    Refusal("onboard f1 --data d.npz --out no/m.safetensors", "there is no folder no"),
    Refusal("onboard own --data d.npz", "its own model"),
    Refusal("onboard f3 --data d.npz --out f3/digests.json", "digests.json"),
    Refusal("onboard f1 --data d.npz", "split.csv", put("f1/split.csv", "a,b\n1,2\n")),
    Refusal("run --resume f1 --seeds 2 --rounds 9", "then with the other"),
    Refusal("run --resume f1 --seeds 2", "", other_data),
    Refusal("run --resume f1 --seeds 2 --out f2", "exists"),
    Refusal("run --resume f1 --method +nonsense", "nonsense"),
    Refusal("run --resume f1 --method +fedavg --rounds 9", "then with the other"),
    Refusal("run --resume f1 --method +fedavg --set fedala.eta=0.5", "set"),
    Refusal("run --resume f1 --method +fedavg --lr 0.1", "lr"),
    Refusal("run --resume f1 --method +fedavg", "", other_data),
    Refusal("run --resume f3 --seeds 2", "history.csv", put("f3/history.csv", "a,b\n1,2\n")),
    Refusal("run --resume f1 --rounds 2", "rounds"),
    Refusal("run --resume f2 --rounds 2", "rounds"),
    Refusal("run --resume stopped --rounds 1", "rounds"),
    Refusal("run --resume f2 --rounds 9", "checkpoint"),
    Refusal("run --resume f3 --rounds 9", "checkpoint"),
    Refusal("run --resume f3 --rounds 2", ""),
    Refusal("run --resume ahead --rounds 2", "rounds"),
    Refusal("run --resume own", "own"),
    Refusal("run --resume f1", "", other_data),
    Refusal("run --resume f2", "", other_data),
    Refusal("run --resume stopped", "", other_data),
    Refusal("run --resume f1 --rounds 9", "", other_data),
    Refusal("run --resume f1 --out copy", "", other_data),
    Refusal("run --resume f1", "d.npz", no_data),
    Refusal("run --resume stopped", "", short_manifests),
    Refusal("run --resume stopped --rounds 9", "", short_manifests),
    Refusal("run --resume stopped --out copy", "", short_manifests),
    Refusal("run --resume f1", "link", link_inside),
    Refusal("run --resume stopped", "config.toml", put("stopped/config.toml", "rounds = many\n")),
    Refusal("run --resume nowhere", "nowhere"),
    Refusal("run --resume d.npz", "d.npz"),
    Refusal("run --resume notes", "notes"),
    Refusal("run --resume f1 --config my.toml", "--config"),
    Refusal("run --resume f1 --force", "--force"),
    Refusal("run --resume f1 --out f2", "exists"),
    Refusal("run --resume f1 --out d.npz/x", "d.npz"),
    Refusal("run --resume f1 --out copy --rounds 2", "rounds"),
    Refusal("run --resume f2 --out copy --rounds 9", "checkpoint"),
    Refusal("run --resume f1 --log nonsense", "nonsense"),
    # run into a folder that is there
    Refusal("RUN --out f1", "exists"),
    Refusal("RUN --out notes", "exists"),
    Refusal("RUN --out notes --force", "diary.txt"),
    Refusal("RUN --out f1 --force", "mine.txt", put("f1/mine.txt", "x")),
    Refusal("RUN --out f1 --force", "mine.txt", put("f1/models/mine.txt", "x")),
    Refusal("RUN --out tool --force", "tool", their_folder("tool/config.toml")),
    Refusal("RUN --out tool --force", "tool", their_folder("tool/summary.json")),
    Refusal("RUN --out tool --force", "tool", their_folder("tool/wandb/config.yaml")),
    Refusal("RUN --out link --force", "link", link_to_f1),
    Refusal("RUN --out d.npz --force", "d.npz"),
    Refusal("RUN --out d.npz/new", "d.npz"),
    Refusal("RUN --out f1 --force --method nonsense", "nonsense"),
    Refusal("RUN --out f1 --force --dataset nowhere.npz", "nowhere.npz"),
    Refusal("RUN --out f1 --force --clients 9999", "clients"),
    Refusal("RUN --out f1 --force --set fedala.nonsense=1", "nonsense"),
    Refusal("RUN --out f1 --force --set ditto.mu=1", "ditto"),
    Refusal("RUN --out f1 --force --augment flop", "flop"),
    Refusal("RUN --out f1 --force --augment crop:16", "a crop must be less than 16"),
    Refusal("RUN --out f1 --force --normalize 0.5/0", "greater than 0"),
    Refusal("RUN --out f1 --force --normalize cifar10", "have 1 channel"),
    Refusal("RUN --out f1 --force --resize 0", "resize"),
    Refusal("RUN --out f1 --force --log nonsense", "nonsense"),
    Refusal("RUN --out f1 --force --config nowhere.toml", "nowhere.toml"),
    Refusal("run --dataset d.npz --method apple --join-ratio 0.5 --out f1 --force", "join_ratio"),
    Refusal(
        "run --dataset t.csv --out new",
        "--loss mse",
        put("t.csv", "".join(["a,label\n", *(f"{k}.5,{7 * k}\n" for k in range(40))])),
    ),
    Refusal("RUN --out new --dataset nowhere.npz", "nowhere.npz"),
    Refusal("RUN --out new --model nonsense", "nonsense"),
    # paper
    Refusal("PAPER --rounds 2", "nothing was run", fewer_samples),
    Refusal("PAPER", "results.csv", put("out/results.csv", "not,a,table\n")),
    Refusal("PAPER", "mine.csv", put("out/mine.csv", "not,a,table\n")),
    Refusal("paper run table9 --data-dir data --out out", "table9"),
    Refusal("PAPER --columns nonsense", "nonsense"),
    Refusal("PAPER --method nonsense", "nonsense"),
    Refusal("PAPER --data-dir nowhere", "nowhere"),
    Refusal("PAPER --out d.npz", "d.npz"),
    Refusal("paper report nowhere", "nowhere"),
    Refusal("paper report empty", ""),
    Refusal("paper report out --out out", "out"),
    Refusal("paper report out --out d.npz", "d.npz"),
    Refusal("paper report out --insert nowhere.md", "nowhere.md"),
    Refusal("paper report out --insert marks.md", "marks.md"),
    Refusal("paper report out", "mine.csv", put("out/mine.csv", "not,a,table\n")),
    # leaderboard
    Refusal("leaderboard run --settings cifar100 --out new", "cifar100-dir"),
    Refusal("leaderboard run --method fedalla --out new", "fedala"),
    Refusal("leaderboard run --method fedavg --import nowhere.py --out new", "nowhere.py"),
    Refusal("leaderboard run --method fedavg --data-dir nowhere --out new", "nowhere"),
    Refusal("leaderboard report nowhere", "nowhere"),
    Refusal("leaderboard report empty", "no result"),
    Refusal("leaderboard report out", "mine.csv", put("out/mine.csv", "not,a,table\n")),
    # report
    Refusal("report nowhere", "nowhere"),
    Refusal("report empty", "empty"),
    Refusal("report f1 f2", "--out"),
    Refusal("report f1 --out nowhere/page.html", "nowhere"),
    Refusal("report f1 --out notes", "notes"),
    Refusal("report f1 --out d.npz/page.html", "d.npz"),
    Refusal("report stopped --plots d.npz", "d.npz"),
    Refusal("report stopped --plots d.npz/plots", "d.npz"),
    Refusal("report f1 --figure final", "--latex"),
    Refusal("report f1 --latex --figure worst", "--figure"),
    Refusal("report f1 --latex --paired clients", "--baseline"),
    Refusal("report f1 --latex --baseline fedavg --out tables", "fedavg"),
    Refusal("report f1 --latex --figure validation --out tables", "validation"),
    Refusal("report f1 --latex --out d.npz", "d.npz"),
    Refusal("report f1", "f1", no_history),
    Refusal("report f1", "clients.csv", put("f1/clients.csv", "not,a,table\n1,2,3\n")),
    # predict, evaluate, export
    Refusal("predict nowhere --data d.npz", "nowhere"),
    Refusal("predict f1 --data d.npz", "--client"),
    Refusal("predict f1 --data d.npz --client 9 --out p.csv", "there are 0 to 2"),
    Refusal("predict f1 --data d.npz --client 1 --global", "not both"),
    Refusal("predict f1 --data nowhere.npz --client 1 --out p.csv", "nowhere.npz"),
    Refusal("predict f1 --data my.toml --client 1", "my.toml"),
    Refusal("predict f1 --data d.npz --client 1 --out p.txt", ".csv"),
    Refusal("predict f1 --data d.npz --client 1 --out nowhere/p.csv", "nowhere"),
    Refusal("predict f1 --data data/mnist.npz --client 1 --out p.csv", "n×1×16×16"),
    Refusal("predict f1 --data d.npz --client 1 --method ditto", "ditto"),
    Refusal("predict f1 --data d.npz --client 1 --seed 3", "seed 3"),
    Refusal("predict stopped --data d.npz --client 1", "--resume stopped"),
    Refusal("predict own --data d.npz", "own model"),
    Refusal("evaluate f1 --data data/mnist.npz", "n×1×16×16"),
    Refusal("evaluate f1 --data nowhere.npz", "nowhere.npz"),
    Refusal("evaluate f1 --data d.npz --label-column y", "tables"),
    Refusal("evaluate f1 --data d.npz --out scores.txt", "must end with .csv"),
    Refusal("evaluate f1 --data d.npz --out f1/clients.csv", "belongs to the run"),
    Refusal("export f1 --client 1 --out model.pt", ".safetensors"),
    Refusal("export f1 --client 9 --out model.pt2", "there are 0 to 2"),
    Refusal("export f1 --out model.pt2", "--client"),
    # what is written over: neither what is read, nor a file of a run, nor a model without --force
    Refusal("predict f1 --data t.csv --client 1 --out t.csv", "t.csv is read", put("t.csv", "")),
    Refusal("predict f1 --data t.csv --client 1 --out ./t.csv", "is read", put("t.csv", "")),
    Refusal(
        "predict f1 --data data --client 1 --out data/p.csv", "lies in data", put("data/p.csv", "")
    ),
    Refusal("predict f1 --data d.npz --client 1 --out f1/history.csv", "belongs to the run in"),
    Refusal("predict f1 --data d.npz --client 1 --out link/split.csv", "belongs", link_to_f1),
    Refusal("predict f1 --data d.npz --client 1 --out f1/faults.csv", "belongs to the run in"),
    Refusal("report f1 --out f1/history.csv", "must end with .html"),
    Refusal("report f1 --out marks.md", "must end with .html"),
    Refusal("partition --partition p.json --save p.json", "p.json is read", put("p.json", "")),
    Refusal("partition --dataset data/ --save data/p.json", "lies in", put("data/p.json", "")),
    Refusal("partition --dataset data/ --plot data/p.png", "lies in", put("data/p.png", "")),
    Refusal("partition --dataset digits --save f1/digests.json", "belongs to the run in"),
    Refusal(f"export f1 --client 1 --out f2/{MODEL} --force", "belongs to the run in"),
    Refusal(f"onboard f1 --data d.npz --out f2/{MODEL} --force", "belongs to the run in"),
    Refusal("export f1 --client 1 --out m.safetensors", "exists already", put("m.safetensors", "")),
    Refusal("onboard f1 --data d.npz --out m.safetensors", "exists", put("m.safetensors", "")),
    Refusal(
        "export f1 --weights m.safetensors --out m.safetensors --force",
        "m.safetensors is read",
        put("m.safetensors", ""),
    ),
    Refusal("bench --quick --out d.npz", "must end with .md"),
    Refusal("RUN --pick-by loss --out new", "--validation 0.1"),
    # sweeps
    Refusal("RUN --sweep lr=0.1 --sweep lr=0.2 --out new", "lr is given twice"),
    Refusal("RUN --sweep lr --out new", "lacks its value"),
    Refusal("RUN --sweep lr=0.1,0.2 --lr 0.1 --out new", "lr is both given and swept"),
    Refusal("RUN --set fedala.eta=1 --set fedala.eta=2 --out new", "fedala.eta is given twice"),
    # code of the user's own
    Refusal("RUN --import mine.py --out new", "mine.py has no method", put("mine.py", "x = 1\n")),
    Refusal("RUN --import mine.py --out new", "line 2: name", put("mine.py", "\nx = nothing\n")),
    Refusal("RUN --import f1 --out new", "f1 has no method"),
    Refusal("methods --import nowhere.py", "no file nowhere.py"),
    Refusal("RUN --model net.py:make --out new", "no file net.py"),
    Refusal("RUN --model net.py:f --out new", "takes width", put("net.py", "def f(width): 0\n")),
    Refusal("RUN --model net.py:f --out new", "nn.Module, not None", put("net.py", "def f(): 0\n")),
    Refusal("RUN --model net.py:f --out new", "line 1: ZeroDi", put("net.py", "def f(): 0/0\n")),
    Refusal("flower new app --model net.py:f", "a part of the app", put("net.py", "def f(): 0\n")),
    Refusal("new method fedala", "There is a method fedala already"),
    Refusal("new method FedMine", "fedmine.py exists", put("fedmine.py", "x = 1\n")),
    Refusal("new method FedMine --out d.npz", "d.npz"),
    Refusal(f"new method {'x' * 400}", "too long"),
    Refusal(f"report {'x' * 400}", "too long"),
    Refusal(f"run --resume {'x' * 400}", "too long"),
    Refusal(f"RUN --out {'x' * 400}", "output folder"),
    # losses
    Refusal("RUN --loss mse --out new", "mse needs float targets, and d.npz has 4 classes"),
    Refusal("RUN --loss hinge --out new", "There is no loss 'hinge'"),
    Refusal("RUN --loss own --out new", "a Python function"),
    Refusal("RUN --class-weights 1,2 --out new", "4 numbers from 0 on"),
    # partition
    Refusal("partition --dataset d.npz --clients 3 --save nowhere/split.json", "nowhere"),
    Refusal("partition --dataset d.npz --clients 3 --save f1/split.csv", "split.csv"),
    Refusal("partition --dataset d.npz --clients 3 --save notes", "notes"),
    Refusal("partition --dataset d.npz --feature-shift blur:1 --save p.json", "feature_shift must"),
    Refusal("convert pfllib notes --out new.npz", "train and test"),
    Refusal("convert pfllib notes --out d.npz", "exists already"),
    Refusal("partition --dataset d.npz --clients 3 --plot f1/split.txt", "split.txt"),
    Refusal("partition --dataset d.npz --save split.json --plot nowhere/split.png", "nowhere"),
    Refusal(
        "partition --dataset d.npz --save split.json --plot folder.png",
        "folder.png",
        put("folder.png/x", ""),
    ),
    Refusal("partition --dataset d.npz --clients 9999 --save split.json", "clients"),
    # flower and bench
    Refusal("flower new f1 --dataset d.npz --partition iid --clients 3", "f1"),
    Refusal("flower new d.npz --dataset d.npz --partition iid --clients 3", "d.npz"),
    Refusal("flower new d.npz/app --dataset d.npz --partition iid --clients 3", "d.npz"),
    Refusal("flower new app --lanes 2", "lanes"),
    Refusal("flower new app --method fedala,fedavg", "one method at a time"),
    Refusal("flower new app --dataset nowhere.npz", "nowhere.npz"),
    Refusal("flower demo --dataset d.npz --out f1", "f1"),
    Refusal("flower demo --dataset d.npz --method fedala,fedavg --out new", "fedala,fedavg"),
    Refusal("bench --quick --out nowhere/table.md", "nowhere"),
    Refusal("bench --quick --plot nowhere/plot.png", "nowhere"),
    Refusal("bench --quick --case nonsense --out table.md", "nonsense"),
    Refusal("bench --quick --data-dir nowhere --out table.md", "nowhere"),
    Refusal("bench --quick --data-dir empty --out table.md", "There is no copy of mnist in empty"),
]  # fmt: skip


def test_every_option_is_in_one_of_the_tables():
    names = {field.name for field in fields(Config)}
    assert set(OTHERS) == names - set(CHANGEABLE)
    assert set(WRONG) == set(CHANGEABLE) - {
        "data_dir",
        "save_models",
        "save_best",
        "keep_checkpoint",
    }


@pytest.fixture(scope="module")
def untouched(places, tmp_path_factory):
    """A copy for the refusals that prepare nothing: none changes it, as each test checks."""
    target = tmp_path_factory.mktemp("untouched") / "here"
    shutil.copytree(places, target, copy_function=link_or_copy)
    return target


@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.prepare is None], ids=str)
def test_a_refused_command_changes_nothing(refusal, untouched):
    refused(untouched, refusal.command, refusal.match)


@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.prepare], ids=str)
def test_a_refused_command_changes_nothing_where_something_is_wrong(refusal, here):
    refusal.prepare(here)
    refused(here, refusal.command, refusal.match)


def test_a_folder_that_is_in_use(here):
    with files.lock(here / "f1" / ".lock", "held by this test"):
        refused(here, "run --resume f1 --rounds 9", "in use")
        refused(here, "RUN --out f1 --force", "in use")


@pytest.mark.parametrize(
    "command",
    [
        "report f1",
        "report f1 --out page.html",
        "report f1 f2 --out f1/report.html",
        "report f1 --plots figures",
        "report f1 --markdown --out tables",
        "predict f1 --data d.npz --client 1 --out p.csv",
        "predict f1 --data d.npz --client 1 --out f1/p.csv",
        "partition --dataset d.npz --partition iid --clients 3 --save p.json --plot p.png",
        "export f1 --client 1 --out m.safetensors --force",
        "onboard f1 --data d.npz --out m.safetensors --force",
    ],
)
def test_a_command_can_be_repeated(here, command):
    must(here, words(command))
    before = snapshot(here)
    must(here, words(command))
    assert snapshot(here).keys() == before.keys()


def results(folder: Path) -> list[object]:
    """Read the results of a run, to the byte."""
    methods = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["methods"]
    models = [path.read_bytes() for path in sorted((folder / "models").rglob("*.safetensors"))]
    tables = [
        (folder / name).read_bytes()
        for name in ("history.csv", "clients.csv", "metrics.csv", "weights.csv", "split.csv")
    ]
    return [{name: about["accuracy"] for name, about in methods.items()}, tables, models]


def test_a_changed_pixel_and_back(here):
    """Refused twice, and nothing is lost: with the data restored, the run is still finished."""
    sound, before = (here / "d.npz").read_bytes(), results(here / "f1")
    other_data(here)
    refused(here, "run --resume f1")
    refused(here, "run --resume f1")
    restore_data(here, sound)
    must(here, words("run --resume f1"))
    assert results(here / "f1") == before


def test_another_pixel_in_the_middle_of_a_run_and_back(here, tmp_path):
    sound = (here / "d.npz").read_bytes()
    before = results(here / "f1")[0]
    other_data(here)
    refused(here, "run --resume stopped")
    restore_data(here, sound)
    found = attempt(["run", "--resume", "stopped"], here)
    assert found.code == 0, found.says
    assert "damaged" not in found.says
    assert results(here / "stopped")[0] == before


def test_two_truncated_manifests_stay_refused(here):
    short_manifests(here)
    refused(here, "run --resume stopped")
    refused(here, "run --resume stopped")


def test_more_rounds_are_refused_without_a_checkpoint_and_the_results_stay(here):
    before = results(here / "f2")
    refused(here, "run --resume f2 --rounds 9")
    must(here, words("run --resume f2 --rounds 4"))
    assert results(here / "f2") == before


def test_fewer_rounds_are_refused_and_not_recorded(here):
    config = (here / "f1" / "config.toml").read_bytes()
    refused(here, "run --resume f1 --rounds 2")
    assert (here / "f1" / "config.toml").read_bytes() == config
    assert b"rounds = 4\n" in config


def test_a_finished_run_that_kept_no_checkpoint_is_not_trained_again(here):
    """It may be refused or do nothing: the seconds in its history show that nothing ran."""
    before = results(here / "f3")
    assert attempt(["run", "--resume", "f3"], here).code in (0, 2)
    assert results(here / "f3") == before


def test_no_resume_is_advised_without_checkpoints(here):
    found = attempt(words("RUN --checkpoint-every 0 --out new"), here, before=stopping_after(2))
    assert found.code == 143, found.says
    assert "Stopped after 2 rounds of " in found.says
    assert "--resume" not in found.says
    kept = attempt(words("RUN --out newer"), here, before=stopping_after(2))
    assert kept.code == 143, kept.says
    assert "--resume newer" in kept.says
