"""FedAMP against a plain loop and by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import PlainALA, batches, combine, cross_entropy, descend, lane, mean_loss, module
from small import assert_close, ragged_task, simulate, start_of
from torch.nn.utils import parameters_to_vector

from fedala import run
from fedala.errors import UserError
from fedala.lanes.messages import Message
from fedala.lanes.uploads import Piece, Uploads
from fedala.methods import ServerRound, make
from fedala.methods.fedamp import FedAMP

SIZES = [5, 13, 3, 0, 8]


def plain_clouds(uploads, task, *, alpha, sigma):
    """u_i of every client, pair by pair in NumPy."""
    flat = [parameters_to_vector(w.parameters()).detach().numpy() for w in uploads]
    clouds = []
    for i, own in enumerate(flat):
        xi = np.array(
            [alpha * np.exp(-np.sum((own - other) ** 2) / sigma) / sigma for other in flat]
        )
        xi[[j for j in range(len(flat)) if j == i or not len(task.parts["train"][j])]] = 0
        if xi.sum() > 1:
            xi /= xi.sum()
        xi[i] = max(0, 1 - xi.sum())
        clouds.append(combine(uploads, xi.tolist()))
        clouds[i].norm.num_batches_tracked.copy_(uploads[i].norm.num_batches_tracked)
    return clouds


def plain(task, rounds, *, alpha, lam, sigma, ala=False):
    """Return what the server sends, every client's model, and the loss of each evaluation."""
    clients = range(len(task.parts["train"]))
    start = module(task, start_of(task)(0))
    clouds, local = [start for _ in clients], [start for _ in clients]
    blends, history = [PlainALA(task, i) for i in clients], []
    for round in range(1, rounds + 2):
        initialized = [
            blends[i](clouds[i], local[i], clouds[i], round=round) if ala else local[i]
            for i in clients
        ]
        history.append(mean_loss(task, initialized))
        if round > rounds:
            return clouds, initialized, history
        for i in clients:

            def loss(model, rows, cloud=clouds[i]):
                pairs = zip(model.parameters(), cloud.parameters(), strict=True)
                distance = sum(((p - u.detach()) ** 2).sum() for p, u in pairs)
                return cross_entropy(task)(model, rows) + lam / (2 * alpha) * distance

            start = initialized[i] if len(task.parts["train"][i]) else clouds[i]
            local[i] = descend(start, loss, batches(task, i, round=round), task.recipe.lr)
        clouds = plain_clouds(local, task, alpha=alpha, sigma=sigma)


# Weights that exceed one and are scaled down; weights that leave the client a part of its own.
SHARED = {"alpha": 4.0, "lam": 3.0, "sigma": 0.5}
OWN = {"alpha": 0.5, "lam": 0.2, "sigma": 2.0}


def send_to_all(simulation):
    """Return the models that the server would send to all clients in the next round."""
    everybody = list(range(len(SIZES)))
    server_round = ServerRound(0, simulation.round + 1, simulation.rounds, everybody, SIZES)
    return simulation.method.send(simulation.servers[0], server_round).model


def upload(models, weights):
    """Return the models of two clients as uploads."""
    return Uploads([0, 1], torch.tensor(weights), [Piece(Message(models), [0, 1], [0, 1])])


#: A round of two clients with one sample each.
TWO = ServerRound(0, 1, 1, [0, 1], [1, 1])


@pytest.mark.parametrize("values", [SHARED, OWN])
@pytest.mark.parametrize("ala", [False, True])
def test_it_is_the_plain_loop(values, ala):
    task = ragged_task(SIZES)
    settings = {f"fedamp.{name}": value for name, value in values.items()} | (
        PlainALA.SETTINGS if ala else {}
    )
    simulation, rows, models = simulate(
        "fedamp+ala" if ala else "fedamp", task, settings=settings, rounds=3
    )
    clouds, personal, history = plain(task, 3, ala=ala, **values)
    sent = send_to_all(simulation)
    for client in range(len(SIZES)):
        assert_close(
            {name: value[client : client + 1] for name, value in sent.items()},
            lane(clouds[client]),
            1e-9,
        )
        assert_close(models[0, client], lane(personal[client]), 1e-9)
    assert [row.loss for row in rows] == pytest.approx(history, abs=1e-9)


def shares(distances, weights=None, **settings):
    distances = torch.tensor(distances).double()
    weights = torch.ones(len(distances)) if weights is None else torch.tensor(weights)
    return FedAMP(**settings).shares(distances, weights)


