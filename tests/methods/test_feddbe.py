"""FedDBE: a memory of each client's own bias, and features that stay near a consensus."""

import copy

import plain
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.methods import make
from fedala.simulation import Simulation

SIZES = [22, 13, 2, 0]
MEMORY = "out.memory"


def trained(net, memory, task, client, round, consensus, kappa, mu):
    """Return model, memory and moving mean. Without a consensus, it is training as in FedAvg."""
    net, memory = copy.deepcopy(net), memory.clone().requires_grad_()
    optimizer = torch.optim.SGD([*net.parameters(), memory], lr=task.recipe.lr)
    moving = None
    for rows in plain.batches(task, client, round=round):
        z = plain.features_of(net, task.x[rows])
        newest = z.mean(0)
        moving = newest if moving is None else (1 - mu) * moving + mu * newest
        if consensus is None:
            loss = F.cross_entropy(net.out(z), task.y[rows])
        else:
            loss = F.cross_entropy(net.out(z + memory), task.y[rows])
            loss = loss + kappa / 2 * F.mse_loss(moving, consensus)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moving = moving.detach()
    return net, memory.detach(), torch.zeros(6).double() if moving is None else moving


def federate(task, start, settings, rounds, joined=lambda round: range(len(SIZES))):
    """Return server, memories and consensus after so many rounds."""
    kappa, mu = settings["feddbe.kappa"], settings["feddbe.mu"]
    server = plain.module(task, {n: v for n, v in start.items() if n != MEMORY})
    memories, consensus = [torch.zeros(6).double() for _ in SIZES], None
    for round in range(1, rounds + 1):
        clients = sorted(joined(round))
        nets, means = [], []
        for client in clients:
            net, memories[client], mean = trained(
                server, memories[client], task, client, round, consensus, kappa, mu
            )
            nets.append(net)
            means.append(mean)
        sizes = [SIZES[client] for client in clients]
        server = plain.mean(nets, sizes)
        if consensus is None:
            pairs = zip(means, sizes, strict=True)
            consensus = sum(mean * size for mean, size in pairs) / sum(sizes)
    return server, memories, consensus


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_against_a_plain_loop(mu):
    task, settings = ragged_task(SIZES), {"feddbe.kappa": 2.0, "feddbe.mu": mu}
    simulation, _, models = simulate("feddbe", task, rounds=3, settings=settings)
    server, memories, consensus = federate(task, simulation.initial[0], settings, 3)
    assert_close(models[0, None], plain.lane(server), 1e-9)
    assert torch.allclose(simulation.servers[0]["mean"][0], consensus, atol=1e-9)
    for client, memory in enumerate(memories):
        expected = {**plain.lane(server), MEMORY: memory[None]}
        assert_close(models[0, client], {n: expected[n] for n in models[0, client]}, 1e-9)
    assert memories[0].abs().max() > 1e-3
    assert (memories[0] - memories[1]).abs().max() > 1e-3
    assert not memories[3].any(), "a client without samples has no bias"


def test_a_client_that_joins_late_meets_the_consensus_of_round_1():
    settings = {"feddbe.kappa": 2.0, "feddbe.mu": 1.0}
    task = ragged_task(SIZES)
    simulation, _, models = simulate(
        "feddbe", task, rounds=4, settings=settings, join_ratio=0.5, seeds=(0,)
    )
    everybody = [set(simulation.draw_participants(0, round)) for round in range(1, 5)]
    assert everybody[0] != everybody[0].union(*everybody[1:]), "somebody should join late"
    server, memories, consensus = federate(
        task, simulation.initial[0], settings, 4, lambda round: everybody[round - 1]
    )
    assert_close(models[0, None], plain.lane(server), 1e-9)
    assert torch.allclose(simulation.servers[0]["mean"][0], consensus, atol=1e-9)
    for client in set.union(*everybody):
        kept = simulation.clients[0, client]["local"][MEMORY]
        assert torch.allclose(kept, memories[client][None], atol=1e-9)


def test_round_1_is_fedavgs_to_the_bit_and_later_ones_are_not():
    task = ragged_task([22, 13, 5])
    one, other = (simulate("feddbe", task, rounds=rounds)[2][0, None] for rounds in (1, 2))
    assert_close(one, simulate("fedavg", task, rounds=1)[2][0, None], 0)
    fedavg = simulate("fedavg", task, rounds=2)[2][0, None]
    assert (other["hidden.bias"] - fedavg["hidden.bias"]).abs().max() > 1e-3


def test_the_first_step_with_a_consensus_by_hand():
    """One batch, a linear map: the gradient of κ/2·MSE adds κ/K·(z̄ − z̄ᵍ) to that of the bias."""
    task = ragged_task([4], lr=0.1)
    pulled, free = (
        simulate("feddbe", task, rounds=2, settings={"feddbe.kappa": kappa})[0]
        for kappa in (3.0, 0.0)
    )
    after_one = simulate("feddbe", task, rounds=1)[0]
    local = {n: v for n, v in after_one.clients[0, 0]["local"].items() if n != MEMORY}
    rows = task.parts["train"][0]
    z = plain.features_of(plain.module(task, local), task.x[rows])
    active = (z > 0).double().mean(0)  # how much of a feature's bias reaches the mean
    slope = 3.0 / 6 * (z.mean(0) - after_one.servers[0]["mean"][0]) * active
    difference = (
        pulled.clients[0, 0]["local"]["hidden.bias"] - free.clients[0, 0]["local"]["hidden.bias"]
    )
    assert slope.abs().max() > 1e-3
    assert torch.allclose(difference[0], -0.1 * slope, atol=1e-12)


def test_memories_never_travel_and_the_mean_only_once():
    task = ragged_task(SIZES)
    simulation = Simulation(make("feddbe"), task, start_of(task), rounds=3)
    uploaded = []

    class Listening(type(simulation.method)):
        def aggregate(self, server, uploads, server_round):
            uploaded.append(uploads.stack())
            return super().aggregate(server, uploads, server_round)

    simulation.methods = [Listening()]
    for round in (1, 2):
        simulation.step(round, train=True)
    first, second = uploaded
    assert MEMORY not in first.model
    assert first.extra["mean"][0].any()
    assert not second.extra["mean"].any()


def test_ala_blends_what_is_received():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("feddbe+ala", task, rounds=3)
    names = make("feddbe+ala").ala_parameters(simulation.task.model, 1)
    assert names == ("out.weight", "out.bias")
    assert not torch.equal(models[0, 0]["out.weight"], models[0, None]["out.weight"])


def test_a_model_that_cannot_be_cut_is_refused():
    class Softened(Net):
        def forward(self, x):
            return super().forward(x) / 2

    task = ragged_task([5], model=Softened())
    simulation = Simulation(make("feddbe"), task, start_of(task, Softened))
    with pytest.raises(UserError, match="FedDBE works with what enters the last layer"):
        simulation.step(1, train=True)


def test_defaults():
    method = make("feddbe")
    assert (method.kappa, method.mu) == (50.0, 1.0)
