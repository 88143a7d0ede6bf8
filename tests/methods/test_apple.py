"""APPLE against autograd on plain tensors and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn
from torch.func import functional_call

from fedala import run
from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.simulation import Simulation

SIZES = [5, 22, 13, 0]
SETTINGS = {"apple.eta": 0.02, "apple.mu": 0.3, "apple.scheduled": 1.0}


def by_autograd(task, start, rounds, eta, mu, *, scale_core=False):
    """Return the personal models and p of all clients after `rounds` rounds, by autograd."""
    net = Net().double()
    learning = [name for name, _ in net.named_parameters()]
    clients = range(len(SIZES))
    cores = [{name: start[name][0].clone() for name in learning} for _ in clients]
    statistics = [{n: v[0].clone() for n, v in start.items() if n not in learning} for _ in clients]
    p_0 = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    p = [p_0.clone() for _ in clients]
    scale = sum(size > 0 for size in SIZES) if scale_core else 1

    def personal(own, downloaded, client, vector):
        every = [own if other == client else downloaded[other] for other in clients]
        return {name: sum(vector[j] * every[j][name] for j in clients) for name in learning}

    for round in range(1, rounds + 1):
        downloaded = [{name: value.clone() for name, value in core.items()} for core in cores]
        strength = mu * (math.cos(math.pi * (round - 1) / rounds) + 1) / 2
        for client in clients:
            rows = task.parts["train"][client]
            order = rows[draw(0, "batches", client=client, round=round).permutation(len(rows))]
            own = {name: value.requires_grad_() for name, value in cores[client].items()}
            vector = p[client].requires_grad_()
            groups = [
                {"params": list(own.values()), "lr": scale * task.recipe.lr},
                {"params": [vector], "lr": eta},
            ]
            optimizer = torch.optim.SGD(groups)
            for first in range(0, len(order) - len(order) % 4, 4):
                batch = order[first : first + 4]
                optimizer.zero_grad()
                model = personal(own, downloaded, client, vector)
                output = functional_call(
                    net.train(), {**model, **statistics[client]}, (task.x[batch],)
                )
                loss = (
                    F.cross_entropy(output, task.y[batch])
                    + strength / 2 * ((vector - p_0) ** 2).sum()
                )
                loss.backward()
                vector.grad[p_0 == 0] = 0  # a client without samples is no part of it
                optimizer.step()
            cores[client] = {name: value.detach() for name, value in own.items()}
            p[client] = vector.detach()
    final = [{**personal(cores[c], cores, c, p[c]), **statistics[c]} for c in clients]
    return [{name: value[None] for name, value in model.items()} for model in final], p


@pytest.mark.parametrize("scale_core", [False, True])
def test_three_rounds_are_those_of_autograd(scale_core):
    task, settings = ragged_task(SIZES), {**SETTINGS, "apple.scale_core": scale_core}
    start = start_of(task)(0)
    expected, p = by_autograd(task, start, 3, eta=0.02, mu=0.3, scale_core=scale_core)
    simulation, _, models = simulate("apple", task, settings=settings, rounds=3)
    for client in range(len(SIZES)):
        assert_close(models[0, client], expected[client], 1e-9)
        assert torch.allclose(simulation.clients[0, client]["p"][0], p[client], atol=1e-10, rtol=0)


# --- by hand --------------------------------------------------------------------------------------


def line_cohort(**settings):
    """Return client 0 of two, with one sample: y = w·x with x = 1, y = 0 and squared error.

    So the loss is w², and its slope 2w.
    """

    def loss(output, y):
        return F.mse_loss(output.squeeze(-1), y)

    x, y = torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False)
    task = Task(model, x, y, [np.array([0]), np.array([1])], loss=loss, precision="float64", lr=0.1)
    received = Message(
        {"weight": torch.tensor([1.0, 3.0]).double().view(1, 2, 1, 1)},
        {"p_0": torch.tensor([[0.5, 0.5]]).double()},
    )
    state = {
        "core": {"weight": received.model["weight"][:, 0]},
        "p": torch.tensor([[0.25, 0.75]]).double(),
    }
    return Cohort(task, [0], [0], **settings), received, state


def test_a_step_by_hand():
    """Cores 1 and 3, p = (¼, ¾): w = 2.5, ∂L/∂w = 5, ∂L/∂core = 5/4, ∂L/∂p = (5, 15).

    Without the pull, core ← 1 − 0.1·5/4 = 0.875 and p ← (¼ − 0.05, ¾ − 0.15). With λ = 1 and
    μ = 4, the pull on p_i adds 4·(∓¼), and it ends at (0.21, 0.59). With the step N·lr = 0.2, the
    core ends at 0.75.
    """
    cohort, received, state = line_cohort(round=9, rounds=10)
    apple = make("apple")
    initialized, state = apple.initialize(cohort, received, state)
    assert initialized["weight"].item() == 1
    tested = apple.model_to_evaluate(cohort, initialized, received, state)
    assert tested["weight"].item() == 2.5
    upload, after = apple.train(cohort, initialized, received, state)
    assert upload.model["weight"].item() == pytest.approx(0.875)
    assert after["p"][0].tolist() == pytest.approx([0.2, 0.6])

    cohort, received, state = line_cohort(round=1, rounds=10)
    apple = make("apple", {"apple.mu": 4.0})
    _, after = apple.train(cohort, initialized, received, state)
    assert after["p"][0].tolist() == pytest.approx([0.21, 0.59])

    upload, _ = make("apple", {"apple.scale_core": True}).train(
        cohort, initialized, received, state
    )
    assert upload.model["weight"].item() == pytest.approx(0.75)


def test_the_pull_fades_over_the_first_l_of_the_rounds():
    apple = make("apple")
    assert [apple.schedule(round, 100) for round in (1, 11, 21, 22, 100)] == pytest.approx(
        [1, 0.5, 0, 0, 0]
    )
    assert make("apple", {"apple.scheduled": 0}).schedule(1, 100) == 0
    assert apple.schedule_depends_on_rounds
    assert not make("fedavg").schedule_depends_on_rounds
    assert not make("fedala").schedule_depends_on_rounds


# --- what sets it apart ---------------------------------------------------------------------------


def test_cores_are_uploaded_and_not_personal_models():
    simulation, _, models = simulate("apple", ragged_task(SIZES), rounds=2)
    for client in range(len(SIZES)):
        uploaded = {
            name: value[:, client] for name, value in simulation.servers[0]["cores"].items()
        }
        assert_close(uploaded, simulation.clients[0, client]["core"], 0)
        assert (uploaded["out.weight"] - models[0, client]["out.weight"]).abs().max() > 1e-3


def test_p_starts_at_the_shares_of_the_samples_and_moves_only_with_its_learning_rate():
    shares = torch.tensor(SIZES).double() / sum(SIZES)
    still, _, _ = simulate("apple", ragged_task(SIZES), settings={"apple.eta": 0}, rounds=2)
    moved, _, _ = simulate("apple", ragged_task(SIZES), rounds=2)
    for client, size in enumerate(SIZES):
        assert torch.equal(still.clients[0, client]["p"][0], shares)
        p = moved.clients[0, client]["p"][0]
        assert ((p - shares).abs().max() > 1e-3) == (size > 0)
        assert p[SIZES.index(0)] == 0


def test_running_statistics_stay_the_clients_own():
    simulation, _, models = simulate("apple", ragged_task(SIZES), rounds=2)
    for client in range(len(SIZES)):
        own = simulation.clients[0, client]["core"]["norm.running_var"]
        assert torch.equal(models[0, client]["norm.running_var"], own)
    first, second = (models[0, client]["norm.running_var"] for client in (0, 1))
    assert (first - second).abs().max() > 1e-3


def test_every_client_must_take_part():
    with pytest.raises(UserError, match="APPLE needs every client"):
        run(method="apple", dataset="digits", join_ratio=0.5, rounds=1)


def test_the_stack_of_cores_reaches_the_steps_without_a_copy(monkeypatch):
    task = ragged_task(SIZES)
    simulation = Simulation(make("apple"), task, start_of(task), rounds=2, seeds=(0, 1))
    seen = []

    def spy(self, step, state, fixed, **options):
        seen.append(fixed["cores"]["out.weight"].data_ptr())
        assert fixed["cores"]["out.weight"].stride(0) == 0
        return train(self, step, state, fixed, **options)

    train = Cohort.train
    monkeypatch.setattr(Cohort, "train", spy)
    stacks = [server["cores"]["out.weight"].data_ptr() for server in simulation.servers]
    simulation.step(1, train=True)
    assert seen == stacks
