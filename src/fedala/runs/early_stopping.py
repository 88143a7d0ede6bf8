"""A run's best evaluation so far, and when a run stops because no evaluation has been better.

Both follow from the rows of the history alone, so that a resumed run decides the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedala.data import Federation
from fedala.errors import UserError
from fedala.options import name_option
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.results import best_row


def check_criterion(config: Config, federation: Federation) -> None:
    """Refuse to pick the best round by a loss on validation samples if there are none."""
    if config.pick_by != Config().pick_by and not any(map(len, federation.validation)):
        raise UserError(
            f"{name_option('pick_by', config.pick_by)} is about validation samples, and there are "
            f"none: hold some out by {name_option('validation', 0.1)}, or leave it out."
        )


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
        is_best = best_row(rows, row.criterion) is row
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
