"""Results of cells: of one seed, of one cell over its seeds, and all together."""

import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedala.cells.cell import Cell, Setting, format_value
from fedala.errors import spreadsheet_safe
from fedala.io import files
from fedala.methods import list_changed_defaults, make
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests
from fedala.runs.tables import csv_text

#: The file of a results folder that gets a line for each cell and seed.
CSV = "results.csv"


def number(least: float, most: float | None = None, **options: Any) -> Any:
    """Declare a field for a number within these bounds."""
    return field(metadata={"least": least, "most": most}, **options)


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One seed of one cell. Accuracies are shares, not percent."""

    setting: str
    method: str
    set: str
    """Hyperparameters that are not the defaults, such as `fedala.layers=2`; separated by spaces.

    One whose default has changed is always named; a result that does not has the former default.
    """
    shuffle: bool
    seed: int = number(0)
    rounds: int = number(0)
    """Rounds that were run."""
    planned: int = number(1)
    """Rounds in the config: the schedules of FedPHP and APPLE depend on them."""
    eval_every: int = number(1)
    best: float = number(0, 1)
    """Accuracy of the best round, picked on test data, as in the paper."""
    best_round: int = number(0)
    best_joined: float = number(0, 1)
    """The same over the participants of each round only."""
    final: float = number(0, 1)
    """Accuracy after the last round that was run."""
    seconds_per_round: float = number(0, 1e9)
    together: int = number(1)
    """How many seeds ran side by side in these seconds."""
    diverged: int = number(0)
    """Rounds in which a client diverged and did not count."""
    sent: int = number(0)
    uploaded: int = number(0)
    samples: int = number(1)
    data: str
    """A remark on the data, such as `partial: …`."""
    device: str
    version: str
    where: str = field(default="", compare=False)
    """The file and line, or the folder, that it was read from; not a column."""

    @property
    def cell(self) -> tuple[str, str, str, bool]:
        """Return the key of its cell, as `Cell.key`."""
        changed = {word for both in self._changed_defaults for word in both}
        own = [word for word in self.set.split(" ") if word not in changed]
        return self.setting, self.method, " ".join(own), self.shuffle

    @property
    def old_settings(self) -> tuple[str, ...]:
        """Return the settings that were the default when it ran, and no longer are."""
        stated = self.set.split(" ")
        return tuple(old for old, new in self._changed_defaults if new not in stated)

    @property
    def _changed_defaults(self) -> list[tuple[str, str]]:
        """Return the former and present defaults of the method that have changed, as in `set`."""
        changed = list_changed_defaults([self.method]).items()
        return [
            (f"{key}={format_value(old)}", f"{key}={format_value(new)}")
            for key, (old, new) in changed
        ]

    @property
    def schedule(self) -> int:
        """Return the planned rounds if the method's schedule depends on them, otherwise 0."""
        return self.planned if make(self.method).schedule_depends_on_rounds else 0

    def contradicts(self, other: "SeedResult") -> bool:
        """Tell whether two results of a seed have equal rounds and different accuracies."""
        accuracies, counts = zip(self._compared(), other._compared(), strict=True)
        # A csv file has six digits of an accuracy.
        is_equal = np.allclose(*accuracies, rtol=1e-5) and counts[0] == counts[1]
        return self.rounds == other.rounds and not is_equal

    def _compared(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        return (self.best, self.best_joined, self.final), (self.best_round, self.diverged)


def columns_of(result_type: type[SeedResult]) -> list[str]:
    """Return the columns of a csv file of results."""
    return [column.name for column in fields(result_type) if column.name != "where"]


def list_optional(result_type: type[SeedResult]) -> set[str]:
    """Return the columns that may be empty, because they are not known."""
    kinds = typing.get_type_hints(result_type)
    return {name for name, kind in kinds.items() if type(None) in typing.get_args(kind)}


#: The columns that all results have, and those of the paper's tables no others.
COLUMNS = columns_of(SeedResult)


@dataclass(frozen=True)
class CellResult:
    """A cell over its seeds."""

    seeds: tuple[SeedResult, ...]
    setting: Setting

    @property
    def accuracy(self) -> float:
        """Return the mean accuracy that tables show, in percent."""
        return float(np.mean(self._accuracies))

    @property
    def std(self) -> float | None:
        return float(np.std(self._accuracies)) if len(self.seeds) > 1 else None

    @property
    def final(self) -> float:
        return 100 * float(np.mean([seed.final for seed in self.seeds]))

    @property
    def _accuracies(self) -> list[float]:
        # With ρ < 1, the paper counts the participants only.
        counts_joined = self.setting.join_ratio < 1
        return [100 * (seed.best_joined if counts_joined else seed.best) for seed in self.seeds]

    @property
    def rounds(self) -> int:
        """Return the rounds that every seed has run."""
        return min(seed.rounds for seed in self.seeds)

    @property
    def old_settings(self) -> tuple[str, ...]:
        return self.seeds[0].old_settings

    @property
    def best_round(self) -> float:
        return float(np.mean([seed.best_round for seed in self.seeds]))

    @property
    def seconds_per_round(self) -> float:
        """Return the seconds of all seeds that ran side by side."""
        return float(np.mean([seed.seconds_per_round for seed in self.seeds]))

    @property
    def departures(self) -> list[str]:
        """List how the runs differ from the setting, in the paper's tables from its experiment."""
        return [*self._list_shortfalls(), *self.changes]

    def _list_shortfalls(self) -> list[str]:
        planned, departures = self.setting, []
        most = max(seed.rounds for seed in self.seeds)
        if self.rounds < planned.rounds:
            rounds = f"{self.rounds}" if most == self.rounds else f"{self.rounds} to {most}"
            departures.append(f"{rounds} of {planned.rounds} rounds")
        if len(self.seeds) < planned.seeds:
            departures.append(f"{len(self.seeds)} of {planned.seeds} seeds")
        return departures

    @property
    def changes(self) -> list[str]:
        """List the departures that are not just fewer rounds or seeds."""
        departures = []
        if self.seeds[0].shuffle != self.setting.preset["shuffle"]:
            departures.append("shuffled")
        departures += [f"{setting} (the default then)" for setting in self.old_settings]
        eval_every = max(seed.eval_every for seed in self.seeds)
        if eval_every > 1:
            departures.append(f"evaluated every {eval_every} rounds")
        diverged = max(seed.diverged for seed in self.seeds)
        if diverged:
            departures.append(f"clients diverged in {diverged} round{'s' if diverged > 1 else ''}")
        return [
            *departures,
            *dict.fromkeys(f"data {seed.data}" for seed in self.seeds if seed.data),
        ]


class Results:
    """All known results, by cell.

    If a seed was read twice, the longer run counts; of two equally long ones, the last.
    """

    def __init__(
        self,
        seeds: Iterable[SeedResult],
        unverified: Iterable[str] = (),
        result_type: type[SeedResult] = SeedResult,
    ) -> None:
        self.columns = columns_of(result_type)
        self.unverified = list(unverified)
        """Sentences about files that no digest covers."""
        self.contradictions: list[str] = []
        """Sentences about seeds that were read twice with different accuracies."""
        chosen: dict[tuple[Any, ...], SeedResult] = {}
        for seed in seeds:
            key = (*seed.cell, seed.old_settings, seed.schedule, seed.seed)
            earlier = chosen.get(key)
            if earlier and seed.contradicts(earlier):
                self.contradictions.append(
                    f"Seed {seed.seed} of {seed.method} in {seed.setting} has an accuracy of "
                    f"{100 * earlier.best:.2f} % in {earlier.where} and of "
                    f"{100 * seed.best:.2f} % in {seed.where}; the latter is shown."
                )
            if earlier is None or seed.rounds >= earlier.rounds:
                chosen[key] = seed
        self.seeds = list(chosen.values())

    def find(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell; of several schedules, the one with the most rounds.

        A result with a default that has changed since counts only if there is no other.
        """
        groups: dict[tuple[tuple[str, ...], int], list[SeedResult]] = {}
        for seed in self.seeds:
            if seed.cell == cell.key:
                groups.setdefault((seed.old_settings, seed.schedule), []).append(seed)
        results = [
            CellResult(tuple(sorted(own, key=lambda seed: seed.seed)), cell.setting)
            for own in groups.values()
        ]
        return max(results, key=lambda one: (not one.old_settings, one.rounds), default=None)

    def write(self, path: Path) -> None:
        """Write a line for each cell and seed, and the digest of the file."""
        lines = []
        for seed in sorted(self.seeds, key=lambda seed: (seed.cell, seed.planned, seed.seed)):
            texts = {name: format_value(getattr(seed, name)) for name in self.columns}
            lines.append({name: spreadsheet_safe(text) for name, text in texts.items()})
        data = csv_text(self.columns, lines, header=True).encode()
        record = Digests.read(path.parent) or Digests()
        record.add_version(path, data)
        files.write_file(path.parent / DIGESTS, record.pack())
        files.write_file(path, data)
