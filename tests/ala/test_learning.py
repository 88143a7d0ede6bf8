"""ALA on small problems: values by hand, invariants, stages and samples."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from ala.common import (
    EXACT,
    FINE,
    ONE,
    TWO,
    assert_same,
    column,
    entries,
    labels,
    line,
    mlp,
    normal,
    numbers,
    script_loss,
    twins,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedala import ALA

# --- by hand --------------------------------------------------------------------------------------


def test_two_rounds_by_hand():
    """ŵ = ax + b, squared loss, η = 1/4, batches {(1, 1), (−1, 1)} and the partial {(2, 1.75)}.

    Round 1, w = (0, 0), g = (1, 1), so g − w = (1, 1); W = (1, 1), ŵ = (1, 1):
      batch 1: errors 1, −1; loss 1; ∂ŵ = (mean 2ex, mean 2e) = (2, 0);
               W = (1 − 2/4, 1) = (0.5, 1), ŵ = (0.5, 1)
      batch 2: error 0.25; loss 0.0625; ∂ŵ = (1, 0.5); W = (0.25, 0.875), ŵ = (0.25, 0.875)
      epoch loss = mean of the two batches = 0.53125
    Round 2, w = (−1, 0), g = (1, 1), so g − w = (2, 1); W as it was,
    ŵ = (−1 + 2·0.25, 0.875) = (−0.5, 0.875):
      batch 1: errors −0.625, 0.375; loss 0.265625; ∂ŵ = (−1, −0.25);
               W = (0.25 + 2/4, 0.875 + 0.0625) = (0.75, 0.9375), ŵ = (0.5, 0.9375)
      batch 2: error 0.1875; loss 0.03515625; ∂ŵ = (0.75, 0.375);
               W = (0.375, 0.84375), ŵ = (−0.25, 0.84375)
    """
    ala = ALA(layers=1, eta=0.25, sample=1.0, batch_size=2, max_epochs=1)
    data = (column(1, -1, 2), column(1, 1, 1.75))

    model = line(0, 0)
    report = ala.initialize(model, line(1, 1), data, loss=F.mse_loss)
    assert numbers(ala.weights) == [0.25, 0.875]
    assert [p.item() for p in model.parameters()] == [0.25, 0.875]
    assert report.losses == (0.53125,)
    assert report.weight_mean == 0.5625

    model = line(-1, 0)
    report = ala.initialize(model, line(1, 1), data, loss=F.mse_loss)
    assert numbers(ala.weights) == [0.375, 0.84375]
    assert [p.item() for p in model.parameters()] == [-0.25, 0.84375]
    assert report.losses == (0.150390625,)


def test_weights_are_clipped_at_both_ends_by_hand():
    """η = 1/8, w = (0, 0), g = (1, 2), so g − w = (1, 2); W = (1, 1), ŵ = (1, 2).

    batch (1, 2): error 1, loss 1, ∂ŵ = (2, 2); W = (1 − 2/8, 1 − 4/8) = (0.75, 0.5), ŵ = (0.75, 1)
    batch (−2, −3.5): error −0.5 + 3.5 = 3, loss 9, ∂ŵ = (−12, 6);
                      W = clip(0.75 + 1.5, 0.5 − 1.5) = (1, 0), ŵ = (1, 0)
    """
    ala = ALA(eta=0.125, sample=1.0, batch_size=1, max_epochs=1)
    model = line(0, 0)
    report = ala.initialize(model, line(1, 2), (column(1, -2), column(2, -3.5)), loss=F.mse_loss)
    assert numbers(ala.weights) == [1, 0]
    assert [p.item() for p in model.parameters()] == [1, 0]
    assert report.losses == (5.0,)


# --- the invariants of the blend ------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    layers=st.integers(0, 2),
    size=st.integers(1, 9),
    eta=st.sampled_from([0.01, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_weights_stay_in_the_unit_interval_and_the_blend_between_the_models(
    widths, layers, size, eta, seed
):
    sides = [3, *widths, 2]
    layers = min(layers, len(sides) - 1)
    stack = [nn.Linear(a, b) for a, b in itertools.pairwise(sides)]
    local, received = twins(lambda: nn.Sequential(*copy.deepcopy(stack)), seed)
    before, sent = entries(local), entries(received)
    ala = ALA(layers, eta=eta, batch_size=4, max_epochs=3, seed=seed)
    data = (normal(size, 3, seed=seed), labels(size, 2, seed))
    for _ in range(2):
        local.load_state_dict(before)
        ala.initialize(local, received, data)
        for name, value in ala.weights.items():
            assert value.shape == before[name].shape
            assert 0 <= value.min() <= value.max() <= 1
    governed = ala.governs(local)
    assert len(governed) == 2 * layers
    for name, value in entries(local).items():
        if name in governed:
            low, high = (
                torch.minimum(before[name], sent[name]),
                torch.maximum(before[name], sent[name]),
            )
            assert (value >= low - 1e-12).all()
            assert (value <= high + 1e-12).all()
        else:
            assert torch.equal(value, sent[name])


def test_no_layers_is_the_overwrite_of_fedavg():
    local, received = twins(mlp)
    report = ALA(layers=0).initialize(local, received, (normal(8, 4), labels(8)))
    assert report.skipped
    assert_same(local, received, **EXACT)


@pytest.mark.parametrize("value", [1.0, 0.0, 0.25])
def test_weights_of_one_take_the_received_model_and_of_zero_keep_the_upper_layers(value):
    local, received = twins(mlp)
    old, new = entries(local), entries(received)
    ala = ALA(layers=1, freeze=True)
    weights = {f"weights.{name}": torch.full_like(old[name], value) for name in ala.governs(local)}
    ala.load_state_dict({"round": torch.tensor(5), "trained": torch.tensor(True), **weights})
    report = ala.initialize(local, received, (normal(8, 4), labels(8)))
    assert report.skipped
    assert report.weight_mean == value
    expected = {
        n: old[n] + (new[n] - old[n]) * value if n.startswith("4.") else new[n] for n in old
    }
    assert_same(local, expected, **FINE)


def test_only_the_local_model_is_changed_and_nothing_is_shared():
    local, received = twins(mlp)
    sent = entries(received)
    storage = [p.data_ptr() for p in local.parameters()]
    flags = [p.requires_grad for p in local.parameters()]
    ALA(layers=2, batch_size=4).initialize(local, received, (normal(8, 4), labels(8)))
    assert_same(received, sent, **EXACT)
    assert [p.data_ptr() for p in local.parameters()] == storage
    assert [p.requires_grad for p in local.parameters()] == flags
    assert all(p.grad is None for model in (local, received) for p in model.parameters())


# --- when it learns, and for how long -------------------------------------------------------------


def test_the_initial_stage_needs_eleven_epochs_even_of_equal_losses():
    report = ALA().initialize(*twins(mlp), ONE, loss=script_loss([], then=2.0))
    assert report.losses == (2.0,) * 11
    assert (report.initial, report.converged, report.capped) == (True, True, False)


def test_the_initial_stage_ends_when_ten_losses_in_a_row_have_settled():
    """The last restless loss is the fourth: the window is free of it after epoch 4 + 10."""
    report = ALA().initialize(*twins(mlp), ONE, loss=script_loss([5, 1, 5, 1], then=2.0))
    assert report.epochs == 14
    assert report.converged


@pytest.mark.parametrize(("threshold", "epochs"), [(1.02, 11), (0.98, 40)])
def test_the_spread_is_the_population_std(threshold, epochs):
    """Losses 0, 2, 0, 2, …: the population std of ten is 1, the sample std √(10/9) = 1.054."""
    ala = ALA(threshold=threshold, max_epochs=40)
    report = ala.initialize(*twins(mlp), ONE, loss=script_loss([0, 2] * 20))
    assert report.epochs == epochs
    assert report.converged == (threshold > 1)
    assert report.capped == (threshold < 1)


def test_the_spread_must_be_below_the_threshold_not_at_it():
    assert (
        ALA(threshold=1, max_epochs=20)
        .initialize(*twins(mlp), ONE, loss=script_loss([0, 2] * 20))
        .capped
    )
    assert ALA(threshold=0, max_epochs=20).initialize(*twins(mlp), ONE, loss=script_loss([])).capped


def test_an_epochs_loss_is_the_mean_of_its_batches():
    """Two batches an epoch: steady means settle, steady last batches alone do not."""
    steady = ALA(batch_size=1, sample=1, max_epochs=30)
    report = steady.initialize(*twins(mlp), TWO, loss=script_loss([1, 3, 3, 1] * 30))
    assert report.losses == (2.0,) * 11
    restless = ALA(batch_size=1, sample=1, max_epochs=30)
    report = restless.initialize(*twins(mlp), TWO, loss=script_loss([1, 2, 3, 2] * 30))
    assert report.losses[:2] == (1.5, 2.5)
    assert report.epochs == 30


def test_the_cap_ends_the_initial_stage_and_is_reported():
    report = ALA(max_epochs=5).initialize(*twins(mlp), ONE, loss=script_loss([0, 9] * 9))
    assert (report.epochs, report.initial, report.converged, report.capped) == (
        5,
        True,
        False,
        True,
    )


def test_every_later_round_is_one_epoch():
    ala = ALA()
    assert ala.initialize(*twins(mlp), ONE).initial
    for seed in (1, 2):
        report = ala.initialize(*twins(mlp, seed), ONE, loss=script_loss([0, 9] * 9))
        assert (report.epochs, report.initial, report.converged, report.capped) == (
            1,
            False,
            None,  # it is a criterion of the initial stage alone
            False,
        )


def test_min_epochs_holds_in_every_round():
    ala = ALA(min_epochs=13)
    assert ala.initialize(*twins(mlp), ONE, loss=script_loss([], then=1.0)).epochs == 13
    assert ala.initialize(*twins(mlp), ONE, loss=script_loss([], then=1.0)).epochs == 13
    ala = ALA(min_epochs=6)
    assert ala.initialize(*twins(mlp), ONE, loss=script_loss([], then=1.0)).epochs == 11
    assert ala.initialize(*twins(mlp), ONE, loss=script_loss([], then=1.0)).epochs == 6


def test_before_start_round_the_received_model_overwrites_and_the_initial_stage_waits():
    ala = ALA(start_round=3, batch_size=4, max_epochs=4)
    data = (normal(8, 4), labels(8))
    for seed in (1, 2):
        local, received = twins(mlp, seed)
        report = ala.initialize(local, received, data)
        assert report.skipped
        assert not report.initial
        assert_same(local, received, **EXACT)
    local, received = twins(mlp, 3)
    report = ala.initialize(local, received, data)
    assert (report.initial, report.epochs) == (True, 4)
    assert ala.initialize(*twins(mlp, 4), data).epochs == 1


def test_freeze_learns_in_the_initial_stage_only_and_still_blends():
    ala = ALA(freeze=True, batch_size=4, max_epochs=3)
    data = (normal(8, 4), labels(8))
    assert ala.initialize(*twins(mlp), data).epochs == 3
    learned = {name: value.clone() for name, value in ala.weights.items()}
    assert any((value < 1).any() for value in learned.values())
    local, received = twins(mlp, 1)
    old, new = entries(local), entries(received)
    assert ala.initialize(local, received, data).skipped
    assert_same(ala.weights, learned, **EXACT)
    blend = {n: old[n] + (new[n] - old[n]) * learned[n] if n in learned else new[n] for n in old}
    assert_same(local, blend, **FINE)


def test_equal_models_are_skipped_and_do_not_use_up_the_initial_stage():
    ala = ALA(max_epochs=4)
    local, received = twins(mlp)
    with torch.no_grad():  # only the governed layers must be equal; the others are overwritten
        for a, b in zip(local[4].parameters(), received[4].parameters(), strict=True):
            a.copy_(b)
    assert ala.initialize(local, received, (normal(8, 4), labels(8))).skipped
    assert_same(local, received, **EXACT)
    assert all((value == 1).all() for value in ala.weights.values())
    report = ala.initialize(*twins(mlp), (normal(8, 4), labels(8)))
    assert (report.initial, report.epochs) == (True, 4)


def test_one_element_that_differs_is_not_equal():
    local, received = twins(mlp)
    local.load_state_dict(received.state_dict())
    with torch.no_grad():
        local[4].bias[2] += 1
    assert not ALA(max_epochs=1).initialize(local, received, (normal(8, 4), labels(8))).skipped


# --- on which samples -----------------------------------------------------------------------------


def visit_samples(ala: ALA, size: int, seed: int = 0) -> list[list[int]]:
    """Which samples one round's weight learning saw, batch by batch: sample i has the target i."""
    seen: list[list[int]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target.tolist())
        return output.mean()

    ala.initialize(*twins(mlp, seed), (normal(size, 4), torch.arange(size)), loss=loss)
    return seen


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [
        (0.8, 10, 8),
        (0.8, 25, 20),
        (1.0, 7, 7),
        (0.05, 100, 5),
        (0.05, 3, 1),
        (0.8, 1, 1),
        (0.29, 100, 29),
        (0.57, 100, 57),
    ],
)
def test_the_sample_is_its_share_without_replacement_in_order(share, size, count):
    """0.29 · 100 and 0.57 · 100 are a little less than whole numbers in floating point."""
    batches = visit_samples(ALA(sample=share, batch_size=4, max_epochs=1), size)
    seen = [sample for batch in batches for sample in batch]
    assert len(seen) == count
    assert seen == sorted(set(seen))
    assert set(seen) <= set(range(size))
    assert [len(batch) for batch in batches] == [4] * (count // 4) + [count % 4] * bool(count % 4)


def test_the_sample_stays_within_a_round_and_changes_from_round_to_round():
    ala = ALA(sample=0.5, batch_size=10, max_epochs=3)
    first = visit_samples(ala, 20)
    assert first[0] == first[1] == first[2]
    later = [visit_samples(ala, 20)[0] for _ in range(3)]
    assert len({tuple(sample) for sample in [first[0], *later]}) == 4
    assert len({sample for samples in [first[0], *later] for sample in samples}) > 15


def test_the_sample_is_random_not_a_window():
    samples = [
        visit_samples(ALA(sample=0.5, batch_size=99, max_epochs=1, seed=seed), 20)[0]
        for seed in range(5)
    ]
    assert any(max(sample) - min(sample) > 10 for sample in samples)
    assert len({tuple(sample) for sample in samples}) > 1


def test_the_same_seed_gives_the_same_result():
    def two_rounds(seed: int) -> dict[str, Tensor]:
        ala = ALA(layers=2, sample=0.5, batch_size=3, max_epochs=3, seed=seed)
        data = (normal(20, 4), labels(20))
        ala.initialize(*twins(mlp, 1), data)
        local, received = twins(mlp, 2)
        ala.initialize(local, received, data)
        return entries(local)

    first = two_rounds(7)
    torch.rand(3)  # global generators do not matter
    assert_same(two_rounds(7), first, **EXACT)
    assert any(
        not torch.equal(a, b) for a, b in zip(two_rounds(8).values(), first.values(), strict=True)
    )


@pytest.mark.parametrize(
    "data", [(normal(0, 4), labels(0)), TensorDataset(normal(0, 4), labels(0))]
)
def test_a_client_without_samples_keeps_the_received_model(data):
    local, received = twins(mlp)
    ala = ALA()
    assert ala.initialize(local, received, data).skipped
    assert_same(local, received, **EXACT)
    assert ala.initialize(*twins(mlp), ONE).initial
