"""Sums of models whose shares learn: of large tables, only the rows of a batch are added up."""

import pytest
import torch
from small import ragged_task, start_of

from fedala.lanes import row_gradients
from fedala.lanes.recipe import Optimizer
from fedala.lanes.trees import leaves
from fedala.methods import make
from fedala.methods.apfl import Mix
from fedala.methods.apple import Personal
from fedala.models import fasttext
from fedala.models.lstm import token_lstm
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 0, 3]
ROWS, WIDTH = 30, 4
METHODS = {
    "apple": (Personal, {"apple.eta": 0.05}),
    "apfl": (Mix, {"apfl.adapt": "step"}),
}


def small_fasttext():
    return fasttext(ROWS, 3, WIDTH)


def small_lstm():
    return token_lstm(ROWS, 3, WIDTH, WIDTH)


@pytest.fixture
def whole_tables(monkeypatch):
    """Note where a sum of whole tables was made."""
    seen = []
    for kind, _ in METHODS.values():

        def compose(self, name, compose=kind.compose):
            seen.append(name)
            return compose(self, name)

        monkeypatch.setattr(kind, "compose", compose)
    return seen


def begin(name, make_model, **options):
    task = ragged_task(SIZES, model=make_model(), **options)
    generator = torch.Generator().manual_seed(0)
    task.x = torch.randint(0, ROWS, (len(task.x), 6), generator=generator).int()
    method = make(name, METHODS[name][1])
    simulation = Simulation(method, task, start_of(task, make_model), rounds=3, seeds=(0, 1))
    return simulation, task


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(momentum=0.9, clip=1.0)])
@pytest.mark.parametrize("make_model", [small_fasttext, small_lstm])
@pytest.mark.parametrize("name", METHODS)
def test_training_by_rows_is_training_with_whole_tables(
    name, make_model, optimizer, monkeypatch, whole_tables
):
    """Also of the shares, α and p. Padding and clients without samples are among them."""
    states, sums = [], []
    for least in (10, 1000):
        monkeypatch.setattr(row_gradients, "LEAST_ROWS", least)
        simulation, task = begin(name, make_model, optimizer=optimizer)
        assert bool(task.embeddings) == (least == 10)
        whole_tables.clear()
        for round in (1, 2, 3):
            simulation.step(round, train=True)
        states.append(dict(leaves(dict(simulation.clients))))
        sums.append(whole_tables.count("embedding.weight"))
    assert sums[0] <= 6 < sums[1]  # in three evaluations of two runs at most, and in every step
    assert states[0].keys() == states[1].keys()
    for path, value in states[0].items():
        assert torch.allclose(value, states[1][path], rtol=0, atol=1e-12), path
    shares = [value for path, value in states[0].items() if path.endswith(("/p", "/alpha"))]
    assert len({tuple(value.flatten().tolist()) for value in shares}) > len(SIZES)
