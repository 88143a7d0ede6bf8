"""The headline: how it is written, and which is better."""

import math

import pytest

from fedala.metrics import ACCURACY, MSE
from fedala.report.headline import (
    AgainstMajority,
    describe_against_majority,
    format_figure,
    rank_means,
)


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
    text = "always the most frequent class: 25.00 %."
    assert describe_against_majority([AgainstMajority("A", 0.5, 0.25)] * 2) == text
    methods = [AgainstMajority("A", 0.6, share) for share in (0.5, 0.25, 0.3)]
    text = "always the most frequent class of the clients in training: 25.00 to 50.00 %."
    assert describe_against_majority(methods, has_newcomers=True) == text


def test_methods_that_are_no_better_than_one_class_are_named():
    """Scores that look the same are equal; a score that is not a number is not better."""
    best = {"A": 0.9236, "B": 0.92371, "C": 0.9238, "D": math.nan, "E": 0.1}
    methods = [AgainstMajority(title, score, 0.92369) for title, score in best.items()]
    assert describe_against_majority(methods[:4]).endswith(
        "92.37 %. A, B and D are no better in the best round: balanced_accuracy and auc in "
        "metrics.csv say whether the classes are told apart."
    )
    assert " A is no better in the best round" in describe_against_majority(
        [methods[0], methods[2]]
    )
    assert " A, A, A and 2 more are no better" in describe_against_majority([methods[0]] * 5)
