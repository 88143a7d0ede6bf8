"""FedRep: a common body, and heads that never leave their clients."""

import copy

import plain
import pytest
import torch
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.trees import join, leaves
from fedala.methods import make
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 22, 13, 3, 8, 17, 0]
HEAD = ("out.weight", "out.bias")


class NormNet(Net):
    """A body whose normalisation learns nothing: only its running statistics show its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)


def trained(model, task, client, round, epochs):
    """Train the head for τ epochs, then the body for one. The other part is in evaluation mode."""
    loss = plain.cross_entropy(task)

    def phase(model, learns, **batches):
        model = copy.deepcopy(model)
        for name, part in model.named_children():
            part.train(learns(name)).requires_grad_(learns(name))
        return plain.descend(
            model, loss, plain.batches(task, client, round=round, **batches), task.recipe.lr
        )

    model = phase(model, lambda name: name == "out", epochs=epochs, purpose="head")
    return phase(model, lambda name: name != "out").train().requires_grad_(True)


def with_head(body, head):
    """The body of one model with the head of another."""
    model = copy.deepcopy(body)
    model.out.load_state_dict(head.out.state_dict())
    return model


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("net", [Net, NormNet])
@pytest.mark.parametrize("name", ["fedrep", "fedrep+ala"])
def test_against_a_plain_loop(name, net, shuffle):
    """With `+ala`, the last layer of the body is ALA(g, w) with the own head in the loss."""
    task = ragged_task(SIZES, model=net(), shuffle=shuffle)
    settings = {"fedrep.epochs": 2} | (plain.PlainALA.SETTINGS if "+" in name else {})
    simulation = Simulation(make(name, settings), task, start_of(task, net), rounds=2)
    models = {}
    for _ in simulation.run(lambda personal: models.update({personal.client: personal.model})):
        pass
    server = plain.module(task, simulation.initial[0])
    local = [server] * len(SIZES)
    ala = [
        plain.PlainALA(task, client, ("hidden.weight", "hidden.bias"))
        for client in range(len(SIZES))
    ]
    for round in (1, 2, 3):
        start = [with_head(server, own) for own in local]
        if "+" in name:
            start = [
                one(s, w, server, round=round) for one, s, w in zip(ala, start, local, strict=True)
            ]
        if round < 3:
            local = [trained(model, task, client, round, 2) for client, model in enumerate(start)]
            server = plain.mean(local, SIZES)
    body = [name for name in simulation.initial[0] if name not in HEAD]
    assert_close(models[None], plain.lane(server, body), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[client], plain.lane(start[client]), 1e-9)


@pytest.mark.parametrize("name", ["fedrep", "fedrep+ala"])
def test_heads_differ_and_never_leave_their_clients(name, monkeypatch):
    """The server neither sends, gets nor keeps a head, and no head reaches another client."""
    method = make(name)
    travelled = set()
    send, aggregate = type(method).send, type(method).aggregate

    def sending(self, server, server_round):
        sent = send(self, server, server_round)
        travelled.update(path.rpartition("/")[2] for path, _ in leaves(sent))
        return sent

    def aggregating(self, server, uploads, *rest):
        both = server, uploads.stack()
        travelled.update(path.rpartition("/")[2] for path, _ in leaves(both))
        return aggregate(self, server, uploads, *rest)

    monkeypatch.setattr(type(method), "send", sending)
    monkeypatch.setattr(type(method), "aggregate", aggregating)
    task = ragged_task(SIZES)
    simulation, rows, models = simulate(name, task, rounds=3)
    assert travelled == set(simulation.initial[0]) - set(HEAD)
    size = sum(value.numel() for key, value in simulation.initial[0].items() if key not in HEAD)
    assert [(row.sent, row.uploaded) for row in rows] == [(size, size)] * 3 + [(size, 0)]
    assert models[0, None].keys() == travelled
    heads = [models[0, client]["out.weight"] for client in range(len(SIZES))]
    apart = [(a - b).abs().max().item() for i, a in enumerate(heads) for b in heads[:i]]
    assert min(apart) > 1e-3
    assert torch.equal(heads[SIZES.index(0)], simulation.initial[0]["out.weight"])


def test_the_evaluated_body_is_the_received_one_and_is_recognised():
    """Evaluation runs the body, the very tensors that were received, once for all clients."""
    task = ragged_task([9, 8], model=cnn((1, 16, 16), 3))
    task.x = torch.nn.functional.interpolate(task.x, size=(16, 16))
    start = {
        name: value.detach().double().unsqueeze(0).expand(2, *value.shape)
        for name, value in task.model.named_parameters()
    }
    method = make("fedrep")
    received = Message(method.shared_part(task, start))
    cohort = Cohort(task, [0, 1], [0, 0], received=received, source=[0, 0])
    initialized, _ = method.initialize(cohort, received, method.init_client(task, start))
    assert initialized.keys() == start.keys()
    assert all(initialized[name] is received.model[name] for name in received.model)
    assert cohort.sharing.count_own_layers(task, initialized) == 1
    # With ALA on top of it, the last layer of the body is the client's own as well.
    method = make("fedrep+ala", {"ala.max_epochs": 1})
    state = method.init_client(task, {name: value + 0.1 for name, value in start.items()})
    initialized, _ = method.initialize(cohort, received, state)
    assert cohort.sharing.count_own_layers(task, initialized) == 2
    assert torch.equal(initialized["fc2.weight"], start["fc2.weight"] + 0.1)


@pytest.mark.parametrize("net", [Net, NormNet])
def test_the_frozen_part_runs_in_evaluation_mode(net):
    """Its parameters and running statistics stay, and it normalises by these statistics."""
    task = ragged_task([12, 9], model=net())
    start = join([start_of(task, net)(seed) for seed in (0, 1)])
    cohort = Cohort(task, [0, 1], [0, 0])
    head = cohort.fit(start, names=HEAD)
    for name in start:
        assert torch.equal(head[name], start[name]) == (name not in HEAD), name
    body = cohort.fit(start, names=set(start) - set(HEAD))
    for name in set(start) - {"conv.bias"}:  # which a normalisation after it keeps from mattering
        assert torch.equal(body[name], start[name]) == (name in HEAD), name
    other = {**start, "norm.running_mean": start["norm.running_mean"] + 1}
    assert not torch.allclose(cohort.fit(other, names=HEAD)["out.weight"], head["out.weight"])
    assert torch.equal(
        cohort.fit(other, names=set(start) - set(HEAD))["hidden.weight"], body["hidden.weight"]
    )
    assert all(module.training for module in task.model.modules())


def test_outside_the_round_a_client_has_the_body_that_it_trained_last_and_its_head():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("fedrep", task, rounds=1, join_ratio=0.5)
    left = set(simulation.draw_participants(0, 1)) - set(simulation.draw_participants(0, 2))
    assert left
    for client in left:
        expected = trained(plain.module(task, simulation.initial[0]), task, client, 1, 5)
        assert_close(models[0, client], plain.lane(expected, models[0, client]), 1e-9)
        score = Cohort(task, [client], [0]).evaluate(models[0, client])
        assert simulation.absent_scores[0, client, 0].tolist() == pytest.approx(
            [t.item() for t in score]
        )


def test_what_ala_governs_is_below_the_head():
    model = cnn()
    method = make("fedrep+ala")
    assert method.ala_parameters(model, 1) == ("fc1.weight", "fc1.bias")
    assert method.ala_parameters(model, 2) == (
        "conv2.weight",
        "conv2.bias",
        "fc1.weight",
        "fc1.bias",
    )
    assert method.ala_parameters(model, 0) == ()
    with pytest.raises(
        UserError, match=r"between 0 and 3, the number of layers that learn and are shared, not 4"
    ):
        method.ala_parameters(model, 4)


def test_ala_without_layers_is_plain_fedrep():
    plain_, off = (
        simulate(name, ragged_task(SIZES), rounds=3, settings=settings)[2]
        for name, settings in [("fedrep", {}), ("fedrep+ala", {"ala.layers": 0})]
    )
    for key in plain_:
        assert_close(off[key], plain_[key], 0)


def test_a_model_without_a_body_is_refused():
    task = ragged_task([5], model=nn.Linear(36, 3))
    with pytest.raises(UserError, match="FedRep needs a model of at least 2 layers"):
        Simulation(make("fedrep"), task, start_of(task, lambda: nn.Linear(36, 3)))


def test_defaults():
    assert make("fedrep").epochs == 5
