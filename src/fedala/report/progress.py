"""A run as it goes: one bar per method on a terminal, a plain line now and then anywhere else."""

import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedala.running import Plan
from fedala.simulation import Row


class Watch(Progress):
    """Follows a run: `with Watch(console, plan) as watch: execute(plan, out, on_row=watch.row)`."""

    def __init__(self, console: Console, plan: Plan, *, every: float = 10) -> None:
        """`every`: seconds between two plain lines, where there is no terminal."""
        self.plain = not console.is_terminal or console.is_dumb_terminal
        columns = TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[text]}")
        super().__init__(*columns, console=console, disable=self.plain)
        self.rounds = int(plan.config.rounds or 1)
        self.titles = {method.name: method.title for method in plan.methods}
        self.bars = {name: self.add_task(title, total=self.rounds, text="") for name, title in self.titles.items()}
        self.last_seed = plan.config.seed + plan.config.seeds - 1
        self.every = every
        self.method = ""
        self.now: dict[int, float] = {}
        self.best: dict[int, float] = {}
        self.began = self.seen = self.printed = time.monotonic()

    def row(self, method: str, row: Row) -> None:
        """One run's evaluation of a round. The runs of a method go side by side, so what is shown is their mean."""
        if method != self.method:
            # A method's first row comes at the end of its first round: it began when the method before it ended.
            self.method, self.began, self.now, self.best = method, self.seen, {}, {}
        seed, round, accuracy = row["seed"], row["round"], row["accuracy"]
        self.now[seed] = accuracy
        self.best[seed] = max(accuracy, self.best.get(seed, accuracy))
        if seed != self.last_seed:
            return
        self.seen = time.monotonic()
        text = self._text(round)
        self.update(self.bars[method], completed=round, text=text)
        if self.plain and (round == self.rounds or self.seen - self.printed >= self.every):
            self.printed = self.seen
            self.console.print(f"{self.titles[method]}: {text}", soft_wrap=True, markup=False, highlight=False)

    def _text(self, round: int) -> str:
        now, best = (100 * float(np.mean(list(values.values()))) for values in (self.now, self.best))
        # The row of round r comes when r + 1 rounds have been trained, but for the last one.
        trained = min(round + 1, self.rounds)
        pace = (self.seen - self.began) / trained
        left = f"  {clock(pace * (self.rounds - trained))} left" if round < self.rounds else ""
        return f"round {round}/{self.rounds}  accuracy {now:.2f} %  best {best:.2f} %  {pace:.2g} s/round{left}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
