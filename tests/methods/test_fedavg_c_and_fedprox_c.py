"""FedAvg-C and FedProx-C: fine-tuning as local initialisation."""

import plain
import pytest
import torch
from small import assert_close, ragged_task, simulate

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.methods import make

SIZES = [5, 22, 13, 3, 8, 17, 0]


def reference(task, start, mu, epochs, rounds):
    """Return the global and the fine-tuned (evaluated) models after `rounds` rounds.

    Every client fine-tunes a copy of g for `epochs` epochs, then trains it for one.
    """
    server = plain.module(task, start)
    plain_loss = plain.cross_entropy(task)
    for round in range(1, rounds + 2):
        anchor = [p.detach().clone() for p in server.parameters()]

        def loss(model, rows, anchor=anchor):
            far = sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchor, strict=True))
            return plain_loss(model, rows) + mu / 2 * far

        tuned, trained = [], []
        for client in range(len(SIZES)):
            tuning = plain.batches(task, client, round=round, epochs=epochs, purpose="tuning")
            tuned.append(plain.descend(server, loss, tuning, task.recipe.lr))
            trained.append(
                plain.descend(
                    tuned[-1], loss, plain.batches(task, client, round=round), task.recipe.lr
                )
            )
        if round <= rounds:
            server = plain.mean(trained, SIZES)
    return server, tuned


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("name", "mu"), [("fedavg-c", 0.0), ("fedprox-c", 0.7)])
def test_against_a_plain_loop(name, mu, shuffle):
    task = ragged_task(SIZES, shuffle=shuffle)
    settings = {f"{name}.epochs": 3} | ({"fedprox-c.mu": mu} if mu else {})
    simulation, _, models = simulate(name, task, rounds=2, settings=settings)
    server, tuned = reference(task, simulation.initial[0], mu, 3, 2)
    assert_close(models[0, None], plain.lane(server, models[0, None]), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(tuned[client], models[0, client]), 1e-9)


def test_tuning_by_hand():
    """y = w·x + b, squared error, one batch {(1, 2), (3, 6)}, lr 0.1, from w = b = 0.

    One epoch of tuning, one of training.

    ∂w = mean 2(wx + b − y)x, ∂b = mean 2(wx + b − y).
    At 0: residuals −2, −6; ∂w = −2 − 18 = −20, ∂b = −8; tuned w = 2, b = 0.8.
    There: residuals 0.8, 0.8; ∂w = 0.8 + 2.4 = 3.2, ∂b = 1.6; trained w = 1.68, b = 0.64.
    """
    model = torch.nn.Linear(1, 1).double()
    task = ragged_task([2], model=model, loss=torch.nn.functional.mse_loss, batch_size=2)
    task.x, task.y = torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[2.0], [6.0]]).double()
    zero = {"weight": torch.zeros(1, 1, 1).double(), "bias": torch.zeros(1, 1).double()}
    method, cohort = make("fedavg-c", {"fedavg-c.epochs": 1}), Cohort(task, [0], [0])
    tuned, state = method.initialize(cohort, Message(zero), method.init_client(task, zero))
    assert (tuned["weight"].item(), tuned["bias"].item()) == (
        pytest.approx(2.0),
        pytest.approx(0.8),
    )
    upload, state = method.train(cohort, tuned, Message(zero), state)
    assert (upload.model["weight"].item(), upload.model["bias"].item()) == (
        pytest.approx(1.68),
        pytest.approx(0.64),
    )
    # FedProx-C with μ = 1: at the anchor there is no pull. At the tuned model, the pull adds
    # w − 0 = 2 and b − 0 = 0.8 to the gradient.
    method = make("fedprox-c", {"fedprox-c.epochs": 1, "fedprox-c.mu": 1})
    tuned, state = method.initialize(cohort, Message(zero), method.init_client(task, zero))
    upload, _ = method.train(cohort, tuned, Message(zero), state)
    assert (upload.model["weight"].item(), upload.model["bias"].item()) == (
        pytest.approx(1.48),
        pytest.approx(0.56),
    )


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_without_tuning_it_is_fedavg(join_ratio):
    """The global model is equal to the bit. At ρ = 1, so is the evaluated model."""
    options = {"rounds": 3, "join_ratio": join_ratio}
    fedavg, rows, models = simulate("fedavg", ragged_task(SIZES), **options)
    _, own_rows, own = simulate(
        "fedavg-c", ragged_task(SIZES), settings={"fedavg-c.epochs": 0}, **options
    )
    assert_close(own[0, None], models[0, None], 0)
    for row, own_row in zip(rows, own_rows, strict=True):
        assert row.accuracy_joined == own_row.accuracy_joined
        assert join_ratio < 1 or row.loss == pytest.approx(own_row.loss, abs=1e-12)
        assert row.metrics.get("train_loss") == own_row.metrics.get("train_loss")
    for client in fedavg.draw_participants(0, 4):
        assert_close(own[0, client], models[0, None], 0)


