"""A method whose functions return something else than they should is refused in one sentence."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from small import Net, ragged_task, start_of

from fedala.errors import UserError
from fedala.lanes import Message, tree_map
from fedala.lanes.trees import take
from fedala.lanes.weight_learning import Settings
from fedala.methods import Method, register, returned
from fedala.methods.with_ala import WithALA
from fedala.options import option
from fedala.simulation import Simulation

SIZES = [5, 8, 4, 3, 6, 4]


class Mine(Method):
    """FedAvg, with a name for sentences."""

    name, title, summary = "mine", "Mine", "FedAvg"


def run(method, rounds=2, **options):
    task = ragged_task(SIZES)
    return list(Simulation(method, task, start_of(task), rounds=rounds, **options).run())


def refuse(method, **options):
    with pytest.raises(UserError) as refusal:
        run(method, **options)
    return str(refusal.value)


def returning(function, found):
    """Make a method one of whose functions returns `found(what FedAvg's returns)`."""

    def changed(self, *arguments):
        return found(getattr(Method, function)(self, *arguments))

    return type("Mine", (Mine,), {function: changed})()


# --- what each function returns -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "found", "says"),
    [
        ("train", lambda both: both[0], "it returns a Message."),
        ("train", lambda both: (both[0].model, both[1]), "it returns a dict and a dict."),
        ("train", lambda both: None, "it returns None."),
        ("train", lambda both: (*both, 1), "it returns a Message and a dict and an int."),
        ("initialize", lambda both: both[0], "it returns a dict."),
        ("init_client", lambda state: [], "init_client must return a state, a dict, and it"),
        ("send", lambda message: message.model, "send must return a Message, and it returns a"),
        ("aggregate", lambda state: Message(state["global"]), "and it returns a Message."),
        ("aggregate", lambda state: None, "it returns None."),
        (
            "aggregate",
            lambda state: {"model": state["global"]},
            "returns lacks global, which",
        ),
    ],
)
@pytest.mark.parametrize("lanes", [1, None])
def test_what_a_function_returns_is_checked(function, found, says, lanes):
    sentence = refuse(returning(function, found), lanes=lanes)
    assert sentence.startswith("Mine: ")
    assert f"{function}" in sentence
    assert says in sentence


def test_a_mistake_below_ala_is_that_of_the_method():
    for found in (lambda both: both[0], lambda both: (both[0], {"own": both[0].model})):
        method = WithALA(returning("train", found), Settings(max_epochs=1))
        assert refuse(method).startswith("Mine: ")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"n": torch.zeros(())}, "a tensor of float32 () under '{}n'"),
        ({"own": {"n": torch.zeros(3)}}, "a tensor of float32 (3,) under '{}own/n'"),
        ({"n": 3.0}, "a float under '{}n'"),
        ({"n": None}, "None under '{}n'"),
        ({"n": np.zeros((6, 1))}, "a ndarray under '{}n'"),
        ({"n": [torch.zeros(6)]}, "a list under '{}n'"),
        ({"own": {"n": {"m": 3}}}, "an int under '{}own/n/m'"),
        ({"own": {0: torch.zeros(6)}}, "a dict with names that are not texts under '{}own'"),
    ],
)
def test_a_state_has_tensors_with_lanes(state, says):
    sentences = {
        "init_client": refuse(returning("init_client", lambda _: state)),
        "initialize": refuse(returning("initialize", lambda both: (both[0], state))),
        "train": refuse(returning("train", lambda both: (both[0], state))),
    }
    for function, sentence in sentences.items():
        path = says.format("" if function == "init_client" else "state/")
        assert sentence.startswith(f"Mine: {function} returns {path}. ")


@pytest.mark.parametrize("lanes", [1, None])
@pytest.mark.parametrize(
    ("function", "found", "says"),
    [
        (
            "shared_part",
            lambda model: list(model),
            "must return a dict of tensors, and it returns a",
        ),
        ("shared_part", lambda model: take(model, 0), "under 'conv.weight'. Its first dimension"),
        ("init_server", lambda state: {**state, "n": 3}, "returns an int under 'n'. It must be a"),
        ("init_server", lambda state: {"model": state["global"]}, "returns nothing under 'global'"),
        ("aggregate", lambda state: {**state, "n": {"m": 3}}, "returns an int under 'n/m'."),
        (
            "aggregate",
            lambda state: tree_map(lambda t: t.float(), state),
            "returns a tensor of float32 (1, 3, 1, 3, 3) under 'global/conv.weight', where the "
            "server's state has a tensor of float64 (1, 3, 1, 3, 3). Names, types and shapes must",
        ),
        ("global_model", lambda model: None, "must return a model, a dict, and it returns None."),
        ("global_model", lambda model: take(model, 0), "under 'conv.weight'. Its first dimension"),
        (
            "send",
            lambda message: message.model,
            "must return a Message, and it returns a dict.",
        ),
        (
            "send",
            lambda message: Message(3.0),
            "must return a Message whose model is a dict of tensors, and it returns a float.",
        ),
        (
            "send",
            lambda message: message._replace(extra={"n": 3}),
            "returns an int under 'extra/n'.",
        ),
        (
            "initialize",
            lambda both: ({"out.bias": both[0]["out.bias"]}, both[1]),
            "returns nothing under 'model/conv.weight', where the model has a tensor of float64",
        ),
        (
            "initialize",
            lambda both: (tree_map(lambda t: t.float(), both[0]), both[1]),
            "returns a tensor of float32",
        ),
        (
            "model_to_evaluate",
            lambda model: {"out.bias": model["out.bias"]},
            "returns nothing under 'conv.weight', where the initialised model has a tensor of",
        ),
        ("model_to_evaluate", lambda model: None, "must return a model, a dict, and it returns"),
        (
            "train",
            lambda both: (Message(both[0].model, {"n": 3}), both[1]),
            "returns an int under 'extra/n'.",
        ),
        ("extra_template", lambda none: {"n": 3}, "returns an int under 'n'."),
        ("extra_template", lambda none: {"n": torch.zeros(())}, "under 'n'. Its first dimension"),
        ("trained_model", lambda model: take(model, 0), "Its first dimension must be the lane"),
        ("model_when_absent", lambda model: None, "must return a dict of tensors, and it returns"),
    ],
)
def test_whatever_a_function_returns_is_refused_where_it_shows(function, found, says, lanes):
    method, kinds = returning(function, found), ("initialized", "trained", "global")
    sentence = refuse(method, lanes=lanes, join_ratio=0.5, evaluate=kinds)
    assert sentence.startswith(f"Mine: {function} ")
    assert says in sentence


@pytest.mark.parametrize("found", [lambda both: both[0], lambda both: (both[0], None)])
def test_what_received_model_returns_is_checked_below_ala(found):
    method = WithALA(returning("received_model", found), Settings(max_epochs=1))
    assert refuse(method).startswith("Mine: received_model must return a model and the client's")


# --- the state after training ---------------------------------------------------------------------


class Keeps(Mine):
    """Keeps `before` from the first, and `after` from training on: names of copies of its model."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def init_client(self, task, initial):
        return dict.fromkeys(self.before, initial)

    def train(self, cohort, initialized, received, state):
        trained = cohort.fit(initialized)
        return Message(trained), dict.fromkeys(self.after, trained)


