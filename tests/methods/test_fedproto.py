"""FedProto: models stay with their clients, and class prototypes travel."""

import copy

import plain
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.lanes.heads import extend_task
from fedala.lanes.losses import Regression
from fedala.methods import make
from fedala.methods.fedproto import NearestPrototype
from fedala.simulation import Simulation

SIZES = [22, 13, 2, 0]
ADDED = ("out.prototypes", "out.is_known")


def trained(net, task, client, round, prototypes, lam):
    """Train on the loss and λ·MSE to the prototypes; `prototypes` has the known classes."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=task.recipe.lr)
    for rows in plain.batches(task, client, round=round):
        z, y = plain.features_of(net, task.x[rows]), task.y[rows]
        loss = F.cross_entropy(net.out(z), y)
        if prototypes:
            targets = [prototypes.get(int(c), own.detach()) for own, c in zip(z, y, strict=True)]
            loss = loss + lam * F.mse_loss(z, torch.stack(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@torch.no_grad()
def collect(net, task, client):
    """Return the features of each class that the client has, all samples one by one."""
    net, found = copy.deepcopy(net).eval(), {}
    for row in task.parts["train"][client]:
        found.setdefault(int(task.y[row]), []).append(plain.features_of(net, task.x[row][None])[0])
    return found


def federate(task, start, lam, rounds, joined=lambda round: range(len(SIZES))):
    """Return models and prototypes after so many rounds."""
    net = plain.module(task, {name: v for name, v in start.items() if name not in ADDED})
    nets, prototypes = [net] * len(SIZES), {}
    for round in range(1, rounds + 1):
        uploads = []
        for client in joined(round):
            nets[client] = trained(nets[client], task, client, round, prototypes, lam)
            uploads.append(collect(nets[client], task, client))
        new = {}
        for label in range(3):
            # Σ_i |D_ij|·C_ij / Σ_i |D_ij| is the mean over all samples of the class.
            samples = [z for upload in uploads for z in upload.get(label, [])]
            if samples:
                new[label] = torch.stack(samples).mean(0)
        prototypes = {**prototypes, **new}
    return nets, prototypes


def as_state(net, prototypes):
    table, is_known = torch.zeros(3, 6).double(), torch.zeros(3).double()
    for label, value in prototypes.items():
        table[label], is_known[label] = value, 1
    return {**plain.lane(net), "out.prototypes": table[None], "out.is_known": is_known[None]}


@pytest.mark.parametrize("lam", [1.0, 0.1])
def test_against_a_plain_loop(lam):
    task = ragged_task(SIZES)
    # Nobody has class 2 at first: it has no prototype, and pulls nothing.
    task.y[: sum(SIZES)].clamp_(max=1)
    simulation, rows, models = simulate("fedproto", task, rounds=3, settings={"fedproto.lam": lam})
    nets, prototypes = federate(task, simulation.initial[0], lam, 3)
    assert prototypes.keys() == {0, 1}
    for client, net in enumerate(nets):
        expected = as_state(net, prototypes)
        assert_close(models[0, client], {n: expected[n] for n in models[0, client]}, 1e-9)
    assert (0, None) not in models
    assert 0 < rows[-1].loss < 1e6


def test_absent_clients_and_classes_keep_their_prototypes():
    task = ragged_task(SIZES)
    task.y[SIZES[0] : sum(SIZES)].clamp_(max=1)  # only client 0 has class 2
    simulation, _, _ = simulate("fedproto", task, rounds=4, join_ratio=0.5)
    joined = [sorted(simulation.draw_participants(0, round)) for round in range(1, 5)]
    assert any(0 in one for one in joined)
    assert any(0 not in one for one in joined)
    _, prototypes = federate(task, simulation.initial[0], 1.0, 4, lambda round: joined[round - 1])
    server = simulation.servers[0]
    assert server["is_known"].tolist() == [[float(label in prototypes) for label in range(3)]]
    for label, value in prototypes.items():
        assert torch.allclose(server["prototypes"][0, label], value, atol=1e-9)


def test_the_nearest_prototype_decides_and_before_there_are_any_the_classifier():
    last = torch.nn.Linear(2, 4)
    head = NearestPrototype(last).eval()
    z = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    assert torch.equal(head(z), F.linear(z, last.weight, last.bias))
    head.prototypes.copy_(torch.tensor([[0.0, 0.0], [9.0, 9.0], [0.0, 2.0], [9.0, 9.0]]))
    head.is_known.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    # Squared distances to classes 0 and 2: 1 and 5, 9 and 1. Others: twice the farthest, and 100.
    expected = -torch.tensor([[1.0, 110.0, 5.0, 110.0], [9.0, 118.0, 1.0, 118.0]])
    assert torch.allclose(head(z), expected)
    assert F.cross_entropy(head(z), torch.tensor([1, 2])).isfinite()
    assert torch.equal(head.train()(z), F.linear(z, last.weight, last.bias))


def test_a_lone_class_wins_whatever_its_distance():
    head = NearestPrototype(torch.nn.Linear(2, 3)).eval()
    head.is_known[2] = 1
    head.prototypes[2] = 1e4
    assert head(torch.zeros(1, 2)).argmax().item() == 2


def test_without_the_distance_it_is_local_training():
    task = ragged_task([22, 13, 5])
    ours = simulate("fedproto", task, rounds=3, settings={"fedproto.lam": 0.0})[2]
    local = simulate("local", task, rounds=3)[2]
    for client in range(3):
        own = {n: v for n, v in ours[0, client].items() if n not in ADDED}
        assert_close(own, local[0, client], 0)


def test_the_first_round_has_no_prototypes_and_is_evaluated_with_the_classifier():
    task = ragged_task([22, 13, 5])
    ours, local = (simulate(name, task, rounds=1)[1] for name in ("fedproto", "local"))
    assert ours[0].loss == pytest.approx(local[0].loss, abs=1e-12)
    assert ours[1].loss != pytest.approx(local[1].loss, abs=1e-6)


def test_refusals():
    with pytest.raises(UserError, match=r"fedproto\+ala is refused: FedProto receives no model"):
        make("fedproto+ala")
    task = ragged_task([5], loss=Regression())
    with pytest.raises(UserError, match="FedProto works with the classes of the samples"):
        simulate("fedproto", task, rounds=1)

    class Softened(Net):
        def forward(self, x):
            return super().forward(x) / 2

    task = ragged_task([5], model=Softened())
    simulation = Simulation(make("fedproto"), task, start_of(task, Softened))
    with pytest.raises(UserError, match="FedProto works with what enters the last layer"):
        simulation.step(1, train=True)


def test_the_counts_of_classes_are_whole_numbers_so_that_a_server_refuses_negative_ones():
    task = ragged_task([5])
    task, start = extend_task(task, start_of(task), NearestPrototype, "FedProto")
    template = make("fedproto").extra_template(task, start(0))
    assert template["counts"].dtype == torch.int64
    assert template["counts"].shape == (1, 3)
