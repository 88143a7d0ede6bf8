"""APFL against plain modules, and its limits: FedAvg and Local."""

import copy

import pytest
import torch
from plain import PlainALA, batches, changed, cross_entropy, lane, mean, module
from small import assert_close, evaluate, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.methods import make

SIZES = [5, 14, 9, 3, 8, 0]


def mixed(w, v, alpha):
    """v̄ = α·v + (1 − α)·w, running statistics included; counters are those of v."""
    own, others = v.state_dict(), w.state_dict()
    values = {
        name: alpha * value + (1 - alpha) * others[name] if value.is_floating_point() else value
        for name, value in own.items()
    }
    return changed(v, values)


def train(task, w, v, alpha, client, round, adapt):
    """Algorithm 1: all gradients of a step are at the models before it."""
    w, v, loss, lr = copy.deepcopy(w), copy.deepcopy(v), cross_entropy(task), task.recipe.lr
    for step, rows in enumerate(batches(task, client, round=round)):
        both = mixed(w, v, alpha)
        both.load_state_dict({n: b for n, b in v.state_dict().items() if "running" in n}, False)
        for model in (w, both):
            model.zero_grad()
            loss(model, rows).backward()
        slope = 0.0
        with torch.no_grad():
            parameters = [dict(model.named_parameters()) for model in (w, v, both)]
            for p_w, p_v, p_both in zip(*(one.values() for one in parameters), strict=True):
                slope += ((p_v - p_w) * p_both.grad).sum().item()
                p_w -= lr * p_w.grad
                p_v -= lr * alpha * p_both.grad
        v.load_state_dict({n: b.clone() for n, b in both.named_buffers()}, strict=False)
        if adapt == "step" or (adapt == "round" and step == 0):
            alpha = min(max(alpha - lr * slope, 0.0), 1.0)
    return w, v, alpha


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("name", "join_ratio", "alpha", "adapt"),
    [
        ("apfl", 1.0, 0.5, "round"),
        ("apfl", 0.5, 0.3, "step"),
        ("apfl", 1.0, 0.7, "never"),
        ("apfl+ala", 1.0, 0.6, "step"),
    ],
)
def test_against_a_plain_loop(name, join_ratio, alpha, adapt, shuffle):
    """Three rounds. With `+ala`, ALA(g, v) initialises v, and the global track stays the same."""
    task, ala = ragged_task(SIZES, shuffle=shuffle), "+" in name
    settings = {"apfl.alpha": alpha, "apfl.adapt": adapt} | (PlainALA.SETTINGS if ala else {})
    simulation, _, models = evaluate(name, task, join_ratio=join_ratio, rounds=3, settings=settings)
    joined = [simulation.draw_participants(0, round) for round in range(1, 5)]
    server = module(task, start_of(task)(0))
    v, personal, alphas = [server] * len(SIZES), [server] * len(SIZES), [alpha] * len(SIZES)
    learner = [PlainALA(task, client) for client in range(len(SIZES))]
    for round, clients in enumerate(joined, 1):
        for i in clients:
            if ala:
                v[i] = learner[i](server, v[i], server, round=round) if SIZES[i] else server
            personal[i] = mixed(server, v[i], alphas[i])
        if round < 4:
            uploads = []
            for i in clients:
                w, v[i], alphas[i] = train(task, server, v[i], alphas[i], i, round, adapt)
                uploads.append(w)
                personal[i] = mixed(w, v[i], alphas[i])
            server = mean(uploads, [SIZES[i] for i in clients])
    assert_close(models[0, None], lane(server), 1e-10)
    for i in {i for clients in joined for i in clients}:
        assert_close(models[0, i], lane(personal[i]), 1e-9)
    for i in {i for clients in joined[:3] for i in clients}:
        state = simulation.clients[0, i]
        kept = (state["base"] if ala else state)["alpha"]
        assert kept.item() == pytest.approx(alphas[i], abs=1e-10)
    assert (len(set(alphas)) > 1) == (adapt != "never")


def floats(model):
    return {name: value for name, value in model.items() if value.is_floating_point()}


def test_its_global_track_is_fedavgs_to_the_bit():
    apfl, fedavg = (simulate(name, ragged_task(SIZES), rounds=3)[2] for name in ("apfl", "fedavg"))
    assert_close(apfl[0, None], fedavg[0, None], 0)


@pytest.mark.parametrize(("alpha", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_without_mixing_it_is_fedavg_or_local(alpha, other):
    settings = {"apfl.alpha": alpha, "apfl.adapt": "never"}
    apfl = simulate("apfl", ragged_task(SIZES), rounds=3, settings=settings)[2]
    expected = simulate(other, ragged_task(SIZES), rounds=3)[2]
    for client in range(len(SIZES)):
        model = expected[0, None if other == "fedavg" else client]
        assert_close(floats(apfl[0, client]), floats(model), 0)


def test_alpha_stays_between_0_and_1():
    """A rate that is far too large drives it to the ends."""
    settings = {"apfl.adapt": "step"}
    simulation, _, _ = evaluate("apfl", ragged_task(SIZES, lr=5.0), rounds=3, settings=settings)
    found = [state["alpha"].item() for state in simulation.clients.values()]
    assert all(0 <= alpha <= 1 for alpha in found)
    assert {0.0, 1.0} & set(found)


def test_in_its_first_round_a_client_does_not_adapt_with_the_first_step():
    """v = w = Θ⁰ there: the slope ⟨v − w, ∇f⟩ is 0."""
    simulation, _, _ = evaluate("apfl", ragged_task(SIZES), rounds=1)
    assert {state["alpha"].item() for state in simulation.clients.values()} == {0.5}


def test_defaults_and_refusals():
    assert (make("apfl").alpha, make("apfl").adapt) == (0.5, "round")
    for name, value in {"alpha": 1.5, "adapt": "epoch"}.items():
        with pytest.raises(UserError, match=f"apfl.{name} must be"):
            make("apfl", {f"apfl.{name}": value})
