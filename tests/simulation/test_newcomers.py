"""Held-out clients: they change nothing, and arrive as a client that joins late."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import Net, assert_close, evaluate, ragged_task, same_rows, start_of

from fedala.errors import UserError
from fedala.lanes import Message, Recipe
from fedala.lanes.trees import take
from fedala.methods import Method, catalogue, make
from fedala.simulation import Simulation
from fedala.simulation.variants import Variant

SIZES = [12, 7, 9, 4, 10, 5]
KNOWN = 4
HELD_OUT = {"held_out": 2, "holdout_epochs": (0, 1, 3)}


def arrivals(evaluations):
    """Return every newcomer's figures: [evaluation, epochs, newcomer, 3]."""
    return np.array([[found.scores for found in one.newcomers] for one in evaluations])


def without_newcomers(task):
    task.parts = {part: rows[:KNOWN] for part, rows in task.parts.items()}
    return task


@pytest.mark.parametrize("method", ["fedala", "apple", "fedamp+ala"])
def test_a_run_is_as_if_held_out_clients_did_not_exist(method):
    rest = {"rounds": 2, "lanes": 3, "evaluate": ("initialized", "trained", "global")}
    task, other = ragged_task(SIZES), without_newcomers(ragged_task(SIZES))
    simulation, found, models = evaluate(method, task, **HELD_OUT, **rest)
    alone, expected, reference = evaluate(method, other, **rest)
    assert [repr(replace(one.row, seconds=0)) for one in found] == [
        repr(replace(one.row, seconds=0)) for one in expected
    ]
    assert models.keys() == reference.keys()
    assert all(torch.equal(models[k][n], reference[k][n]) for k in models for n in models[k])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.client_scores, other.client_scores)
    assert arrivals(found).shape == (3, 3, 2, 3)
    assert not any(one.newcomers for one in expected)
    assert len(simulation.clients) == len(alone.clients)


def test_participants_are_drawn_from_the_known_clients_alone():
    options = {"rounds": 3, "join_ratio": 0.5}
    _, rows, _ = evaluate("fedala", ragged_task(SIZES), **HELD_OUT, **options)
    _, expected, _ = evaluate("fedala", without_newcomers(ragged_task(SIZES)), **options)
    same_rows([one.row for one in rows], [one.row for one in expected], 0)


@pytest.mark.parametrize("method", [*catalogue(), "ditto+ala"])
def test_lanes_are_one_newcomer_after_another(method):
    options = {"rounds": 1, "held_out": 2, "holdout_epochs": (0, 2)}
    one, many = (
        arrivals(evaluate(method, ragged_task(SIZES), lanes=lanes, **options)[1][1:])
        for lanes in (1, None)
    )
    np.testing.assert_allclose(one, many, atol=1e-10)


def test_threads_are_one_newcomer_after_another():
    found = [
        arrivals(evaluate("fedala", ragged_task(SIZES), lanes=1, threads=n, **HELD_OUT)[1])
        for n in (1, 2)
    ]
    np.testing.assert_array_equal(*found)


class LateJoin(Simulation):
    """Everybody takes part but the last client, which comes in the last round."""

    def draw_participants(self, seed, round):
        return list(range(self.setup.population - (round < self.rounds)))


@pytest.mark.parametrize(
    "method", ["fedala", "fedavg-c", "fedrep", "ditto", "per-fedavg", "fedfomo"]
)
def test_a_newcomer_is_a_client_that_joins_late(method):
    """The client first joins in round 3; a newcomer arrives after round 2, with the same draws."""
    optimizer = {"keeps_optimizer": True, "epochs": 2}
    settings = {"fedavg-c.epochs": 2} if method == "fedavg-c" else None
    task = ragged_task(SIZES, **optimizer)
    late = LateJoin(make(method, settings), task, start_of(task), rounds=3)
    for round in (1, 2):
        late.step(round, train=True)
    evaluation = late.step(3, train=True)[0]
    last = len(SIZES) - 1
    joined = late.method.model_when_absent(Message(), late.clients[0, last])

    task = ragged_task(SIZES, **optimizer)
    options = {"rounds": 2, "held_out": 1, "holdout_epochs": (0, 2)}
    simulation, found, _ = evaluate(method, task, settings=settings, **options)
    np.testing.assert_allclose(
        found[-1].newcomers[0].scores[0], evaluation.client_scores[last], atol=1e-12
    )
    server_round = simulation._server_round(0, 3, range(last))
    [arrival] = simulation.newcomers.arrive(simulation.servers, [server_round], keeps_models=True)
    assert_close(arrival.models[2], joined, 1e-12)


def test_epochs_by_hand():
    """FedAvg with one batch: k epochs from the received model are k steps of plain SGD."""
    task = ragged_task([6, 6, 5], batch_size=0, lr=0.1)
    options = {"rounds": 1, "held_out": 1, "holdout_epochs": (0, 1, 4)}
    simulation, found, _ = evaluate("fedavg", task, **options)
    model = Net().double()
    model.load_state_dict(
        {name: value[0] for name, value in simulation.servers[0]["global"].items()}
    )
    x, y = task.x, task.y
    train, test = (torch.from_numpy(task.parts[part][2]) for part in ("train", "test"))
    expected = {}
    for epoch in range(5):
        model.eval()
        with torch.no_grad():
            output = model(x[test])
        loss = torch.nn.functional.cross_entropy(output, y[test], reduction="sum")
        expected[epoch] = [int((output.argmax(1) == y[test]).sum()), loss.item(), len(test)]
        model.train()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        with torch.no_grad():
            for value in model.parameters():
                value -= 0.1 * value.grad
    for one in found[-1].newcomers:
        np.testing.assert_allclose(one.scores[0], expected[one.epochs], atol=1e-10)


