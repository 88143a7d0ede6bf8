"""The progress of cells: a live table on a terminal, otherwise a plain line now and then."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fedala.cells.observer import Outcome
from fedala.cells.running import BUSY
from fedala.records import HistoryRow
from fedala.report.progress import format_duration
from fedala.runs.seconds import average_seconds

_WAITING, _RUNNING = "waiting", "running"
_MOST_ENDED, _MOST_WAITING = 12, 3  # cells in the live table
_SECONDS_BETWEEN_LINES = 10


@dataclass
class CellState:
    """What is known about a cell."""

    status: str = _WAITING
    """Waiting, running, or its outcome."""
    reason: str = ""
    round: int = -1
    rows: list[HistoryRow] = field(default_factory=list)
    """Those of the first seed, in this process."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """The last ones, by seed."""
    best: dict[int, float] = field(default_factory=dict)

    @property
    def seconds_per_round(self) -> float:
        """Return those of the rounds of this process; 0 if they are unknown."""
        return average_seconds(self.rows) if self.status == _RUNNING and self.rows else 0.0


def _mean_percent(values: dict[int, float]) -> str:
    return f"{100 * float(np.mean(list(values.values()))):.2f}" if values else ""


class CellProgress:
    """Shows cells as they run.

    `with CellProgress(console, {"cifar100-dir/fedala": 55.92}, rounds, deadline) as progress:`
    """

    def __init__(
        self,
        console: Console,
        printed: Mapping[str, float | None],
        rounds: int | Mapping[str, int],
        deadline: float | None = None,
        source: str = "paper",
    ) -> None:
        """Show cells, each with the accuracy that the paper, or another `source`, prints for it.

        `rounds` are those of all cells, or of each.
        """
        self.source = source
        self.console, self.printed, self.deadline = console, printed, deadline
        self.rounds = dict.fromkeys(printed, rounds) if isinstance(rounds, int) else rounds
        self.cells = {cell: CellState() for cell in printed}
        self.plain = not console.is_terminal or console.is_dumb_terminal
        self.live = Live(
            console=console, get_renderable=self.table, refresh_per_second=2, transient=True
        )
        self.print_time = time.monotonic()

    def __enter__(self) -> "CellProgress":
        if not self.plain:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.plain:
            self.live.stop()

    def row(self, cell: str, row: HistoryRow) -> None:
        """Note one seed's evaluation of a round."""
        state, seed = self.cells[cell], row.seed
        accuracy = row.accuracy_joined  # with ρ < 1, the paper counts the participants only
        if state.status != _RUNNING:
            state.status, state.rows = _RUNNING, []
        if not state.rows or state.rows[0].seed == seed:
            state.rows.append(row)
        state.round = row.round
        state.accuracies[seed] = accuracy
        state.best[seed] = float(np.fmax(accuracy, state.best.get(seed, accuracy)))
        if self.plain and time.monotonic() - self.print_time >= _SECONDS_BETWEEN_LINES:
            self.print_time = time.monotonic()
            self._say(f"{cell}: {self._describe(cell)}")

    def end(self, cell: str, outcome: Outcome, reason: str = "") -> None:
        """Note how a cell ended."""
        state = self.cells[cell]
        has_begun = state.status != _WAITING
        # Every process reports every cell: what another process does or has done is not news.
        if outcome == Outcome.FINISHED_BEFORE and has_begun:
            return
        if outcome in (Outcome.SKIPPED, Outcome.NOT_STARTED) and has_begun:
            return
        if outcome == Outcome.NOT_STARTED and state.reason == BUSY:
            return
        if reason == BUSY:
            state.reason = reason
            return
        state.status, state.reason = outcome, reason
        if self.plain:
            text = f"{cell}: {outcome}" + (f" ({reason})" if reason else "")
            self._say(f"{text} {self._describe(cell)}" if state.round >= 0 else text)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _describe(self, cell: str) -> str:
        state = self.cells[cell]
        accuracy, best = _mean_percent(state.accuracies), _mean_percent(state.best)
        text = f"round {state.round}/{self.rounds[cell]}  accuracy {accuracy} %  best {best} %"
        pace = state.seconds_per_round
        return f"{text}  {pace:.2g} s/round" if pace else text

    def table(self) -> Table:
        """Return a table of the cells that are running, that ended last, and that come next."""
        table = Table("cell", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("round", "accuracy", "best", self.source, "s/round", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        by_status: dict[str, list[str]] = {_RUNNING: [], _WAITING: [], Outcome.FINISHED_BEFORE: []}
        ended: list[str] = []
        for cell, state in self.cells.items():
            by_status.get(state.status, ended).append(cell)
        running, waiting = by_status[_RUNNING], by_status[_WAITING]
        for cell in (*ended[-_MOST_ENDED:], *running, *waiting[:_MOST_WAITING]):
            self._add_row(table, cell)
        count = len(self.cells) - len(running) - len(waiting)
        table.caption = f"{count} of {len(self.cells)} cells ended"
        if self.deadline is not None:
            seconds = max(0, self.deadline - time.monotonic())
            table.caption += f", {format_duration(seconds)} left"
        return table

    def _add_row(self, table: Table, cell: str) -> None:
        state, paper, rounds = self.cells[cell], self.printed[cell], self.rounds[cell]
        pace = state.seconds_per_round
        table.add_row(
            escape(cell),
            escape(state.status),
            f"{state.round}/{rounds}" if state.round >= 0 else "",
            _mean_percent(state.accuracies),
            _mean_percent(state.best),
            "" if paper is None else f"{paper:.2f}",
            f"{pace:.2g}" if pace else "",
            format_duration(pace * (rounds - state.round)) if pace else "",
        )

    def summary(self) -> list[str]:
        """Return sentences about how the cells ended."""
        counts = []
        for outcome, words in ((Outcome.DONE, "run"), (Outcome.FINISHED_BEFORE, "finished before")):
            if cells := self._list_cells(outcome):
                counts.append(f"{len(cells)} {words}")
        sentences = [f"Cells: {', '.join(counts) or 'none finished'} (of {len(self.cells)})."]
        for cell in self._list_cells(Outcome.STOPPED):
            state = self.cells[cell]
            why = f"Stopped by an error ({state.reason})" if state.reason else "Out of time"
            rounds = f"has {state.round} of {self.rounds[cell]} rounds"
            how_far = rounds if state.round >= 0 else "is not finished"
            sentences.append(f"{why}: {cell} {how_far}; the same command continues it.")
        waiting = self._list_cells(Outcome.NOT_STARTED, _WAITING)
        busy = [cell for cell in waiting if self.cells[cell].reason == BUSY]
        if cells := [cell for cell in waiting if cell not in busy]:
            sentences.append(f"Out of time, not started: {', '.join(cells)}.")
        if busy:
            sentences.append(f"Not run here: {', '.join(busy)}: {BUSY}")
        reasons: dict[tuple[str, str], list[str]] = {}
        for cell in self._list_cells(Outcome.SKIPPED, Outcome.FAILED):
            state = self.cells[cell]
            reasons.setdefault((state.status, state.reason), []).append(cell)
        for (status, reason), cells in reasons.items():
            sentences.append(f"{status.capitalize()}: {', '.join(cells)}: {reason}")
        return sentences

    def _list_cells(self, *statuses: str) -> list[str]:
        return [cell for cell, state in self.cells.items() if state.status in statuses]
