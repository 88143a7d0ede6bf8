"""FedBABU: the body is trained under a fixed head, and fine-tuned with it to be tested."""

import copy

import plain
import pytest
import torch
from small import assert_close, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.optimizers import Optimizer
from fedala.methods import make
from fedala.models import cnn

SIZES = [5, 14, 9, 0]
LEARNS = {"whole": ("conv", "norm", "hidden", "out"), "body": ("conv", "norm", "hidden"),
          "head": ("out",)}  # fmt: skip


def is_head(name):
    return name.startswith("out.")


def descend(task, model, client, round, part, **batches):
    """Train a part of a model. The rest is frozen, and in evaluation mode."""
    model = copy.deepcopy(model)
    for name, child in model.named_children():
        child.train(name in LEARNS[part]).requires_grad_(name in LEARNS[part])
    rows = plain.batches(task, client, round=round, **batches)
    trained = plain.descend(model, plain.cross_entropy(task), rows, task.recipe.lr)
    return trained.train().requires_grad_(True)


def tune(task, model, client, round, part="whole", epochs=2):
    return descend(task, model, client, round, part, epochs=epochs, purpose="tuning")


@pytest.mark.parametrize(
    ("name", "part", "shuffle"),
    [
        ("fedbabu", "whole", True),
        ("fedbabu", "whole", False),
        ("fedbabu", "head", True),
        ("fedbabu", "body", True),
        ("fedbabu+ala", "whole", True),
    ],
)
def test_against_a_plain_loop(name, part, shuffle):
    """With `+ala`, the last layer of the body is ALA(g, w), under the common head."""
    task = ragged_task(SIZES, shuffle=shuffle)
    settings = {"fedbabu.epochs": 2, "fedbabu.part": part}
    blended = ("hidden.weight", "hidden.bias") if "+" in name else ()
    settings |= plain.PlainALA.SETTINGS if blended else {}
    simulation, rows, models = simulate(name, task, rounds=3, settings=settings)
    server, start, _ = plain.share_a_part(
        task,
        simulation.initial[0],
        is_head,
        3,
        train=lambda model, client, round: descend(task, model, client, round, "body"),
        blended=blended,
    )
    body = [n for n in simulation.initial[0] if not is_head(n)]
    assert_close(models[0, None], plain.lane(server, body), 1e-9)
    tuned = [tune(task, model, client, 4, part) for client, model in enumerate(start)]
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(tuned[client]), 1e-9)
    assert rows[-1].loss == pytest.approx(plain.mean_loss(task, tuned), abs=1e-9)


def test_the_head_never_learns_and_never_travels():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("fedbabu", task, rounds=3)
    head = {n: v for n, v in simulation.initial[0].items() if is_head(n)}
    assert models[0, None].keys() == simulation.initial[0].keys() - head.keys()
    for client in range(len(SIZES)):
        local = simulation.clients[0, client]["local"]
        assert all(torch.equal(local[n], value) for n, value in head.items())
    apart = (models[0, 0]["out.weight"] - models[0, 1]["out.weight"]).abs().max()
    assert apart > 1e-3


def test_fine_tuning_leaves_no_trace_on_the_server():
    """Whatever a client fine-tunes to be tested, the global body and the clients' are the same."""
    settings = [{"fedbabu.epochs": 0}, {"fedbabu.epochs": 3}, {"fedbabu.part": "head"}]
    optimizer = {"optimizer": Optimizer(momentum=0.9), "keeps_optimizer": True}
    found = [
        simulate("fedbabu", ragged_task(SIZES, **optimizer), rounds=3, settings=one)
        for one in settings
    ]
    for simulation, _, models in found[1:]:
        assert_close(models[0, None], found[0][2][0, None], 0)
        for client in range(len(SIZES)):
            own, other = (one.clients[0, client] for one in (simulation, found[0][0]))
            assert_close(own["local"], other["local"], 0)
            slots, others = (one["optimizer"]["local"]["momentum"] for one in (own, other))
            assert_close(slots, others, 0)
        assert own["optimizer"].keys() == {"local"}


def test_without_fine_tuning_it_is_tested_with_the_global_body():
    simulation, _, models = simulate(
        "fedbabu", ragged_task(SIZES), rounds=2, settings={"fedbabu.epochs": 0}
    )
    for client in range(len(SIZES)):
        expected = {**simulation.initial[0], **models[0, None]}
        assert_close(models[0, client], expected, 0)


def test_fine_tuning_the_body_for_the_local_epochs_is_a_client_of_the_next_round():
    """Without shuffling, the tested model is the one that the client would upload."""
    task = ragged_task(SIZES, shuffle=False)
    settings = {"fedbabu.epochs": 1, "fedbabu.part": "body"}
    _, _, models = simulate("fedbabu", task, rounds=2, settings=settings)
    simulation, _, _ = simulate("fedbabu", task, rounds=3, settings=settings)
    for client in range(len(SIZES)):
        assert_close(simulation.clients[0, client]["local"], models[0, client], 1e-12)


def test_absent_clients_are_tested_with_what_they_fine_tuned_in_their_last_round():
    task = ragged_task([5, 9, 7, 6, 8])
    simulation, _, models = simulate(
        "fedbabu", task, rounds=1, join_ratio=0.4, settings={"fedbabu.epochs": 2}
    )
    absent = set(simulation.draw_participants(0, 1)) - set(simulation.draw_participants(0, 2))
    assert absent
    for client in absent:
        start = plain.module(task, simulation.initial[0])
        expected = tune(task, descend(task, start, client, 1, "body"), client, 1)
        assert_close(models[0, client], plain.lane(expected), 1e-9)
        score = Cohort(task, [client], [0]).evaluate(models[0, client])
        found = simulation.absent_scores[0, client, 0].tolist()
        assert found == pytest.approx([figure.item() for figure in score])


@pytest.mark.parametrize("tests_absent", [True, False])
def test_the_model_after_training_is_fine_tuned_whenever_it_is_tested(tests_absent):
    task, method = ragged_task([9]), make("fedbabu", {"fedbabu.epochs": 2})
    initial = start_of(task)(0)
    cohort = Cohort(task, [0], [0], tests_absent=tests_absent)
    received = Message(method.shared_part(task, initial))
    upload, state = method.train(cohort, initial, received, method.init_client(task, initial))
    local = descend(task, plain.module(task, initial), 0, 1, "body")
    tuned = plain.lane(tune(task, local, 0, 1))
    assert_close(state["local"], plain.lane(local), 1e-9)
    assert_close(method.trained_model(cohort, received, upload, state), tuned, 1e-9)
    # Otherwise fine-tuning would cost five epochs in every round, for nothing.
    assert_close(state["personal"], tuned if tests_absent else plain.lane(local), 1e-9)


def test_what_ala_governs_is_the_body():
    method = make("fedbabu+ala")
    assert method.ala_parameters(cnn(), 1) == ("fc1.weight", "fc1.bias")


def test_refusals():
    with pytest.raises(UserError, match=r"fedbabu\.part must be one of whole, head, body"):
        make("fedbabu", {"fedbabu.part": "tail"})
    with pytest.raises(UserError, match="FedBABU needs a model of at least 2 layers"):
        make("fedbabu").check_model(torch.nn.Linear(3, 2))
