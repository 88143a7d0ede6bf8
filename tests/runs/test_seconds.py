"""Seconds per round and in total, by hand."""

import pytest

from fedala.records import HistoryRow
from fedala.runs.results import MethodResult
from fedala.runs.seconds import average_seconds, sum_seconds


def rows(*seconds, every=1, seed=0):
    return [
        HistoryRow(seed, every * k, 0.5, 1.0, 0.5, seconds=value) for k, value in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("given", "every", "seconds"),
    [
        ([10, 7, 1, 3, 0.1], 1, 2),  # neither start, ALA's initial stage nor the last
        ([10, 3, 1, 0.1], 5, 2),  # round 5 is not among the first two
        ([10, 7, 1], 1, 8.5),  # there is no steady round yet
        ([10], 1, 10),
    ],
)
def test_the_seconds_per_round_are_those_of_steady_rounds(given, every, seconds):
    assert average_seconds(rows(*given, every=every)) == seconds
    result = MethodResult("a", "A", [*rows(*given, every=every), *rows(9, every=every, seed=1)])
    assert result.seconds_per_round == result.summary()["seconds_per_round"] == seconds


def test_the_total_counts_every_round():
    assert sum_seconds(rows(10, 7, 1)) == {0: 10, 1: 17, 2: 18}
    assert sum_seconds(rows(10, 7, 1, every=5)) == {0: 10, 5: 45, 10: 50}
    stopped = MethodResult("a", "A", [*rows(10, 7), *rows(11, 8, 2, 1, seed=1)])
    assert stopped.total_seconds == stopped.summary()["total_seconds"] == 10 + 7 + 2 + 1
