"""pFedMe against a plain loop and by hand."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import PlainALA, batches, changed, combine, cross_entropy, lane, mean, mean_loss, module
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.parameters import model_state
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.methods.pfedme import PFedMe

SIZES = [5, 13, 3, 0, 8]


def plain(task, rounds, *, personal_lr, lam, steps, beta, ala=False):
    """Return the global model, the evaluated models, every w, and the loss of each evaluation."""
    clients = range(len(task.parts["train"]))
    received = module(task, start_of(task)(0))
    thetas, local = [received for _ in clients], [received for _ in clients]
    blends, history = [PlainALA(task, i) for i in clients], []
    for round in range(1, rounds + 2):
        starts = [
            blends[i](received, local[i], received, round=round) if ala else received
            for i in clients
        ]
        evaluated = starts if ala else thetas
        history.append(mean_loss(task, evaluated))
        if round > rounds:
            return received, evaluated, local, history
        for i in clients:
            theta = copy.deepcopy(starts[i])
            w = {name: p.detach().clone() for name, p in theta.named_parameters()}
            for rows in batches(task, i, round=round):
                for _ in range(steps):
                    theta.zero_grad()
                    cross_entropy(task)(theta, rows).backward()
                    with torch.no_grad():
                        for name, p in theta.named_parameters():
                            p -= personal_lr * (p.grad + lam * (p - w[name]))
                w = {
                    name: w[name] - task.recipe.lr * lam * (w[name] - p.detach())
                    for name, p in theta.named_parameters()
                }
            thetas[i], local[i] = theta, changed(theta, w)
        received = combine([mean(local, SIZES), received], [beta, 1 - beta])


@pytest.mark.parametrize("ala", [False, True])
def test_it_is_the_plain_loop(ala):
    task = ragged_task(SIZES)
    values = {"personal_lr": 0.05, "lam": 3.0, "steps": 3, "beta": 0.7}
    settings = {f"pfedme.{name}": value for name, value in values.items()} | (
        PlainALA.SETTINGS if ala else {}
    )
    _, rows, models = simulate("pfedme+ala" if ala else "pfedme", task, settings=settings, rounds=3)
    received, evaluated, _, history = plain(task, 3, ala=ala, **values)
    assert_close(models[0, None], lane(received), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], lane(evaluated[client]), 1e-9)
    assert [row.loss for row in rows] == pytest.approx(history, abs=1e-9)


def trained_by_hand(**settings):
    """Train a·x + b from a, b = 1, 0 on the sample (x, y) = (2, 1) by squared error."""
    model = nn.Linear(1, 1).double()
    task = Task(
        model,
        torch.tensor([[2.0]]).double(),
        torch.tensor([[1.0]]).double(),
        [np.array([0])],
        loss=F.mse_loss,
        lr=0.5,
        precision="float64",
    )
    start = {"weight": torch.tensor([[[1.0]]]).double(), "bias": torch.tensor([[0.0]]).double()}
    assert start.keys() == model_state(model).keys()
    method = PFedMe(**settings)
    upload, state = method.train(
        Cohort(task, [0], [0]), start, Message(start), method.init_client(task, start)
    )
    return [
        [value.item() for value in params.values()] for params in (upload.model, state["personal"])
    ]


def test_two_parameters_by_hand():
    """
    r = 2·1 + 0 − 1 = 1, ∇f = (2·r·2, 2·r) = (4, 2);     θ = w = (1, 0)
    θ ← θ − 0.1·∇f = (0.6, −0.2), where r = 0:           the second step only pulls
    θ ← θ − 0.1·1·(θ − w) = (0.64, −0.18)
    w ← w − 0.5·1·(w − θ) = (0.82, −0.09)
    """
    w, theta = trained_by_hand(personal_lr=0.1, lam=1.0, steps=2)
    assert theta == pytest.approx([0.64, -0.18], abs=1e-12)
    assert w == pytest.approx([0.82, -0.09], abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "gradient"), [(1, (4.0, 2.0)), (2, (3.6, 1.8)), (3, (3.64, 1.82))]
)
def test_a_pull_as_strong_as_the_step_starts_every_step_at_w(steps, gradient):
    """
    With λ = 1/personal_lr, a step is θ ← w − 0.01·∇f(θ), wherever θ was. From (1, 0), r = 1:
    θ = (0.96, −0.02). There r = 0.9, ∇f = (3.6, 1.8), θ = (0.964, −0.018). There r = 0.91,
    ∇f = (3.64, 1.82).
    """
    _, theta = trained_by_hand(personal_lr=0.01, lam=100.0, steps=steps)
    assert theta == pytest.approx([1 - 0.01 * gradient[0], 0 - 0.01 * gradient[1]], abs=1e-12)


def test_the_personal_model_is_the_clients_own():
    """A well-known public version evaluates g, by aliasing."""
    simulation, _, models = simulate("pfedme", ragged_task(SIZES), rounds=2)
    for client, size in enumerate(SIZES):
        personal = simulation.clients[0, client]["personal"]
        assert_close(models[0, client], personal, 0)
        if size:
            assert (personal["out.weight"] - models[0, None]["out.weight"]).abs().max() > 1e-4
    weights = [models[0, client]["out.weight"] for client, size in enumerate(SIZES) if size]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_without_beta_the_global_model_never_moves_and_with_one_it_is_the_mean():
    task = ragged_task(SIZES)
    still, _, _ = simulate("pfedme", task, settings={"pfedme.beta": 0.0}, rounds=3)
    for name, value in still.initial[0].items():
        if value.is_floating_point():
            assert torch.equal(still.servers[0]["global"][name], value)
    moved, _, _ = simulate("pfedme", task, rounds=1)
    _, _, local, _ = plain(task, 1, personal_lr=0.01, lam=15.0, steps=5, beta=1.0)
    assert_close(moved.servers[0]["global"], lane(mean(local, SIZES)), 1e-12)


def test_without_a_pull_the_local_model_stays():
    simulation, _, _ = simulate(
        "pfedme", ragged_task(SIZES), settings={"pfedme.lam": 0.0}, rounds=2
    )
    for name, _ in Net().named_parameters():
        assert torch.allclose(
            simulation.servers[0]["global"][name], simulation.initial[0][name], rtol=0, atol=1e-14
        )


def test_defaults_and_refusals():
    assert make("pfedme") == PFedMe(personal_lr=0.01, lam=15.0, steps=5, beta=1.0)
    for name, value in {"personal_lr": 0, "lam": -1, "steps": 0, "beta": -0.1}.items():
        with pytest.raises(UserError, match=f"pfedme.{name} must be"):
            make("pfedme", {f"pfedme.{name}": value})
