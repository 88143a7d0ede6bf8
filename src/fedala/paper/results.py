"""What was run: one line for each cell and seed, from run folders and from csv files, and its mean over the seeds."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedala import files
from fedala.config import Config
from fedala.errors import UserError
from fedala.options import convert
from fedala.paper.experiments import Cell, preset, settings, text
from fedala.simulation import Row
from fedala.store import RunFolder, csv_text

#: The file in a results folder into which `fedala paper run` writes a line for each cell and seed.
CSV = "results.csv"
#: What a cell's own file says, and a run folder does not.
ABOUT = {"samples": int, "data": str, "device": str, "version": str}


@dataclass(frozen=True)
class Run:
    """One seed of one cell. Accuracies are shares, not percent."""

    setting: str
    method: str
    set: str
    """Hyperparameters that are not the defaults, such as `fedala.layers=2`; several are separated by spaces."""
    shuffle: bool
    seed: int
    rounds: int
    """Rounds that were run."""
    planned: int
    """Rounds that the run was to have: the schedules of FedPHP and APPLE depend on it."""
    eval_every: int
    best: float
    """Accuracy of the best round, picked on test data, as in the paper."""
    best_round: int
    best_joined: float
    """The same over the participants of each round alone."""
    final: float
    """Accuracy after the last of the rounds that were run."""
    seconds_per_round: float
    together: int
    """How many seeds ran side by side in these seconds."""
    diverged: int
    """Rounds in which a client diverged and did not count."""
    sent: int
    uploaded: int
    samples: int
    data: str
    """What is to be said about the data, such as `partial: …`."""
    device: str
    version: str

    @property
    def cell(self) -> tuple[str, str, str, bool]:
        return self.setting, self.method, self.set, self.shuffle


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
    """All runs that are known, by cell."""

    def __init__(self, runs: Iterable[Run]) -> None:
        best: dict[tuple[Any, ...], Run] = {}
        for run in runs:
            key = (*run.cell, self._schedule(run), run.seed)
            if key not in best or run.rounds >= best[key].rounds:
                best[key] = run
        self.runs = list(best.values())

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """From the run folders of a results folder, and from the csv files that lie in it."""
        if not folder.is_dir():
            raise UserError(f"{folder} is no results folder: fedala paper run makes one.")
        listed = [run for path in sorted(folder.glob("*.csv")) for run in read_csv(path)]
        return cls([*listed, *found(folder)])

    def figure(self, cell: Cell) -> Figure | None:
        """What is known about a cell; where it ran with several schedules, the one that got furthest."""
        wanted = (cell.setting.name, cell.method, hyperparameters(cell), cell.shuffle)
        groups: dict[int, list[Run]] = {}
        for run in self.runs:
            if run.cell == wanted:
                groups.setdefault(self._schedule(run), []).append(run)
        figures = [Figure(tuple(sorted(group, key=lambda run: run.seed))) for group in groups.values()]
        return max(figures, key=lambda figure: figure.rounds, default=None)

    @staticmethod
    def _schedule(run: Run) -> int:
        cell = Cell(settings()[run.setting], run.method)
        return run.planned if cell.made().schedule_depends_on_rounds else 0

    def write(self, path: Path) -> None:
        """One line for each cell and seed."""
        order = sorted(self.runs, key=lambda run: (run.cell, run.planned, run.seed))
        lines = [{key: text(value) for key, value in asdict(run).items()} for run in order]
        files.replace(path, csv_text([field.name for field in fields(Run)], lines, header=True).encode())


def hyperparameters(cell: Cell) -> str:
    return " ".join(f"{key}={text(value)}" for key, value in cell.set)


def read_csv(path: Path) -> Iterator[Run]:
    """The lines of a csv file of results; a file of other columns is refused."""
    names = [field.name for field in fields(Run)]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if list(rows.fieldnames or ()) != names:
                raise UserError(f"{path} is no csv of results: its first line must be {','.join(names)}.")
            for row in rows:
                where = f"{path}, line {rows.line_num}:"
                if None in row or None in row.values():
                    raise UserError(f"{where} it must have {len(names)} columns.")
                run = Run(**{f.name: convert(row[f.name], f.type, f"{where} {f.name}") for f in fields(Run)})
                if run.setting not in settings():
                    raise UserError(f"{where} there is no setting {run.setting}.")
                yield run
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def found(folder: Path) -> Iterator[Run]:
    """The runs in the folders under a results folder: setting / cell / seeds-…"""
    for path in sorted(folder.glob("*/*/cell.json")):
        if path.parent.parent.name in settings():
            for part in run_folders(path.parent):
                try:
                    yield from runs_in(part, about(path))
                except (KeyError, TypeError) as error:
                    raise UserError(f"{part} is not the run of a cell: {error}.") from None


def about(path: Path) -> dict[str, Any]:
    """What a cell's own file says about its data and machine."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        return {name: convert(words[name], kind, name) for name, kind in ABOUT.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}.") from None


def run_folders(cell_folder: Path) -> list[Path]:
    """The run folders of a cell, each of some seeds."""
    parts = (path.parent for path in cell_folder.glob("seeds-*/config.toml"))
    return sorted(part for part in parts if re.fullmatch(r"seeds-\d+-\d+", part.name, re.ASCII))


def runs_in(folder: Path, words: dict[str, Any]) -> Iterator[Run]:
    """Each seed of a run folder, finished or not: the history tells."""
    try:
        config = Config.of(Config.read(folder / "config.toml"))
    except UserError as error:
        raise UserError(f"{folder} is not the run of a cell: {error}") from None
    for seed, rows in histories(folder).items():
        best, joined = (max(rows, key=lambda row: row[key]) for key in ("accuracy", "accuracy_joined"))
        seconds = [row["seconds"] for row in rows]
        yield Run(
            setting=folder.parent.parent.name,
            method=config.methods[0],
            set=" ".join(f"{key}={text(value)}" for key, value in config.set.items()),
            shuffle=config.shuffle,
            seed=seed,
            rounds=rows[-1]["round"],
            planned=int(config.rounds or 0),
            eval_every=config.eval_every,
            best=best["accuracy"],
            best_round=best["round"],
            best_joined=joined["accuracy_joined"],
            final=rows[-1]["accuracy"],
            # The first two pay for the start and for ALA's initial stage, and the last does not train.
            seconds_per_round=float(np.mean(seconds[2:-1] or seconds)),
            together=config.seeds,
            diverged=sum(row["diverged"] > 0 for row in rows),
            sent=max(row["sent"] for row in rows),
            uploaded=max(row["uploaded"] for row in rows),
            **words,
        )


def histories(folder: Path) -> dict[int, list[Row]]:
    """The rows of a run folder of one method, by seed; none where there is no history yet."""
    rows: dict[int, list[Row]] = {}
    if (folder / "history.csv").is_file():
        for row in RunFolder(folder).history():
            rows.setdefault(int(row["seed"]), []).append(row)
    return rows
