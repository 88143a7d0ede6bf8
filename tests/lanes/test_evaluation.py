"""A score depends on no other lane, also if the model mixes the samples of a batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Net, ragged_task, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, evaluation
from fedala.lanes.layers import call
from fedala.lanes.trees import share, take
from fedala.methods import make
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [30, 22, 13, 3, 8, 17, 0]


class BatchStatistics(Net):
    """Normalises by the batch at hand, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)


class BatchMean(Net):
    """Subtracts the mean of its batch, in evaluation mode only."""

    def forward(self, x):
        scores = super().forward(x)
        return scores if self.training else scores - scores.mean(0)


class Dropout(Net):
    """Draws random numbers in training mode."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


MIXING = [BatchStatistics, BatchMean]


def list_losses(model, method="fedavg", sizes=SIZES, **options):
    task = ragged_task(sizes, model=model())
    simulation = Simulation(make(method), task, start_of(task, model), rounds=3, **options)
    return [one.row.loss for one in simulation.run()], task


@pytest.mark.parametrize("method", ["fedavg", "fedala", "fedfomo"])
@pytest.mark.parametrize("model", MIXING)
def test_lanes_do_not_change_the_losses_of_a_model_that_mixes_samples(model, method):
    alone, task = list_losses(model, method, lanes=1)
    assert task.mixes_samples
    for lanes in (2, None):
        losses, _ = list_losses(model, method, lanes=lanes)
        assert losses == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("model", MIXING)
def test_a_score_is_that_of_the_plain_module(model):
    """Each client's samples are one batch of its own."""
    task = ragged_task(SIZES, model=model())
    initial = start_of(task, model)(0)
    module = model().double()
    module.load_state_dict({name: value[0] for name, value in initial.items()})
    total = 0.0
    for rows in task.parts["test"]:
        with torch.no_grad():
            output = module.eval()(task.x[rows])
        total += nn.functional.cross_entropy(output, task.y[rows], reduction="sum").item()
    losses, _ = list_losses(model)
    expected = total / sum(len(rows) for rows in task.parts["test"])
    assert losses[0] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("lanes", [1, 7])
@pytest.mark.parametrize("model", [Net, *MIXING])
def test_predictions_are_those_of_the_plain_module(model, lanes):
    """Each client's in the order of its samples, in whatever order the lanes are."""
    task = ragged_task(SIZES, model=model())
    initial = start_of(task, model)(0)
    module = model().double()
    module.load_state_dict({name: value[0] for name, value in initial.items()})
    clients = sorted(range(len(SIZES)), key=lambda client: -SIZES[client])[:lanes]
    log = evaluation.PredictionLog()
    cohort = Cohort(task, clients, [0] * lanes)
    score = cohort.evaluate(share(initial, lanes), log=log)
    for lane, found in enumerate(log.collect(lanes)):
        rows = task.parts["test"][clients[lane]]
        with torch.no_grad():
            expected = module.eval()(task.x[rows]).softmax(-1).numpy()
        np.testing.assert_allclose(found.probabilities, expected, atol=1e-12)
        assert (found.targets == task.y[rows].numpy()).all()
        assert (found.predicted == expected.argmax(1)).all()
        assert (found.targets == found.predicted).sum() == score.score[lane]


def test_many_samples_are_batches_of_the_same_size_in_any_cohort(monkeypatch):
    monkeypatch.setattr(evaluation, "MIXED_BATCH", 4)
    alone, _ = list_losses(BatchMean, lanes=1)
    for lanes in (2, None):
        losses, _ = list_losses(BatchMean, lanes=lanes)
        assert losses == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("model", [Net, Dropout, lambda: cnn((1, 16, 16), 3)])
def test_ordinary_models_do_not_mix_samples(model):
    task = ragged_task(SIZES, model=model())
    if isinstance(task.model, Net):
        assert not task.mixes_samples
    else:
        task.x = torch.zeros(len(task.y), 1, 16, 16, dtype=torch.float64)
        assert not task.mixes_samples


@pytest.mark.parametrize("model", [Net, *MIXING])
def test_the_order_of_the_samples_does_not_matter_to_the_trial(model):
    """A resumed run decides as the first one did: the trial depends on the data alone."""
    task, again = (ragged_task(SIZES, model=model()) for _ in range(2))
    again.parts = {part: [np.flip(rows) for rows in own] for part, own in task.parts.items()}
    assert task.mixes_samples == again.mixes_samples == (model is not Net)


@pytest.mark.parametrize("lanes", [1, 2])
def test_losses_of_bf16_outputs_are_not_rounded_to_bf16(lanes):
    """A rounded loss is off by up to 0.4 %, and FedFomo weighs models by it."""
    task = ragged_task([30] * lanes, dtype=torch.float32, precision="bf16")
    model = start_of(task)(0)
    received = Message(share(model, lanes))
    cohort = Cohort(task, range(lanes), [0] * lanes, received=received, source=[0] * lanes)
    found = cohort.evaluate(received.model).loss
    for lane, rows in enumerate(task.parts["test"]):
        rows = torch.as_tensor(rows)
        with task.use_mode(training=False), torch.no_grad(), task.autocast():
            output = call(task.model, take(model, 0), task.inputs(rows))
        assert output.dtype == torch.bfloat16
        expected = F.cross_entropy(output.float(), task.y[rows], reduction="sum")
        torch.testing.assert_close(found[lane], expected)


def test_no_batch_of_one_is_left_for_a_model_that_mixes_samples():
    size = evaluation.MIXED_BATCH
    batches = evaluation._split_batches(torch.zeros(1, size + 1))
    assert [rows.shape[1] for rows in batches] == [size - 1, 2]
    assert [rows.shape[1] for rows in evaluation._split_batches(torch.zeros(1, 1))] == [1]


class NoSingleSample(Net):
    """Fails on a batch of one."""

    def __init__(self):
        super().__init__()
        self.last = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x):
        return self.last(super().forward(x))


@pytest.mark.parametrize("lanes", [1, None])
def test_a_single_test_sample_that_the_model_cannot_run_on_is_refused(lanes):
    with pytest.raises(UserError, match="a single sample to test"):
        list_losses(NoSingleSample, sizes=[9, 3], lanes=lanes)


class DrawsAlways(Net):
    """Draws random numbers in evaluation mode, too."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, training=True))


def test_a_model_that_draws_in_evaluation_does_not_count_as_one_that_mixes():
    assert not ragged_task([9, 9], model=DrawsAlways()).mixes_samples


def test_a_method_without_a_global_model_for_absent_clients_is_refused():
    class Homeless(type(make("fedavg"))):
        def global_model(self, server):
            return {}

    task = ragged_task([9, 9])
    simulation = Simulation(Homeless(), task, start_of(task), rounds=1, join_ratio=0.5)
    with pytest.raises(UserError, match="has no global model to test absent clients with"):
        list(simulation.run())
