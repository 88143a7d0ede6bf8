"""The progress of a run on a terminal: a bar for each method. It needs rich."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedala.report.progress import RunProgress
from fedala.runs.plan import Plan


class ProgressBars(RunProgress):
    """Show a bar for each method; if the console is not a terminal, a plain line now and then."""

    def __init__(self, console: Console, plan: Plan, *, every: float = 10) -> None:
        """`every`: seconds between two plain lines if there is no terminal."""
        super().__init__(plan, every=every)
        self.console = console
        self.plain = not console.is_terminal or console.is_dumb_terminal
        columns = TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[text]}")
        self.bars = Progress(*columns, console=console, disable=self.plain)
        self.tasks = [self.bars.add_task(n, total=self.rounds, text="") for n in self.names]

    def __enter__(self) -> "ProgressBars":
        self.bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bars.stop()

    def show(self, group: int, round: int, text: str) -> None:
        """Show what is known after a round of a group."""
        if self.plain:
            super().show(group, round, text)
        else:
            self.bars.update(self.tasks[group], completed=round, text=text)

    def say(self, sentence: str) -> None:
        """Print a sentence above the bars."""
        self.console.print(sentence, soft_wrap=True, markup=False, highlight=False)