def keeping(before, after, base=Keeps):
    return type("Mine", (base,), {"before": before, "after": after})()


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((), ("local",), "a tensor of float64 ({}, 3, 1, 3, 3) under 'state/local/conv.weight'"),
        (("local", "old"), ("local",), "nothing under 'state/old/conv.weight'"),
    ],
)
@pytest.mark.parametrize("lanes", [1, 2, None])
@pytest.mark.parametrize("join_ratio", [0.7, 1])
@pytest.mark.parametrize("rounds", [1, 3])
def test_other_keys_after_training_are_refused_alike(
    before, after, says, lanes, join_ratio, rounds
):
    """What is refused depends neither on who takes part nor on how many work side by side."""
    method = keeping(before, after)
    sentence = refuse(method, rounds=rounds, lanes=lanes, join_ratio=join_ratio)
    width = lanes or (len(SIZES) if join_ratio == 1 else 4)
    begin = f"Mine: train returns {says.format(width)}, where the state of init_client has "
    assert sentence.startswith(begin)


def test_other_shapes_after_training_are_refused():
    class Grows(Mine):
        def init_client(self, task, initial):
            return {"losses": torch.zeros(1, 1)}

        def train(self, cohort, initialized, received, state):
            losses = torch.cat([state["losses"], state["losses"][:, :1]], 1)
            return Message(cohort.fit(initialized)), {"losses": losses}

    says = "returns a tensor of float32 (1, 2) under 'state/losses', where the state of init_client"
    assert says in refuse(Grows(), lanes=1)


def test_the_same_keys_are_taken():
    run(keeping(("local",), ("local",)), join_ratio=0.7)


class Extends(Keeps):
    """Adds to a client's first state when it is initialised, as APPLE does."""

    def initialize(self, cohort, received, state):
        return received.model, {"after": received.model, **state}


def test_only_a_method_of_all_clients_may_extend_the_state_while_it_initialises():
    method = keeping(("local",), ("local", "after"), Extends)
    assert "under 'state/after/conv.weight', where the state of init_client has" in refuse(method)
    run(type("All", (type(method),), {"requires_all_clients": True})())


# --- the cost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, None])
def test_what_is_as_it_should_be_is_not_described(lanes, monkeypatch):
    """Sentences about each tensor of each client would take longer than the checks."""

    def describe(value):
        raise AssertionError("a description that nobody reads")

    monkeypatch.setattr(returned, "_describe", describe)
    run(keeping(("local",), ("local",)), lanes=lanes, evaluate=("initialized", "trained"))


def test_another_model_of_a_task_has_its_own_shapes():
    task = ragged_task(SIZES)
    for classes in (3, 5):
        task.use_model(Net(classes))
        list(Simulation(Mine(), task, start_of(task, partial(Net, classes))).run())


# --- the class ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"share", "mv"}, r"'mv', which is not a field of type float; choose from mu, share"),
        ({"sharing"}, r"'sharing', which is not a field of type float \(did you mean share\?\)"),
        ({"steps"}, "'steps'"),
    ],
)
def test_lane_numbers_that_are_not_fields_are_refused(numbers, says):
    with pytest.raises(UserError, match=rf"^Numbers\.lane_numbers has {says}"):

        @register
        @dataclass(frozen=True)
        class Numbers(Mine):
            name = "numbers"
            lane_numbers = frozenset(numbers)

            mu: float = option(0.5, "a number")
            share: float | None = option(None, "another, or none")
            steps: int = option(1, "a number of steps")


def test_a_class_without_a_name_is_refused():
    with pytest.raises(UserError, match="Nameless lacks its name"):
        register(type("Nameless", (Method,), {}))
