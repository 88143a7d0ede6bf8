"""SCAFFOLD against plain modules, and what its control variates are."""

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


def descend(task, model, client, round, correction):
    """Algorithm 1, lines 9 to 11: y ← y − η(g(y) − c_i + c) for each batch."""
    model, loss = copy.deepcopy(model), cross_entropy(task)
    for rows in batches(task, client, round=round):
        model.zero_grad()
        loss(model, rows).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= task.recipe.lr * (p.grad + correction[name])
    return model


def gradient_at(task, model, client, round):
    """Option I: g_i(x), the mean over the batches of one more epoch."""
    loss, found = cross_entropy(task), []
    for rows in batches(task, client, round=round, purpose="control variate"):
        own = copy.deepcopy(model)
        own.zero_grad()
        loss(own, rows).backward()
        found.append({name: p.grad for name, p in own.named_parameters()})
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def plain(task, sizes, joined, *, eta_g, variant, ala=False):
    """Return x, c, each client's c_i, and each client's last evaluated model."""
    x = module(task, start_of(task)(0))
    c = {name: torch.zeros_like(p) for name, p in list_values(x).items()}
    own, local = [dict(c) for _ in sizes], [x for _ in sizes]
    learner = [PlainALA(task, client) for client in range(len(sizes))]
    for round, clients in enumerate(joined, 1):
        start = {
            i: learner[i](x, local[i], x, round=round) if ala and sizes[i] else x for i in clients
        }
        if round == len(joined):  # after the last round, clients initialise once more
            return x, c, own, start
        changes, before = [], list_values(x)
        for i in [i for i in clients if sizes[i]]:
            correction = {n: c[n] - own[i][n] for n in c}
            y = local[i] = descend(task, start[i], i, round, correction)
            if variant == "I":
                new = gradient_at(task, x, i, round)
            else:
                steps, begin = len(list(batches(task, i, round=round))), list_values(start[i])
                new = {
                    n: own[i][n] - c[n] + (begin[n] - p) / (steps * task.recipe.lr)
                    for n, p in list_values(y).items()
                }
            changes.append({n: new[n] - own[i][n] for n in c})
            own[i] = new
        models = [local[i] for i in clients if sizes[i]]
        x = combine(models, [1 / len(models)] * len(models))
        with torch.no_grad():
            for n, p in x.named_parameters():
                p.copy_(before[n] + eta_g * (p - before[n]))
        n_clients = sum(size > 0 for size in sizes)
        c = {n: value + sum(change[n] for change in changes) / n_clients for n, value in c.items()}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("name", "join_ratio", "eta_g", "variant"),
    [
        ("scaffold", 1.0, 1.0, "II"),
        ("scaffold", 0.5, 0.7, "II"),
        ("scaffold", 0.5, 1.3, "I"),
        ("scaffold+ala", 1.0, 1.0, "II"),
        ("scaffold+ala", 1.0, 0.7, "I"),
    ],
)
def test_against_a_plain_loop(name, join_ratio, eta_g, variant, shuffle):
    """Three rounds. With `+ala`, steps begin at ALA(x, y_i), and option I's gradient is at x."""
    task, ala = ragged_task(SIZES, shuffle=shuffle), "+" in name
    settings = {"scaffold.eta_g": eta_g, "scaffold.variant": variant}
    settings |= PlainALA.SETTINGS if ala else {}
    simulation, _, models = evaluate(name, task, join_ratio=join_ratio, rounds=3, settings=settings)
    joined = [simulation.draw_participants(0, round) for round in range(1, 5)]
    x, c, own, start = plain(task, SIZES, joined, eta_g=eta_g, variant=variant, ala=ala)
    assert_close(simulation.servers[0]["global"], lane(x), 1e-10)
    assert_close(simulation.servers[0]["c"], {n: v[None] for n, v in c.items()}, 1e-9)
    for i in {client for clients in joined[:3] for client in clients}:
        state = simulation.clients[0, i]
        kept = (state["base"] if ala else state)["c"]
        assert_close(kept, {n: v[None] for n, v in own[i].items()}, 1e-9)
    assert_close(models[0, None], lane(x), 1e-10)
    for i in start if ala else ():
        assert_close(models[0, i], lane(start[i]), 1e-9)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_with_every_client_in_every_round_c_is_the_mean_of_all_c_i(variant):
    task = ragged_task(SIZES)
    simulation, _, _ = evaluate("scaffold", task, rounds=3, settings={"scaffold.variant": variant})
    for name, value in simulation.servers[0]["c"].items():
        own = [simulation.clients[0, i]["c"][name] for i, size in enumerate(SIZES) if size]
        assert torch.allclose(value[0], torch.cat(own).mean(0), atol=1e-12)
        # A bias before a normalisation has no gradient.
        assert value.abs().max() > 1e-6 or name == "conv.bias"
        assert not simulation.clients[0, SIZES.index(0)]["c"][name].any()


def test_the_first_round_is_fedavg_with_equal_weights():
    """c = c_i = 0: with clients of one size, the first global model is FedAvg's to the bit."""
    scaffold, fedavg = (
        simulate(name, ragged_task([8, 8, 8]), rounds=1)[2][0, None]
        for name in ("scaffold", "fedavg")
    )
    assert_close(scaffold, fedavg, 0)


def test_one_client_alone_is_never_corrected():
    """c = c_i in every round, so that the steps are those of local training."""
    scaffold, local = (
        simulate(name, ragged_task([13]), rounds=3)[2][0, key]
        for name, key in (("scaffold", None), ("local", 0))
    )
    assert_close(scaffold, local, 1e-12)


def test_the_control_variate_travels_both_ways():
    task = ragged_task(SIZES)
    simulation, rows, _ = simulate("scaffold", task, rounds=2)
    model = sum(value.numel() for value in simulation.initial[0].values())
    learning = sum(simulation.initial[0][name].numel() for name in task.trainable)
    assert (rows[1].sent, rows[1].uploaded) == (model + learning, model + learning)


def test_defaults_and_refusals():
    assert (make("scaffold").eta_g, make("scaffold").variant) == (1.0, "II")
    for name, value in {"eta_g": 0, "variant": "III"}.items():
        with pytest.raises(UserError, match=f"scaffold.{name} must be"):
            make("scaffold", {f"scaffold.{name}": value})