def test_two_clients_by_hand():
    """w_1 = (0, 0), w_2 = (1, 2), σ = 5, α = 2.

    So ξ = 2·exp(−5/5)/5 = 0.4/e and u_1 = (1 − ξ)·w_1 + ξ·w_2 = ξ·(1, 2).
    """
    method = FedAMP(alpha=2.0, sigma=5.0)
    start = {"w": torch.zeros(1, 2).double()}
    server = method.init_server(SimpleNamespace(trainable=("w",)), start, TWO)
    assert_close(method.send(server, TWO).model, start, 0)
    models = {"w": torch.tensor([[0.0, 0.0], [1.0, 2.0]]).double()}
    sent = method.send(method.aggregate(server, upload(models, [3.0, 7.0]), TWO), TWO).model
    xi = 0.4 / math.e
    expected = torch.tensor([[xi, 2 * xi], [1 - xi, 2 - 2 * xi]], dtype=torch.float64)
    assert_close(sent, {"w": expected}, 1e-12)


def test_the_first_round_sends_the_initial_model_as_it_is():
    simulation, _, _ = simulate("fedamp", ragged_task(SIZES), rounds=0)
    assert_close(send_to_all(simulation), simulation.initial[0], 0)


def test_clients_far_apart_stay_alone():
    task = ragged_task(SIZES, lr=0.5)
    simulation, _, _ = simulate("fedamp", task, settings={"fedamp.sigma": 1e-4}, rounds=1)
    sent = send_to_all(simulation)
    for client in range(len(SIZES)):
        own = simulation.clients[0, client]["local"]
        assert_close({name: value[client : client + 1] for name, value in sent.items()}, own, 1e-12)


def test_identical_clients_share_equally():
    same = [[0.0] * 4] * 4
    mixed = shares(same)  # α/σ is far above 1: all weight goes to the others
    assert torch.allclose(mixed, (1 - torch.eye(4).double()) / 3)
    mixed = shares(same, alpha=0.025, sigma=0.1)  # ξ = 1/4: to all alike
    assert torch.allclose(mixed, torch.full((4, 4), 0.25).double())


def test_shares_are_never_negative_and_add_up():
    random = np.random.default_rng(0)
    for width in (1e-3, 0.1, 1.0, 10.0):
        points = random.normal(size=(9, 5)) * width
        distances = ((points[:, None] - points) ** 2).sum(-1)
        for alpha in (1e-2, 0.1, 1.0, 1000.0):
            mixed = shares(distances, alpha=alpha, sigma=0.1)
            assert (mixed >= 0).all()
            assert torch.allclose(mixed.sum(1), torch.ones(9).double(), rtol=0, atol=1e-12)


def test_a_client_without_samples_has_no_part_in_the_others():
    mixed = shares([[0.0] * 3] * 3, weights=[5.0, 0.0, 2.0])
    assert mixed[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert mixed[1].tolist() == [0.5, 0.0, 0.5]


def test_running_statistics_travel_but_make_no_distance():
    method = FedAMP(alpha=0.05, sigma=0.1)
    start = {
        "w": torch.zeros(1, 2),
        "mean": torch.zeros(1, 1),
        "count": torch.zeros(1, dtype=torch.int64),
    }
    models = {
        "w": torch.ones(2, 2),
        "mean": torch.tensor([[0.0], [100.0]]),
        "count": torch.tensor([3, 4]),
    }
    server = method.init_server(SimpleNamespace(trainable=("w",)), start, TWO)
    server = method.aggregate(server, upload(models, [1.0, 1.0]), TWO)
    sent = method.send(server, TWO).model
    assert sent["mean"].flatten().tolist() == [50.0, 50.0]
    assert sent["count"].tolist() == [3, 4]


def test_lambda_matters():
    task = ragged_task(SIZES)
    weak, strong = (
        simulate("fedamp", task, settings={"fedamp.alpha": 2.0, "fedamp.lam": lam}, rounds=2)[2]
        for lam in (0.1, 5.0)
    )
    assert (weak[0, 1]["out.weight"] - strong[0, 1]["out.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["fedamp", "fedamp+ala"])
def test_it_is_refused_where_not_everybody_takes_part(name, tmp_path):
    with pytest.raises(UserError, match="needs every client in every round"):
        run(method=name, dataset="digits", join_ratio=0.5, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_defaults_and_refusals():
    assert make("fedamp") == FedAMP(alpha=1000.0, lam=1.0, sigma=0.1)
    for name, value in {"alpha": 0, "lam": -1, "sigma": 0}.items():
        with pytest.raises(UserError, match=f"fedamp.{name} must be"):
            make("fedamp", {f"fedamp.{name}": value})
