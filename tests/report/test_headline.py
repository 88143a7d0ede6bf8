"""The headline: how it is written, and which is better."""

import math

import pytest

from fedala.metrics import ACCURACY, MSE
from fedala.report.headline import describe_majority, format_figure, rank_means


@pytest.mark.parametrize(
    ("mean", "std", "runs", "text"),
    [
        (0.5, 0.0, 1, "50.00"),
        (0.6, 0.1, 2, "60.00 ± 10.00"),
        (math.nan, math.nan, 2, "–"),
        (None, None, 2, "–"),
    ],
)
def test_figures_are_percent_with_the_deviation_of_several_runs(mean, std, runs, text):
    assert format_figure(ACCURACY, {"mean": mean, "std": std, "runs": [mean] * runs}) == text


def test_no_figure_is_a_dash():
    assert format_figure(ACCURACY, None) == "–"


def test_means_that_look_the_same_share_their_rank():
    means = [0.5, 0.90001, 0.90002, 0.7, 0.09]
    ranks = rank_means(ACCURACY, means)
    assert [ranks[mean] for mean in means] == [3, 1, 1, 2, 4]
    assert rank_means(MSE, [2.0, 0.5]) == {2.0: 2, 0.5: 1}


def test_runs_with_other_shares_have_the_least_and_the_most():
    assert describe_majority([0.25, 0.25]) == "always the most frequent class: 25.00 %"
    assert describe_majority([0.5, 0.25, 0.3]) == "always the most frequent class: 25.00 to 50.00 %"
