"""The progress of a run as text: what a round has brought, and how long the rest takes."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedala.errors import printable
from fedala.metrics import ACCURACY
from fedala.records import Fault, HistoryRow
from fedala.runs.batches import name_seeds
from fedala.runs.members import Group
from fedala.runs.plan import Plan
from fedala.runs.seconds import average_seconds


@dataclass
class _Series:
    """Rounds of some seeds of a group, which run side by side, as far as they have been shown."""

    seeds: Sequence[int]
    which_seeds: str = ""
    """What a line says of the seeds: nothing if they are all of the run's."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """By label and seed."""
    best: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: list[HistoryRow] = field(default_factory=list)
    """Of the first run, in this process."""
    diverged: set[tuple[int, int]] = field(default_factory=set)


class RunProgress:
    """Show the progress of a run: a plain line now and then. Several groups may run at a time.

    `with RunProgress(plan) as progress: execute(plan, out, observer=RunObserver(progress.row))`
    """

    def __init__(self, plan: Plan, *, every: float = 10) -> None:
        """`every`: seconds between two lines."""
        self.rounds = int(plan.config.rounds or 1)
        #: By label: the group that the method runs in, and the method's title.
        self.groups = {m.label: n for n, group in enumerate(plan.groups) for m in group.members}
        self.titles = {member.label: member.title for member in plan.members}
        self.names = [_describe_group(group) for group in plan.groups]
        self.last_labels = [group.members[-1].label for group in plan.groups]
        self.every = every
        self.best_before: dict[str, dict[int, float]] = {}  # the resume
        self.seeds = range(plan.config.seed, plan.config.seed + plan.config.seeds)
        self.series = [_Series(self.seeds) for _ in plan.groups]
        self.metric = ACCURACY
        self.print_time = time.monotonic()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def begin(self, method: str, seeds: Sequence[int]) -> None:
        """Show rounds of these seeds from now on."""
        which = ""
        if len(seeds) < len(self.seeds):
            which = f", {name_seeds(seeds)}"
        self.series[self.groups[method]] = _Series(seeds, which)

    def earlier(self, method: str, rows: Sequence[HistoryRow]) -> None:
        """Take into account what was evaluated before a resume."""
        best = self.best_before[method] = dict[int, float]()
        for row in rows:
            best[row.seed] = row.metric.pick_best([row.score, best.get(row.seed, row.score)])

    def row(self, method: str, row: HistoryRow) -> None:
        """Show one run's evaluation of a round.

        The mean over the runs of a method is shown; in a sweep, that of the best point.
        """
        group = self.groups[method]
        series = self.series[group]
        if not series.rows:
            own = [label for label, number in self.groups.items() if number == group]
            series.best = {label: dict(self.best_before.get(label, {})) for label in own}
        seed, round, self.metric = row.seed, row.round, row.metric
        series.scores.setdefault(method, {})[seed] = row.score
        best = series.best.setdefault(method, {})
        best[seed] = row.metric.pick_best([row.score, best.get(seed, row.score)])
        if not series.rows or series.rows[-1].round < round:
            series.rows.append(row)
        if seed == series.seeds[-1] and method == self.last_labels[group]:
            self.show(group, round, self._describe(series, round))

    def show(self, group: int, round: int, text: str) -> None:
        """Show what is known after a round of a group."""
        now = time.monotonic()
        if round == self.rounds or now - self.print_time >= self.every:
            self.print_time = now
            self.say(f"{self.names[group]}{self.series[group].which_seeds}: {text}")

    def fault(self, method: str, fault: Fault) -> None:
        """Name a client that diverged, once; the table of results counts how often it did."""
        diverged = self.series[self.groups[method]].diverged
        if fault.step is not None or (fault.seed, fault.client) not in diverged:
            self.say(f"{self.titles[method]}: {fault}")
        diverged.add((fault.seed, fault.client))

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        print(printable(sentence, 2000), file=sys.stderr, flush=True)

    def _find_best_mean(self, by_label: dict[str, dict[int, float]]) -> float:
        """Return the mean over the seeds, of the best point if it is a sweep."""
        means = [float(np.mean(list(values.values()))) for values in by_label.values() if values]
        return self.metric.pick_best(means)

    def _describe(self, series: _Series, round: int) -> str:
        score, best = (
            self.metric.format(self._find_best_mean(by_label)) + self.metric.unit
            for by_label in (series.scores, series.best)
        )
        pace = average_seconds(series.rows)
        text = f"round {round}/{self.rounds}  {self.metric.title} {score}  best {best}"
        text += f"  {pace:.3g} s/round"
        if round < self.rounds:
            # The row of round r comes after r + 1 rounds of training, except that of the last.
            text += f"  {format_duration(pace * max(0, self.rounds - round - 1))} left"
        return text


def _describe_group(group: Group) -> str:
    """Return the name of a group: its method's, and how many points of a sweep it has."""
    first = group.members[0]
    if len(group.members) == 1:
        return first.title
    return f"{first.method.title}, {len(group.members)} points"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
