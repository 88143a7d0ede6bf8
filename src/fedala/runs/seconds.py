"""How long rounds take: what `seconds per round` means everywhere, and the total."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedala.records import HistoryRow

#: What the seconds per round leave out, as a sentence for a footnote.
MEANING = (
    "Seconds per round: the mean wall time of a round with its evaluation. If there are more, it "
    "leaves out the first two rounds (start and ALA's initial stage) and the last evaluation (no "
    "training). "
    "Totals include them."
)


def average_seconds(rows: Sequence[HistoryRow]) -> float:
    """Return the seconds per round of all runs that train side by side; `rows` are one run's.

    The first two rounds do not count, because they include the start and ALA's initial stage, and
    neither does the last row, which need not train. If nothing else is there, they do count.
    """
    seconds = [row.seconds for row in rows[:-1] if row.round > 1]
    return float(np.mean(seconds or [row.seconds for row in rows[:-1] or rows]))


def sum_seconds(rows: Iterable[HistoryRow]) -> dict[int, float]:
    """Return the seconds from the start to the end of each evaluated round, of all runs together.

    Every round counts, the first ones too. A round that was not evaluated counts as long as the
    next evaluated one. The first run that has not stopped yet tells the time.
    """
    of_round: dict[int, float] = {}
    for row in rows:
        of_round.setdefault(row.round, row.seconds)
    total, before, sums = 0.0, -1, {}
    for round, seconds in sorted(of_round.items()):
        total += seconds * (round - before)
        sums[round], before = total, round
    return sums
