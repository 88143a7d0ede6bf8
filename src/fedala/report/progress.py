"""A run as it goes: one bar per method on a terminal, a plain line now and then anywhere else."""

import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedala.records import Fault, HistoryRow
from fedala.runs.plan import Plan


class Watch(Progress):
    """Follows a run: `with Watch(console, plan) as watch: execute(plan, out, on_row=watch.row)`."""

    def __init__(self, console: Console, plan: Plan, *, every: float = 10) -> None:
        """`every`: seconds between two plain lines, where there is no terminal."""
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
        self.first = 0  # the round of a method with which this process began
        self.named: set[tuple[int, int]] = set()
        self.now: dict[int, float] = {}
        self.best: dict[int, float] = {}
        self.began = self.seen = self.printed = time.monotonic()

    def row(self, method: str, row: HistoryRow) -> None:
        """One run's evaluation of a round. The runs of a method go side by side, so what is shown is their mean."""
        if method != self.method:
            # A method's first row comes at the end of its first round: it began when the method before it ended.
            self.method, self.began, self.now, self.best = method, self.seen, {}, {}
            self.first, self.named = row.round, set()
        seed, round, accuracy = row.seed, row.round, row.accuracy
        self.now[seed] = accuracy
        self.best[seed] = float(np.fmax(accuracy, self.best.get(seed, accuracy)))
        if seed != self.last_seed:
            return
        self.seen = time.monotonic()
        text = self._text(round)
        self.update(self.bars[method], completed=round, text=text)
        if self.plain and (round == self.rounds or self.seen - self.printed >= self.every):
            self.printed = self.seen
            self.say(f"{self.titles[method]}: {text}")

    def fault(self, method: str, fault: Fault) -> None:
        """A client that diverged; each is named once, the table says how often it happened."""
        if fault.step is not None or (fault.seed, fault.client) not in self.named:
            self.say(f"{self.titles[method]}: {fault}")
        self.named.add((fault.seed, fault.client))

    def say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    def _text(self, round: int) -> str:
        now, best = (
            100 * float(np.mean(list(values.values()))) for values in (self.now, self.best)
        )
        # The row of round r comes when r + 1 rounds have been trained, but for the last one.
        trained = min(round + 1, self.rounds)
        pace = (self.seen - self.began) / max(1, trained - self.first)
        left = f"  {clock(pace * (self.rounds - trained))} left" if round < self.rounds else ""
        return f"round {round}/{self.rounds}  accuracy {now:.2f} %  best {best:.2f} %  {pace:.2g} s/round{left}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
