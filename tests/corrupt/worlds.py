"""The sound folders that get damaged, and the commands that read them."""

import csv
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.bounded import attempt

import fedala.cells.running
from fedala.cells.results import Results
from fedala.cli import run as run_command
from fedala.errors import UserError
from fedala.paper.comparison import make_sheets
from fedala.runs.folder import RunFolder

RUN = [
    *(
        "run",
        "--dataset",
        "d.npz",
        "--clients",
        "3",
        "--partition",
        "iid",
        "--rounds",
        "3",
        "--method",
        "fedala",
    ),
    *("--set", "fedala.max_epochs=2", "--checkpoint-every", "1", "--device", "cpu"),
]
PAPER = [
    *(
        "paper",
        "run",
        "table2",
        "--columns",
        "mnist-pathological",
        "--seeds",
        "1",
        "--data-dir",
        "data",
    ),
    *("--out", "out", "--device", "cpu"),
]

#: The learning rates of a run and of its twin.
LR = ("0.005", "0.02")
#: What differs between two runs of the same: how long they took.
_TIMES = ("seconds", "seconds_per_round")


@dataclass(frozen=True)
class Command:
    """One way to read a folder."""

    name: str
    arguments: tuple[str, ...]
    outcome: Callable[[Path, str], dict[str, Any]]
    """What came out of it, from the folder and from what was printed: equal if nothing was lost."""
    reads: Callable[[Path], bool] = lambda path: True
    """Tell whether the command reads a file. Other files get only a few kinds of damage."""
    before: Callable[[], None] | None = None


@dataclass(frozen=True)
class World:
    """A sound folder, another of the same kind, and its commands. Paths are relative to `sound`."""

    name: str
    sound: Path
    twin: Path
    folder: str
    commands: tuple[Command, ...]

    def victims(self) -> list[Path]:
        """List the files that can be damaged, one of each kind of model and of client state."""
        paths = sorted(
            p.relative_to(self.sound) for p in (self.sound / self.folder).rglob("*") if p.is_file()
        )
        kinds: dict[str, Path] = {}
        for path in reversed(paths):  # fedavg before fedala: the other is what a cell is by default
            if path.name != ".lock":
                kinds.setdefault(_kind(path), path)
        return sorted(kinds.values())

    def copy(self, place: Path) -> None:
        """Make a copy of the sound folder. Large files are linked: no command writes into one."""
        shutil.copytree(self.sound, place, copy_function=link_or_copy)


def _kind(path: Path) -> str:
    """Name what a file stands for: of many clients' files, and of many cells', one will do."""
    if path.parts[0] == "out":
        return "/".join(path.parts[3:]) or str(path)
    if path.suffix != ".safetensors":
        return str(path)
    letter = "client" if path.name[0].isdecimal() or path.name.startswith("client") else path.name
    return str(path.with_name("best" if path.name.startswith("best-") else letter))


def link_or_copy(source: str, target: str) -> None:
    if source.endswith((".safetensors", ".npz")):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def run_outcome(folder: str) -> Callable[[Path, str], dict[str, Any]]:
    """Return a resumed run's tables, accuracies and models, without its times."""

    def look(here: Path, said: str) -> dict[str, Any]:
        path = here / folder
        found: dict[str, Any] = {
            name: table(path / name)
            for name in ("history.csv", "clients.csv", "metrics.csv", "weights.csv")
        }
        found |= {name: content(path / name) for name in ("split.csv", "faults.csv", "config.toml")}
        found["summary.json"] = accuracies(path / "summary.json")
        for model in sorted((path / "models").rglob("*.safetensors")):
            found[str(model.relative_to(here))] = content(model)
        return found

    return look


def page_outcome(folder: str) -> Callable[[Path, str], dict[str, Any]]:
    """Return the page."""

    def look(here: Path, said: str) -> dict[str, Any]:
        return {
            "report.html": content(here / folder / "report.html").replace(str(here).encode(), b"")
        }

    return look


def comparison_outcome(here: Path, said: str) -> dict[str, Any]:
    """Return the files and the output of `paper report`."""
    folder = here / "out" / "report" / "paper"
    found = {path.name: content(path) for path in sorted(folder.glob("*"))}
    return {**found, "printed": said}


