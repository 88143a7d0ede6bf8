"""Losses: lanes against one lane, and against torch's own functions on a plain module."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import module
from small import Net, assert_close, evaluate, ragged_task, same_rows, start_of

from fedala.errors import UserError
from fedala.lanes import Cohort
from fedala.lanes.losses import CrossEntropy, MultiLabel, OwnLoss, Regression, align, as_loss
from fedala.lanes.task import Task
from fedala.metrics import ACCURACY, LABEL_ACCURACY, MAE, MSE, OWN_LOSS

SIZES = [9, 6, 4, 1, 0]
WEIGHTS = (0.5, 2.0, 1.25)
TENSOR = torch.tensor(WEIGHTS, dtype=torch.float64)


def own_loss(output, y):
    return F.cross_entropy(output, y) + output.square().mean()


def own_distance(output, y):
    return (output - y).abs().pow(1.5).mean()


def soften(y, smoothing):
    return y * (1 - smoothing) + smoothing / 2


#: Each loss with the same in torch, for a batch of the plain module.
LOSSES = {
    "plain": (CrossEntropy(), F.cross_entropy),
    "smoothed": (
        CrossEntropy(0.2),
        lambda output, y: F.cross_entropy(output, y, label_smoothing=0.2),
    ),
    "weighted": (
        CrossEntropy(0.0, WEIGHTS),
        lambda output, y: F.cross_entropy(output, y, weight=TENSOR),
    ),
    "weighted and smoothed": (
        CrossEntropy(0.1, WEIGHTS),
        lambda output, y: F.cross_entropy(output, y, weight=TENSOR, label_smoothing=0.1),
    ),
    "multilabel": (MultiLabel(), F.binary_cross_entropy_with_logits),
    "multilabel, weighted and smoothed": (
        MultiLabel(0.1, WEIGHTS),
        lambda output, y: F.binary_cross_entropy_with_logits(
            output, soften(y, 0.1), pos_weight=TENSOR
        ),
    ),
    "mse": (Regression("mse"), F.mse_loss),
    "mae": (Regression("mae"), F.l1_loss),
    "huber": (Regression("huber"), F.huber_loss),
    "own": (OwnLoss(own_loss, ACCURACY), own_loss),
    "own distance": (OwnLoss(own_distance), own_distance),
}
#: For each metric, the score of a sample by hand.
SCORES = {
    ACCURACY: lambda output, y: (output.argmax(1) == y).double(),
    LABEL_ACCURACY: lambda output, y: ((output.sigmoid() > 0.5) == (y == 1)).double().mean(1),
    MSE: lambda output, y: (output - y).square().mean(1),
    MAE: lambda output, y: (output - y).abs().mean(1),
}
#: The plain loss of each kind, which an evaluation measures.
PLAIN = {
    CrossEntropy: F.cross_entropy,
    MultiLabel: F.binary_cross_entropy_with_logits,
    Regression: None,
    OwnLoss: None,
}


def make_task(loss, outputs=3, **settings):
    """The ragged clients with targets that fit the loss."""
    base = ragged_task(SIZES)
    random = torch.Generator().manual_seed(1)
    if loss.metric == LABEL_ACCURACY:
        y = torch.randint(0, 2, (len(base.y), outputs), generator=random).double()
    elif loss.metric == ACCURACY:
        y = base.y
    else:
        y = 2 * torch.randn(len(base.y), outputs, generator=random, dtype=torch.float64)
        y = y if outputs > 1 else y[:, 0]
    options = {"batch_size": 4, "lr": 0.1, "precision": "float64", "loss": loss, **settings}
    return Task(Net(outputs), base.x, y, base.parts["train"], base.parts["test"], **options)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_torch(name):
    """Three lanes of one task, each against its own plain module."""
    loss, function = LOSSES[name]
    task = make_task(loss)
    states = [start_of(task)(seed) for seed in range(3)]
    stacked = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    rows = torch.tensor([[0, 5, 7, 9], [1, 2, 3, 4], [12, 3, 8, 6]])
    with task.use_mode(training=False):
        losses, gradients = task.gradients(stacked, task.inputs(rows), task.targets(rows))
    for lane, state in enumerate(states):
        model = module(task, state).eval()
        value = function(model(task.x[rows[lane]]), task.y[rows[lane]])
        value.backward()
        assert losses[lane].item() == pytest.approx(value.item(), abs=1e-10)
        for key, parameter in model.named_parameters():
            assert torch.allclose(gradients[key][lane], parameter.grad, rtol=0, atol=1e-10), key


@pytest.mark.parametrize("name", LOSSES)
def test_lanes_equal_one_lane(name):
    task = make_task(LOSSES[name][0])
    _, one, models = evaluate("fedala", task, lanes=1, rounds=2)
    _, many, others = evaluate("fedala", task, lanes=None, rounds=2)
    same_rows([e.row for e in one], [e.row for e in many], 1e-10)
    for key in models:
        assert_close(models[key], others[key], 1e-10)
    assert one[0].row.metric == LOSSES[name][0].metric


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_runs_under_vmap(name):
    """Our own models are not tried before they run in lanes."""
    assert make_task(LOSSES[name][0]).uses_vmap


@pytest.mark.parametrize("name", LOSSES)
def test_an_evaluation_sums_plain_losses_and_scores(name):
    """Smoothing and class weights do not count in an evaluation: Σ loss / Σ samples."""
    loss, function = LOSSES[name]
    task = make_task(loss)
    plain = PLAIN[type(loss)] or function
    states = [start_of(task)(seed) for seed in range(len(SIZES))]
    stacked = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    found = Cohort(task, range(len(SIZES)), [0] * len(SIZES)).evaluate(stacked)
    for lane, state in enumerate(states):
        rows = task.parts["test"][lane]
        with torch.no_grad():
            output, y = module(task, state).eval()(task.x[rows]), task.y[rows]
            expected = len(rows) * plain(output, y).item()
            score = SCORES[loss.metric](output, y).sum() if loss.metric != OWN_LOSS else expected
        assert found.loss[lane].item() == pytest.approx(expected, abs=1e-10)
        assert found.score[lane].item() == pytest.approx(float(score), abs=1e-10)
        assert found.samples[lane] == len(rows)


@pytest.mark.parametrize("kind", ["mse", "mae", "huber"])
def test_a_single_output_is_compared_sample_by_sample(kind):
    """Outputs N×1 and targets N never become N×N, in training and in evaluation."""
    task = make_task(Regression(kind), outputs=1)
    assert task.y.dim() == 1
    state = start_of(task, lambda: Net(1))(0)
    model = module(task, state).eval()
    rows = task.parts["test"][0]
    with torch.no_grad():
        output = model(task.x[rows])[:, 0]
    score = Cohort(task, [0], [0]).evaluate(state)
    error = output - task.y[rows]
    expected = error.abs() if kind == "mae" else error.square()
    assert score.score.item() == pytest.approx(expected.sum().item(), abs=1e-10)
    both = {key: torch.cat([value, value]) for key, value in state.items()}
    with task.use_mode(training=False):
        losses = task.losses(
            both, *(f(torch.tensor(np.array([rows] * 2))) for f in (task.inputs, task.targets))
        )
    functions = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}
    assert losses.tolist() == pytest.approx([functions[kind](output, task.y[rows]).item()] * 2)


def test_align_takes_a_dimension_of_one_on_either_side():
    column, row = torch.zeros(4, 1), torch.zeros(4)
    assert [t.shape for t in align(column, row)] == [row.shape] * 2
    assert [t.shape for t in align(row, column)] == [column.shape] * 2
    assert align(column.double(), column)[1].dtype == torch.float64
    for output, y in ((torch.zeros(4, 2), row), (torch.zeros(4, 2), torch.zeros(4, 3))):
        with pytest.raises(UserError, match="they must be equal"):
            align(output, y)
    with pytest.raises(UserError, match="it returns a tuple"):
        align((row,), row)


def test_equal_losses_are_equal_and_hashable():
    """A GPU captures a step once for each loss, and ALA's kernel asks for plain cross-entropy."""
    assert CrossEntropy(0.1, (1.0, 2.0)) == CrossEntropy(0.1, (1.0, 2.0))
    assert len({CrossEntropy(), CrossEntropy(), CrossEntropy(0.1), MultiLabel()}) == 3
    weighted = CrossEntropy(0.0, (1.0, 2.0))
    weighted.place_on(torch.device("cpu"), torch.float32)
    assert weighted == CrossEntropy(0.0, (1.0, 2.0))
    labels, numbers = torch.tensor([0, 1]), torch.tensor([0.0, 1.0])
    assert as_loss(F.cross_entropy, labels) == CrossEntropy()
    assert as_loss(own_loss, labels).metric == ACCURACY
    assert as_loss(own_loss, numbers).metric == OWN_LOSS


def test_weights_are_on_the_device_before_a_step_is_captured():
    loss = CrossEntropy(0.0, WEIGHTS)
    task = make_task(loss)
    [placed] = loss._placed.values()
    task.losses(
        start_of(task)(0), task.inputs(torch.tensor([[0, 1]])), task.targets(torch.tensor([[0, 1]]))
    )
    assert [value is placed for value in loss._placed.values()] == [True]
    assert placed.dtype == torch.float64
    assert np.allclose(placed, WEIGHTS)


def test_a_loss_of_several_numbers_is_refused():
    task = make_task(OwnLoss(lambda output, y: F.cross_entropy(output, y, reduction="none")))
    task.y = ragged_task(SIZES).y
    with pytest.raises(UserError, match=r"tensor of one number, not a torch\.float64 tensor"):
        task.losses(
            start_of(task)(0),
            task.inputs(torch.tensor([[0, 1]])),
            task.targets(torch.tensor([[0, 1]])),
        )
