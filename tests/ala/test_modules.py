"""ALA blends any module as the authors' code would."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ala.common import (
    EXACT,
    FINE,
    POINTS,
    X,
    Y,
    assert_same,
    entries,
    labels,
    mlp,
    normal,
    twins,
)
from ala.models import (
    CASES,
    Attention,
    normalised,
)
from oracles import learn_by_the_paper, learn_like_the_authors
from torch import Tensor, nn
from torch.func import functional_call

from fedala import ALA
from fedala.lanes.trees import take


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_any_module_gives_the_same_as_the_authors_code(case, layers):
    """Two rounds: the initial stage of three epochs, then one epoch from the same W."""
    make, x, y, loss = CASES[case]
    ala = ALA(layers, eta=2.0, sample=1.0, batch_size=4, max_epochs=3)
    weights = None
    for round, epochs in ((1, 3), (2, 1)):
        local, received = twins(make, round)
        governed = ala.governs(local, take(x, slice(0, 2)))
        settings = {"loss": loss, "eta": 2.0, "epochs": epochs, "weights": weights}
        expected, weights, losses = learn_like_the_authors(
            local, received, x, y, governed, **settings
        )
        report = ala.initialize(local, received, (x, y), loss=loss)
        assert_same(local, expected, **FINE)
        assert_same(ala.weights, weights, **FINE)
        assert report.losses == pytest.approx(losses, rel=1e-10)
    assert any((value != 1).any() for value in weights.values())


@pytest.mark.parametrize("layers", [1, 2])
def test_the_authors_way_is_the_papers_mathematics(layers):
    """The two oracles know nothing of each other."""
    local, received = twins(mlp)
    governed = ALA(layers).governs(local)
    _, weights, losses = learn_like_the_authors(local, received, X, Y, governed, eta=2.0, epochs=4)
    old, new = ({n: model.get_parameter(n) for n in governed} for model in (local, received))

    def loss(blended: dict[str, Tensor], rows: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(received, blended, (X[rows],)), Y[rows])

    found, history = learn_by_the_paper(
        loss,
        old,
        new,
        {name: torch.ones_like(value) for name, value in old.items()},
        torch.arange(len(Y)).split(4),
        eta=2.0,
        is_enough=lambda losses: len(losses) == 4,
    )
    assert_same(found, weights, **FINE)
    assert history == pytest.approx(losses, rel=1e-10)
    assert any((value == 0).any() for value in found.values())


@pytest.mark.parametrize("case", ["tagger", "two-positions-first", "inplace-relu", "sequential"])
def test_a_single_sample_is_enough_for_the_same(case):
    make, x, y, loss = CASES[case]
    local, received = twins(make)
    expected, *_ = learn_like_the_authors(
        local, received, x[:1], y[:1], ALA().governs(local, x[:1]), loss=loss
    )
    ALA(max_epochs=3).initialize(local, received, (x[:1], y[:1]), loss=loss)
    assert_same(local, expected, **FINE)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_caller_who_has_switched_gradients_off_gets_the_same(layers, off):
    def learned() -> dict[str, Tensor]:
        local, received = twins(mlp)
        ALA(layers, batch_size=4, max_epochs=3).initialize(local, received, (POINTS, labels(11)))
        return entries(local)

    def switched_off() -> dict[str, Tensor]:
        local, received = twins(mlp)
        with off():
            received, data = copy.deepcopy(received), (POINTS.clone(), labels(11))
            ALA(layers, batch_size=4, max_epochs=3).initialize(local, received, data)
            assert not torch.is_grad_enabled()
        assert sum(p.sum() for p in local.parameters()).requires_grad
        return entries(local)

    assert_same(switched_off(), learned(), **EXACT)


def test_the_upper_layers_of_a_foreign_module_count_from_the_output():
    assert ALA(1).governs(mlp()) == ("4.weight", "4.bias")
    assert ALA(2).governs(mlp()) == ("2.weight", "2.bias", "4.weight", "4.bias")
    assert ALA(0).governs(mlp()) == ()
    assert ALA(2).governs(normalised()) == ("6.weight", "6.bias", "7.weight", "7.bias")
    assert ALA(["fc", "norm"]).governs(Attention()) == (
        "norm.weight",
        "norm.bias",
        "fc.weight",
        "fc.bias",
    )
    assert ALA("fc").governs(Attention()) == ("fc.weight", "fc.bias")


def test_layers_may_be_named_by_patterns():
    local, received = twins(mlp)
    expected, *_ = learn_like_the_authors(
        local, received, POINTS, labels(11), ("0.weight", "4.bias")
    )
    ala = ALA([r"0\.weight", "4.b"], sample=1.0, batch_size=4, max_epochs=3)
    assert ala.governs(local) == ("0.weight", "4.bias")
    ala.initialize(local, received, (POINTS, labels(11)))
    assert_same(local, expected, **FINE)
    assert list(ala.weights) == ["0.weight", "4.bias"]


def test_running_statistics_are_the_received_ones_and_alas_runs_leave_no_trace():
    local, received = twins(normalised)
    local.train()
    received.train()
    sent = entries(received)
    ALA(layers=2, batch_size=4).initialize(local, received, (normal(11, 1, 4, 4), labels(11)))
    assert_same(received, sent, **EXACT)
    for name, value in local.named_buffers():
        assert torch.equal(value, sent[name]), name
    assert local[1].num_batches_tracked.dtype == torch.int64


def test_training_flags_stay_as_they_were():
    local, received = twins(normalised)
    local.train()
    local[1].eval()
    received.eval()
    before = [m.training for model in (local, received) for m in model.modules()]
    ALA(batch_size=4).initialize(local, received, (normal(11, 1, 4, 4), labels(11)))
    assert [m.training for model in (local, received) for m in model.modules()] == before

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("the user's loss fails")

    with pytest.raises(RuntimeError, match="the user's loss fails"):
        ALA().initialize(local, received, (normal(11, 1, 4, 4), labels(11)), loss=broken)
    assert [m.training for model in (local, received) for m in model.modules()] == before


def test_frozen_parameters_are_not_blended_and_do_not_count():
    """The head is frozen, so the layer below it is the first that counts."""
    local, received = twins(mlp)
    for model in (local, received):
        for layer in (model[0], model[4]):
            layer.requires_grad_(False)
    assert ALA(1).governs(local) == ALA(2).governs(local) == ("2.weight", "2.bias")
    expected, weights, _ = learn_like_the_authors(
        local, received, POINTS, labels(11), ("2.weight", "2.bias")
    )
    ala = ALA(1, sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (POINTS, labels(11)))
    assert [p.requires_grad for p in local.parameters()] == [False, False, True, True, False, False]
    assert_same(entries(local), entries(expected), **FINE)
    assert_same(ala.weights, weights, **FINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_in_the_models_precision(dtype):
    local, received = twins(mlp)
    expected, *_ = learn_like_the_authors(local, received, POINTS, labels(11), ALA().governs(local))
    local.to(dtype), received.to(dtype)
    ala = ALA(sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (POINTS.to(dtype), labels(11)))
    assert {value.dtype for value in (*ala.weights.values(), *local.parameters())} == {dtype}
    tolerance = FINE if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert_same(local.double(), expected, **tolerance)


# --- models that notice their layout --------------------------------------------------------------


class Views(nn.Module):
    """Flattens with `view`, as the PyTorch tutorial's network does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(self.conv1(x).relu()).relu()
        assert h.is_contiguous()
        return self.fc(h.view(-1, 16))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_model_that_flattens_with_view_gives_the_same(layers):
    local, received = twins(Views)
    x, y = normal(11, 2, 4, 4), labels(11)
    governed = ALA(layers).governs(local, x[:2])
    expected, weights, _ = learn_like_the_authors(local, received, x, y, governed)
    ala = ALA(layers, sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (x, y))
    assert_same(local, expected, **FINE)
    assert_same(ala.weights, weights, **FINE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_learns_in_half_precision(dtype):
    local, received = twins(mlp)
    local.to(dtype), received.to(dtype)
    ala = ALA(batch_size=4, max_epochs=2, sample=1.0)
    report = ala.initialize(local, received, (POINTS, labels(11)))
    assert (report.epochs, report.fault) == (2, None)
    assert {value.dtype for value in (*ala.weights.values(), *local.parameters())} == {dtype}
