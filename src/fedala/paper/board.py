"""The cells as they run: a live table on a terminal, a plain line now and then anywhere else."""

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

from fedala.paper.running import BUSY
from fedala.records import HistoryRow
from fedala.report.progress import clock

_SHOWN = 12  # ended cells that stay in view


@dataclass
class Line:
    """What is known of a cell."""

    how: str = "waiting"
    why: str = ""
    round: int = -1
    began: float = 0.0
    first: int = 0
    now: dict[int, float] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)

    def mean(self, values: dict[int, float]) -> str:
        return f"{100 * float(np.mean(list(values.values()))):.2f}" if values else ""


class Board:
    """Follows cells: `with Board(console, {"cifar100-dir/fedala": 55.92}, rounds, deadline) as board:`."""

    def __init__(
        self,
        console: Console,
        printed: Mapping[str, float | None],
        rounds: int,
        deadline: float | None = None,
    ) -> None:
        """`printed`: the cells, each with what the paper says about it."""
        self.console, self.printed, self.rounds, self.deadline = console, printed, rounds, deadline
        self.lines = {cell: Line() for cell in printed}
        self.plain = not console.is_terminal or console.is_dumb_terminal
        self.live = Live(
            console=console, get_renderable=self.table, refresh_per_second=2, transient=True
        )
        self.printed_at = time.monotonic()

    def __enter__(self) -> "Board":
        if not self.plain:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.plain:
            self.live.stop()

    def row(self, cell: str, row: HistoryRow) -> None:
        line, seed = self.lines[cell], row.seed
        accuracy = row.accuracy_joined  # with ρ < 1, the paper counts the participants alone
        if line.how != "running":
            line.how, line.began, line.first = (
                "running",
                time.monotonic() - row.seconds,
                row.round - 1,
            )
        line.round = row.round
        line.now[seed] = accuracy
        line.best[seed] = float(np.fmax(accuracy, line.best.get(seed, accuracy)))
        if self.plain and time.monotonic() - self.printed_at >= 10:
            self.printed_at = time.monotonic()
            self._say(f"{cell}: {self._progress(line)}")

    def ended(self, cell: str, how: str, why: str = "") -> None:
        line = self.lines[cell]
        if how == "kept" and line.how != "waiting":
            return  # another process has just finished it
        if how in ("skipped", "left out") and (line.how != "waiting" or why == BUSY):
            return  # another process is running it, or has done what it could
        line.how, line.why = how, why
        if self.plain:
            progress = f" {self._progress(line)}" if line.round >= 0 else ""
            self._say(f"{cell}: {how}{f' ({why})' if why else ''}{progress}")

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _progress(self, line: Line) -> str:
        text = f"round {line.round}/{self.rounds}  accuracy {line.mean(line.now)} %  best {line.mean(line.best)} %"
        pace = self._pace(line)
        return f"{text}  {pace:.2g} s/round" if pace else text

    @staticmethod
    def _pace(line: Line) -> float:
        trained = line.round - line.first
        return (
            (time.monotonic() - line.began) / trained
            if line.how == "running" and trained > 0
            else 0.0
        )

    def table(self) -> Table:
        """What is running, what ended last, and what comes next."""
        table = Table("cell", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("round", "accuracy", "best", "paper", "s/round", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        ended = [
            cell
            for cell, line in self.lines.items()
            if line.how not in ("running", "waiting", "kept")
        ]
        running = [cell for cell, line in self.lines.items() if line.how == "running"]
        waiting = [cell for cell, line in self.lines.items() if line.how == "waiting"]
        for cell in (*ended[-_SHOWN:], *running, *waiting[:3]):
            line, paper = self.lines[cell], self.printed[cell]
            pace = self._pace(line)
            table.add_row(
                escape(cell),
                escape(line.how),
                f"{line.round}/{self.rounds}" if line.round >= 0 else "",
                line.mean(line.now),
                line.mean(line.best),
                "" if paper is None else f"{paper:.2f}",
                f"{pace:.2g}" if pace else "",
                clock(pace * (self.rounds - line.round)) if pace else "",
            )
        left = (
            ""
            if self.deadline is None
            else f", {clock(max(0, self.deadline - time.monotonic()))} left"
        )
        table.caption = f"{len(self.lines) - len(running) - len(waiting)} of {len(self.lines)} cells ended{left}"
        return table

    def summary(self) -> list[str]:
        """What has become of the cells, in sentences."""
        by = {
            how: [c for c, line in self.lines.items() if line.how == how]
            for how in ("done", "kept")
        }
        counts = [
            f"{len(by['done'])} run" if by["done"] else "",
            f"{len(by['kept'])} kept" if by["kept"] else "",
        ]
        lines = [
            f"Cells: {', '.join(filter(None, counts)) or 'none was finished'} (of {len(self.lines)})."
        ]
        for cell, line in self.lines.items():
            if line.how == "stopped":
                lines.append(
                    f"Out of time: {cell} has {line.round} of {self.rounds} rounds; the same command goes on."
                )
        left = [cell for cell, line in self.lines.items() if line.how in ("left out", "waiting")]
        if left:
            lines.append(f"Left out, for want of time: {', '.join(left)}.")
        reasons: dict[tuple[str, str], list[str]] = {}
        for cell, line in self.lines.items():
            if line.how in ("skipped", "failed"):
                reasons.setdefault((line.how, line.why), []).append(cell)
        lines += [f"{how.capitalize()}: {', '.join(c)}: {why}" for (how, why), c in reasons.items()]
        return lines
