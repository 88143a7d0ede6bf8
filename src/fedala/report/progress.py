"""The progress of a run: one bar per method on a terminal, otherwise a plain line now and then."""

import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedala.records import Fault, HistoryRow
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
        self.titles = {method.name: method.title for method in plan.methods}
        self.bars = {
            name: self.add_task(title, total=self.rounds, text="")
            for name, title in self.titles.items()
        }
        self.last_seed = plan.config.seed + plan.config.seeds - 1
        self.every = every
        self.method = ""
        self.first_round = 0  # of the method, in this process
        self.diverged: set[tuple[int, int]] = set()
        self.accuracies: dict[int, float] = {}  # by seed
        self.best: dict[int, float] = {}
        self.start_time = self.row_time = self.print_time = time.monotonic()

    def begin(self, method: str, seeds: Sequence[int]) -> None:
        """Show rounds of these seeds from now on."""
        self.last_seed = seeds[-1]
        self.method = ""  # the next row is the first of another series

    def row(self, method: str, row: HistoryRow) -> None:
        """Show one run's evaluation of a round. The mean over the runs of a method is shown."""
        if method != self.method:
            # A method's first row comes after its first round: it began at the last row of the
            # method before it.
            self.method, self.start_time, self.accuracies, self.best = method, self.row_time, {}, {}
            self.first_round, self.diverged = row.round, set()
        seed, round, accuracy = row.seed, row.round, row.accuracy
        self.accuracies[seed] = accuracy
        self.best[seed] = float(np.fmax(accuracy, self.best.get(seed, accuracy)))
        if seed != self.last_seed:
            return
        self.row_time = time.monotonic()
        text = self._describe(round)
        self.update(self.bars[method], completed=round, text=text)
        is_due = round == self.rounds or self.row_time - self.print_time >= self.every
        if self.plain and is_due:
            self.print_time = self.row_time
            self.say(f"{self.titles[method]}: {text}")

    def fault(self, method: str, fault: Fault) -> None:
        """Name a client that diverged, once; the table of results counts how often it did."""
        if fault.step is not None or (fault.seed, fault.client) not in self.diverged:
            self.say(f"{self.titles[method]}: {fault}")
        self.diverged.add((fault.seed, fault.client))

    def say(self, sentence: str) -> None:
        """Print a sentence above the bars."""
        self.console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    def _describe(self, round: int) -> str:
        accuracy, best = (
            100 * float(np.mean(list(values.values()))) for values in (self.accuracies, self.best)
        )
        # The row of round r comes after r + 1 rounds of training, except that of the last round.
        trained = min(round + 1, self.rounds)
        pace = (self.row_time - self.start_time) / max(1, trained - self.first_round)
        text = f"round {round}/{self.rounds}  accuracy {accuracy:.2f} %  best {best:.2f} %"
        text += f"  {pace:.2g} s/round"
        if round < self.rounds:
            text += f"  {format_duration(pace * (self.rounds - trained))} left"
        return text


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
