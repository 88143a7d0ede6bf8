"""Means of word embeddings that read real words alone: the same numbers as all places give."""

import pytest
import torch
from small import assert_close, ragged_task, start_of
from torch import nn
from torch.func import functional_call, vmap

from fedala.lanes import row_gradients
from fedala.lanes.late_gradients import PulledGradient, ShiftedGradient
from fedala.lanes.optimizers import descend, pull, shift
from fedala.lanes.trees import join, share
from fedala.lanes.words import MeanEmbedding, WordGradient, mean_embedding, skip_padding
from fedala.models import fasttext

ROWS, WIDTH = 30, 4


def draw_texts(*shape):
    """Draw texts of which every second place is padding."""
    texts = torch.randint(1, ROWS, shape, generator=torch.Generator().manual_seed(0))
    texts[..., ::2] = 0
    texts[0] = 0  # all texts of a lane, or one text, without a word
    return texts


def draw_tables(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("padding", [0, 7, None])
def test_a_mean_over_real_words_is_the_mean_over_all_places(padding):
    """Padding may have a row that is not zero, as noise makes it: it counts as before."""
    texts, table = draw_texts(5, 6), draw_tables(ROWS, WIDTH)
    expected = torch.stack([table[text].mean(0) for text in texts])
    with torch.no_grad(), skip_padding():
        assert_close({"": mean_embedding(texts.int(), table, padding)}, {"": expected}, 1e-15)


@pytest.mark.parametrize("is_shared", [False, True])
def test_lanes_read_their_own_tables(is_shared):
    texts = draw_texts(3, 5, 6)
    tables = share(draw_tables(1, ROWS, WIDTH), 3) if is_shared else draw_tables(3, ROWS, WIDTH)
    expected = torch.stack([t[x].mean(1) for t, x in zip(tables, texts, strict=True)])
    with torch.no_grad(), skip_padding():
        found = vmap(lambda x, table: mean_embedding(x, table, 0))(texts, tables)
    assert_close({"": found}, {"": expected}, 1e-15)


def test_a_module_on_its_own_looks_up_every_place():
    """Outside of a task there is nothing special about it: it can be exported and saved."""
    module = MeanEmbedding(ROWS, WIDTH, padding_idx=0)
    plain = nn.Embedding(ROWS, WIDTH, padding_idx=0)
    plain.load_state_dict(module.state_dict())
    texts = draw_texts(5, 6)
    module(texts).square().sum().backward()
    plain(texts).mean(1).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(row_gradients, "LEAST_ROWS", 10)
    task = ragged_task([12, 8, 5], model=fasttext(ROWS, 3, WIDTH))
    task.x = draw_texts(len(task.x), 6).int()
    return task


def start(task, lanes):
    return join([start_of(task, lambda: fasttext(ROWS, 3, WIDTH))(seed) for seed in range(lanes)])


def find_dense_gradient(task, params, rows):
    """Return each lane's gradient of the table, from the plain model."""

    def loss(state, x, y):
        return nn.functional.cross_entropy(functional_call(task.model, state, (x,)), y)

    found = []
    for lane in range(len(rows)):
        state = {name: value[lane].clone().requires_grad_() for name, value in params.items()}
        loss(state, task.x[rows[lane]], task.y[rows[lane]]).backward()
        found.append(state["embedding.weight"].grad)
    return torch.stack(found)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_changes_the_rows_of_real_words_alone(task, lanes):
    params, rows = start(task, lanes), torch.tensor([[1, 3], [2, 4]])[:lanes]
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    found = gradients["embedding.weight"]
    assert isinstance(found, WordGradient)
    assert len(found.words.rows) == (task.x[rows] != 0).sum()
    expected = find_dense_gradient(task, params, rows)
    assert_close({"": found.densify()[0]}, {"": expected}, 1e-15)
    after = params["embedding.weight"] - 0.1 * expected
    descend(params, gradients, torch.full((lanes,), 0.1, dtype=torch.float64))
    assert_close({"": params["embedding.weight"]}, {"": after}, 1e-15)


@pytest.mark.parametrize("mu", [2.0, torch.tensor([2.0, 0.5], dtype=torch.float64)])
def test_a_proximal_step_is_the_dense_one(task, mu):
    """w − lr·(g + μ·(w − anchor)), on w itself and on another tensor of its shape."""
    params, rows = start(task, 2), torch.tensor([[1, 3], [2, 4]])
    anchor = {name: value + 1 for name, value in params.items()}
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    pull(params, gradients, anchor, mu)
    found = gradients["embedding.weight"]
    assert isinstance(found, PulledGradient)
    strength = mu.view(2, 1, 1) if isinstance(mu, torch.Tensor) else mu
    whole = find_dense_gradient(task, params, rows) - strength
    assert_close({"": found.densify()[0]}, {"": whole}, 1e-14)
    lr = torch.tensor([0.1, 0.2], dtype=torch.float64)
    elsewhere = torch.zeros_like(whole)
    found.add_to([elsewhere], -lr)
    expected = params["embedding.weight"] - lr.view(2, 1, 1) * whole
    descend(params, gradients, lr)
    assert_close({"": elsewhere}, {"": -lr.view(2, 1, 1) * whole}, 1e-14)
    assert_close({"": params["embedding.weight"]}, {"": expected}, 1e-14)


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_a_step_with_a_linear_term_is_the_dense_one(task, mu):
    """w − lr·(g + c), and with a proximal term w − lr·(g + c + μ·(w − anchor))."""
    params, rows = start(task, 2), torch.tensor([[1, 3], [2, 4]])
    anchor = {name: value + 1 for name, value in params.items()}
    shifts = {name: value.cos() for name, value in params.items()}
    _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
    expected = find_dense_gradient(task, params, rows) + shifts["embedding.weight"] - mu
    shift(gradients, shifts)
    assert isinstance(gradients["embedding.weight"], ShiftedGradient)
    if mu:
        pull(params, gradients, anchor, mu)
    found = gradients["embedding.weight"]
    assert isinstance(found, PulledGradient if mu else ShiftedGradient)
    assert_close({"": found.densify()[0]}, {"": expected}, 1e-14)
    lr = torch.tensor([0.1, 0.2], dtype=torch.float64)
    after = params["embedding.weight"] - lr.view(2, 1, 1) * expected
    elsewhere = torch.zeros_like(expected)
    found.add_to([elsewhere], -lr)
    descend(params, gradients, lr)
    assert_close({"": elsewhere}, {"": -lr.view(2, 1, 1) * expected}, 1e-14)
    assert_close({"": params["embedding.weight"]}, {"": after}, 1e-14)
