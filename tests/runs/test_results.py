"""Results: the best round is the one with the best number, wherever a NaN stands."""

import json
from itertools import permutations

import numpy as np
import pytest

from fedala.records import HistoryRow
from fedala.report.tables import results
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.results import MethodResult, best_row

NAN = float("nan")


def method_result(accuracies, validation=None):
    """One run with these accuracies, round by round."""
    validation = validation or [None] * len(accuracies)
    rows = [
        HistoryRow(0, round, accuracy, 1.0, accuracy, score_validation=picked)
        for round, (accuracy, picked) in enumerate(zip(accuracies, validation, strict=True))
    ]
    return MethodResult("fedavg", "FedAvg", rows)


@pytest.mark.parametrize("accuracies", list(permutations([NAN, 0.5, 0.6])))
def test_a_round_without_a_number_is_never_the_best(accuracies):
    result = method_result(accuracies)
    assert result.best.tolist() == [0.6]
    assert result.best_joined.tolist() == [0.6]
    assert result.best_accuracy == 0.6
    assert best_row(result.history, "score").round == accuracies.index(0.6)


def test_the_share_of_clients_below_local_by_hand():
    """Seed 0: one of two is below, and a third has no samples. Seed 1: none. Seed 2 is unknown."""
    local, own = method_result([0.5]), method_result([0.5])
    for seed, of_local, of_own in (
        (0, [9, 5, 0], [8, 5, 0]),
        (1, [1, 2, 3], [1, 3, 3]),
    ):
        for result, correct in ((local, of_local), (own, of_own)):
            samples = [10, 10, 0 if seed == 0 else 10]
            result.add_clients(seed, np.array([correct, [1.0] * 3, samples]).T)
    local.add_clients(2, np.ones((3, 3)))
    expected = {"mean": 0.25, "std": 0.25, "runs": [0.5, 0.0]}
    assert own.summary(local)["clients_below_local"] == expected
    assert "clients_below_local" not in own.summary()
    assert "clients_below_local" not in local.summary(local)


@pytest.mark.parametrize("validation", list(permutations([NAN, 0.1, 0.2])))
def test_validation_picks_a_round_with_a_number(validation):
    accuracies = [0.7, 0.8, 0.9]
    result = method_result(accuracies, list(validation))
    assert result.validation_picked.tolist() == [accuracies[validation.index(0.2)]]


def test_without_any_number_the_result_is_nan():
    assert np.isnan(method_result([NAN, NAN]).best).all()
    assert np.isnan(method_result([0.5, 0.6], [NAN, NAN]).validation_picked).all()
    assert method_result([0.5, 0.6]).validation_picked is None


def test_the_first_of_two_equal_rounds_is_the_best():
    assert best_row(method_result([0.5, 0.6, 0.6]).history, "score").round == 1


def test_a_summary_is_json_and_null_is_shown_as_a_dash(tmp_path):
    def refuse(constant):
        raise ValueError(constant)

    with RunFolder.create(tmp_path / "run", Config(), force=False) as folder:
        summary = method_result([NAN, NAN]).summary()
        folder.write_summary({"methods": {"fedavg": summary}, "seconds": float("inf")})
        text = folder.read_verified("summary.json").decode()
    written = json.loads(text, parse_constant=refuse)
    assert written["methods"]["fedavg"]["accuracy"]["best"] == {
        "mean": None,
        "std": None,
        "runs": [None],
    }
    assert written["seconds"] is None
    best = results(written["methods"]).columns[1]
    assert list(best.cells) == ["–"]
