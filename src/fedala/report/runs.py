"""Run folders as they are looked at: finished or not, one's own or somebody else's."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import UserError, first_line, printable
from fedala.io.untrusted import read_json
from fedala.methods import make
from fedala.records import HistoryRow
from fedala.runs.config import FREE
from fedala.runs.folder import RunFolder
from fedala.runs.results import MethodResult

Rows = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]

_NEEDED = {
    "history.csv": (
        "method",
        "seed",
        "round",
        "accuracy",
        "accuracy_joined",
        "loss",
        "sent",
        "uploaded",
        "seconds",
    ),
    "clients.csv": ("method", "seed", "round", "client", "samples", "accuracy"),
    "split.csv": ("client", "class", "name", "train", "validation", "test"),
    "resumed.csv": ("time", "changed"),
    "weights.csv": (
        "method",
        "seed",
        "round",
        "client",
        "parameter",
        "mean",
        *(f"bin{k}" for k in range(10)),
    ),
}

#: What two runs may differ in, and their accuracies can still be compared.
_APART = {*FREE, "method", "set", "seed", "seeds", "eval_every"}

_WHOLE = {
    "seed",
    "round",
    "client",
    "samples",
    "class",
    "train",
    "validation",
    "test",
    "sent",
    "uploaded",
    "diverged",
}


@dataclass(frozen=True)
class Run:
    """What stands in a run folder."""

    path: Path
    name: str
    """The folder's; beside other folders, the part of its path that tells it from them."""
    config: dict[str, Any]
    config_text: str
    results: dict[str, MethodResult]
    """By method, in the order in which they ran."""
    clients: Rows
    split: Rows
    weights: Rows
    resumed: Rows = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    unverified: list[str] = field(default_factory=list)
    """Sentences about what no digest vouches for."""

    @property
    def rounds(self) -> int:
        """How many rounds were asked for."""
        rounds = self.config.get("rounds")
        return (
            rounds if isinstance(rounds, int) else max(self.reached(name) for name in self.results)
        )

    def reached(self, method: str) -> int:
        return self.results[method].history[-1].round

    @property
    def missing(self) -> list[str]:
        """Methods that were asked for and have not begun."""
        asked = str(self.config.get("method", "")).split(",")
        return [
            name.strip()
            for name in asked
            if name.strip() and name.strip().lower() not in self.results
        ]

    def is_like(self, other: "Run") -> bool:
        """Whether the two differ in their methods, seeds and rounds alone, and their clients hold the same."""
        here, there = (
            {k: v for k, v in run.config.items() if k not in _APART} for run in (self, other)
        )
        return self is other or (here == there and self.split == other.split)

    def counts(self) -> tuple[Array, list[int], list[str]]:
        """Clients × classes: samples held; and the clients' numbers and the classes' names."""
        names = {row["class"]: row["name"] for row in self.split}
        held = [
            {**row, "held": row["train"] + row["validation"] + row["test"]} for row in self.split
        ]
        counts, (clients, classes) = _cube(held, ("client", "class"), "held")
        return np.nan_to_num(counts[..., 0]), clients, [names[label] for label in classes]

    def accuracies(self, method: str) -> Array:
        """Seeds × clients: each client's accuracy at the method's last evaluation; empty before that."""
        return _cube(
            [row for row in self.clients if row["method"] == method], ("seed", "client"), "accuracy"
        )[0][..., 0]

    def samples(self) -> Array:
        """Test samples of each client."""
        return _cube(self.clients, ("client",), "samples")[0][..., 0]


