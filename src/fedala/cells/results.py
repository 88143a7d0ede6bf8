"""Results of cells: of one seed, of one cell over its seeds, and all together."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedala.cells.cell import Cell, Setting, format_value, is_known
from fedala.cells.curves import Curve, read_curve
from fedala.errors import spreadsheet_safe
from fedala.io import files
from fedala.methods import list_changed_defaults, make
from fedala.report.headline import count_things
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
    """One seed of one cell. Accuracies are shares, not percent, of all clients' test samples.

    `best` and `final` are of initialised models, before training. What is not known is None: older
    runs did not test trained models, and no run tests them before the first round.
    """

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
    mean: float | None = number(0, 1, default=None)
    """Mean of the clients' accuracies in the best round."""
    worst: float | None = number(0, 1, default=None)
    """Mean of the tenth of the clients with the lowest accuracies in the best round."""
    trained: float | None = number(0, 1, default=None)
    """Accuracy of trained models, after local training, in the round in which it is best."""
    trained_round: int | None = number(0, default=None)
    trained_final: float | None = number(0, 1, default=None)
    trained_mean: float | None = number(0, 1, default=None)
    trained_worst: float | None = number(0, 1, default=None)
    bytes_sent: int | None = number(0, default=None)
    """Bytes that a client receives in a round."""
    bytes_uploaded: int | None = number(0, default=None)
    clients: int | None = number(0, default=None)
    """Clients with test samples."""
    curve: str = ""
    """Round and accuracy of initialised models, such as `0:0.1 10:0.52`."""
    trained_curve: str = ""
    title: str = field(default="", compare=False)
    """What its run calls a method that is not installed here; not a column."""
    where: str = field(default="", compare=False)
    """The file and line, or the folder, that it was read from; not a column."""
    trained_rounds: int | None = field(default=None, compare=False)
    """Rounds of the shorter run that has tested the trained models, if it is another one; not a
    column."""

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
        """Return the planned rounds if the method's schedule depends on them, otherwise 0.

        A method that is not installed here may have one.
        """
        if is_known(self.method) and not make(self.method).schedule_depends_on_rounds:
            return 0
        return self.planned

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what results have in common that are of the same experiment and seed."""
        return *self.cell, self.old_settings, self.schedule, self.seed

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Return what results have in common whose trained models were tested alike."""
        return *self.identity, self.data, self.eval_every

    @property
    def completeness(self) -> tuple[int, bool]:
        """Return what makes it count more than another result of the same seed."""
        return self.rounds, self.trained is not None

    def take_trained_from(self, other: "SeedResult") -> "SeedResult":
        """Return this result with the accuracies of trained models that another run has found."""
        names = [name for name in COLUMNS if name.startswith("trained")]
        taken = {name: getattr(other, name) for name in names}
        return replace(self, trained_rounds=other.rounds, **taken)

    def contradicts(self, other: "SeedResult") -> bool:
        """Tell whether two results of a seed have equal rounds and different accuracies."""
        names = ("best", "best_joined", "final", "best_round", "diverged", "trained")
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        known = [pair for pair in pairs if None not in pair]
        # A csv file has six digits of an accuracy.
        is_equal = all(np.isclose(*pair, rtol=1e-5) for pair in known)
        return self.rounds == other.rounds and not is_equal


#: The columns of a csv file of results.
COLUMNS = [column.name for column in fields(SeedResult) if column.compare]
#: Those of older files, and those that may be empty because they are not known.
OLD_COLUMNS = COLUMNS[: COLUMNS.index("mean")]
OPTIONAL = {column.name for column in fields(SeedResult) if column.default is None}


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
    def trained(self) -> float | None:
        """Return the mean accuracy of trained models in percent, of the seeds that have it."""
        mean = self.average("trained")
        return None if mean is None else 100 * mean

    def average(self, name: str) -> float | None:
        """Return the mean of a column over the seeds that have it."""
        values = self._list_values(name)
        return float(np.mean(values)) if values else None

    def deviation(self, name: str) -> float | None:
        """Return the standard deviation of a column over the seeds; None if there is one seed."""
        values = self._list_values(name)
        return float(np.std(values)) if len(values) > 1 else None

    def _list_values(self, name: str) -> list[float]:
        values = [getattr(seed, name) for seed in self.seeds]
        return [float(value) for value in values if value is not None]

    def curves(self, name: str) -> list[Curve]:
        """Return a curve of each seed that has it: `curve` or `trained_curve`."""
        curves = [read_curve(getattr(seed, name)) for seed in self.seeds]
        return [curve for curve in curves if curve]

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
        tested = [seed for seed in self.seeds if seed.trained is not None]
        is_partial = 0 < len(tested) < len(self.seeds)
        if is_partial or any(seed.trained_rounds for seed in tested):
            fewest = min(seed.trained_rounds or seed.rounds for seed in tested)
            seeds = f" of {count_things(len(tested), 'seed')}" if is_partial else ""
            departures.append(f"trained models tested in {fewest} rounds{seeds}")
        diverged = max(seed.diverged for seed in self.seeds)
        if diverged:
            departures.append(f"clients diverged in {diverged} round{'s' if diverged > 1 else ''}")
        return [
            *departures,
            *dict.fromkeys(f"data {seed.data}" for seed in self.seeds if seed.data),
        ]