def cells_outcome(here: Path, said: str) -> dict[str, Any]:
    """Return the results and the tables of every cell of `paper run`."""
    names = ("history.csv", "clients.csv", "metrics.csv", "weights.csv")
    found: dict[str, Any] = {"results.csv": table(here / "out" / "results.csv")}
    for path in sorted((here / "out").rglob("*.csv")):
        if path.name in names:
            found[str(path.relative_to(here))] = table(path)
    for path in sorted((here / "out").rglob("*.json")):
        if path.name == "cell.json":
            found[str(path.relative_to(here))] = words(path)
    return found


def models_outcome(here: Path, said: str) -> dict[str, Any]:
    return {"models": said}


def words(path: Path) -> Any:
    """Read a JSON file, or its bytes if it is not JSON."""
    try:
        return json.loads(content(path))
    except ValueError:
        return content(path)


def content(path: Path) -> bytes:
    """Read a file, or nothing if it is a pipe or a device."""
    return path.read_bytes() if path.is_file() else b""


def table(path: Path) -> Any:
    """Read a table without its times, or its bytes if it cannot be read.

    Lines are sorted by method: a method that is run again adds its lines after the others.
    """
    data = content(path)
    try:
        lines = list(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
    except (ValueError, csv.Error):
        return data
    left = [n for n, name in enumerate(lines[0]) if name not in _TIMES] if lines else []
    kept = [
        [line[n] if n < len(line) else None for n in left] + line[len(lines[0]) :] for line in lines
    ]
    return kept[:1] + sorted(kept[1:], key=lambda line: str(line[:1]))


def accuracies(path: Path) -> Any:
    """Read the values of a summary that do not depend on the clock."""
    data = content(path)
    try:
        found = json.loads(data)
        keys = (
            "title",
            "accuracy",
            "parameters_per_client_and_round",
            "client_rounds_that_diverged",
        )
        methods = {name: [about[key] for key in keys] for name, about in found["methods"].items()}
        return [methods, found["rounds"], found["seeds"], found["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return data


def build(place: Path, names: Sequence[str] = (), *, twins: bool = True) -> list[World]:
    """Make the sound folders in `place`, and with `twins` others of runs with other options."""
    for name in ("torch._dynamo", "sklearn.datasets", "matplotlib.figure"):
        importlib.import_module(name)  # here, once: every case would import it again
    make_sheets(Results([]))
    makers = {
        "finished": _finished,
        "stopped": _stopped,
        "cells": _cells,
        "stopped cell": _stopped_cell,
        "csv": _csv,
    }
    worlds = []
    for name in names or makers:
        sound, twin = (place / name.replace(" ", "-") / which for which in ("sound", "twin"))
        for folder in (sound, twin):
            folder.mkdir(parents=True)
        if twins:
            makers[name](twin, True)
        commands = makers[name](sound, False)
        worlds.append(
            World(name, sound, twin, "run" if (sound / "run").is_dir() else "out", commands)
        )
    return worlds


def data(here: Path) -> None:
    """Write 120 images in four classes that a model can learn."""
    random = np.random.default_rng(0)
    y = np.arange(120) % 4
    x = (random.integers(0, 120, (120, 16, 16)) + y[:, None, None] * 30).astype(np.uint8)
    np.savez(here / "d.npz", x=x, y=y)


def mnist(here: Path) -> None:
    random = np.random.default_rng(0)
    y = np.arange(240) % 10
    x = (random.integers(0, 60, (240, 28, 28)) + y[:, None, None] * 18).astype(np.uint8)
    (here / "data").mkdir()
    np.savez(here / "data" / "mnist.npz", x=x, y=y)


def _finished(here: Path, is_twin: bool) -> tuple[Command, ...]:
    """Make a finished run. Its last round was resumed, so every kind of file is there."""
    data(here)
    must(here, [*RUN, "--rounds", "2", "--lr", LR[is_twin], "--out", "run"])
    must(here, ["run", "--resume", "run", "--rounds", "3"])
    return _run_commands(here)


def _stopped(here: Path, is_twin: bool) -> tuple[Command, ...]:
    """Make a run of two methods, stopped twice in the second, with two checkpoints."""
    data(here)
    both = ["--method", "fedala,fedavg", "--lr", LR[is_twin]]
    must(here, [*RUN, *both, "--out", "run"], stop_after=5, code=143)
    must(here, ["run", "--resume", "run"], stop_after=1, code=143)
    must(here, ["report", "run"])
    return _run_commands(here)


def _run_commands(here: Path) -> tuple[Command, ...]:
    def no_weights(path: Path) -> bool:
        return path.suffix not in (".safetensors", ".html")

    def not_a_model(path: Path) -> bool:
        return "models" not in path.parts and path.suffix != ".html"

    return (
        Command("run --resume", ("run", "--resume", "run"), run_outcome("run"), not_a_model),
        Command(
            "run --resume --rounds 4",
            ("run", "--resume", "run", "--rounds", "4"),
            run_outcome("run"),
            not_a_model,
        ),
        Command("report", ("report", "run"), page_outcome("run"), no_weights),
        Command(
            "model()",
            ("run",),
            models_outcome,
            lambda path: "models" in path.parts,
            _load(here / "run"),
        ),
    )


def _cells(here: Path, is_twin: bool) -> tuple[Command, ...]:
    """Make two finished cells of the paper's tables."""
    mnist(here)
    must(here, [*PAPER, "--method", "fedavg,fedala", "--rounds", str(2 + is_twin)])
    return _cell_commands([*PAPER, "--method", "fedavg,fedala", "--rounds", "2"], _decides)


def _stopped_cell(here: Path, is_twin: bool) -> tuple[Command, ...]:
    """Make one cell that was stopped between two rounds."""
    mnist(here)
    must(here, [*PAPER, "--method", "fedavg", "--rounds", str(4 + is_twin)], stop_after=3, code=143)
    return _cell_commands([*PAPER, "--method", "fedavg", "--rounds", "4"], lambda path: True)


def _decides(path: Path) -> bool:
    """Tell whether a file shows if a cell is finished; `paper run` then reads no more of it."""
    return (
        path.name in ("history.csv", "metrics.csv", "config.toml", "cell.json", "results.csv")
        or path.parent.parent.name == "checkpoint"
    )


def _cell_commands(again: list[str], needs: Callable[[Path], bool]) -> tuple[Command, ...]:
    def no_weights(path: Path) -> bool:
        return path.suffix != ".safetensors"

    return (
        Command("paper report", ("paper", "report", "out"), comparison_outcome, no_weights),
        Command("paper run, again", tuple(again), cells_outcome, needs),
        Command(
            "report", ("report", "out", "--out", "out/report.html"), page_outcome("out"), no_weights
        ),
    )


def _csv(here: Path, is_twin: bool) -> tuple[Command, ...]:
    """Make a results folder with one csv, without the run folders."""
    mnist(here)
    must(here, [*PAPER, "--method", "fedavg", "--rounds", str(1 + is_twin)])
    for path in (here / "out").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    return (Command("paper report", ("paper", "report", "out"), comparison_outcome),)


def must(here: Path, arguments: list[str], *, stop_after: int = 0, code: int = 0) -> None:
    """Run a command that is expected to end with `code`."""
    found = attempt(arguments, here, before=stopping_after(stop_after) if stop_after else None)
    if found.code != code:
        raise AssertionError(f"{arguments} ended with {found.code}, not {code}: {found.says}")


def stopping_after(rows: int) -> Callable[[], None]:
    """Send SIGTERM to the run after `rows` evaluations."""

    def before() -> None:
        execute, seen = run_command.execute, 0

        def watched(*arguments: Any, observer: Any, **options: Any) -> Any:
            def on_row(method: str, row: Any) -> None:
                nonlocal seen
                observer.on_row(method, row)
                seen += 1
                if seen == rows:
                    signal.raise_signal(signal.SIGTERM)

            return execute(*arguments, observer=replace(observer, on_row=on_row), **options)

        run_command.execute = fedala.cells.running.execute = watched  # type: ignore[assignment]

    return before


def _load(run: Path) -> Callable[[], None]:
    """Load and print every model that the sound folder has, instead of running the command."""
    wanted = []
    for path in sorted((run / "models").rglob("*.safetensors")):
        client = None if path.stem == "global" else int(path.stem.split("-")[1])
        best = path.parts[-4] == "best"
        wanted.append((path.parts[-3], int(path.parts[-2].split("-")[1]), client, best))

    def before() -> None:
        warnings.simplefilter("always")
        try:
            for method, seed, client, best in wanted:
                model = RunFolder(Path("run")).model(method, seed, client, best=best)
                digest = hashlib.sha256()
                for name, value in sorted(model.items()):
                    digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                    digest.update(value.contiguous().view(-1).numpy().tobytes())
                print(method, seed, client, best, digest.hexdigest())
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise SystemExit(0)

    return before
