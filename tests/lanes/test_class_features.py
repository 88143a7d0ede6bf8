"""Class-wise sums of features against a loop over samples."""

import plain
import pytest
import torch
from small import ragged_task, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.class_features import measure_features, sum_class_features
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut
from fedala.lanes.losses import Regression
from fedala.lanes.trees import join

SIZES = [22, 13, 5, 0]


def models_of(task):
    return join([start_of(task)(seed) for seed in range(len(SIZES))])


def cut_of(task, params):
    probe = {name: value[0] for name, value in params.items()}, task.inputs(torch.arange(2))
    with task.use_mode(training=False), torch.no_grad():
        return Cut(task.model, 1, probe)


@pytest.mark.parametrize("chunk", [1, 64])
def test_against_a_loop_over_samples(chunk):
    """Chunks of two samples a lane, and all samples at once. The last client has none."""
    task = ragged_task(SIZES)
    task.chunk = chunk
    params = models_of(task)
    cut = cut_of(task, params)
    assert measure_features(task, "FedX") == (3, 6)
    found = sum_class_features(Cohort(task, range(4), [0] * 4), cut, params, 3, 6)
    for client, rows in enumerate(task.parts["train"]):
        own = {name: value[client : client + 1] for name, value in params.items()}
        model = plain.module(task, own).eval()
        sums, squares, counts = torch.zeros(3, 6).double(), torch.zeros(3).double(), [0, 0, 0]
        for row in rows:
            feature = plain.features_of(model, task.x[row][None])[0].detach()
            label = int(task.y[row])
            sums[label] += feature
            squares[label] += feature @ feature
            counts[label] += 1
        assert torch.allclose(found.sums[client], sums, atol=1e-12)
        assert torch.allclose(found.squares[client], squares, atol=1e-12)
        assert found.counts[client].tolist() == counts
        means = sums / torch.tensor(counts).clamp(min=1).unsqueeze(1)
        assert torch.allclose(found.means[client], means, atol=1e-12)
    assert all(module.training for module in task.model.modules())


def test_numbers_that_are_not_finite_stay_in_their_lane():
    task = ragged_task(SIZES)
    params = models_of(task)
    cut = cut_of(task, params)
    cohort = Cohort(task, range(4), [0] * 4)
    sound = sum_class_features(cohort, cut, params, 3, 6)
    params["hidden.bias"][1] = torch.nan
    params["hidden.bias"][3] = torch.inf
    broken = sum_class_features(cohort, cut, params, 3, 6)
    assert broken.sums[1].isnan().any()
    for lane in (0, 2, 3):
        assert torch.allclose(broken.sums[lane], sound.sums[lane], atol=1e-12)


def test_a_task_without_classes_is_refused():
    with pytest.raises(UserError, match=r"FedX works with the classes of the samples"):
        measure_features(ragged_task(SIZES, loss=Regression()), "FedX")


def test_a_model_whose_last_layer_is_not_linear_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3))
    with pytest.raises(UserError, match=r"FedX needs a model whose last layer is an nn.Linear"):
        measure_features(ragged_task(SIZES, model=model), "FedX")
