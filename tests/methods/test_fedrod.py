"""FedRoD: a generic head for balanced classes, and a personal head on top of it."""

import copy

import plain
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.class_features import count_classes
from fedala.lanes.cohort import Cohort
from fedala.lanes.losses import CrossEntropy, Regression
from fedala.methods import make
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [22, 13, 2, 0]
PERSONAL = ("out.personal.weight", "out.personal.bias")


def trained(net, head, task, client, round, gamma):
    """Step body and generic head with the balanced softmax, and P with the plain loss."""
    net, head = copy.deepcopy(net), copy.deepcopy(head)
    labels = [int(task.y[row]) for row in task.parts["train"][client]]
    counts = torch.tensor([labels.count(c) for c in range(3)]).double()
    generic = torch.optim.SGD(net.parameters(), lr=task.recipe.lr)
    personal = torch.optim.SGD(head.parameters(), lr=task.recipe.lr)
    for rows in plain.batches(task, client, round=round):
        y, z = task.y[rows], plain.features_of(net, task.x[rows])
        scores = net.out(z)
        # −log of n_y^γ·exp(g_y) / Σ_c n_c^γ·exp(g_c), over the classes that the client has
        weighted = counts**gamma * scores.exp()
        generic_loss = -(weighted[range(len(y)), y] / weighted.sum(1)).log().mean()
        personal_loss = F.cross_entropy(scores.detach() + head(z.detach()), y)
        generic.zero_grad()
        personal.zero_grad()
        generic_loss.backward()
        personal_loss.backward()
        generic.step()
        personal.step()
    return net, head


def merged(net, head):
    """Both heads as one state."""
    own = {f"out.personal.{name}": value[None] for name, value in head.state_dict().items()}
    return {**plain.lane(net), **own}


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_against_a_plain_loop(gamma):
    task = ragged_task(SIZES)
    simulation, _, models = simulate("fedrod", task, rounds=3, settings={"fedrod.gamma": gamma})
    names = [name for name in simulation.initial[0] if name not in PERSONAL]
    server = plain.module(task, {name: simulation.initial[0][name] for name in names})
    heads = [nn.Linear(6, 3).double() for _ in SIZES]
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    for round in (1, 2, 3):
        uploads = []
        for client, head in enumerate(heads):
            net, heads[client] = trained(server, head, task, client, round, gamma)
            uploads.append(net)
        server = plain.mean(uploads, SIZES)
    assert_close(models[0, None], plain.lane(server), 1e-9)
    for client, head in enumerate(heads):
        expected = merged(server, head)
        assert_close(models[0, client], {n: expected[n] for n in models[0, client]}, 1e-9)
    apart = heads[0].weight - heads[1].weight
    assert apart.abs().max() > 1e-3
    assert not heads[3].weight.any(), "without samples, the personal predictor is the generic one"


def test_without_the_prior_body_and_generic_head_are_fedavgs_to_the_bit():
    """P sees frozen features and a frozen generic head, so it changes neither."""
    task = ragged_task([22, 13, 5])
    generic = simulate("fedrod", task, rounds=3, settings={"fedrod.gamma": 0.0})[2][0, None]
    assert_close(generic, simulate("fedavg", task, rounds=3)[2][0, None], 0)
    balanced = simulate("fedrod", task, rounds=3)[2][0, None]
    assert (balanced["out.weight"] - generic["out.weight"]).abs().max() > 1e-3


def test_the_evaluated_scores_are_the_sum_of_both_heads():
    task = ragged_task([9])
    simulation, _, models = simulate("fedrod", task, rounds=2)
    model, x = models[0, 0], task.x[:4]
    own = {name: value for name, value in model.items() if name not in PERSONAL}
    net = plain.module(ragged_task([9]), own).eval()
    with torch.no_grad(), simulation.task.use_mode(training=False):
        [scores] = simulation.task.outputs(model, x[None])
        z = plain.features_of(net, x)
        expected = net.out(z) + F.linear(z, *(model[name][0] for name in PERSONAL))
    assert torch.allclose(scores, expected, atol=1e-12)


def test_class_counts():
    task = ragged_task(SIZES)
    counts = count_classes(Cohort(task, range(4), [0] * 4), 3)
    for client, rows in enumerate(task.parts["train"]):
        labels = task.y[rows].tolist()
        assert counts[client].tolist() == [labels.count(c) for c in range(3)]


def test_a_class_that_a_client_does_not_have_leaves_every_number_finite():
    """Its generic scores get no gradient: the row of G stays as it was."""
    task = ragged_task([6, 6], batch_size=6)
    task.y[:6] = torch.tensor([0, 1, 0, 1, 0, 1])
    simulation, _, _ = simulate("fedrod", task, rounds=1)
    before, after = simulation.initial[0], simulation.clients[0, 0]["local"]
    assert torch.equal(after["out.weight"][0, 2], before["out.weight"][0, 2])
    assert not torch.equal(after["out.weight"][0, 1], before["out.weight"][0, 1])
    assert after["out.personal.weight"][0, 2].any()
    smoothed = ragged_task([6, 6], loss=CrossEntropy(smoothing=0.1))
    smoothed.y[:6] = 0
    _, _, models = simulate("fedrod", smoothed, rounds=2)
    assert all(value.isfinite().all() for model in models.values() for value in model.values())


def test_the_personal_head_never_travels():
    task = ragged_task(SIZES)
    simulation, rows, models = simulate("fedrod", task, rounds=2)
    size = sum(value.numel() for name, value in simulation.initial[0].items()) - 6 * 3 - 3
    assert [(row.sent, row.uploaded) for row in rows] == [(size, size)] * 2 + [(size, 0)]
    assert models[0, None].keys() == models[0, 0].keys() - set(PERSONAL)


def test_ala_blends_the_generic_head():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("fedrod+ala", task, rounds=2)
    method = make("fedrod+ala")
    names = method.ala_parameters(simulation.task.model, 1)
    assert names == ("out.weight", "out.bias")
    assert not torch.equal(models[0, 0]["out.weight"], models[0, None]["out.weight"])
    assert torch.equal(models[0, 0]["hidden.weight"], models[0, None]["hidden.weight"])
    with pytest.raises(UserError, match="takes nothing that FedRoD shares"):
        method.ala_parameters(simulation.task.model, "out.personal")
    assert make("fedrod").ala_parameters(cnn(), 1) == ("fc2.weight", "fc2.bias")


def test_refusals():
    task = ragged_task([5], loss=Regression())
    with pytest.raises(UserError, match="FedRoD works with the classes of the samples"):
        simulate("fedrod", task, rounds=1)

    class Softened(Net):
        def forward(self, x):
            return super().forward(x) / 2

    task = ragged_task([5], model=Softened())
    simulation = Simulation(make("fedrod"), task, start_of(task, Softened))
    with pytest.raises(UserError, match="FedRoD works with what enters the last layer"):
        simulation.step(1, train=True)
