"""With `eval_every`, other rounds skip what only a test reads, and the results are the same."""

from collections import Counter

import numpy as np
import pytest
import torch
from small import evaluate, ragged_task, start_of

from fedala.lanes.cohort import Cohort
from fedala.lanes.training import EagerRunner
from fedala.lanes.trees import leaves
from fedala.methods import apple, list_methods, make
from fedala.simulation import Simulation

SIZES = [8, 4, 5]
PLAIN = [name for name in list_methods() if "+ala" not in name]


def assert_equal(a, b):
    """Compare two trees of tensors to the bit."""
    ours, others = dict(leaves(a)), dict(leaves(b))
    assert ours.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in ours.items())


@pytest.mark.parametrize(
    ("name", "join_ratio"),
    [
        *((name, 1.0) for name in [*PLAIN, "ditto+ala", "per-fedavg+ala"]),
        *((name, 0.5) for name in ("fedavg", "fedavg-c", "fedala", "per-fedavg", "fedbabu")),
    ],
)
def test_evaluated_rounds_and_states_are_the_same_to_the_bit(name, join_ratio):
    def go(eval_every):
        return evaluate(
            name, ragged_task(SIZES), rounds=6, join_ratio=join_ratio, eval_every=eval_every
        )

    every, all_found, all_models = go(1)
    seldom, found, models = go(5)
    assert [one.row.round for one in found] == [0, 5, 6]
    for one in found:
        other = all_found[one.row.round]
        cells, expected = one.row.columns(), other.row.columns()
        assert cells.keys() == expected.keys()
        for column in cells.keys() - {"seconds"}:
            np.testing.assert_array_equal(cells[column], expected[column], column)
        np.testing.assert_array_equal(one.client_scores, other.client_scores)
    assert_equal(seldom.state(), every.state())
    for client in range(len(SIZES)):
        assert ((0, client) in seldom.clients) == ((0, client) in every.clients)
        if (0, client) in every.clients:
            assert_equal(seldom.clients[0, client], every.clients[0, client])
    assert models.keys() == all_models.keys()
    for key in models:
        assert_equal(models[key], all_models[key])


@pytest.fixture
def counted(monkeypatch):
    """Count the steps of trainings, the tests of models, and APPLE's personal models."""
    counts = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counting(*arguments, **named):
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)

    for owner, name in ((EagerRunner, "step"), (Cohort, "evaluate"), (apple, "Personal")):
        count(owner, name)
    return counts


def count_rounds(name, settings, counted):
    """Return the counts of round 2 if it is evaluated, and if it is not."""
    found = []
    for eval_every in (1, 5):
        task = ragged_task(SIZES)
        simulation = Simulation(
            make(name, settings), task, start_of(task), rounds=6, eval_every=eval_every
        )
        simulation.step(1, train=True)
        counted.clear()
        simulation.step(2, train=True)
        found.append(Counter(counted))
    return found


#: Per-FedAvg adapts the model that it tests by one step, FedBABU by five epochs of two steps.
STEPS_TO_A_TEST = {"per-fedavg": 1, "fedbabu": 10}


@pytest.mark.parametrize("name", [*PLAIN, "ditto+ala"])
def test_rounds_without_an_evaluation_test_nothing(name, counted):
    evaluated, other = count_rounds(name, None, counted)
    assert evaluated["evaluate"] - other["evaluate"] == 1
    if name not in ("fedfomo", "ifca"):  # they compare the models that they receive by their losses
        assert other["evaluate"] == 0
    assert evaluated["step"] - other["step"] == STEPS_TO_A_TEST.get(name, 0)
    # APPLE adds up the cores at every step, and once more for the model that it tests.
    assert other["Personal"] == (other["step"] if name == "apple" else 0)
    assert evaluated["Personal"] - other["Personal"] == (name == "apple")


@pytest.mark.parametrize("name", ["fedavg-c", "fedprox-c"])
def test_fine_tuning_is_part_of_every_round(name, counted):
    """Training starts from the fine-tuned model: three epochs and one, of two steps each."""
    evaluated, other = count_rounds(name, {f"{name}.epochs": 3}, counted)
    assert evaluated["step"] == other["step"] == (3 + 1) * 2
