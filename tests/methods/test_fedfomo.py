"""FedFomo against plain modules and against numbers worked out by hand."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.parameters import model_state
from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.methods import ServerRound, make
from fedala.simulation import Simulation

SIZES = [5, 22, 13]


def module(state):
    net = Net().double()
    net.load_state_dict({name: value[0] for name, value in state.items()})
    return net


def split(task, client, seed=0):
    rows = task.parts["train"][client]
    chosen = draw(seed, "fedfomo slice", client=client).permutation(len(rows))[: len(rows) // 5]
    return rows[np.sort(chosen)], np.delete(rows, chosen)


def by_plain_modules(task, start, rounds):
    """Return the initialised models of all clients after `rounds` rounds, one after the other."""
    local = [module(start) for _ in SIZES]
    previous = [module(start) for _ in SIZES]
    uploaded, weighed = [], []
    for round in range(1, rounds + 2):
        initialized = []
        for client in range(len(SIZES)):
            held_out, _ = split(task, client)

            def loss_of(net, held_out=held_out):
                with torch.no_grad():
                    return F.cross_entropy(net.eval()(task.x[held_out]), task.y[held_out]).item()

            prev = previous[client]
            weights = []
            for theta in uploaded:
                squares = [
                    ((a - b) ** 2).sum().item()
                    for a, b in zip(theta.parameters(), prev.parameters(), strict=True)
                ]
                gain = loss_of(prev) - loss_of(theta)
                weights.append(max(0.0, gain / np.sqrt(sum(squares))) if sum(squares) else 0.0)
            weighed.append(weights)
            if sum(weights) == 0:
                initialized.append(copy.deepcopy(local[client]))
                continue
            mixed = {}
            for name, value in prev.state_dict().items():
                others = [theta.state_dict()[name] for theta in uploaded]
                step = sum(
                    w / sum(weights) * (other - value)
                    for w, other in zip(weights, others, strict=True)
                )
                mixed[name] = (
                    value + step if value.is_floating_point() else local[client].state_dict()[name]
                )
            initialized.append(copy.deepcopy(prev))
            initialized[-1].load_state_dict(mixed)
        if round > rounds:
            return initialized, weighed
        for client in range(len(SIZES)):
            _, rest = split(task, client)
            order = rest[draw(0, "batches", client=client, round=round).permutation(len(rest))]
            net = copy.deepcopy(initialized[client]).train()
            optimizer = torch.optim.SGD(net.parameters(), task.recipe.lr)
            for first in range(0, len(order) - len(order) % 4, 4):
                batch = order[first : first + 4]
                optimizer.zero_grad()
                F.cross_entropy(net(task.x[batch]), task.y[batch]).backward()
                optimizer.step()
            local[client] = net
        previous, uploaded = initialized, [copy.deepcopy(net) for net in local]
    raise AssertionError


def test_three_rounds_are_those_of_plain_modules():
    task = ragged_task(SIZES)
    expected, weighed = by_plain_modules(task, start_of(task)(0), rounds=3)
    assert any(0 < sum(w > 0 for w in weights) < len(SIZES) for weights in weighed), (
        "some models should help, some not"
    )
    _, _, models = simulate("fedfomo", task, rounds=3)
    for client in range(len(SIZES)):
        assert_close(models[0, client], model_state(expected[client]), 1e-9)


# --- by hand --------------------------------------------------------------------------------------


def line_task(samples=5):
    """y = w·x + b with x = 1, y = 0 and squared error: the loss is (w + b)²."""

    def loss(output, y):
        return F.mse_loss(output.squeeze(-1), y)

    x, y = torch.ones(samples, 1, dtype=torch.float64), torch.zeros(samples, dtype=torch.float64)
    return Task(nn.Linear(1, 1), x, y, [np.arange(samples)], loss=loss, precision="float64")


def line(*weights):
    """Models of bias 0 as one stack."""
    stack = torch.tensor(weights, dtype=torch.float64)
    return {
        "weight": stack.view(1, -1, 1, 1),
        "bias": torch.zeros(1, len(weights), 1, dtype=torch.float64),
    }


def single(weight):
    return {name: value[:, 0] for name, value in line(weight).items()}


def test_weights_by_hand():
    """previous = 2 has loss 4. 1 gains 3 over a distance of 1, 0 gains 4 over 2, 3 loses.

    So the weights are 3/5, 2/5, 0, 0, and the new model is 2 + 3/5·(1 − 2) + 2/5·(0 − 2) = 0.6.
    """
    cohort, fomo = Cohort(line_task(), [0], [0]), make("fedfomo")
    received, state = line(1.0, 0.0, 3.0, 2.0), {"local": single(7.0), "previous": single(2.0)}
    weights = fomo.weights(cohort, received, state["previous"])
    assert weights.tolist() == [pytest.approx([0.6, 0.4, 0, 0])]
    initialized, _ = fomo.initialize(cohort, Message(received), state)
    assert initialized["weight"].item() == pytest.approx(0.6)


def test_identical_clients_have_equal_weights():
    weights = make("fedfomo").weights(
        Cohort(line_task(), [0], [0]), line(1.0, 1.0, 1.0), single(2.0)
    )
    assert weights.tolist() == [[1 / 3] * 3]


def test_near_pairs_have_their_true_distance():
    """2 and 2 − 10⁻⁹: a Gram matrix would give a distance of 0."""
    weights = make("fedfomo").weights(
        Cohort(line_task(), [0], [0]), line(2 - 1e-9, 1.0), single(2.0)
    )
    assert weights.tolist() == [pytest.approx([4 / 7, 3 / 7], rel=1e-5)]


@pytest.mark.parametrize("received", [line(3.0, 4.0), line(2.0), line(float("nan"), 5.0), {}])
def test_where_nothing_helps_the_client_keeps_its_own_last_trained_model(received):
    state = {"local": single(7.0), "previous": single(2.0)}
    initialized, _ = make("fedfomo").initialize(
        Cohort(line_task(), [0], [0]), Message(received), state
    )
    assert initialized["weight"].item() == 7


def test_a_diverged_model_spoils_nobody():
    state = {"local": single(7.0), "previous": single(2.0)}
    received = line(float("nan"), float("inf"), 1.0)
    initialized, _ = make("fedfomo").initialize(
        Cohort(line_task(), [0], [0]), Message(received), state
    )
    assert initialized["weight"].item() == 1


def test_a_client_without_samples_takes_the_mean_and_one_with_a_single_sample_uses_it_twice():
    state = {"local": single(7.0), "previous": single(2.0)}
    initialized, _ = make("fedfomo").initialize(
        Cohort(line_task(0), [0], [0]), Message(line(1.0, 4.0)), state
    )
    assert initialized["weight"].item() == 2.5
    cohort, fomo = Cohort(line_task(1), [0], [0]), make("fedfomo")
    initialized, _ = fomo.initialize(cohort, Message(line(1.0, 4.0)), state)
    assert initialized["weight"].item() == 1
    upload, _ = fomo.train(cohort, initialized, Message(line(1.0, 4.0)), state)
    assert upload.model["weight"].item() != 1


# --- what is trained on, and what is sent ---------------------------------------------------------


def test_the_slice_is_not_trained_on_in_any_round():
    """In round 1, other labels on the slice change nothing. In round 2, the slice is the same."""
    uploads = []
    for flip in (False, True):
        task = ragged_task(SIZES)
        if flip:
            held_out, _ = split(task, 1)
            task.y[held_out] = (task.y[held_out] + 1) % 3
        simulation = Simulation(make("fedfomo"), task, start_of(task), rounds=2)
        simulation.step(1, train=True)
        uploads.append({name: value[0] for name, value in simulation.servers[0]["models"].items()})
    assert_close(*uploads, 0)
    fomo = make("fedfomo")
    slices = [fomo._split(Cohort(task, [1], [0], round=round))[0][0] for round in (1, 2)]
    assert np.array_equal(*slices)
    assert len(slices[0]) == SIZES[1] // 5


def test_models_of_clients_that_never_took_part_are_not_sent():
    """Per round: as many models as there are clients with samples that have taken part before."""
    task = ragged_task([9, 9, 9, 9, 9, 0])
    simulation = Simulation(make("fedfomo"), task, start_of(task), rounds=5, join_ratio=0.34)
    size = sum(value.numel() for value in simulation.initial[0].values())
    seen, counts = set(), []
    for round in range(1, 6):
        [evaluation] = simulation.step(round, train=True)
        counts.append(len(seen))
        assert evaluation.row.sent == len(seen) * size
        seen |= set(simulation.draw_participants(0, round)) - {5}
    assert counts[0] == 0
    assert len(set(counts)) > 2, "clients should join at different times for this test to bite"


def test_lanes_of_a_run_share_one_stack_also_next_to_other_runs():
    task = ragged_task(SIZES)
    simulation = Simulation(make("fedfomo"), task, start_of(task), rounds=1, seeds=(0, 1))
    simulation.step(1, train=True)
    joined = [[0, 1, 2]] * 2
    next_round = ServerRound(0, 2, 2, joined[0], SIZES)
    sent = [simulation.method.send(server, next_round) for server in simulation.servers]
    cohorts = list(simulation.transport._form_cohorts(joined))
    assert [len({run for run, _ in lanes}) for lanes in cohorts] == [1, 1]
    for lanes in cohorts:
        received = simulation.transport.make_cohort(lanes, 2, sent, joined).received
        for name, value in received.model.items():
            assert value.data_ptr() == sent[lanes[0][0]].model[name].data_ptr()
            assert value.stride(0) == 0 or len(value) == 1


@pytest.mark.parametrize(("share", "size", "count"), [(0.29, 100, 29), (0.57, 100, 57)])
def test_a_share_just_below_a_whole_number_is_that_number(share, size, count):
    """0.29 · 100 and 0.57 · 100 are a little less than whole numbers in floating point."""
    assert int(share * size) == count - 1
    task = ragged_task([size])
    [(held_out, rest)] = make("fedfomo", {"fedfomo.share": share})._split(Cohort(task, [0], [0]))
    assert (len(held_out), len(rest)) == (count, size - count)
