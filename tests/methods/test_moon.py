"""MOON against plain modules, and its limits."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from plain import PlainALA, batches, descend, features_of, lane, mean, module
from small import Doubled, assert_close, evaluate, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.methods import make
from fedala.methods.moon import add_contrast
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 3, 8, 0]


def contrastive(task, received, previous, mu, tau):
    """ℓ_sup + μ·ℓ_con, the publication's equations (3) and (4), sample by sample."""
    received, previous = (copy.deepcopy(model) for model in (received, previous))

    def cosine(a, b):
        """With the bound of torch's own on each norm."""
        return a @ b / (a.norm().clamp(min=1e-8) * b.norm().clamp(min=1e-8))

    def loss(model, rows):
        z = features_of(model, task.x[rows])
        z_glob, z_prev = (features_of(one, task.x[rows]).detach() for one in (received, previous))
        total = 0
        for own, glob, prev in zip(z, z_glob, z_prev, strict=True):
            near, far = (torch.exp(cosine(own, other) / tau) for other in (glob, prev))
            total = total - torch.log(near / (near + far))
        return F.cross_entropy(model.out(z), task.y[rows]) + mu * total / len(rows)

    return loss


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("name", "join_ratio", "mu", "tau"),
    [("moon", 1.0, 1.0, 0.5), ("moon", 0.5, 5.0, 0.2), ("moon+ala", 1.0, 2.0, 0.5)],
)
def test_against_a_plain_loop(name, join_ratio, mu, tau, shuffle):
    """Three rounds. With `+ala`, training begins at ALA(g, w), and is contrasted with g and w."""
    task, ala = ragged_task(SIZES, shuffle=shuffle), "+" in name
    settings = {"moon.mu": mu, "moon.tau": tau} | (PlainALA.SETTINGS if ala else {})
    simulation, _, models = evaluate(name, task, join_ratio=join_ratio, rounds=3, settings=settings)
    joined = [simulation.draw_participants(0, round) for round in range(1, 5)]
    server = module(task, start_of(task)(0))
    previous, start = [server] * len(SIZES), {}
    learner = [PlainALA(task, client) for client in range(len(SIZES))]
    for round, clients in enumerate(joined, 1):
        for i in clients:
            start[i] = server
            if ala and SIZES[i]:
                start[i] = learner[i](server, previous[i], server, round=round)
        if round < 4:
            for i in clients:
                loss = contrastive(task, server, previous[i], mu, tau)
                order = batches(task, i, round=round)
                previous[i] = descend(start[i], loss, order, task.recipe.lr)
            server = mean([previous[i] for i in clients], [SIZES[i] for i in clients])
    assert_close(models[0, None], lane(server), 1e-9)
    for i in {i for clients in joined[:3] for i in clients}:
        state = simulation.clients[0, i]
        assert_close((state["base"] if ala else state)["local"], lane(previous[i]), 1e-9)
    for i in start if ala else ():
        assert_close(models[0, i], lane(start[i]), 1e-9)
    fedavg = simulate("fedavg", ragged_task(SIZES, shuffle=shuffle), rounds=3)[2][0, None]
    assert (models[0, None]["hidden.weight"] - fedavg["hidden.weight"]).abs().max() > 1e-4


def test_without_its_term_and_in_the_first_round_it_is_fedavg():
    """At first, the received and the previous model are both Θ⁰: their similarities are equal."""
    for rounds, mu, tolerance in ((3, 0.0, 0), (1, 5.0, 1e-12)):
        moon = simulate("moon", ragged_task(SIZES), rounds=rounds, settings={"moon.mu": mu})[2]
        fedavg = simulate("fedavg", ragged_task(SIZES), rounds=rounds)[2]
        assert_close(moon[0, None], fedavg[0, None], tolerance)


def test_the_contrast_by_hand():
    """Along the received features and across the previous: log(1 + e^(−1/τ)); then half of each."""
    received, previous = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])

    def contrast(*own):
        return add_contrast(torch.tensor(0.5), torch.tensor([own]), received, previous, 2.0, 0.5)

    assert contrast(1.0, 0.0).item() == pytest.approx(0.5 + 2 * math.log(1 + math.exp(-2)))
    assert contrast(1.0, 1.0).item() == pytest.approx(0.5 + 2 * math.log(2))
    assert contrast(0.0, 4.0).item() == pytest.approx(0.5 + 2 * math.log(1 + math.exp(2)))


def test_features_that_are_all_zero_have_a_gradient():
    own = torch.zeros(2, 3, requires_grad=True)
    others = torch.stack([torch.ones(3), torch.zeros(3)])
    loss = add_contrast(torch.tensor(0.0), own, others, -others, 1.0, 0.5)
    assert loss.item() == pytest.approx(math.log(2))
    [gradient] = torch.autograd.grad(loss, own)
    assert gradient.isfinite().all()


def test_the_fixed_models_keep_their_running_statistics():
    task = ragged_task(SIZES)
    simulation = Simulation(make("moon"), task, start_of(task), rounds=2)
    simulation.step(1, train=True)
    kept = {
        i: {n: v.clone() for n, v in simulation.clients[0, i]["local"].items()}
        for i in range(len(SIZES))
    }
    server = {n: v.clone() for n, v in simulation.servers[0]["global"].items()}
    before, states = simulation.servers[0]["global"], dict(simulation.clients.items())
    simulation.step(2, train=True)
    assert_close(before, server, 0)
    for (_, i), state in states.items():
        assert_close(state["local"], kept[i], 0)


def test_defaults_and_refusals():
    assert (make("moon").mu, make("moon").tau) == (1.0, 0.5)
    for name, value in {"mu": -1, "tau": 0}.items():
        with pytest.raises(UserError, match=f"moon.{name} must be"):
            make("moon", {f"moon.{name}": value})
    task = ragged_task(SIZES, model=Doubled())
    simulation = Simulation(make("moon"), task, start_of(task, Doubled), rounds=1)
    with pytest.raises(UserError, match="MOON works with what enters the last layer"):
        simulation.step(1, train=False)
