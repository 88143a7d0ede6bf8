"""Per-FedAvg: a global model that one local step makes personal."""

import copy
from itertools import pairwise

import numpy as np
import plain
import pytest
import torch
from small import assert_close, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.uploads import Piece, Uploads
from fedala.methods import ServerRound, make

#: Batches are of four, so meta-batches of eight: none, one sample, an odd and an even part of one,
#: exactly one, more.
SIZES = [5, 22, 13, 1, 8, 17, 6, 0]


def gradient_at(model, task, rows):
    """The gradient of the loss on some rows, and the module as its forward pass left it."""
    model = copy.deepcopy(model)
    plain.cross_entropy(task)(model, rows).backward()
    return [p.grad for p in model.parameters()], model


def moved(model, gradients, lr):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= lr * gradient
    return model


def adapted(model, task, client, alpha):
    """Take a step on the first B training samples. The running statistics stay."""
    rows = task.parts["train"][client][: task.batch_size]
    return moved(model, gradient_at(model, task, rows)[0], alpha) if len(rows) else model


def meta_trained(model, task, client, round, alpha, beta):
    for rows in plain.batches(task, client, round=round, size=2 * task.batch_size):
        half = len(rows) // 2
        first, second = (rows[:half], rows[half:]) if half else (rows, rows)
        trial = moved(model, gradient_at(model, task, first)[0], alpha)
        gradients, seen = gradient_at(trial, task, second)
        model = moved(model, gradients, beta)
        with torch.no_grad():  # statistics are those of the pass that w itself learns from
            for buffer, value in zip(model.buffers(), seen.buffers(), strict=True):
                buffer.copy_(value)
    return model


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", ["per-fedavg", "per-fedavg+ala"])
def test_against_a_plain_loop(name, shuffle):
    """With `+ala`, both the meta-steps and the evaluation start from ALA(g, w)."""
    task = ragged_task(SIZES, shuffle=shuffle)
    alpha, beta = 0.3, 0.05
    settings = {"per-fedavg.alpha": alpha, "per-fedavg.beta": beta} | (
        plain.PlainALA.SETTINGS if "+" in name else {}
    )
    simulation, _, models = simulate(name, task, rounds=2, settings=settings)
    server = plain.module(task, simulation.initial[0])
    ala = [plain.PlainALA(task, client) for client in range(len(SIZES))]
    local = [server] * len(SIZES)
    for round in (1, 2, 3):
        start = [server] * len(SIZES)
        if "+" in name:
            start = [own(server, w, server, round=round) for own, w in zip(ala, local, strict=True)]
        personal = [adapted(model, task, client, alpha) for client, model in enumerate(start)]
        if round < 3:
            local = [
                meta_trained(model, task, client, round, alpha, beta)
                for client, model in enumerate(start)
            ]
            server = plain.mean(local, SIZES)
    assert_close(models[0, None], plain.lane(server, models[0, None]), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(personal[client], models[0, client]), 1e-9)
    moves = [
        (models[0, c]["out.weight"] - models[0, None]["out.weight"]).abs().max() > 1e-4
        for c in range(len(SIZES))
    ]
    assert moves == [size > 0 for size in SIZES]


