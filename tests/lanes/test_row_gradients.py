"""Row gradients: the same as torch's dense ones, without touching the rest of the table."""

import pytest
import torch
from small import assert_close, ragged_task, start_of
from torch import nn

from fedala.lanes import row_gradients as embedding
from fedala.lanes.cohort import Cohort
from fedala.lanes.optimizers import descend, pull, try_step
from fedala.lanes.trees import join
from fedala.methods import make
from fedala.models import fasttext
from fedala.simulation import Simulation


class Words(nn.Module):
    """Looks the same table up twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 4, padding_idx=0)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1) + self.table(x[:, 0]))


class Tied(Words):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 30, bias=False)
        self.other.weight = self.table.weight

    def forward(self, x):
        return self.out(
            self.table(x).mean(1) + self.other(self.table(x[:, 1])).sum(1, keepdim=True)
        )


class Reused(Words):
    """Uses the table in another way, too, which no module shows."""

    def forward(self, x):
        words = self.table(x).mean(1)
        return self.out(words) * (words @ self.table.weight.T).exp().mean(1, keepdim=True)


def text_task(model):
    task = ragged_task([12, 8, 5, 3], model=model())
    task.x = torch.randint(
        0, 30, (len(task.x), 6), generator=torch.Generator().manual_seed(0)
    ).int()
    return task


def small_fasttext():
    return fasttext(30, 3, 4)


@pytest.fixture
def by_rows(monkeypatch):
    monkeypatch.setattr(embedding, "LEAST_ROWS", 10)


@pytest.mark.parametrize("model", [Words, Reused, small_fasttext])
@pytest.mark.parametrize("lanes", [1, 4])
def test_training_by_rows_is_training_with_dense_gradients(model, lanes, monkeypatch):
    results = []
    for least in (10, 1000):
        monkeypatch.setattr(embedding, "LEAST_ROWS", least)
        task = text_task(model)
        assert bool(task.embeddings) == (least == 10)
        params = join([start_of(task, model)(seed) for seed in range(lanes)])
        anchor = join([start_of(task, model)(seed) for seed in range(50, 50 + lanes)])
        cohort = Cohort(task, list(range(lanes)), [0] * lanes)
        results.append((cohort.fit(params, epochs=2), cohort.fit(params, proximal=(0.5, anchor))))
    for rows, dense in zip(*results, strict=True):
        assert_close(rows, dense, 1e-12)


def test_the_gradient_names_the_rows_of_the_batch_and_spares_the_padding(by_rows):
    task = text_task(Words)
    params = join([start_of(task, Words)(seed) for seed in range(2)])
    rows = torch.tensor([[0, 1], [2, 3]])
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    found = gradients["table.weight"]
    assert isinstance(found, embedding.RowGradient)
    assert found.indices.shape == (2, 2 * 6 + 2)
    assert (found.values[found.indices == 0] == 0).all()
    before = params["table.weight"].clone()
    descend(params, gradients, torch.full((2,), 0.1))
    used = torch.zeros(2, 30, dtype=torch.bool).scatter(1, found.indices, True)
    assert torch.equal(params["table.weight"][~used], before[~used])
    assert (params["table.weight"][used] != before[used]).any()


def test_a_proximal_term_pulls_the_whole_table(by_rows):
    task = text_task(Words)
    params = join([start_of(task, Words)(0)])
    anchor = {name: value + 1 for name, value in params.items()}
    rows = torch.tensor([[0, 1]])
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    dense = gradients["table.weight"].densify()[0]
    pull(params, gradients, anchor, 2.0)
    assert torch.allclose(gradients["table.weight"].densify()[0], dense - 2.0)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("model", [Words, small_fasttext])
def test_a_step_that_is_tried_is_put_back_to_the_bit(model, lanes, by_rows):
    """Some words stand in a batch twice."""
    task = text_task(model)
    params = join([start_of(task, model)(seed) for seed in range(lanes)])
    before = {name: value.clone() for name, value in params.items()}
    rows, lr = torch.tensor([[0, 1], [2, 3], [4, 5]])[:lanes], torch.full((lanes,), 0.1)
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    expected = {name: value.clone() for name, value in params.items()}
    descend(expected, gradients, lr)
    [table] = task.embeddings
    with try_step(params, gradients, lr) as stepped:
        assert_close(stepped, expected, 0)
        assert stepped[table].data_ptr() == params[table].data_ptr()  # it is not a copy
    assert_close(params, before, 0)


@pytest.mark.parametrize("model", [Words, small_fasttext])
def test_meta_steps_by_rows_are_those_with_dense_gradients(model, monkeypatch):
    results = []
    for least in (10, 1000):
        monkeypatch.setattr(embedding, "LEAST_ROWS", least)
        task = text_task(model)
        simulation = Simulation(make("per-fedavg"), task, start_of(task, model), rounds=2)
        for round in (1, 2):
            simulation.step(round, train=True)
        results.append(simulation.servers[0]["global"])
    assert_close(*results, 1e-12)


def test_a_table_with_another_use_takes_the_usual_way(by_rows):
    assert text_task(Tied).embeddings == {}
