"""A run over several ranks gives what one process gives."""

import numpy as np
import pytest
from ranks.threads import evaluate_on_ranks
from small import EACH_KIND, assert_close, evaluate, ragged_task, same_rows

from fedala.methods import make

SIZES = [5, 14, 9, 3, 8, 0, 11]
RATIOS = [
    (name, ratio)
    for name in EACH_KIND
    for ratio in (1.0, 0.5)
    if ratio == 1 or not make(name).requires_all_clients
]


def task():
    return ragged_task(SIZES)


def assert_same(one, other, tolerance=1e-10):
    _, evaluations, models = one
    _, expected, expected_models = other
    same_rows([e.row for e in evaluations], [e.row for e in expected], tolerance)
    for a, b in zip(evaluations, expected, strict=True):
        assert np.allclose(a.client_scores, b.client_scores, atol=tolerance)
    assert models
    assert models.keys() == expected_models.keys()
    for key in models:
        assert_close(models[key], expected_models[key], tolerance)


@pytest.mark.parametrize(("name", "ratio"), RATIOS)
def test_two_ranks_are_one_process(name, ratio):
    options = {"rounds": 3, "join_ratio": ratio}
    assert_same(evaluate_on_ranks(2, name, task, **options), evaluate(name, task(), **options))


@pytest.mark.parametrize("ranks", [1, 4, 9])
@pytest.mark.parametrize("name", ["fedala", "fedavg", "apple", "fedamp+ala"])
def test_any_number_of_ranks_even_more_than_clients(name, ranks):
    options = {"rounds": 2, "seeds": (3, 4), "join_ratio": 1.0}
    assert_same(evaluate_on_ranks(ranks, name, task, **options), evaluate(name, task(), **options))
