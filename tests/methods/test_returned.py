"""A method whose functions return something else than they should is refused in one sentence."""

from dataclasses import dataclass

import pytest
import torch
from small import ragged_task, start_of

from fedala.errors import UserError
from fedala.lanes import Message
from fedala.lanes.weight_learning import Settings
from fedala.methods import Method, register
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
        ({"n": torch.zeros(())}, r"a tensor of shape () under 'n'"),
        ({"own": {"n": torch.zeros(3)}}, r"of shape (3,) under 'own/n'"),
        ({"n": 3.0}, "has a float under 'n'"),
        ({"n": None}, "has None under 'n'"),
    ],
)
def test_a_state_has_lanes(state, says):
    sentences = {
        "init_client": refuse(returning("init_client", lambda _: state)),
        "train": refuse(returning("train", lambda both: (both[0], state))),
    }
    for function, sentence in sentences.items():
        assert sentence.startswith(f"Mine: the state that {function} returns has ")
        assert says in sentence


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
        ((), ("local",), "train returns has local, and that of init_client has nothing."),
        (("local", "old"), ("local",), "has local, and that of init_client has local, old."),
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
    assert sentence.startswith("Mine: the state that train returns")
    assert says in sentence


def test_other_shapes_after_training_are_refused():
    class Grows(Mine):
        def init_client(self, task, initial):
            return {"losses": torch.zeros(1, 1)}

        def train(self, cohort, initialized, received, state):
            losses = torch.cat([state["losses"], state["losses"][:, :1]], 1)
            return Message(cohort.fit(initialized)), {"losses": losses}

    assert "under 'losses', the state that train returns has tensors of other" in refuse(Grows())


def test_the_same_keys_are_taken():
    run(keeping(("local",), ("local",)), join_ratio=0.7)


class Extends(Keeps):
    """Adds to a client's first state when it is initialised, as APPLE does."""

    def initialize(self, cohort, received, state):
        return received.model, {"after": received.model, **state}


def test_only_a_method_of_all_clients_may_extend_the_state_while_it_initialises():
    method = keeping(("local",), ("local", "after"), Extends)
    assert "has local, after, and that of init_client has local" in refuse(method)
    run(type("All", (type(method),), {"requires_all_clients": True})())


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
