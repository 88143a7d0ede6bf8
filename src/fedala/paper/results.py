"""Results of the paper's cells: of one seed, of one cell over its seeds, and all together."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import spreadsheet_safe
from fedala.io import files
from fedala.methods import list_changed_defaults
from fedala.paper.experiments import Cell, format_value, preset, settings
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests
from fedala.runs.tables import csv_text

#: The file of a results folder into which `fedala paper run` writes a line for each cell and seed.
CSV = "results.csv"


def number(least: float, most: float | None = None) -> Any:
    """Declare a field for a number within these bounds."""
    return field(metadata={"least": least, "most": most})


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
        return self.planned if Cell(settings()[self.setting], self.method).has_schedule else 0

    def contradicts(self, other: "SeedResult") -> bool:
        """Tell whether two results of a seed have equal rounds and different accuracies."""
        accuracies, counts = zip(self._compared(), other._compared(), strict=True)
        # A csv file has six digits of an accuracy.
        is_equal = np.allclose(*accuracies, rtol=1e-5) and counts[0] == counts[1]
        return self.rounds == other.rounds and not is_equal

    def _compared(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        return (self.best, self.best_joined, self.final), (self.best_round, self.diverged)


COLUMNS = [column.name for column in fields(SeedResult) if column.name != "where"]


@dataclass(frozen=True)
class CellResult:
    """A cell over its seeds."""

    seeds: tuple[SeedResult, ...]

    @property
    def accuracy(self) -> float:
        """Return the mean accuracy that the paper's tables show, in percent."""
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
        counts_joined = settings()[self.seeds[0].setting].join_ratio < 1
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
        """List how the runs differ from the paper's experiment."""
        paper, departures = preset(), []
        most = max(seed.rounds for seed in self.seeds)
        if self.rounds < paper["rounds"]:
            rounds = f"{self.rounds}" if most == self.rounds else f"{self.rounds} to {most}"
            departures.append(f"{rounds} of {paper['rounds']} rounds")
        if len(self.seeds) < paper["seeds"]:
            departures.append(f"{len(self.seeds)} of {paper['seeds']} seeds")
        if self.seeds[0].shuffle != paper["shuffle"]:
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

    def __init__(self, seeds: Iterable[SeedResult], unverified: Iterable[str] = ()) -> None:
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
            CellResult(tuple(sorted(own, key=lambda seed: seed.seed))) for own in groups.values()
        ]
        return max(results, key=lambda one: (not one.old_settings, one.rounds), default=None)

    def write(self, path: Path) -> None:
        """Write a line for each cell and seed, and the digest of the file."""
        lines = []
        for seed in sorted(self.seeds, key=lambda seed: (seed.cell, seed.planned, seed.seed)):
            texts = {name: format_value(getattr(seed, name)) for name in COLUMNS}
            lines.append({name: spreadsheet_safe(text) for name, text in texts.items()})
        data = csv_text(COLUMNS, lines, header=True).encode()
        record = Digests.read(path.parent) or Digests()
        record.add_version(path, data)
        files.write_file(path.parent / DIGESTS, record.pack())
        files.write_file(path, data)
