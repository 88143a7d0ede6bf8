"""The progress of a run: one bar per method on a terminal, otherwise a plain line now and then."""

import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedala.metrics import ACCURACY
from fedala.records import Fault, HistoryRow
from fedala.runs.members import Group
from fedala.runs.plan import Plan


class ProgressBars(Progress):
    """Show the progress of a run.

    `with ProgressBars(console, plan) as bars: execute(plan, out, on_row=bars.row)`
    """

    def __init__(self, console: Console, plan: Plan, *, every: float = 10) -> None:
        """`every`: seconds between two plain lines if there is no terminal."""
        self.plain = not console.is_terminal or console.is_dumb_terminal
        columns = TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[text]}")
        super().__init__(*columns, console=console, disable=self.plain)
        self.rounds = int(plan.config.rounds or 1)
        #: By label: the group that the method runs in, and the method's title.
        self.groups = {m.label: n for n, group in enumerate(plan.groups) for m in group.members}
        self.titles = {member.label: member.title for member in plan.members}
        self.names = [_describe_group(group) for group in plan.groups]
        self.bars = [self.add_task(name, total=self.rounds, text="") for name in self.names]
        self.last_labels = [group.members[-1].label for group in plan.groups]
        self.last_seed = plan.config.seed + plan.config.seeds - 1
        self.every = every
        self.group = -1
        self.first_round = 0  # of the group, in this process
        self.diverged: set[tuple[int, int]] = set()
        self.scores: dict[str, dict[int, float]] = {}  # by label and seed
        self.best: dict[str, dict[int, float]] = {}
        self.metric = ACCURACY
        self.start_time = self.row_time = self.print_time = time.monotonic()

    def begin(self, method: str, seeds: Sequence[int]) -> None:
        """Show rounds of these seeds from now on."""
        self.last_seed = seeds[-1]
        self.method = ""  # the next row is the first of another series

    def row(self, method: str, row: HistoryRow) -> None:
        """Show one run's evaluation of a round.

        The mean over the runs of a method is shown; in a sweep, that of the best point.
        """
        group = self.groups[method]
        if group != self.group:
            # A group's first row comes after its first round: it began at the last row of the
            # group before it.
            self.group, self.start_time, self.scores, self.best = group, self.row_time, {}, {}
            self.first_round, self.diverged = row.round, set()
        seed, round, self.metric = row.seed, row.round, row.metric
        self.scores.setdefault(method, {})[seed] = row.score
        best = self.best.setdefault(method, {})
        best[seed] = row.metric.pick_best([row.score, best.get(seed, row.score)])
        if seed != self.last_seed or method != self.last_labels[group]:
            return
        self.row_time = time.monotonic()
        text = self._describe(round)
        self.update(self.bars[group], completed=round, text=text)
        is_due = round == self.rounds or self.row_time - self.print_time >= self.every
        if self.plain and is_due:
            self.print_time = self.row_time
            self.say(f"{self.names[group]}: {text}")

    def fault(self, method: str, fault: Fault) -> None:
        """Name a client that diverged, once; the table of results counts how often it did."""
        if fault.step is not None or (fault.seed, fault.client) not in self.diverged:
            self.say(f"{self.titles[method]}: {fault}")
        self.diverged.add((fault.seed, fault.client))

    def say(self, sentence: str) -> None:
        """Print a sentence above the bars."""
        self.console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    def _find_best_mean(self, by_label: dict[str, dict[int, float]]) -> float:
        """Return the mean over the seeds, of the best point if it is a sweep."""
        means = [float(np.mean(list(values.values()))) for values in by_label.values()]
        return self.metric.pick_best(means)

    def _describe(self, round: int) -> str:
        score, best = (
            self.metric.format(self._find_best_mean(by_label)) + self.metric.unit
            for by_label in (self.scores, self.best)
        )
        # The row of round r comes after r + 1 rounds of training, except that of the last round.
        trained = min(round + 1, self.rounds)
        pace = (self.row_time - self.start_time) / max(1, trained - self.first_round)
        text = f"round {round}/{self.rounds}  {self.metric.title} {score}  best {best}"
        text += f"  {pace:.2g} s/round"
        if round < self.rounds:
            text += f"  {format_duration(pace * (self.rounds - trained))} left"
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
