"""What happens to cells as they run."""

from enum import StrEnum
from typing import Protocol

from fedala.records import HistoryRow


class Outcome(StrEnum):
    """How a cell ended."""

    DONE = "done"
    FINISHED_BEFORE = "finished before"
    STOPPED = "stopped"
    """Between two rounds, because the time was up."""
    NOT_STARTED = "not started"
    """Because the time was up."""
    SKIPPED = "skipped"
    """Because it cannot be run, or another process runs it."""
    FAILED = "failed"


class CellObserver(Protocol):
    """Follows cells as they run."""

    def row(self, cell: str, row: HistoryRow) -> None:
        """Note one seed's evaluation of a round."""

    def end(self, cell: str, outcome: Outcome, reason: str = "") -> None:
        """Note how a cell ended, and why if it did not finish."""
