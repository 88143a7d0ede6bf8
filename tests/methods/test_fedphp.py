"""FedPHP, both variants, against a plain loop and by hand."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import (
    PlainALA,
    batches,
    combine,
    descend,
    features_of,
    lane,
    mean,
    mean_loss,
    mmd_of_pairs,
    module,
)
from small import Doubled, Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut
from fedala.lanes.messages import Message
from fedala.lanes.parameters import model_state
from fedala.methods import make
from fedala.methods.fedphp import FedPHP, stay_near
from fedala.methods.teachers import TeacherObjective, mmd
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 13, 3, 0, 8]


def plain(task, rounds, *, mu, lam, variant, ala=False):
    """Return the global model, the evaluated models, and the loss of each evaluation."""
    clients = range(len(task.parts["train"]))
    received = module(task, start_of(task)(0))
    local, historical = [received for _ in clients], [received for _ in clients]
    blends, history = [PlainALA(task, i) for i in clients], []
    for round in range(1, rounds + 2):
        done = mu * (round - 1) / rounds
        if ala:
            starts = evaluated = [
                blends[i](received, local[i], received, round=round) for i in clients
            ]
        elif variant == "paper":
            starts = evaluated = [combine([received, local[i]], [1 - done, done]) for i in clients]
        else:
            starts, evaluated = [received for _ in clients], historical
        history.append(mean_loss(task, evaluated))
        if round > rounds:
            return received, evaluated, history
        for i in clients:
            teacher = copy.deepcopy(received if variant == "paper" else historical[i])

            def loss(model, rows, teacher=teacher):
                under_w = features_of(model, task.x[rows])
                distance = mmd_of_pairs(under_w, features_of(teacher, task.x[rows]).detach())
                return (1 - lam) * F.cross_entropy(
                    model.out(under_w), task.y[rows]
                ) + lam * distance

            local[i] = descend(starts[i], loss, batches(task, i, round=round), task.recipe.lr)
        part = mu * round / rounds
        historical = [
            combine([w, h], [1 - part, part]) for w, h in zip(local, historical, strict=True)
        ]
        received = mean(local, SIZES)


@pytest.mark.parametrize("variant", ["paper", "historical"])
@pytest.mark.parametrize("ala", [False, True])
def test_it_is_the_plain_loop(variant, ala):
    task = ragged_task(SIZES)
    values = {"mu": 0.8, "lam": 0.3, "variant": variant}
    settings = {f"fedphp.{name}": value for name, value in values.items()} | (
        PlainALA.SETTINGS if ala else {}
    )
    _, rows, models = simulate("fedphp+ala" if ala else "fedphp", task, settings=settings, rounds=3)
    received, evaluated, history = plain(task, 3, ala=ala, **values)
    assert_close(models[0, None], lane(received), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], lane(evaluated[client]), 1e-9)
    assert [row.loss for row in rows] == pytest.approx(history, abs=1e-9)


@pytest.mark.parametrize("name", ["fedphp", "fedphp+ala"])
def test_the_historical_variant_is_the_same_in_any_number_of_lanes(name):
    task, settings = ragged_task(SIZES), {"fedphp.variant": "historical"}
    alone, together = (
        simulate(name, task, settings=settings, rounds=3, join_ratio=0.5, seeds=(3, 4), lanes=lanes)
        for lanes in (1, None)
    )
    assert alone[2].keys() == together[2].keys()
    for key in alone[2]:
        assert_close(alone[2][key], together[2][key], 1e-10)
    assert [row.loss for row in alone[1]] == pytest.approx(
        [row.loss for row in together[1]], abs=1e-9
    )


# --- the distance between features ----------------------------------------------------------------


def test_mmd_is_a_double_loop():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(4, 3)) * 3, random.normal(size=(5, 3)) * 3 + 1

    def kernel(p, q):
        return sum(np.exp(-np.sum((p - q) ** 2) / (2 * width)) for width in (10, 15, 20, 50))

    means = [
        np.mean([kernel(p, q) for p in one for q in other])
        for one, other in ((a, a), (b, b), (a, b))
    ]
    assert mmd(torch.tensor(a), torch.tensor(b)).item() == pytest.approx(
        means[0] + means[1] - 2 * means[2], abs=1e-12
    )


def test_mmd_of_equal_features_is_zero_and_of_others_is_not():
    a = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert mmd(a, a.clone()).item() == 0
    assert mmd(a, a + 1).item() > 0.01


def test_mmd_by_hand():
    """One sample each, √20 apart: 4 + 4 − 2·(e^−1 + e^−(2/3) + e^−(1/2) + e^−(1/5))."""
    value = mmd(torch.zeros(1, 5).double(), torch.full((1, 5), 2.0).double())
    expected = 8 - 2 * (math.exp(-1) + math.exp(-2 / 3) + math.exp(-0.5) + math.exp(-0.2))
    assert value.item() == pytest.approx(expected, abs=1e-12)


# --- what sets it apart ---------------------------------------------------------------------------


def test_without_mu_it_starts_from_the_global_model_and_without_lambda_it_trains_plainly():
    """Then nothing is left but FedAvg."""
    task = ragged_task(SIZES)
    _, _, models = simulate(
        "fedphp", task, settings={"fedphp.mu": 0.0, "fedphp.lam": 0.0}, rounds=3
    )
    _, _, fedavg = simulate("fedavg", task, rounds=3)
    assert_close(models[0, None], fedavg[0, None], 1e-12)
    for client in range(len(SIZES)):
        assert_close(models[0, client], models[0, None], 0)


@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_mu_is_the_share_of_the_own_model_after_the_last_round(mu):
    simulation, _, models = simulate(
        "fedphp", ragged_task(SIZES), settings={"fedphp.mu": mu}, rounds=3
    )
    received = simulation.servers[0]["global"]
    for client in range(len(SIZES)):
        own = simulation.clients[0, client]["local"]
        for name in ("out.weight", "norm.running_mean"):
            expected = mu * own[name] + (1 - mu) * received[name]
            assert torch.allclose(models[0, client][name], expected, rtol=0, atol=1e-12)


def test_the_distance_alone_does_not_move_a_model_that_is_its_own_teacher():
    """λ = 1 and μ = 0: equal features have the least distance. The teacher keeps its statistics."""
    task = ragged_task(SIZES)
    _, rows, models = simulate(
        "fedphp", task, settings={"fedphp.mu": 0.0, "fedphp.lam": 1.0}, rounds=2
    )
    start = start_of(task)(0)
    for name, value in models[0, None].items():
        if name.startswith("norm.running"):
            assert (value - start[name]).abs().max() > 1e-3
        elif value.is_floating_point():
            assert torch.allclose(value, start[name], rtol=0, atol=1e-12)
    assert [row.metrics["train_loss"] for row in rows[:2]] == pytest.approx([0, 0], abs=1e-12)


def test_the_variants_differ_and_the_historical_model_is_tested():
    settings = {"fedphp.variant": "historical", "fedphp.lam": 0.3}
    simulation, _, models = simulate("fedphp", ragged_task(SIZES), settings=settings, rounds=3)
    for client in range(len(SIZES)):
        assert_close(models[0, client], simulation.clients[0, client]["personal"], 0)
    _, _, paper = simulate(
        "fedphp", ragged_task(SIZES), settings={**settings, "fedphp.variant": "paper"}, rounds=3
    )
    assert (models[0, 1]["out.weight"] - paper[0, 1]["out.weight"]).abs().max() > 1e-4


def test_its_schedule_depends_on_the_number_of_rounds():
    assert make("fedphp").schedule_depends_on_rounds
    assert make("fedphp+ala").schedule_depends_on_rounds
    assert not make("ditto+ala").schedule_depends_on_rounds
    simulations = [
        Simulation(make("fedphp"), t, start_of(t), rounds=n)
        for n, t in ((2, ragged_task(SIZES)), (9, ragged_task(SIZES)))
    ]
    for simulation in simulations:
        for round in (1, 2):
            simulation.step(round, train=True)
    a, b = (simulation.servers[0]["global"]["out.weight"] for simulation in simulations)
    assert not torch.allclose(a, b)


def test_steps_of_different_rounds_are_one_to_be_captured():
    task = ragged_task(SIZES)
    one, other, deeper = (TeacherObjective(Cut(task.model, p), stay_near) for p in (1, 1, 0))
    assert one == other
    assert hash(one) == hash(other)
    assert one != deeper
    assert one != TeacherObjective(Cut(Net(), 1), stay_near)


def test_a_model_that_cannot_be_cut_is_refused_before_any_work():
    task = ragged_task(SIZES, model=Doubled())
    simulation = Simulation(make("fedphp+ala"), task, start_of(task, Doubled), rounds=1)
    with pytest.raises(UserError, match="last layer cannot be cut off"):
        simulation.step(1, train=False)


def test_a_model_of_one_layer_has_its_inputs_for_features():
    """They are the same in any model: the distance is 0, and (1 − λ) of the loss remains."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    task, plain = (ragged_task(SIZES, model=model, lr=lr) for lr in (0.2, 0.1))

    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    halved = Simulation(FedPHP(mu=0.0, lam=0.5), task, start_of(task, build), rounds=1)
    fedavg = Simulation(make("fedavg"), plain, start_of(plain, build), rounds=1)
    for simulation in (halved, fedavg):
        simulation.step(1, train=True)
    assert_close(halved.servers[0]["global"], fedavg.servers[0]["global"], 1e-12)