def find(paths: Sequence[Path]) -> list[Run]:
    """The run folders that are named, each once; a folder that holds run folders stands for all that have begun."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"There is no folder {path}.")
        # The results of `fedala paper run` lie three levels deep: setting, cell, seeds.
        signs = ("config.toml", "history.csv", "digests.json")  # one of them may be gone
        around = {
            file.parent
            for level in (1, 2, 3)
            for sign in signs
            for file in path.glob("*/" * level + sign)
        }
        below = sorted(folder for folder in around if RunFolder(folder).has_begun())
        inner = [path] if (path / "config.toml").is_file() else below
        if not inner:
            raise UserError(
                f"{path} is not a run folder, and holds none in which a round has been evaluated."
            )
        folders |= {folder.resolve(): folder for folder in inner}
    return [
        replace(read(folder), name=name)
        for folder, name in zip(folders.values(), names(list(folders)), strict=True)
    ]


def names(paths: Sequence[Path]) -> list[str]:
    """Folders by what tells them apart: their paths without what all of them begin with and end in."""
    parts = [path.parts for path in paths]
    most = min(map(len, parts)) - 1
    before = _alike(parts, most)
    after = _alike([part[::-1] for part in parts], most - before)
    return [printable("/".join(part[before : len(part) - after]), 200) for part in parts]


def _alike(parts: Sequence[Sequence[str]], most: int) -> int:
    """How many of the first parts are the same everywhere, up to `most`."""
    return next((k for k in range(most) if len({part[k] for part in parts}) > 1), most)


def distinct_splits(runs: Sequence[Run]) -> list[Run]:
    """The first run of each split."""
    found: list[Run] = []
    for run in runs:
        if run.split and all(run.split != other.split for other in found):
            found.append(run)
    return found


def read(path: Path) -> Run:
    """One run folder; what is not there yet is empty."""
    folder = RunFolder(path)
    try:
        text = folder.read_verified("config.toml").decode()
        config = tomllib.loads(text)
        summary = read_json(path / "summary.json", 2**28) if folder.has("summary.json") else {}
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The run folder {path} cannot be read: {first_line(error)}.") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path / 'summary.json'} is not a run's summary.")
    history = _table(folder, "history.csv")
    if not history:
        raise UserError(f"{path} has nothing to report yet: no round has been evaluated.")
    told = summary.get("methods")
    titles = (
        {name: about.get("title") for name, about in told.items() if isinstance(about, dict)}
        if isinstance(told, dict)
        else {}
    )
    results: dict[str, MethodResult] = {}
    for row in history:
        name = row["method"]
        if name not in results:
            results[name] = MethodResult(name, str(titles.get(name) or _title(name)))
        results[name].history.append(HistoryRow.from_columns(row))
    names = ("clients.csv", "split.csv", "weights.csv", "resumed.csv")
    clients, split, weights, resumed = (_table(folder, name) for name in names)
    tables = (clients, split, weights, resumed)
    return Run(
        path, path.resolve().name, config, text, results, *tables, summary, folder.list_unverified()
    )


def _table(folder: RunFolder, name: str) -> Rows:
    path = folder.path
    try:
        rows = folder.rows(name)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path / name} cannot be read: {first_line(error)}.") from None
    for row in rows:
        if lacking := [column for column in _NEEDED[name] if row.get(column) is None]:
            raise UserError(
                f"{path / name} has a line without {lacking[0]}: it is not a table of a run."
            )
        for column, value in row.items():
            if problem := _problem(column, value):
                raise UserError(
                    f"{path / name} has a line with {column} = {printable(str(value), 40)}, {problem}."
                )
    return rows


def _problem(column: str, value: Any) -> str:
    """What is impossible about a value of a run's table, or nothing."""
    if value is None or isinstance(value, str):
        return ""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "which has more than 64 bits"
    if column in _WHOLE and not isinstance(value, int):
        return "which is no whole number"
    if column in _WHOLE and value < 0:
        return "which is less than 0"
    if column == "seconds" and not 0 <= value < math.inf:
        return "which is not a time"
    if column.startswith("accuracy") and (value < 0 or value > 1):
        return "which is not from 0 to 1"
    return ""


def _title(name: str) -> str:
    try:
        return make(name).title
    except UserError:
        return name  # a method of somebody's own


