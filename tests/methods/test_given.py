"""A method whose functions change what they were given is refused; none of fedala's own does."""

from collections import Counter

import pytest
import torch
from small import EACH_KIND, QUICK, ragged_task, start_of

from fedala.errors import UserError
from fedala.lanes import Message
from fedala.lanes.weight_learning import Settings
from fedala.methods import Method, given, make
from fedala.methods.server_optimizer import ServerOptimizer, with_server_optimizer
from fedala.methods.with_ala import WithALA
from fedala.simulation import Simulation

SIZES = [5, 8, 4, 3]


class Mine(Method):
    """FedAvg with a counter at the server and one at each client, a new one in every round."""

    name, title, summary = "mine", "Mine", "FedAvg that counts"

    def init_server(self, task, initial, server_round):
        return {"global": initial, "rounds": torch.zeros(1)}

    def aggregate(self, server, uploads, server_round):
        return {"global": uploads.average().model, "rounds": server["rounds"] + 1}

    def init_client(self, task, initial):
        some = next(iter(initial.values()))
        return {"m": some.new_zeros(len(some)), "local": initial}

    def train(self, cohort, initialized, received, state):
        trained = cohort.fit(initialized)
        return Message(trained), {"m": 0.9 * state["m"] + 1, "local": trained}


def changing(function, change, base=Mine):
    """Make a method one of whose functions begins with `change(*arguments)`."""

    def changed(self, *arguments):
        change(*arguments)
        return getattr(base, function)(self, *arguments)

    return type("Mine", (base,), {function: changed})()


def run(method, lanes=1, rounds=2, **options):
    task = ragged_task(SIZES)
    return list(
        Simulation(method, task, start_of(task), lanes=lanes, rounds=rounds, **options).run()
    )


def refuse(method, **options):
    with pytest.raises(UserError) as refusal:
        run(method, **options)
    return str(refusal.value)


#: By function: what it does, and what the sentence names.
CHANGES = [
    ("init_server", lambda task, initial, _: initial["out.bias"].zero_(), "initial/out.bias"),
    ("init_client", lambda task, initial: initial["out.bias"].zero_(), "initial/out.bias"),
    ("send", lambda server, _: server["rounds"].add_(1), "server/rounds"),
    ("aggregate", lambda server, *_: server["rounds"].add_(1), "server/rounds"),
    ("aggregate", lambda server, *_: server["global"].pop("out.bias"), "server/global/out.bias"),
    ("aggregate", lambda server, *_: server.update(rounds=torch.ones(1)), "server/rounds"),
    ("aggregate", lambda server, *_: server.update(more=torch.ones(1)), "server/more"),
    (
        "aggregate",
        lambda server, uploads, _: [upload.model["out.bias"].zero_() for _, upload in uploads],
        "uploads/0/model/out.bias",
    ),
    ("initialize", lambda cohort, _, state: state["m"].mul_(0.9), "state/m"),
    (
        "initialize",
        lambda cohort, received, _: received.model["out.bias"].mul_(0.9),
        "received/model/out.bias",
    ),
    (
        "initialize",
        lambda cohort, received, _: received.extra.update(mine=torch.ones(1)),
        "received/extra/mine",
    ),
    ("model_to_evaluate", lambda *given: given[1]["out.bias"].mul_(2), "initialized/out.bias"),
    ("train", lambda *given: given[1]["out.bias"].mul_(2), "initialized/out.bias"),
    ("train", lambda *given: given[3]["m"][:].mul_(0.9), "state/m"),
    ("train", lambda *given: given[3]["local"]["out.bias"].zero_(), "state/local/out.bias"),
]


@pytest.mark.parametrize(("function", "change", "where"), CHANGES)
def test_a_function_that_changes_what_it_was_given_is_refused(function, change, where):
    sentence = refuse(changing(function, change), rounds=1)
    begin, _, rest = sentence.partition(" changes ")
    assert begin == f"Mine: {function}"
    # In the first round, Θ⁰ has several names.
    assert where in rest.partition(", and must leave what it was given as it is.")[0].split(", ")


@pytest.mark.parametrize("lanes", [1, 3, None])
def test_the_same_method_without_a_change_is_taken(lanes):
    run(Mine(), lanes)


def test_what_belongs_to_the_lanes_is_refused_side_by_side():
    """What all lanes share cannot be written to; a state has memory of its own in every lane."""
    change = changing("train", lambda *given: given[3]["m"].mul_(0.9))
    assert refuse(change, lanes=None).startswith("Mine: train changes state/m")
    assert refuse(change, threads=2).startswith("Mine: train changes state/m")


def test_a_change_in_a_later_round_is_refused_in_that_round():
    def change(server, uploads, server_round):
        if server_round.round == 3:
            server["rounds"].add_(1)

    task, rounds = ragged_task(SIZES), Counter()
    simulation = Simulation(changing("aggregate", change), task, start_of(task), rounds=5)
    with pytest.raises(UserError, match="aggregate changes server/rounds"):
        list(simulation.run(after_round=lambda round: rounds.update([round])))
    assert sorted(rounds) == [1, 2]


def test_a_change_below_other_methods_is_that_of_the_method():
    """Under ALA and with a server optimiser, the sentence names the user's own class."""

    class Averages(Mine):
        init_server, aggregate = Method.init_server, Method.aggregate

    train = changing("train", lambda *given: given[3]["m"].mul_(0.9), Averages)
    receive = changing(
        "received_model",
        lambda cohort, received, state: received.model["out.bias"].zero_(),
        Averages,
    )
    optimizer = ServerOptimizer("avgm", 1.0, 0.9, 0.99, 1e-3)
    for wrap in (
        lambda method: WithALA(method, Settings(max_epochs=1)),
        lambda method: with_server_optimizer(method, optimizer),
        lambda method: with_server_optimizer(WithALA(method, Settings(max_epochs=1)), optimizer),
    ):
        run(wrap(Averages()))
        assert refuse(wrap(train)).startswith("Mine: train changes state/")
        assert refuse(wrap(receive)).startswith("Mine: initialize changes received/model/")


def test_tensors_of_inference_mode_have_no_count():
    with torch.inference_mode():
        frozen = torch.ones(3)
    with given.forbid_changes(Mine(), "send", server={"frozen": frozen}):
        pass
    with (
        pytest.raises(UserError, match="send changes server/frozen"),
        given.forbid_changes(Mine(), "send", server=(server := {"frozen": frozen})),
    ):
        server["frozen"] = torch.ones(3)


@pytest.mark.parametrize("lanes", [1, None])
@pytest.mark.parametrize("name", EACH_KIND)
def test_no_method_changes_what_it_was_given(name, lanes, monkeypatch):
    monkeypatch.setattr(given, "is_own", lambda method: True)
    run(make(name, QUICK.get(name)), lanes, evaluate=("initialized", "trained"))
