"""FedDyn against plain modules, and what its server keeps."""

import copy

import pytest
import torch
from plain import PlainALA, batches, combine, cross_entropy, lane, module
from small import assert_close, evaluate, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.methods import make

SIZES = [5, 14, 9, 3, 8, 0]


def list_values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def minimize(task, model, client, round, gradient, anchor, alpha):
    """SGD on L_k(θ) − ⟨∇L_k, θ⟩ + α/2·‖θ − θ_server‖², all of it in autograd."""
    model, loss = copy.deepcopy(model), cross_entropy(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.recipe.lr)
    for rows in batches(task, client, round=round):
        optimizer.zero_grad()
        objective = loss(model, rows)
        for n, p in model.named_parameters():
            objective = objective - (gradient[n] * p).sum()
            objective = objective + alpha / 2 * (p - anchor[n]).square().sum()
        objective.backward()
        optimizer.step()
    return model


def plain(task, joined, alpha, ala=False):
    """Return θ, h, each client's ∇L_k, and each client's last evaluated model. Algorithm 1."""
    server = module(task, start_of(task)(0))
    h = {name: torch.zeros_like(p) for name, p in list_values(server).items()}
    own, local = [dict(h) for _ in SIZES], [server for _ in SIZES]
    learner = [PlainALA(task, client) for client in range(len(SIZES))]
    m = sum(size > 0 for size in SIZES)
    for round, clients in enumerate(joined, 1):
        start = {
            i: learner[i](server, local[i], server, round=round) if ala and SIZES[i] else server
            for i in clients
        }
        if round == len(joined):
            return server, h, own, start
        before, moves = list_values(server), []
        for i in [i for i in clients if SIZES[i]]:
            local[i] = minimize(task, start[i], i, round, own[i], before, alpha)
            moves.append({n: p - before[n] for n, p in list_values(local[i]).items()})
            own[i] = {n: own[i][n] - alpha * move for n, move in moves[-1].items()}
        h = {n: v - alpha / m * sum(move[n] for move in moves) for n, v in h.items()}
        models = [local[i] for i in clients if SIZES[i]]
        server = combine(models, [1 / len(models)] * len(models))
        with torch.no_grad():
            for n, p in server.named_parameters():
                p -= h[n] / alpha


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("name", "join_ratio", "alpha"),
    [("feddyn", 1.0, 0.1), ("feddyn", 0.5, 0.7), ("feddyn+ala", 1.0, 0.3)],
)
def test_against_a_plain_loop(name, join_ratio, alpha, shuffle):
    """Three rounds. With `+ala`, minimising begins at ALA(θ, θ_k), and the anchor stays θ."""
    task, ala = ragged_task(SIZES, shuffle=shuffle), "+" in name
    settings = {"feddyn.alpha": alpha} | (PlainALA.SETTINGS if ala else {})
    simulation, _, models = evaluate(name, task, join_ratio=join_ratio, rounds=3, settings=settings)
    joined = [simulation.draw_participants(0, round) for round in range(1, 5)]
    server, h, own, start = plain(task, joined, alpha, ala)
    assert_close(simulation.servers[0]["global"], lane(server), 1e-10)
    assert_close(simulation.servers[0]["h"], {n: v[None] for n, v in h.items()}, 1e-10)
    for i in {client for clients in joined[:3] for client in clients}:
        state = simulation.clients[0, i]
        kept = (state["base"] if ala else state)["g"]
        assert_close(kept, {n: v[None] for n, v in own[i].items()}, 1e-10)
    assert_close(models[0, None], lane(server), 1e-10)
    for i in start if ala else ():
        assert_close(models[0, i], lane(start[i]), 1e-9)


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_the_servers_state_is_the_mean_of_the_clients_gradients(join_ratio):
    """h = 1/m·Σ ∇L_k over all m clients, also those that are absent or never took part."""
    simulation, _, _ = evaluate("feddyn", ragged_task(SIZES), join_ratio=join_ratio, rounds=3)
    m = sum(size > 0 for size in SIZES)
    for name, value in simulation.servers[0]["h"].items():
        total = sum(state["g"][name] for state in simulation.clients.values())
        assert torch.allclose(value, total / m, atol=1e-12)
    states = [simulation.clients.get((0, SIZES.index(0)))]
    assert not any(state["g"][name].any() for state in states if state for name in state["g"])


def test_one_step_by_hand():
    """A client with one batch: θ_1 = θ − η∇f, h = αη∇f, so the server's model is θ − 2η∇f."""
    task = ragged_task([4], lr=0.1)
    _, _, models = simulate("feddyn", task, rounds=1, settings={"feddyn.alpha": 0.3})
    model = module(task, start_of(task)(0))
    [rows] = batches(task, 0, round=1)
    cross_entropy(task)(model, rows).backward()
    for name, p in model.named_parameters():
        expected = p.detach() - 2 * 0.1 * p.grad
        assert torch.allclose(models[0, None][name][0], expected, atol=1e-12), name


def test_defaults_and_refusals():
    assert make("feddyn").alpha == 0.1
    with pytest.raises(UserError, match=r"feddyn\.alpha must be greater than 0"):
        make("feddyn", {"feddyn.alpha": 0})