def _cube(rows: Rows, axes: Sequence[str], *values: str) -> tuple[Array, list[list[Any]]]:
    """Rows as an array with the given axes and the values along the last, NaN where there is none; and what stands along each
    axis."""
    along: list[list[Any]] = [list(dict.fromkeys(row[axis] for row in rows)) for axis in axes]
    along = [
        keys if axis == "parameter" else sorted(keys)
        for axis, keys in zip(axes, along, strict=True)
    ]
    shape = [len(keys) for keys in along]
    if math.prod(shape) > 5_000_000:
        raise UserError(
            f"The run has more clients, rounds and parameters than a report can show: {shape}."
        )
    cube = np.full([*shape, len(values)], np.nan)
    places = [{key: place for place, key in enumerate(keys)} for keys in along]
    index = tuple(
        [place[row[axis]] for row in rows] for place, axis in zip(places, axes, strict=True)
    )
    told = [[row.get(value) for value in values] for row in rows]
    cube[index] = np.array(told, dtype=float).reshape(len(rows), len(values))  # None becomes NaN
    return cube, along


def curves(result: MethodResult, column: str) -> tuple[list[int], Array]:
    """The evaluated rounds, and seeds × rounds of a column of the history (NaN where a seed has not got there)."""
    rows = [row.columns() for row in result.history]
    cube, (_, rounds) = _cube(rows, ("seed", "round"), column)
    return rounds, cube[..., 0]


def columns(result: MethodResult) -> list[str]:
    """What the history says about every round, besides which one it is and what it cost."""
    aside = {"method", "seed", "round", "sent", "uploaded", "seconds"}
    if not any(row.diverged for row in result.history):
        aside.add("diverged")
    return [name for name in result.history[0].columns() if name not in aside]


def elapsed(result: MethodResult) -> Array:
    """Seconds, over all runs together, until each evaluated round was done. Rounds that were not evaluated are taken to have
    cost what the next evaluated one did."""
    rounds, seconds = curves(result, "seconds")
    return np.asarray(np.nancumsum(seconds[0] * np.diff(rounds, prepend=-1)))


def reach(result: MethodResult, target: float) -> tuple[list[int | None], list[float | None]]:
    """For each seed, the first round whose accuracy is at least `target`, and the seconds until then; None: never."""
    [(rounds, seconds)] = reaches(result, [target])
    return rounds, seconds


def reaches(
    result: MethodResult, targets: Sequence[float]
) -> list[tuple[list[int | None], list[float | None]]]:
    """The same for several targets."""
    rounds, values = curves(result, "accuracy")
    seconds = elapsed(result)
    # The best so far only grows, so the first place where it gets to a target can be searched for.
    best = np.fmax.accumulate(np.nan_to_num(values, nan=-np.inf), axis=1)
    found = []
    for target in targets:
        first = [int(np.searchsorted(run, target)) for run in best]
        there = [place if place < len(rounds) else None for place in first]
        found.append(
            (
                [None if place is None else rounds[place] for place in there],
                [None if place is None else float(seconds[place]) for place in there],
            )
        )
    return found


def mean_std(values: Array, axis: int = 0) -> tuple[Array, Array]:
    """Mean and population deviation over the runs that there are, NaN where there is none."""
    there = np.isfinite(values)
    n = there.sum(axis)
    kept = np.where(there, values, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = kept.sum(axis) / n
        deviation = np.sqrt(
            (np.where(there, values - np.expand_dims(mean, axis), 0) ** 2).sum(axis) / n
        )
    return mean, deviation


def spread(run: Run, method: str) -> tuple[Array, list[list[Any]]] | None:
    """Recorded W as an array [seed, round, client, parameter, mean and shares], with what stands along its first four axes."""
    rows = [row for row in run.weights if row["method"] == method]
    if not rows:
        return None
    return _cube(
        rows, ("seed", "round", "client", "parameter"), "mean", *(f"bin{k}" for k in range(10))
    )
