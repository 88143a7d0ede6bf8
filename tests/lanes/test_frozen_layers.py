"""If only upper layers learn, they learn on features, as they would in the whole model."""

import pytest
import torch
from small import assert_close, ragged_task, same_rows, simulate, start_of
from tape import TapedGpu, use_tapes
from torch import nn

from fedala.lanes.augmentation import Augmentation
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Layered
from fedala.lanes.messages import Message
from fedala.lanes.optimizers import Optimizer
from fedala.lanes.trees import join

#: Zero to five batches of four, whole and partial.
SIZES = [21, 16, 9, 9, 3, 1, 0]


class Staged(Layered):
    """A model of ours with running statistics in its lower layers."""

    layers = (("out",), ("hidden",), ("conv", "norm"))

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.hidden, self.out = nn.Linear(12, 6), nn.Linear(6, 3)
        self.lower_batches = []

    def stages(self):
        def lower(x):
            self.lower_batches.append(len(x))
            return torch.max_pool2d(self.norm(self.conv(x)).relu(), 2)

        return lower, lambda x: self.hidden(x.flatten(1)).relu(), self.out


def make_cohort(task, seeds=(0, 1), is_received=True):
    """Lanes of two seeds, the longest first; each seed's have received one model."""
    pairs = sorted(
        ((client, seed) for seed in seeds for client in range(len(SIZES))),
        key=lambda pair: -SIZES[pair[0]],
    )
    start = start_of(task, Staged)
    models = join([start(seed) for _, seed in pairs])
    received = Message(models) if is_received else Message({})
    clients, own = zip(*pairs, strict=True)
    cohort = Cohort(
        task, list(clients), list(own), round=2, received=received,
        source=[seeds.index(seed) for seed in own],
    )  # fmt: skip
    return cohort, models


def fit(monkeypatch, uses_features, names, *, is_received=True, fit_options=(), **task_options):
    task = ragged_task(SIZES, model=Staged(), **task_options)
    cohort, models = make_cohort(task, is_received=is_received)
    given = {name: value.clone() for name, value in models.items()}
    task.model.lower_batches.clear()
    with monkeypatch.context() as patch:
        if not uses_features:
            patch.setattr(Cohort, "_cut_below", lambda *_: None)
        trained = cohort.fit(models, names=names, **dict(fit_options))
    assert_close(models, given, 0)  # a trial of the cut must not change running statistics
    return trained, cohort.metrics["train_loss"], task.model.lower_batches, models


HEAD, UPPER = ("out.weight", "out.bias"), ("out.weight", "out.bias", "hidden.weight", "hidden.bias")
CASES = {
    "head": {"names": HEAD, "fit_options": {"epochs": 5}},
    "two layers": {"names": UPPER, "fit_options": {"epochs": 2}},
    "a bias below the last layer": {"names": ("hidden.bias",), "fit_options": {"epochs": 2}},
    "own models": {"names": HEAD, "is_received": False, "fit_options": {"epochs": 2}},
    "momentum": {"names": HEAD, "optimizer": Optimizer(momentum=0.9), "local_steps": 7},
    "without shuffling": {"names": UPPER, "shuffle": False, "fit_options": {"epochs": 2}},
    "in float32": {"names": UPPER, "dtype": torch.float32, "fit_options": {"epochs": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_upper_layers_learn_on_features_what_they_learn_in_the_whole_model(case, monkeypatch):
    tolerance = 1e-6 if "dtype" in CASES[case] else 1e-13
    (own, loss, _, start), (whole, whole_loss, _, _) = (
        fit(monkeypatch, uses_features, **CASES[case]) for uses_features in (True, False)
    )
    assert_close(own, whole, tolerance)
    torch.testing.assert_close(loss, whole_loss, rtol=0, atol=tolerance, equal_nan=True)
    assert not torch.equal(own["out.bias"], start["out.bias"]) or "bias" in case
    for name in ("conv.weight", "norm.running_mean", "norm.num_batches_tracked"):
        assert torch.equal(own[name], start[name])


def test_the_lower_layers_run_once_for_each_sample(monkeypatch):
    *_, once, _ = fit(monkeypatch, True, HEAD, fit_options={"epochs": 5})
    assert sum(once) == 2 * sum(SIZES) + 1  # of two seeds; one sample shows the features' size
    *_, always, _ = fit(monkeypatch, False, HEAD, fit_options={"epochs": 5})
    assert len(always) > 5 * len(once)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("conv.weight",), {}),
        ((*HEAD, "norm.bias"), {}),
        ((), {}),
        (HEAD, {"feature_memory": 100}),
        (HEAD, {"augmentation": Augmentation(flip=True)}),
    ],
)
def test_lower_layers_that_learn_or_see_other_samples_run_in_every_step(names, options):
    task = ragged_task(SIZES, model=Staged(), **options)
    cohort, models = make_cohort(task)
    assert cohort._cut_below(names, models) is None


def test_modules_that_are_not_ours_run_whole():
    task = ragged_task(SIZES)
    cohort = Cohort(task, [0], [0])
    assert cohort._cut_below(HEAD, join([start_of(task)(0)])) is None


@pytest.mark.parametrize("method", ["fedrep", "fedrep+ala", "fedpac", "fedbabu"])
def test_methods_get_what_whole_models_give(method, monkeypatch):
    runs = []
    for uses_features in (True, False):
        with monkeypatch.context() as patch:
            if not uses_features:
                patch.setattr(Cohort, "_cut_below", lambda *_: None)
            task = ragged_task(SIZES[:4], model=Staged())
            options = {"settings": {"fedbabu.part": "head"}} if method == "fedbabu" else {}
            runs.append(simulate(method, task, rounds=3, **options))
    same_rows(runs[0][1], runs[1][1], 1e-10)


@pytest.mark.parametrize("method", ["fedrep", "fedrep+ala", "fedpac", "fedbabu"])
def test_captured_steps_take_the_features_of_their_round(method, monkeypatch):
    """Lanes with and without a full batch, of two seeds, in rounds that replay the same steps."""
    use_tapes(monkeypatch)
    runs = []
    for captures in (True, False):
        task = ragged_task(
            SIZES[:6], model=Staged(), optimizer=Optimizer(momentum=0.9), keeps_optimizer=True
        )
        if captures:
            task.backend = gpu = TapedGpu(task.device)
        options = {"settings": {"fedbabu.part": "head"}} if method == "fedbabu" else {}
        runs.append(simulate(method, task, rounds=3, seeds=[0, 1], **options))
    assert "replay" in gpu.log
    same_rows(runs[0][1], runs[1][1], 1e-10)