def test_epochs_of_ditto_and_fedrep_grow_with_those_of_a_newcomer():
    task = ragged_task(SIZES, epochs=2)
    _, short, _ = evaluate("ditto", task, rounds=0, held_out=1, holdout_epochs=(2, 4))
    settings = {"ditto.epochs": 4}
    _, long, _ = evaluate(
        "ditto", task, settings=settings, rounds=0, held_out=1, holdout_epochs=(2,)
    )
    scores = [one.scores.tolist() for one in short[0].newcomers]
    assert scores[1] == long[0].newcomers[0].scores.tolist()  # twice as long as a round, s = 2·2
    assert scores[0] != scores[1]
    assert make("fedrep").scale_epochs(1) == make("fedrep")


def test_seeds_and_variants_side_by_side_are_each_alone():
    methods = [make("ditto", {"ditto.lam": lam}) for lam in (0.1, 1.0)]
    recipes = [Recipe(0.1), Recipe(0.03)]
    variants = [Variant(*pair) for pair in zip(methods, recipes, strict=True)]
    task = ragged_task(SIZES)
    together = Simulation(
        methods[0], task, start_of(task), seeds=(3, 4), variants=variants, rounds=1, **HELD_OUT
    )
    found = arrivals(together.run()).reshape(2, 2, 2, 3, 2, 3)  # evaluation, variant, seed
    for v, (method, recipe) in enumerate(zip(methods, recipes, strict=True)):
        for s, seed in enumerate((3, 4)):
            task = ragged_task(SIZES, lr=recipe.lr)
            alone = Simulation(method, task, start_of(task), seeds=(seed,), rounds=1, **HELD_OUT)
            np.testing.assert_allclose(found[:, v, s], arrivals(alone.run()), atol=1e-10)


def test_every_so_many_rounds_and_always_at_the_end():
    options = {"rounds": 7, "eval_every": 2, "holdout_every": 4, **HELD_OUT}
    _, found, _ = evaluate("fedavg", ragged_task(SIZES), **options)
    assert [one.row.round for one in found] == [0, 2, 4, 6, 7]
    assert [one.row.round for one in found if one.newcomers] == [0, 4, 7]


def test_dropout_draws_the_same_numbers_for_a_newcomer_and_a_late_client():
    class Dropping(Net):
        def forward(self, x):
            return super().forward(torch.dropout(x, 0.5, self.training))

    def make_task():
        return ragged_task(SIZES, model=Dropping())

    options = {"rounds": 1, "held_out": 1, "lanes": 1}
    found = [
        evaluate("fedavg", make_task(), holdout_epochs=epochs, **options)[1][-1].newcomers[-1]
        for epochs in ((0, 1, 2), (2,))
    ]
    np.testing.assert_array_equal(found[0].scores, found[1].scores)


def test_a_newcomer_that_diverges_is_counted_and_hurts_nobody():
    task = ragged_task(SIZES)
    task.x[torch.from_numpy(task.parts["train"][5])] = float("inf")
    _, found, models = evaluate("fedavg", task, rounds=2, **HELD_OUT)
    assert [one.diverged for one in found[-1].newcomers] == [0, 1, 1]
    assert all(value.isfinite().all() for model in models.values() for value in model.values())
    assert not any(one.row.diverged for one in found)


class OwnMessage(Method):
    """Sends each client a message of its own, and does not think of newcomers."""

    name, title, summary = "own-message", "OwnMessage", ""

    def send(self, server, server_round):
        lanes = [0] * len(server_round.clients)
        return Message(take(server["global"], lanes))


def test_a_server_that_knows_each_client_must_say_what_newcomers_get():
    task = ragged_task(SIZES)
    simulation = Simulation(OwnMessage(), task, start_of(task), **HELD_OUT)
    with pytest.raises(UserError, match="takes no newcomers: its server sends each client"):
        simulation.step(1, train=True)


def test_fedamp_sends_the_mean_of_its_mixes_and_apple_all_cores():
    for method in ("fedamp", "apple"):
        task = ragged_task(SIZES)
        simulation, _, _ = evaluate(method, task, rounds=1, **HELD_OUT)
        [server], server_round = simulation.servers, simulation._server_round(0, 2, range(KNOWN))
        message = simulation.method.send_to_newcomers(server, server_round)
        if method == "fedamp":
            weight = server["learned"]["out.weight"]
            assert_close({"w": message.model["out.weight"]}, {"w": weight.sum(0)[None] / 4}, 1e-12)
        else:
            cohort = simulation.transport.make_cohort([(0, 4)], 2, [message], [[4]])
            own, received = simulation.setup.init_client(task, (0, 4)), cohort.received
            initialized, own = simulation.method.initialize(cohort, received, own)
            tested = simulation.method.model_to_evaluate(cohort, initialized, received, own)
            cores = server["cores"]["out.weight"][0]
            shares = torch.tensor(SIZES[:KNOWN], dtype=torch.float64) / sum(SIZES[:KNOWN])
            mix = (shares[:, None, None] * cores).sum(0)[None]
            assert_close({"w": tested["out.weight"]}, {"w": mix}, 1e-12)
