"""Lane independence: any lane of a cohort gives what that client alone gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import Net, assert_close, ragged_task, start_of
from torch import nn

from fedala.ala import Settings, fresh, initialize
from fedala.cohort import Cohort, average, steps
from fedala.layers import upper
from fedala.methods import make
from fedala.simulation import Simulation
from fedala.trees import join, take

#: Zero to nine batches of four, whole and partial, two of one size.
SIZES = [37, 36, 30, 21, 21, 16, 8, 5, 4, 3, 3, 1, 0]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def stacked(task, dtype_seeds):
    start = start_of(task)
    return join([start(seed) for seed in dtype_seeds])


def alone(task, cohort, lane, **kept):
    return Cohort(task, [cohort.clients[lane]], [cohort.seeds[lane]], cohort.round, cohort.rounds, **kept)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def task(request):
    return ragged_task(SIZES, dtype=request.param)


@pytest.fixture
def cohort(task):
    return Cohort(task, list(range(len(SIZES))), [5 + i % 2 for i in range(len(SIZES))], round=3, rounds=9)


def test_sgd_in_lanes_is_each_clients_own_sgd(task, cohort):
    params = stacked(task, range(len(SIZES)))
    together = cohort.sgd(params, epochs=2)
    for lane in range(len(SIZES)):
        own = take(params, slice(lane, lane + 1))
        assert_close(
            take(together, slice(lane, lane + 1)), alone(task, cohort, lane).sgd(own, epochs=2), TOLERANCE[task.dtype]
        )


def test_sgd_leaves_its_start_alone_and_does_train(task, cohort):
    params = stacked(task, [0] * len(SIZES))
    before = {name: value.clone() for name, value in params.items()}
    after = cohort.sgd(params)
    assert_close(params, before, 0)
    for lane, size in enumerate(SIZES):
        moved = (after["out.weight"][lane] - before["out.weight"][lane]).abs().max().item()
        assert (moved > 0) == (size > 0)
        # One running-statistics update per step: full batches only, but a small client trains on all it has.
        assert after["norm.num_batches_tracked"][lane] == (size // 4 if size >= 4 else int(size > 0))


def test_ala_in_lanes_is_each_clients_own_ala(task, cohort):
    local, received = stacked(task, range(len(SIZES))), start_of(task)(99)
    received = {name: value.expand(len(SIZES), *value.shape[1:]) for name, value in received.items()}
    governed = upper(task.model, 2)
    settings_ = Settings(layers=2, max_epochs=30, threshold=0.003)
    state = fresh(local, governed)
    state["trained"][::3] = True  # some lanes are past their initial stage
    cohort.received, cohort.source = received, [0] * len(SIZES)
    together, state_after, outcome = initialize(cohort, settings_, state, local, received, governed=governed)
    reports = outcome.reports(settings_)
    assert len({report.epochs for report in reports}) > 3, "lanes should stop at different epochs for this test to bite"
    for lane in range(len(SIZES)):
        own = slice(lane, lane + 1)
        single = alone(task, cohort, lane, received=take(received, own), source=[0])
        one, one_state, outcome = initialize(
            single, settings_, take(state, own), take(local, own), take(received, own), governed=governed
        )
        [report] = outcome.reports(settings_)
        assert report.epochs == reports[lane].epochs
        assert report.converged == reports[lane].converged
        assert np.allclose(report.losses, reports[lane].losses, atol=TOLERANCE[task.dtype])
        assert_close(take(together, own), one, TOLERANCE[task.dtype])
        assert_close(take(state_after["weights"], own), one_state["weights"], TOLERANCE[task.dtype])
        assert state_after["trained"][lane] == one_state["trained"][0]


@pytest.mark.parametrize("shared", [False, True])
def test_evaluation_in_lanes_is_each_clients_own(task, cohort, shared):
    params = stacked(task, range(len(SIZES)))
    if shared:  # one model for all: it goes through in large batches
        params = {name: value[:1].expand(len(SIZES), *value.shape[1:]) for name, value in params.items()}
        cohort.received, cohort.source = params, [0] * len(SIZES)
    score = cohort.evaluate(params)
    for lane, client in enumerate(cohort.clients):
        own = alone(task, cohort, lane).evaluate(take(params, slice(lane, lane + 1)))
        model = Net().to(task.dtype).eval()
        model.load_state_dict({name: value[lane] for name, value in params.items()})
        rows = torch.as_tensor(task.parts["test"][client])
        output = model(task.x[rows])
        assert score.correct[lane] == own.correct[0] == (output.argmax(1) == task.y[rows]).sum()
        assert score.samples[lane] == own.samples[0] == len(rows)
        expected = nn.functional.cross_entropy(output, task.y[rows], reduction="sum").item()
        assert score.loss[lane].item() == pytest.approx(expected, rel=1e-5)
        assert own.loss[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_shared_body_is_evaluated_once_and_right(task, cohort):
    """Received lower layers and own upper ones, as FedALA evaluates; the model is one that can be cut."""
    from fedala.models import cnn

    cut_task = ragged_task([9, 5, 2], model=cnn((1, 16, 16), 3), dtype=task.dtype)
    cut_task.x = torch.randn(len(cut_task.x), 1, 16, 16, generator=torch.Generator().manual_seed(0)).to(task.dtype)
    start = start_of(cut_task, lambda: cnn((1, 16, 16), 3))
    received = {n: v.expand(3, *v.shape[1:]) for n, v in start(1).items()}
    own = join([start(seed) for seed in (2, 3, 4)])
    params = {n: own[n] if n.startswith("fc2") else received[n] for n in received}
    shared = Cohort(cut_task, [0, 1, 2], [0, 0, 0], received=received, source=[0, 0, 0]).evaluate(params)
    plain = Cohort(cut_task, [0, 1, 2], [0, 0, 0]).evaluate({n: v.clone() for n, v in params.items()})
    assert torch.equal(shared.correct, plain.correct)
    assert torch.allclose(shared.loss, plain.loss, rtol=1e-5)


def test_the_gradient_of_a_padding_row_is_spared_in_every_lane():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4, padding_idx=0)
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.embedding(x).mean(1))

    task = ragged_task([8, 8, 4], model=Words())
    task.x = torch.randint(0, 7, (len(task.x), 5), generator=torch.Generator().manual_seed(0))
    params = join([start_of(task, Words)(seed) for seed in range(3)])
    trained = Cohort(task, [0, 1, 2], [0, 0, 0]).sgd(params)
    assert trained["embedding.weight"][:, 0].abs().max() == 0
    assert ((trained["embedding.weight"] - params["embedding.weight"])[:, 1:].abs().amax((1, 2)) > 0).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 7), st.booleans())
@settings(max_examples=100, deadline=None)
def test_steps_visit_every_sample_once_and_drop_only_what_they_may(lengths, size, drop_last):
    lengths = sorted(lengths, reverse=True)
    seen = [[] for _ in lengths]
    for lanes, columns in steps(lengths, size, drop_last=drop_last):
        assert columns.stop - columns.start <= size
        for lane in range(lanes.start, lanes.stop):
            seen[lane] += range(columns.start, columns.stop)
    for lane, length in enumerate(lengths):
        kept = length if not drop_last or length < size else length - length % size
        assert seen[lane] == list(range(kept))


def test_average_is_weighted_and_leaves_counters_whole():
    params = {"w": torch.tensor([[1.0], [4.0]]), "n": torch.tensor([3, 9])}
    mean = average(params, torch.tensor([1.0, 2.0]))
    assert mean["w"].tolist() == [[3.0]]
    assert mean["n"].tolist() == [3]


def test_unsorted_lanes_are_refused(task):
    with pytest.raises(ValueError, match="sorted"):
        Cohort(task, [5, 0], [0, 0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("model", ["cnn", "own"])
def test_features_that_do_not_fit_are_computed_again_with_the_same_result(layers, model, monkeypatch):
    """With no memory for features ALA learns on the samples themselves; it is the same function of them."""
    from fedala.models.cnn import cnn

    build = (lambda: cnn((1, 28, 28), 3)) if model == "cnn" else Net
    found, cuts = [], []

    def seen(self, cut, *args, features=Cohort.features):
        cuts.append(cut.cuts)
        return features(self, cut, *args)

    monkeypatch.setattr(Cohort, "features", seen)
    for memory in (None, 0):
        task = ragged_task([9, 6, 5], model=build(), feature_memory=memory)
        if model == "cnn":
            task.x = torch.nn.functional.interpolate(task.x, (28, 28))
        simulation = Simulation(make("fedala", {"ala.layers": layers}), task, start_of(task, build), rounds=2)
        found.append([row["loss"] for row in simulation.run()])
        if model == "cnn" or layers == 1:
            assert any(cuts) == (memory is None)
        cuts.clear()
    assert found[0] == pytest.approx(found[1], rel=1e-9)