def test_without_its_term_fedprox_c_is_fedavg_c_and_with_it_is_not():
    fedavg, plain_, pulled = (
        simulate(name, ragged_task(SIZES), rounds=2, settings={f"{name}.epochs": 2, **more})[2]
        for name, more in [
            ("fedavg-c", {}),
            ("fedprox-c", {"fedprox-c.mu": 0.0}),
            ("fedprox-c", {"fedprox-c.mu": 1.0}),
        ]
    )
    for key in fedavg:
        assert_close(plain_[key], fedavg[key], 0)
    assert (pulled[0, 1]["out.weight"] - fedavg[0, 1]["out.weight"]).abs().max() > 1e-3


def test_tuning_and_training_see_their_batches_in_different_orders():
    """Otherwise the round's epoch of training would repeat the first epoch of tuning."""
    task = ragged_task([22])
    cohort = Cohort(task, [0], [0])
    orders = [
        cohort.shuffle(0, task.parts["train"][0], purpose, 0).tolist()
        for purpose in ("tuning", "batches")
    ]
    assert orders[0] != orders[1]
    tuned = simulate("fedavg-c", task, rounds=1, settings={"fedavg-c.epochs": 1})[0]
    longer = simulate("fedavg", ragged_task([22], epochs=2))[0]
    assert not torch.equal(
        tuned.servers[0]["global"]["out.weight"], longer.servers[0]["global"]["out.weight"]
    )


def test_outside_the_round_a_client_has_what_its_training_left_it():
    task = ragged_task(SIZES)
    simulation, _, models = simulate("fedavg-c", task, rounds=3, join_ratio=0.5)
    outside = set(range(len(SIZES))) - set(simulation.draw_participants(0, 4))
    seen = {
        client for round in (1, 2, 3) for client in simulation.draw_participants(0, round)
    } & outside
    assert seen, "somebody should have taken part and stay out at the end for this test to bite"
    for client in seen:
        last = Cohort(task, [client], [0])
        assert_close(models[0, client], simulation.clients[0, client]["local"], 0)
        score = last.evaluate(models[0, client])
        assert simulation.absent_scores[0, client, 0].tolist() == pytest.approx(
            [t.item() for t in score]
        )


@pytest.mark.parametrize("name", ["fedavg-c", "fedprox-c"])
def test_defaults_and_refusals(name):
    assert make(name).epochs == 14
    with pytest.raises(
        UserError, match=rf"{name}\+ala is refused: fine-tuning is the local initialisation already"
    ):
        make(f"{name}+ala")
    with pytest.raises(UserError, match=rf"{name}.epochs must be at least 0"):
        make(name, {f"{name}.epochs": -1})


def test_fedprox_cs_term_is_fedproxs():
    assert make("fedprox-c").mu == make("fedprox").mu == 0.001
