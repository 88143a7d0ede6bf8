"""A run's best evaluation so far, and when a run stops because no evaluation has been better.

Both follow from the rows of the history alone, so that a resumed run decides the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedala.records import HistoryRow
from fedala.runs.results import best_row


def headline_column(row: HistoryRow) -> str:
    """Return the column that picks the best round: validation samples if there are any."""
    return "score" if row.score_validation is None else "score_validation"


@dataclass
class RunWatch:
    """The evaluations of one run, as they come."""

    best: HistoryRow | None = None
    last: HistoryRow | None = None
    evaluations: int = 0
    since_best: int = 0
    """How many evaluations in a row have not been better than the best."""

    def add(self, row: HistoryRow) -> bool:
        """Take the next evaluation; tell whether it is the best so far."""
        rows = [row] if self.best is None else [self.best, row]
        is_best = best_row(rows, headline_column(row)) is row
        self.last = row
        self.evaluations += 1
        self.since_best = 0 if is_best else self.since_best + 1
        if is_best:
            self.best = row
        return is_best

    def is_over(self, patience: int | None) -> bool:
        """Tell whether the run ends with its latest evaluation."""
        return patience is not None and self.since_best >= patience


def group_runs(
    rows: Iterable[HistoryRow], seeds: Sequence[int], patience: int | None
) -> list[RunWatch]:
    """Return what a history says of each run, in the order of `seeds`.

    Raises a ValueError if a run has a row after its end, or if there is a row of no run.
    """
    watches = {seed: RunWatch() for seed in seeds}
    for row in rows:
        watch = watches.get(row.seed)
        if watch is None:
            raise ValueError(f"it has a row of seed {row.seed}")
        if watch.is_over(patience):
            raise ValueError(f"it has a row of seed {row.seed} after its end")
        watch.add(row)
    return list(watches.values())