def line(samples):
    """y = w·x + b with squared error on (x, y) samples, in order; a batch is half of them."""
    size = len(samples)
    task = ragged_task(
        [size],
        model=torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        batch_size=max(1, size // 2),
        shuffle=False,
    )
    task.x, task.y = (torch.tensor([[s[i]] for s in samples]).double() for i in (0, 1))
    zero = {"weight": torch.zeros(1, 1, 1).double(), "bias": torch.zeros(1, 1).double()}
    return Cohort(task, [0], [0]), zero


def numbers(model):
    return model["weight"].item(), model["bias"].item()


def test_by_hand():
    """Samples (1, 2), (1, 3) from w = b = 0, α = 0.1, β = 0.5.

    First half: residual −2, ∂w = ∂b = −4, so w' = b' = 0.4. Second half at w': residual
    0.8 − 3 = −2.2, ∂w = ∂b = −4.4. That moves w, not w': w = b = 2.2. Evaluation, α on the first
    sample: the residual of 0 is −2 again, so 0.4.
    """
    cohort, zero = line([(1.0, 2.0), (1.0, 3.0)])
    method = make("per-fedavg", {"per-fedavg.alpha": 0.1, "per-fedavg.beta": 0.5})
    state = method.init_client(cohort.task, zero)
    upload, _ = method.train(cohort, zero, Message(zero), state)
    assert numbers(upload.model) == pytest.approx((2.2, 2.2), abs=1e-12)
    assert numbers(method.model_to_evaluate(cohort, zero, Message(zero), {})) == pytest.approx(
        (0.4, 0.4), abs=1e-12
    )


def test_a_single_sample_is_both_halves():
    """(1, 2) from 0, α = β = 0.1: w' = b' = 0.4, residual −1.2, ∂w = ∂b = −2.4, w = b = 0.24."""
    cohort, zero = line([(1.0, 2.0)])
    method = make("per-fedavg")
    state = method.init_client(cohort.task, zero)
    upload, _ = method.train(cohort, zero, Message(zero), state)
    assert numbers(upload.model) == pytest.approx((0.24, 0.24), abs=1e-12)


def test_the_learning_rates_are_the_runs_unless_they_are_set():
    cohort, zero = line([(1.0, 2.0), (1.0, 3.0)])
    plain_, same, other = (
        numbers(make("per-fedavg", settings).train(cohort, zero, Message(zero), {})[0].model)
        for settings in (
            {},
            {"per-fedavg.alpha": "0.1", "per-fedavg.beta": 0.1},
            {"per-fedavg.alpha": 0.2, "per-fedavg.beta": 0.1},
        )
    )
    assert plain_ == same != other
    with pytest.raises(UserError, match=r"per-fedavg.alpha must be at least 0"):
        make("per-fedavg", {"per-fedavg.alpha": -0.1})


def test_without_alpha_it_is_fedavg_on_the_second_halves():
    """A step is FedAvg's on the second half of each batch of 2B, running statistics too."""
    sizes = [8, 24, 16, 3, 5, 17, 0]
    task = ragged_task(sizes, shuffle=False)
    _, _, models = simulate("per-fedavg", task, rounds=3, settings={"per-fedavg.alpha": 0})
    halves = ragged_task(sizes, shuffle=False)

    def second_halves(rows):
        if len(rows) < 8:
            return rows[len(rows) // 2 :]
        return np.concatenate([rows[a + 4 : b] for a, b in pairwise(range(0, len(rows) + 1, 8))])

    halves.parts = {**task.parts, "train": [second_halves(rows) for rows in task.parts["train"]]}
    assert [len(rows) for rows in halves.parts["train"]] == [4, 12, 8, 2, 3, 8, 0]
    server = start_of(halves)(0)
    fedavg = make("fedavg")
    for round in (1, 2, 3):
        pieces = []
        for client in range(len(sizes)):
            cohort = Cohort(halves, [client], [0], round=round)
            upload, _ = fedavg.train(cohort, server, Message(server), {})
            pieces.append(Piece(upload, [0], [client]))
        everybody = list(range(len(sizes)))
        uploads = Uploads(everybody, torch.tensor(sizes).double(), pieces)
        server_round = ServerRound(0, round, 3, everybody, sizes)
        server = fedavg.aggregate({}, uploads, server_round)["global"]
    assert_close(models[0, None], server, 1e-12)
    for client in range(len(sizes)):
        assert_close(
            models[0, client], models[0, None], 0
        )  # a step of nothing: evaluated as FedAvg


def test_evaluation_adapts_on_the_first_training_samples_and_on_nothing_else():
    """Other test samples, or other training samples after the first B, change nothing."""
    task = ragged_task([22, 13])
    method, start = make("per-fedavg"), start_of(task)(0)
    first = method.model_to_evaluate(Cohort(task, [0], [0]), start, Message(start), {})
    task.y[task.parts["test"][0]] = 2 - task.y[task.parts["test"][0]]
    task.x[task.parts["train"][0][4:]] += 1
    assert_close(
        method.model_to_evaluate(Cohort(task, [0], [0], round=7), start, Message(start), {}),
        first,
        1e-12,
    )
    task.x[task.parts["train"][0][3]] += 1
    changed = method.model_to_evaluate(Cohort(task, [0], [0]), start, Message(start), {})
    assert (changed["out.weight"] - first["out.weight"]).abs().max() > 1e-6


def test_outside_the_round_a_client_has_its_trained_model_adapted():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("per-fedavg", task, rounds=1, join_ratio=0.5)
    method, start = make("per-fedavg"), simulation.initial[0]
    compared = 0
    for client in set(simulation.draw_participants(0, 1)) - set(simulation.draw_participants(0, 2)):
        cohort = Cohort(task, [client], [0], round=1)
        upload, _ = method.train(cohort, start, Message(start), {})
        expected = method.model_to_evaluate(cohort, upload.model, Message(start), {})
        assert_close(models[0, client], expected, 1e-10)
        score = [t.item() for t in cohort.evaluate(expected)]
        assert simulation.absent_scores[0, client, 0].tolist() == pytest.approx(score)
        compared += SIZES[client] > 0
    assert compared