class Results:
    """All known results, by cell.

    If a seed was read twice, the longer run counts; of two equally long ones, the one with the
    accuracy of trained models, otherwise the last. If the longer one has not tested trained models,
    a cell has their accuracy from the longest that has, on the same data and as often.
    """

    def __init__(
        self,
        seeds: Iterable[SeedResult],
        unverified: Iterable[str] = (),
        left_out: Iterable[str] = (),
    ) -> None:
        self.unverified = list(unverified)
        """Sentences about files that no digest covers."""
        self.left_out = list(left_out)
        """Sentences about results that do not count, and whose names may be misspelt."""
        self.contradictions: list[str] = []
        """Sentences about seeds that were read twice with different accuracies."""
        self._with_trained: dict[tuple[Any, ...], SeedResult] = {}
        chosen: dict[tuple[Any, ...], SeedResult] = {}
        for seed in seeds:
            key = seed.identity
            if seed.trained is not None:
                known = self._with_trained.get(seed.conditions, seed)
                self._with_trained[seed.conditions] = max(known, seed, key=lambda one: one.rounds)
            earlier = chosen.get(key)
            is_chosen = earlier is None or seed.completeness >= earlier.completeness
            if earlier and seed.contradicts(earlier):
                self.contradictions.append(
                    f"Seed {seed.seed} of {seed.method} in {seed.setting} has an accuracy of "
                    f"{100 * earlier.best:.2f} % in {earlier.where} and of "
                    f"{100 * seed.best:.2f} % in {seed.where}; "
                    f"the {'latter' if is_chosen else 'former'} is shown."
                )
            if is_chosen:
                chosen[key] = seed
        self.seeds = list(chosen.values())

    def find(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell; of several schedules, the one with the most rounds.

        A result with a default that has changed since counts only if there is no other.
        """
        groups: dict[tuple[tuple[str, ...], int], list[SeedResult]] = {}
        for seed in self.seeds:
            if seed.cell == cell.key:
                complete = self._complete(seed)
                groups.setdefault((seed.old_settings, seed.schedule), []).append(complete)
        results = [
            CellResult(tuple(sorted(own, key=lambda seed: seed.seed)), cell.setting)
            for own in groups.values()
        ]
        return max(results, key=lambda one: (not one.old_settings, one.rounds), default=None)

    def _complete(self, seed: SeedResult) -> SeedResult:
        other = self._find_trained(seed)
        return seed.take_trained_from(other) if other else seed

    def _find_trained(self, seed: SeedResult) -> SeedResult | None:
        """Return the shorter run that has tested the trained models, if the seed's own has not."""
        return self._with_trained.get(seed.conditions) if seed.trained is None else None

    def write(self, path: Path) -> None:
        """Write a line for each cell and seed, and the digest of the file.

        A seed that has its trained models from a shorter run has a line for that one, too.
        """
        shorter = [found for seed in self.seeds if (found := self._find_trained(seed))]
        seeds = [*self.seeds, *shorter]
        lines = []
        for seed in sorted(seeds, key=lambda seed: (seed.cell, seed.planned, seed.seed)):
            texts = {name: format_value(getattr(seed, name)) for name in COLUMNS}
            lines.append({name: spreadsheet_safe(text) for name, text in texts.items()})
        data = csv_text(COLUMNS, lines, header=True).encode()
        record = Digests.read(path.parent) or Digests()
        record.add_version(path, data)
        files.write_file(path.parent / DIGESTS, record.pack())
        files.write_file(path, data)
