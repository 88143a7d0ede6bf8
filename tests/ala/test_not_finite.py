"""Numbers that are not finite do no lasting harm."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ala.common import (
    EXACT,
    GOOD,
    assert_same,
    entries,
    labels,
    make_learned_ala,
    mlp,
    normal,
    poison,
    twins,
)
from ala.models import normalised
from torch import Tensor, nn

from fedala import ALA, UserError


def fails_late(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = itertools.count()
    return lambda output, target: (
        F.cross_entropy(output, target) * (float("inf") if next(calls) >= after else 1)
    )


def infinite_slope(output: Tensor, target: Tensor) -> Tensor:
    """A finite loss whose gradient is not: the slope of the root at zero, times zero."""
    return F.cross_entropy(output, target) + (output * 0).abs().sqrt().sum()


BAD_ROUNDS: dict[str, tuple[Any, Callable[[Any, Any], Tensor]]] = {
    "data": ((poison(GOOD[0]), GOOD[1]), F.cross_entropy),
    "loss": (GOOD, lambda output, target: F.cross_entropy(output, target) * float("nan")),
    "late loss": (GOOD, fails_late(1)),
    "gradient": (GOOD, infinite_slope),
}


@pytest.mark.parametrize("case", BAD_ROUNDS)
def test_a_bad_round_leaves_what_was_learned_and_blends_with_it(case):
    data, loss = BAD_ROUNDS[case]
    ala = make_learned_ala()
    before = {name: value.clone() for name, value in ala.weights.items()}
    local, received = twins(mlp, 2)
    old, new = entries(local), entries(received)
    report = ala.initialize(local, received, data, loss=loss)
    assert "weight learning was not finite" in report.fault
    assert (report.epochs, report.losses, report.skipped, ala.round) == (0, (), True, 2)
    assert_same(ala.weights, before, **EXACT)
    blend = {n: old[n] + (new[n] - old[n]) * before[n] if n in before else new[n] for n in old}
    assert_same(local, blend, **EXACT)
    # The next round starts from there, as if the bad one had been skipped.
    other = make_learned_ala()
    other.round = 2
    results = []
    for each in (ala, other):
        model, sent = twins(mlp, 3)
        results.append((each.initialize(model, sent, GOOD), entries(model)))
    assert results[0][0] == results[1][0]
    assert results[0][0].epochs == 1
    assert_same(results[0][1], results[1][1], **EXACT)


@pytest.mark.parametrize("case", BAD_ROUNDS)
def test_a_bad_first_round_takes_the_received_model_and_does_not_count_as_initial(case):
    data, loss = BAD_ROUNDS[case]
    ala = ALA(batch_size=4, max_epochs=2, sample=1.0)
    local, received = twins(mlp)
    report = ala.initialize(
        local, received, data, loss=fails_late(1) if case == "late loss" else loss
    )
    assert report.fault
    assert not report.initial
    assert_same(local, received, **EXACT)
    assert all((value == 1).all() for value in ala.weights.values())
    report = ala.initialize(*twins(mlp, 1), GOOD)
    assert (report.initial, report.epochs, report.fault) == (True, 2, None)


def spoil(model: nn.Module, name: str, value: float = float("nan")) -> nn.Module:
    with torch.no_grad():
        dict([*model.named_parameters(), *model.named_buffers()])[name].view(-1)[0] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_received_model_replaces_a_local_one_that_is_not_finite(value):
    ala = make_learned_ala()
    before = {name: tensor.clone() for name, tensor in ala.weights.items()}
    local, received = twins(mlp, 2)
    report = ala.initialize(spoil(local, "4.weight", value), received, GOOD)
    assert "local model is not finite" in report.fault
    assert report.epochs == 0
    assert_same(local, received, **EXACT)
    assert_same(ala.weights, before, **EXACT)
    assert ala.initialize(*twins(mlp, 3), GOOD).fault is None


def test_lower_layers_that_are_not_finite_are_overwritten_without_a_fault():
    local, received = twins(mlp)
    report = ALA(max_epochs=2).initialize(spoil(local, "0.weight"), received, GOOD)
    assert (report.fault, report.epochs) == (None, 2)
    assert all(parameter.isfinite().all() for parameter in local.parameters())


@pytest.mark.parametrize(
    ("make", "name", "data"),
    [
        (mlp, "4.bias", GOOD),
        (mlp, "0.weight", GOOD),
        (normalised, "1.running_var", (normal(8, 1, 4, 4), labels(8))),
    ],
)
@pytest.mark.parametrize("options", [{}, {"layers": 0}, {"start_round": 9}])
def test_a_received_model_that_is_not_finite_changes_nothing(make, name, data, options):
    ala = ALA(max_epochs=2, **options)
    ala.initialize(*twins(make, 1), data)
    before, (local, received) = ala.state_dict(), twins(make, 2)
    old = entries(local)
    report = ala.initialize(local, spoil(received, name), data)
    assert "received model is not finite" in report.fault
    assert report.epochs == 0
    assert_same(local, old, **EXACT)
    assert_same(ala.state_dict(), {**before, "round": torch.tensor(2)}, **EXACT)


def test_two_models_that_are_not_finite_are_refused():
    ala = make_learned_ala()
    before = ala.state_dict()
    local, received = twins(mlp, 2)
    with pytest.raises(UserError, match=r"4\.bias of the received.*0\.weight of the local"):
        ala.initialize(spoil(local, "0.weight"), spoil(received, "4.bias"), GOOD)
    assert_same(ala.state_dict(), before, **EXACT)


class Masked(nn.Module):
    """Its mask holds minus infinity, as attention masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0, 0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.body(x) + self.mask).softmax(1))


def test_infinities_that_both_models_share_are_not_a_fault():
    local, received = Masked().double(), Masked().double()
    report = ALA(max_epochs=2).initialize(local, received, GOOD)
    assert (report.fault, report.epochs) == (None, 2)
    assert "received" in ALA().initialize(local, spoil(received, "mask"), GOOD).fault
