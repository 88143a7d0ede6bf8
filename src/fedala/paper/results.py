"""What was run: one line for each cell and seed, from run folders and from csv files, and its mean over the seeds."""

import csv
import io
import json
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from dataclasses import replace as changed
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import UserError, first_line, spreadsheet_safe
from fedala.io import files
from fedala.io.untrusted import read_file, read_json, require_file
from fedala.methods import make
from fedala.options import build, convert
from fedala.paper.experiments import Cell, preset, settings, tables, text
from fedala.records import HistoryRow
from fedala.runs.config import FREE, Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests
from fedala.runs.folder import RunFolder
from fedala.runs.tables import csv_text

#: The file in a results folder into which `fedala paper run` writes a line for each cell and seed.
CSV = "results.csv"
#: What a cell's own file says, and a run folder does not.
ABOUT = {"samples": int, "data": str, "device": str, "version": str}
#: Bytes that a csv of results, and a cell's own file, have at most: both are far smaller.
_LARGEST_CSV, _LARGEST_ABOUT = 2**25, 2**16
_LONGEST_TEXT = 300


def number(least: float, most: float | None = None) -> Any:
    """A field that holds a number within these bounds."""
    return field(metadata={"least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One seed of one cell. Accuracies are shares, not percent."""

    setting: str
    method: str
    set: str
    """Hyperparameters that are not the defaults, such as `fedala.layers=2`; several are separated by spaces."""
    shuffle: bool
    seed: int = number(0)
    rounds: int = number(0)
    """Rounds that were run."""
    planned: int = number(1)
    """Rounds that the run was to have: the schedules of FedPHP and APPLE depend on it."""
    eval_every: int = number(1)
    best: float = number(0, 1)
    """Accuracy of the best round, picked on test data, as in the paper."""
    best_round: int = number(0)
    best_joined: float = number(0, 1)
    """The same over the participants of each round alone."""
    final: float = number(0, 1)
    """Accuracy after the last of the rounds that were run."""
    seconds_per_round: float = number(0, 1e9)
    together: int = number(1)
    """How many seeds ran side by side in these seconds."""
    diverged: int = number(0)
    """Rounds in which a client diverged and did not count."""
    sent: int = number(0)
    uploaded: int = number(0)
    samples: int = number(1)
    data: str
    """What is to be said about the data, such as `partial: …`."""
    device: str
    version: str
    where: str = field(default="", compare=False)
    """The file and line, or the folder, that it was read from; not a column."""

    @property
    def cell(self) -> tuple[str, str, str, bool]:
        return self.setting, self.method, self.set, self.shuffle

    def contradicts(self, other: "Run") -> bool:
        """Whether the two are the same seed of the same cell after as many rounds, and yet give other accuracies."""
        own, others = (
            [(run.best, run.best_joined, run.final), (run.best_round, run.diverged)]
            for run in (self, other)
        )
        # A csv file has six digits of an accuracy.
        return self.rounds == other.rounds and not (
            np.allclose(own[0], others[0], rtol=1e-5) and own[1] == others[1]
        )


COLUMNS = [column.name for column in fields(Run) if column.name != "where"]


@cache
def _paper_cells() -> dict[tuple[str, str, str, bool], Cell]:
    """Every cell of the paper's tables, with shuffling and without, by what a `Run` calls it."""
    cells = {}
    for table in tables().values():
        for column, method in table.entries():
            for shuffle in (False, True):
                cell = column.cell(method, shuffle=shuffle)
                cells[cell.setting.name, cell.method, hyperparameters(cell), shuffle] = cell
    return cells


def make_run(values: Mapping[str, Any], where: str) -> Run:
    """A run from names and values, all within plain bounds. `where` is what they were read from, for messages."""
    run = build(Run, values, f"{where}: ")
    for name in ("data", "device", "version"):
        told = getattr(run, name)
        if len(told) > _LONGEST_TEXT or not told.isprintable():
            raise UserError(
                f"{where}: {name} must be printable text of at most {_LONGEST_TEXT} characters."
            )
    for low, high in (("best_round", "rounds"), ("rounds", "planned"), ("final", "best")):
        if getattr(run, low) > getattr(run, high):
            sizes = f"{getattr(run, low)} and {getattr(run, high)}"
            raise UserError(
                f"{where}: {low} must not be greater than {high}, and they are {sizes}."
            )
    if run.diverged > run.rounds + 1:
        raise UserError(
            f"{where}: diverged is {run.diverged}, and there are only {run.rounds} rounds."
        )
    if run.setting not in settings():
        raise UserError(f"{where}: there is no setting {run.setting}.")
    if run.cell not in _paper_cells():
        try:
            make(run.method)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        options = f" with {run.set}" if run.set else ""
        raise UserError(
            f"{where}: the paper has no cell of {run.method}{options} in {run.setting}."
        )
    return changed(run, where=where)


@dataclass(frozen=True)
class Figure:
    """A cell over its seeds."""

    runs: tuple[Run, ...]

    @property
    def accuracy(self) -> float:
        """The headline, in percent."""
        return float(np.mean(self._headlines))

    @property
    def std(self) -> float | None:
        return float(np.std(self._headlines)) if len(self.runs) > 1 else None

    @property
    def final(self) -> float:
        return 100 * float(np.mean([run.final for run in self.runs]))

    @property
    def _headlines(self) -> list[float]:
        joining = settings()[self.runs[0].setting].join_ratio < 1
        return [100 * (run.best_joined if joining else run.best) for run in self.runs]

    @property
    def rounds(self) -> int:
        """Rounds that every seed has had."""
        return min(run.rounds for run in self.runs)

    @property
    def best_round(self) -> float:
        return float(np.mean([run.best_round for run in self.runs]))

    @property
    def seconds_per_round(self) -> float:
        """Of all seeds that ran side by side."""
        return float(np.mean([run.seconds_per_round for run in self.runs]))

    @property
    def departures(self) -> list[str]:
        """In what this is not the paper's experiment."""
        asked, first = preset(), self.runs[0]
        found = []
        if self.rounds < asked["rounds"]:
            most = max(run.rounds for run in self.runs)
            some = f"{self.rounds}" if most == self.rounds else f"{self.rounds} to {most}"
            found.append(f"{some} of {asked['rounds']} rounds")
        if len(self.runs) < asked["seeds"]:
            found.append(f"{len(self.runs)} of {asked['seeds']} seeds")
        if first.shuffle != asked["shuffle"]:
            found.append("shuffled")
        if any(run.eval_every > 1 for run in self.runs):
            found.append(f"evaluated every {max(run.eval_every for run in self.runs)} rounds")
        if any(run.diverged for run in self.runs):
            most = max(run.diverged for run in self.runs)
            found.append(f"clients diverged in {most} round{'s' if most > 1 else ''}")
        return [*found, *dict.fromkeys(f"data {run.data}" for run in self.runs if run.data)]


class Results:
    """All runs that are known, by cell. Of two runs of the same seed, the longer one counts; of two that are equally
    long, the one that was read last."""

    def __init__(self, runs: Iterable[Run], unverified: Iterable[str] = ()) -> None:
        self.unverified = list(unverified)
        """Sentences about what no digest vouches for."""
        best: dict[tuple[Any, ...], Run] = {}
        self.contradictions: list[str] = []
        """Sentences about seeds that were read twice with different accuracies."""
        for run in runs:
            key = (*run.cell, self._schedule(run), run.seed)
            if key in best and run.contradicts(best[key]):
                self.contradictions.append(
                    f"Seed {run.seed} of {run.method} in {run.setting} has an accuracy of {100 * best[key].best:.2f} % "
                    f"in {best[key].where} and of {100 * run.best:.2f} % in {run.where}; the latter is shown."
                )
            if key not in best or run.rounds >= best[key].rounds:
                best[key] = run
        self.runs = list(best.values())

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """From the csv files that lie in a results folder, and then from the run folders in it."""
        if not folder.is_dir():
            raise UserError(f"{folder} is no results folder: fedala paper run makes one.")
        notes: list[str] = []
        listed = [run for path in sorted(folder.glob("*.csv")) for run in read_csv(path)]
        record, is_there = Digests.read(folder), os.path.lexists(folder / CSV)
        if record is None and is_there:
            notes.append(f"{folder / CSV} has no {DIGESTS} beside it, so it is unverified.")
        elif record and CSV in record.written and not is_there:
            notes.append(
                f"{folder / CSV} is missing: what it said of folders that are gone is lost."
            )
        elif record and is_there and not record.expects(CSV, read_file(folder / CSV, _LARGEST_CSV)):
            raise files.DamagedFile(
                f"{folder / CSV} is not what fedala paper run wrote. Restore it, or give it another name, "
                "such as other.csv, to have its lines counted as they are."
            )
        return cls([*listed, *found(folder, notes)], notes)

    def figure(self, cell: Cell) -> Figure | None:
        """What is known about a cell; where it ran with several schedules, the one that got furthest."""
        wanted = (cell.setting.name, cell.method, hyperparameters(cell), cell.shuffle)
        groups: dict[int, list[Run]] = {}
        for run in self.runs:
            if run.cell == wanted:
                groups.setdefault(self._schedule(run), []).append(run)
        figures = [
            Figure(tuple(sorted(group, key=lambda run: run.seed))) for group in groups.values()
        ]
        return max(figures, key=lambda figure: figure.rounds, default=None)

    @staticmethod
    def _schedule(run: Run) -> int:
        cell = Cell(settings()[run.setting], run.method)
        return run.planned if cell.made().schedule_depends_on_rounds else 0

    def write(self, path: Path) -> None:
        """Write a line for each cell and seed, and the digest of the file."""
        order = sorted(self.runs, key=lambda run: (run.cell, run.planned, run.seed))
        lines = [
            {key: spreadsheet_safe(text(getattr(run, key))) for key in COLUMNS} for run in order
        ]
        data = csv_text(COLUMNS, lines, header=True).encode()
        record = Digests.read(path.parent) or Digests()
        record.add_version(path, data)
        files.write_file(path.parent / DIGESTS, record.pack())
        files.write_file(path, data)


def hyperparameters(cell: Cell) -> str:
    return " ".join(f"{key}={text(value)}" for key, value in cell.set)


def read_csv(path: Path) -> Iterator[Run]:
    """The lines of a csv file of results; a file of other columns, or with impossible numbers, is refused."""
    try:
        rows = csv.DictReader(io.StringIO(read_file(path, _LARGEST_CSV).decode(), newline=""))
        if list(rows.fieldnames or ()) != COLUMNS:
            raise UserError(
                f"{path} is no csv of results: its first line must be {','.join(COLUMNS)}."
            )
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: it must have {len(COLUMNS)} columns.")
            yield make_run(row, where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from None


def found(folder: Path, notes: list[str]) -> Iterator[Run]:
    """The runs in the folders under a results folder: setting / cell / seeds-…. `notes` gets what is unverified."""
    for part in sorted(folder.glob("*/*/seeds-*")):
        # A run that is killed as it begins leaves neither of the two. A link that leads nowhere counts as there.
        has_begun = any(os.path.lexists(part / name) for name in ("config.toml", "history.csv"))
        if part.parent.parent.name in settings() and _SEEDS.fullmatch(part.name) and has_begun:
            yield from runs_in(part, about(part.parent / "cell.json", notes), notes)


def write_about(path: Path, words: Mapping[str, Any]) -> None:
    """Write a cell's own file: what it says about its data and machine, and the checksum of that."""
    files.write_file(path, json.dumps({**words, "checksum": _checksum(words)}, indent=2).encode())


def _checksum(words: Mapping[str, Any]) -> str:
    return files.sha256(json.dumps({name: words[name] for name in ABOUT}).encode())


def about(path: Path, notes: list[str] | None = None) -> dict[str, Any]:
    """Read what a cell's own file says about its data and machine. `notes` gets what is unverified."""
    try:
        words = read_json(path, _LARGEST_ABOUT)
        if not isinstance(words, dict):
            raise TypeError("it is not a table of words")
        if "checksum" not in words and notes is not None:
            notes.append(f"{path} has no checksum, so it is unverified.")
        if words.get("checksum", _checksum(words)) != _checksum(words):
            raise ValueError("its checksum is wrong")
        return {name: convert(words[name], kind, name) for name, kind in ABOUT.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or missing: {error}.") from None


_SEEDS = re.compile(r"seeds-(\d{1,9})-(\d{1,9})", re.ASCII)


def run_folders(cell_folder: Path) -> list[Path]:
    """The run folders of a cell, each of some seeds."""
    parts = (path.parent for path in cell_folder.glob("seeds-*/config.toml"))
    return sorted(part for part in parts if _SEEDS.fullmatch(part.name))


def cell_config(folder: Path) -> Config:
    """Read the config of a cell's run folder.

    It must state every value, as a run writes it: a default in the place of a missing value would be another
    experiment. And it must be the config of the cell whose folder it lies in.
    """
    try:
        path = folder / "config.toml"
        values = Config.parse(RunFolder(folder).read_verified("config.toml"), path)
        config = Config.from_values(values)
    except UserError as error:
        raise UserError(f"{folder} is not the run of a cell: {error}") from None
    missing = [name for name in _stated() if name not in values]
    if (
        missing and RunFolder(folder).record is None
    ):  # otherwise its digest shows that a run wrote it
        raise UserError(
            f"{folder} is not the run of a cell: its config.toml does not state {', '.join(missing)}. "
            "A run writes every value; restore the file, or remove the folder and run the cell again."
        )
    cell = _cell_of(folder, config.rounds)
    first, last = _seeds_of(folder)
    own = {name: getattr(config, name) for name in (*FREE, "eval_every")}
    differences = cell.config(**own, seed=first, seeds=last - first + 1).differences(config)
    if differences:
        told = ", ".join(f"{name} ({change})" for name, change in differences.items())
        raise UserError(f"{folder} is not the run of {cell}: its config.toml differs in {told}.")
    return config


@cache
def _stated() -> list[str]:
    """The options that the config of a run always states: those that have a value once a run has begun."""
    kinds = typing.get_type_hints(Config)
    resolved = ("model", "clients", "rounds", "lr")
    return [
        name
        for name, kind in kinds.items()
        if type(None) not in typing.get_args(kind) or name in resolved
    ]


def _cell_of(folder: Path, rounds: int | None) -> Cell:
    """The paper's cell that a run folder belongs to by its place; some have their number of rounds in their name."""
    setting, name = folder.parent.parent.name, folder.parent.name
    for cell in _paper_cells().values():
        if cell.setting.name == setting:
            other = rounds != preset()["rounds"] and cell.made().schedule_depends_on_rounds
            cell = changed(cell, rounds=int(rounds or 0)) if other else cell
            if cell.name == name:
                return cell
    raise UserError(
        f"{folder} is not the run of a cell: the paper has no cell {setting}/{name} with {rounds} rounds."
    )


def _seeds_of(folder: Path) -> tuple[int, int]:
    """The first and the last seed by a run folder's name."""
    first, last = folder.name.split("-")[1:]
    return int(first), int(last)


def runs_in(folder: Path, words: dict[str, Any], notes: list[str]) -> Iterator[Run]:
    """Each seed of a run folder, finished or not: the history tells."""
    config = cell_config(folder)
    try:
        for seed, rows in _checked_histories(folder, config, notes).items():
            yield _run_of(folder, config, seed, rows, words)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{folder} is not the run of a cell: its history.csv lacks {error}."
        ) from None


def _run_of(
    folder: Path, config: Config, seed: int, rows: list[HistoryRow], words: dict[str, Any]
) -> Run:
    best = max(rows, key=lambda row: row.accuracy)  # no accuracy is NaN: that is refused before
    seconds = [row.seconds for row in rows]
    values = {
        "setting": folder.parent.parent.name,
        "method": config.method,
        "set": " ".join(f"{key}={text(value)}" for key, value in config.set.items()),
        "shuffle": config.shuffle,
        "seed": seed,
        "rounds": rows[-1].round,
        "planned": config.rounds,
        "eval_every": config.eval_every,
        "best": best.accuracy,
        "best_round": best.round,
        "best_joined": max(row.accuracy_joined for row in rows),
        "final": rows[-1].accuracy,
        # The first two pay for the start and for ALA's initial stage, and the last does not train.
        "seconds_per_round": float(np.mean(seconds[2:-1] or seconds)),
        "together": config.seeds,
        "diverged": sum(row.diverged > 0 for row in rows),
        "sent": max(row.sent for row in rows),
        "uploaded": max(row.uploaded for row in rows),
        **words,
    }
    return make_run(values, f"{folder}, seed {seed}")


def _checked_histories(
    folder: Path, config: Config, notes: list[str]
) -> dict[int, list[HistoryRow]]:
    """The rows of a cell's run folder by seed, if they are those of its config: its method, its seeds, its rounds."""
    first, last = _seeds_of(folder)
    run = RunFolder(folder)
    history = run.history()
    found = _by_seed(history)
    if found:
        notes += run.list_unverified()
    for method in history:
        if method != config.method:
            told = f"its history.csv is of {method}, and its config.toml of {config.method}"
            raise UserError(f"{folder} is not the run of a cell: {told}.")
    if not found and require_file(folder / "summary.json").exists():
        raise UserError(
            f"{folder} is not the run of a cell: it has a summary.json but no history.csv."
        )
    for seed, rows in found.items():
        if not first <= seed <= last:
            raise UserError(
                f"{folder} is not the run of a cell: its history.csv has a seed {seed}."
            )
        for row in rows:
            for key in ("accuracy", "accuracy_joined"):
                value = getattr(row, key)
                if not 0 <= value <= 1:
                    told = f"its history.csv has {key} = {value} in round {row.round}, which is not from 0 to 1"
                    raise UserError(f"{folder} is not the run of a cell: {told}.")
        if any(before.round >= after.round for before, after in pairwise(rows)):
            raise UserError(
                f"{folder} is not the run of a cell: the rounds in its history.csv are not in order."
            )
    return found


def histories(folder: Path) -> dict[int, list[HistoryRow]]:
    """The rows of a run folder of one method, by seed; none if there is no history yet."""
    return _by_seed(RunFolder(folder).history())


def _by_seed(history: Mapping[str, list[HistoryRow]]) -> dict[int, list[HistoryRow]]:
    rows: dict[int, list[HistoryRow]] = {}
    for method in history.values():
        for row in method:
            rows.setdefault(row.seed, []).append(row)
    return rows