def test_defaults_and_refusals():
    assert make("fedphp") == FedPHP(mu=0.9, lam=0.01, variant="paper")
    for name, value in {"mu": 1.1, "lam": -0.1, "variant": "hysterical"}.items():
        with pytest.raises(UserError, match=f"fedphp.{name} must be"):
            make("fedphp", {f"fedphp.{name}": value})


def test_our_own_models_are_cut_where_they_say():
    """One step of the CNN by autograd. A hook on its last layer takes the features."""
    task = ragged_task([4], model=cnn((1, 16, 16), 3))
    task.x = torch.randn(
        len(task.y), 1, 16, 16, generator=torch.Generator().manual_seed(0)
    ).double()
    model, teacher = (cnn((1, 16, 16), 3).double() for _ in range(2))
    seen = []
    for one in (model, teacher):
        one.fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    start, received = (
        {n: v.clone() for n, v in model_state(one).items()} for one in (model, teacher)
    )
    method = FedPHP(lam=0.7)
    upload, _ = method.train(
        Cohort(task, [0], [0]), start, Message(received), method.init_client(task, start)
    )
    rows = task.parts["train"][0]
    loss = F.cross_entropy(model(task.x[rows]), task.y[rows])
    teacher(task.x[rows])
    (0.3 * loss + 0.7 * mmd_of_pairs(seen[0], seen[1].detach())).backward()
    torch.optim.SGD(model.parameters(), lr=task.recipe.lr).step()
    assert_close(upload.model, model_state(model), 1e-12)
