"""ALA as a drop-in: values worked out by hand, invariants, and the paper's algorithm written out plainly beside it.

`by_the_paper` below is Algorithm 1's ALA (lines 7–15) for one client, on whole modules, rebuilt after every batch, with
no cached features. What `fedala.ALA` gives must agree with it whatever the module looks like inside.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from fedala import ALA, UserError

Weights = dict[str, Tensor]


def forward(model: nn.Module, x: Any) -> Any:
    return model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, dict) else model(x)


def part(x: Any, rows: slice) -> Any:
    if isinstance(x, tuple):
        return tuple(value[rows] for value in x)
    return {key: value[rows] for key, value in x.items()} if isinstance(x, dict) else x[rows]


def by_the_paper(
    local: nn.Module,
    received: nn.Module,
    x: Any,
    y: Tensor,
    governed: Sequence[str],
    *,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    epochs: int = 3,
    eta: float = 1.0,
    batch_size: int = 4,
    weights: Weights | None = None,
) -> tuple[nn.Module, Weights, list[float]]:
    """The initialised model, W, and the mean loss of each epoch; every epoch visits all samples in their order."""
    old, new = dict(local.named_parameters()), dict(received.named_parameters())
    hat = copy.deepcopy(received).eval()  # lower layers and buffers are the received ones
    mine = dict(hat.named_parameters())
    weights = (
        {name: torch.ones_like(new[name]) for name in governed}
        if weights is None
        else dict(weights)
    )
    for parameter in mine.values():
        parameter.requires_grad_(True)

    def rebuild() -> None:
        with torch.no_grad():
            for name in governed:
                mine[name].copy_(old[name] + (new[name] - old[name]) * weights[name])

    losses = []
    rebuild()
    for _ in range(epochs):
        of_batches = []
        for first in range(0, len(y), batch_size):
            rows = slice(first, first + batch_size)
            hat.zero_grad()
            value = loss(forward(hat, part(x, rows)), y[rows])
            value.backward()
            for name in governed:
                step = mine[name].grad * (new[name] - old[name]).detach()
                weights[name] = (weights[name] - eta * step).clamp(0, 1).detach()
            rebuild()
            of_batches.append(value.item())
        losses.append(float(np.mean(of_batches)))
    return hat, weights, losses


def twins(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """A local and a received model that differ everywhere, the running statistics included; float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        local, received = make().double(), make().double()
        for model in (local, received):
            for (
                parameter
            ) in model.parameters():  # layers such as BatchNorm start alike in every model
                parameter.data += 0.1 * torch.randn_like(parameter)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer += torch.rand_like(buffer)
                else:
                    buffer += int(torch.randint(1, 9, ()))
    return local, received


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def labels(size: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(classes, size=size))


def entries(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as copies."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value.detach().clone() for name, value in named}


def assert_same(
    model: nn.Module | dict[str, Tensor], expected: nn.Module | dict[str, Tensor], **kwargs: Any
) -> None:
    a, b = (entries(m) if isinstance(m, nn.Module) else m for m in (model, expected))
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **kwargs
        )


EXACT = {"rtol": 0, "atol": 0}
FINE = {"rtol": 1e-10, "atol": 1e-12}


def line(weight: float, bias: float) -> nn.Module:
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(weight)
        model.bias.fill_(bias)
    return model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def numbers(tensors: dict[str, Tensor]) -> list[float]:
    return [value.item() for value in tensors.values()]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def scripted(values: Sequence[float], then: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that takes these values, batch after batch, and has no gradient: only the stopping rule is at work."""
    remaining = iter(values)
    return lambda output, target: output.sum() * 0 + next(remaining, then)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_two_rounds_by_hand():
    """ŵ = ax + b, squared loss, η = 1/4, batches {(1, 1), (−1, 1)} and the partial {(2, 1.75)}.

    Round 1, w = (0, 0), g = (1, 1), so g − w = (1, 1); W = (1, 1), ŵ = (1, 1):
      batch 1: errors 1, −1; loss 1; ∂ŵ = (mean 2ex, mean 2e) = (2, 0); W = (1 − 2/4, 1) = (0.5, 1), ŵ = (0.5, 1)
      batch 2: error 0.25; loss 0.0625; ∂ŵ = (1, 0.5); W = (0.25, 0.875), ŵ = (0.25, 0.875)
      epoch loss = mean of the two batches = 0.53125
    Round 2, w = (−1, 0), g = (1, 1), so g − w = (2, 1); W as it was, ŵ = (−1 + 2·0.25, 0.875) = (−0.5, 0.875):
      batch 1: errors −0.625, 0.375; loss 0.265625; ∂ŵ = (−1, −0.25); W = (0.25 + 2/4, 0.875 + 0.0625) = (0.75, 0.9375)
               ŵ = (0.5, 0.9375)
      batch 2: error 0.1875; loss 0.03515625; ∂ŵ = (0.75, 0.375); W = (0.375, 0.84375), ŵ = (−0.25, 0.84375)
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
    batch (−2, −3.5): error −0.5 + 3.5 = 3, loss 9, ∂ŵ = (−12, 6); W = clip(0.75 + 1.5, 0.5 − 1.5) = (1, 0), ŵ = (1, 0)
    """
    ala = ALA(eta=0.125, sample=1.0, batch_size=1, max_epochs=1)
    model = line(0, 0)
    report = ala.initialize(model, line(1, 2), (column(1, -2), column(2, -3.5)), loss=F.mse_loss)
    assert numbers(ala.weights) == [1, 0]
    assert [p.item() for p in model.parameters()] == [1, 0]
    assert report.losses == (5.0,)


# --- the invariants of the blend -------------------------------------------------------------------------------------


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


# --- when it learns, and for how long --------------------------------------------------------------------------------

ONE = (torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
TWO = (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))


def test_the_initial_stage_needs_eleven_epochs_even_of_equal_losses():
    report = ALA().initialize(*twins(mlp), ONE, loss=scripted([], then=2.0))
    assert report.losses == (2.0,) * 11
    assert (report.initial, report.converged, report.capped) == (True, True, False)


def test_the_initial_stage_ends_when_ten_losses_in_a_row_have_settled():
    """The last restless loss is the fourth: the window is free of it after epoch 4 + 10."""
    report = ALA().initialize(*twins(mlp), ONE, loss=scripted([5, 1, 5, 1], then=2.0))
    assert report.epochs == 14
    assert report.converged


@pytest.mark.parametrize(("threshold", "epochs"), [(1.02, 11), (0.98, 40)])
def test_the_spread_is_the_population_std(threshold, epochs):
    """Losses 0, 2, 0, 2, …: the population std of ten is 1, the sample std √(10/9) = 1.054."""
    ala = ALA(threshold=threshold, max_epochs=40)
    report = ala.initialize(*twins(mlp), ONE, loss=scripted([0, 2] * 20))
    assert report.epochs == epochs
    assert report.converged == (threshold > 1)
    assert report.capped == (threshold < 1)


def test_the_spread_must_be_below_the_threshold_not_at_it():
    assert (
        ALA(threshold=1, max_epochs=20)
        .initialize(*twins(mlp), ONE, loss=scripted([0, 2] * 20))
        .capped
    )
    assert ALA(threshold=0, max_epochs=20).initialize(*twins(mlp), ONE, loss=scripted([])).capped


def test_an_epochs_loss_is_the_mean_of_its_batches():
    """Two batches an epoch. Steady means under restless last batches settle; steady last batches alone do not."""
    steady = ALA(batch_size=1, sample=1, max_epochs=30)
    report = steady.initialize(*twins(mlp), TWO, loss=scripted([1, 3, 3, 1] * 30))
    assert report.losses == (2.0,) * 11
    restless = ALA(batch_size=1, sample=1, max_epochs=30)
    report = restless.initialize(*twins(mlp), TWO, loss=scripted([1, 2, 3, 2] * 30))
    assert report.losses[:2] == (1.5, 2.5)
    assert report.epochs == 30


def test_the_cap_ends_the_initial_stage_and_is_reported():
    report = ALA(max_epochs=5).initialize(*twins(mlp), ONE, loss=scripted([0, 9] * 9))
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
        report = ala.initialize(*twins(mlp, seed), ONE, loss=scripted([0, 9] * 9))
        assert (report.epochs, report.initial, report.converged, report.capped) == (
            1,
            False,
            False,
            False,
        )


def test_min_epochs_holds_in_every_round():
    ala = ALA(min_epochs=13)
    assert ala.initialize(*twins(mlp), ONE, loss=scripted([], then=1.0)).epochs == 13
    assert ala.initialize(*twins(mlp), ONE, loss=scripted([], then=1.0)).epochs == 13
    ala = ALA(min_epochs=6)
    assert ala.initialize(*twins(mlp), ONE, loss=scripted([], then=1.0)).epochs == 11
    assert ala.initialize(*twins(mlp), ONE, loss=scripted([], then=1.0)).epochs == 6


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


def test_freeze_learns_in_the_initial_stage_only_and_goes_on_blending():
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
    with (
        torch.no_grad()
    ):  # equal on the governed layers is enough; lower down they differ, and are overwritten
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


# --- on which samples ------------------------------------------------------------------------------------------------


def visited(ala: ALA, size: int, seed: int = 0) -> list[list[int]]:
    """Which samples one round's weight learning saw, batch by batch: sample i has the target i."""
    seen: list[list[int]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target.tolist())
        return output.mean()

    ala.initialize(*twins(mlp, seed), (normal(size, 4), torch.arange(size)), loss=loss)
    return seen


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [(0.8, 10, 8), (0.8, 25, 20), (1.0, 7, 7), (0.05, 100, 5), (0.05, 3, 1), (0.8, 1, 1)],
)
def test_the_sample_is_its_share_without_replacement_in_order(share, size, count):
    batches = visited(ALA(sample=share, batch_size=4, max_epochs=1), size)
    seen = [sample for batch in batches for sample in batch]
    assert len(seen) == count
    assert seen == sorted(set(seen))
    assert set(seen) <= set(range(size))
    assert [len(batch) for batch in batches] == [4] * (count // 4) + [count % 4] * bool(count % 4)


def test_the_sample_is_kept_within_a_round_and_drawn_anew_each_round():
    ala = ALA(sample=0.5, batch_size=10, max_epochs=3)
    first = visited(ala, 20)
    assert first[0] == first[1] == first[2]
    later = [visited(ala, 20)[0] for _ in range(3)]
    assert len({tuple(sample) for sample in [first[0], *later]}) == 4
    assert len({sample for samples in [first[0], *later] for sample in samples}) > 15


def test_the_sample_is_random_not_a_window():
    samples = [
        visited(ALA(sample=0.5, batch_size=99, max_epochs=1, seed=seed), 20)[0] for seed in range(5)
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
    torch.rand(3)  # the generators that run on are none of its business
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


# --- any module ------------------------------------------------------------------------------------------------------


class Ends(nn.Module):
    """A model whose last layer with parameters is followed by something: its output is not the model's."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.fc, self.end = nn.Linear(4, 5), nn.Linear(5, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.fc(self.body(x).tanh()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.fc = (
            nn.Embedding(9, 4),
            nn.GRU(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = (
            nn.Embedding(9, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.fc(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Tagger(nn.Module):
    """An answer for every position; the samples' positions go through the last layer as one long batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.embedding(x).flatten(0, 1))


class Tied(nn.Module):
    """The output layer's weight is the embedding's; its bias is its own."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.hidden, self.decoder = (
            nn.Embedding(9, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 9, bias=bias),
        )
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.hidden(self.embedding(x).mean(1)).tanh())


class TiedBelow(nn.Module):
    """The same with the output layer registered first: the weight goes by its name, and is at work below it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.decoder, self.embedding = (
            nn.Linear(4, 4),
            nn.Linear(4, 9),
            nn.Embedding(9, 4),
        )
        self.embedding.weight = self.decoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.hidden(self.embedding(x).mean(1)).tanh())


class Unseen(nn.Module):
    """Uses its last layer's weight below it, without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.linear(self.body(x), self.fc.weight).tanh())


class TimeFirst(nn.Module):
    """An answer for every position, positions first: with two or three of them, as many as a small batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.embedding(x).transpose(0, 1))


class Bytes(nn.Module):
    """Does what it likes with images of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8
        return self.fc(self.body(x.double() / 100).tanh())


class HeadFirst(nn.Module):
    """Registers its output layer first: the last registered layer is not the last that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).tanh())


class Twice(nn.Module):
    """Goes through its last layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(self.body(x)).tanh())


class Scaled(nn.Module):
    """A parameter outside any layer, and a buffer in a module that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body, self.norm, self.fc = (
            nn.Linear(4, 5),
            nn.BatchNorm1d(5, affine=False),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.body(x))) * self.scale


def batch_statistics() -> nn.Module:
    """Normalises by the batch it is in, in evaluation as well: a sample's features depend on its neighbours."""
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)
    )


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(12, 5),
        nn.BatchNorm1d(5), nn.Linear(5, 3),
    )  # fmt: skip


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.fc = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.fc((self.left(left) + self.right(right)).tanh())


WORDS = labels(11, 9 * 7, seed=3) % 9
TEXTS = torch.from_numpy(np.random.default_rng(5).integers(9, size=(11, 6)))
POINTS = normal(11, 4)
PAIR = (normal(11, 4), normal(11, 2, seed=1))


def per_position(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


def positions_first(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.permute(1, 2, 0), target)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, Callable[[Any, Any], Tensor]]] = {
    "sequential": (mlp, POINTS, labels(11), F.cross_entropy),
    "log-softmax": (lambda: Ends(lambda z: z.log_softmax(1)), POINTS, labels(11), F.nll_loss),
    "softmax": (lambda: Ends(lambda z: z.softmax(1)), POINTS, labels(11), F.cross_entropy),
    "inplace-relu": (
        lambda: Ends(lambda z: F.relu(z, inplace=True)),
        POINTS,
        labels(11),
        F.cross_entropy,
    ),
    "inplace-scale": (lambda: Ends(lambda z: z.mul_(0.1)), POINTS, labels(11), F.cross_entropy),
    "squeezed": (lambda: Ends(lambda z: z.sum(1)), POINTS, normal(11), F.mse_loss),
    "gru": (Recurrent, TEXTS, labels(11), F.cross_entropy),
    "attention": (Attention, TEXTS, labels(11), F.cross_entropy),
    "tagger": (Tagger, TEXTS, TEXTS % 3, per_position),
    "two-positions-first": (TimeFirst, TEXTS[:, :2], TEXTS[:, :2] % 3, positions_first),
    "three-positions-first": (TimeFirst, TEXTS[:, :3], TEXTS[:, :3] % 3, positions_first),
    "tied": (Tied, TEXTS, WORDS, F.cross_entropy),
    "tied-below": (TiedBelow, TEXTS, WORDS, F.cross_entropy),
    "unseen": (Unseen, POINTS, labels(11), F.cross_entropy),
    "batch-statistics": (batch_statistics, POINTS, labels(11), F.cross_entropy),
    "bytes": (Bytes, (POINTS * 40 + 128).byte(), labels(11), F.cross_entropy),
    "tied-no-bias": (lambda: Tied(bias=False), TEXTS, WORDS, F.cross_entropy),
    "head-first": (HeadFirst, POINTS, labels(11), F.cross_entropy),
    "twice": (Twice, POINTS, labels(11), F.cross_entropy),
    "scaled": (Scaled, POINTS, labels(11), F.cross_entropy),
    "batch-norm": (normalised, normal(11, 1, 4, 4), labels(11), F.cross_entropy),
    "tuple": (TwoInputs, PAIR, labels(11), F.cross_entropy),
    "dict": (TwoInputs, {"right": PAIR[1], "left": PAIR[0]}, labels(11), F.cross_entropy),
    "regression": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        POINTS,
        normal(11, 2),
        F.mse_loss,
    ),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_any_module_gives_what_the_paper_says(case, layers):
    """Two rounds: the initial stage of three epochs, then one epoch that goes on from the same W."""
    make, x, y, loss = CASES[case]
    ala = ALA(layers, eta=2.0, sample=1.0, batch_size=4, max_epochs=3)
    weights = None
    for round, epochs in ((1, 3), (2, 1)):
        local, received = twins(make, round)
        governed = ala.governs(local)
        settings = {"loss": loss, "eta": 2.0, "epochs": epochs, "weights": weights}
        expected, weights, losses = by_the_paper(local, received, x, y, governed, **settings)
        report = ala.initialize(local, received, (x, y), loss=loss)
        assert_same(local, expected, **FINE)
        assert_same(ala.weights, weights, **FINE)
        assert report.losses == pytest.approx(losses, rel=1e-10)
    assert any((value != 1).any() for value in weights.values())


@pytest.mark.parametrize("case", ["tagger", "two-positions-first", "inplace-relu", "sequential"])
def test_a_single_sample_is_enough_for_the_same(case):
    make, x, y, loss = CASES[case]
    local, received = twins(make)
    expected, *_ = by_the_paper(local, received, x[:1], y[:1], ALA().governs(local), loss=loss)
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
    expected, *_ = by_the_paper(local, received, POINTS, labels(11), ("0.weight", "4.bias"))
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


def test_frozen_parameters_stay_frozen_and_do_not_disturb():
    """A body that never trains is the same everywhere; the head learns as if nothing were special."""
    local, received = twins(mlp)
    for model in (local, received):
        model[0].load_state_dict(received[0].state_dict())
        for layer in (model[0], model[4]):
            layer.requires_grad_(False)
    expected, weights, _ = by_the_paper(local, received, POINTS, labels(11), ALA(3).governs(local))
    ala = ALA(3, sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (POINTS, labels(11)))
    assert [p.requires_grad for p in local.parameters()] == [False, False, True, True, False, False]
    assert_same(entries(local), entries(expected), **FINE)
    assert_same(ala.weights, weights, **FINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_in_the_models_precision(dtype):
    local, received = twins(mlp)
    expected, *_ = by_the_paper(local, received, POINTS, labels(11), ALA().governs(local))
    local.to(dtype), received.to(dtype)
    ala = ALA(sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (POINTS.to(dtype), labels(11)))
    assert {value.dtype for value in (*ala.weights.values(), *local.parameters())} == {dtype}
    tolerance = FINE if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert_same(local.double(), expected, **tolerance)


# --- any data --------------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    """A map-style dataset of the user's own, that hands out one sample at a time, labels as plain numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


class Stream(IterableDataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


X, Y = normal(25, 4), labels(25)
SAME_DATA: dict[str, Callable[[], Any]] = {
    "list": lambda: [X, Y],
    "numpy": lambda: (X.numpy(), read_only(Y.numpy())),
    "list-loader": lambda: DataLoader(list(zip(X, Y, strict=True)), batch_size=7, shuffle=True),
    "tensor-sampler": lambda: DataLoader(Pairs(X, Y), batch_size=7, sampler=torch.randperm(25)),
    "batched-dataset": lambda: DataLoader(
        list(zip(X.split(10), Y.split(10), strict=True)), batch_size=None
    ),
    "tensor-dataset": lambda: TensorDataset(X, Y),
    "dataset": lambda: Pairs(X, Y),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=7),
    "shuffled-loader": lambda: DataLoader(Pairs(X, Y), batch_size=7, shuffle=True),
    "dropping-loader": lambda: DataLoader(Pairs(X, Y), batch_size=7, shuffle=True, drop_last=True),
    "stream": lambda: Stream(X, Y),
    "stream-loader": lambda: DataLoader(Stream(X, Y), batch_size=3),
}


def learned_on(data: Any, **options: Any) -> dict[str, Tensor]:
    local, received = twins(mlp)
    ALA(layers=2, batch_size=4, max_epochs=2, **options).initialize(local, received, data)
    return entries(local)


@pytest.mark.parametrize("kind", SAME_DATA)
def test_the_same_samples_give_the_same_result_in_whatever_they_come(kind):
    assert_same(learned_on(SAME_DATA[kind](), sample=0.6), learned_on((X, Y), sample=0.6), **FINE)


RESTRICTED: dict[str, Callable[[], DataLoader]] = {
    "sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(5, 15))
    ),
    "batch-sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=BatchSampler(SubsetRandomSampler(range(5, 15)), 4, False)
    ),
    "dropping": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(5, 15)), drop_last=True
    ),
    "repeating": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=[*range(14, 4, -1), 5, 5, 9]
    ),
    "batches-by-hand": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=[[14, 5, 6], [7, 8], [*range(8, 14)]]
    ),
}


@pytest.mark.parametrize("kind", RESTRICTED)
def test_a_loader_that_leaves_samples_out_is_obeyed(kind):
    """A sampler says which samples are the client's own; the rest of the dataset is other clients' or the test set."""
    assert_same(
        learned_on(RESTRICTED[kind](), sample=1.0),
        learned_on((X[5:15], Y[5:15]), sample=1.0),
        **FINE,
    )


def test_a_shuffled_loader_draws_nothing_from_the_users_generators():
    generator = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), generator.get_state()
    learned_on(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
    learned_on(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=generator))
    for now, then in zip((torch.get_rng_state(), generator.get_state()), before, strict=True):
        assert torch.equal(now, then)


def test_the_loaders_own_way_to_make_a_batch_is_used():
    """Texts of many lengths, padded by the user's collate function to whatever is the longest."""

    def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        texts, targets = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.stack(targets)

    texts = [(TEXTS[i, : 2 + i % 5], WHICH[i]) for i in range(11)]
    local, received = twins(Attention)
    ALA(sample=1.0, max_epochs=2).initialize(local, received, DataLoader(texts, collate_fn=padded))
    expected, received = twins(Attention)
    ALA(sample=1.0, max_epochs=2).initialize(expected, received, padded(texts))
    assert_same(local, expected, **EXACT)


class Rows(Dataset):
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


LEFT, RIGHT, WHICH = PAIR[0], PAIR[1], labels(11)
TUPLES = [((LEFT[i], RIGHT[i]), WHICH[i]) for i in range(11)]
DICTS = [({"left": LEFT[i], "right": RIGHT[i]}, WHICH[i]) for i in range(11)]


@pytest.mark.parametrize(
    "data",
    [
        Rows(TUPLES),
        Rows(DICTS),
        DataLoader(Rows(TUPLES), batch_size=3, shuffle=True),
        DataLoader(TUPLES, batch_size=3, shuffle=True),
    ],
    ids=["tuples", "dicts", "loader", "loader-of-a-list"],
)
def test_samples_may_have_several_inputs(data):
    def learned(data: Any) -> dict[str, Tensor]:
        local, received = twins(TwoInputs)
        ALA(batch_size=4, max_epochs=2).initialize(local, received, data)
        return entries(local)

    assert_same(learned(data), learned((PAIR, WHICH)), **FINE)


# --- its state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_saved_and_loaded_ala_goes_on_as_if_uninterrupted(rounds, tmp_path):
    options = {"layers": 2, "sample": 0.5, "batch_size": 4, "max_epochs": 3, "seed": 3}

    def go_on(ala: ALA, seeds: Sequence[int]) -> list[Any]:
        given = []
        for seed in seeds:
            local, received = twins(mlp, seed)
            report = ala.initialize(local, received, (X, Y))
            given.append((report, [value.tolist() for value in entries(local).values()]))
        return given

    uninterrupted = go_on(ALA(**options), range(4))
    before = ALA(**options)
    go_on(before, range(rounds))
    save_file(before.state_dict(), tmp_path / "ala.safetensors")
    after = ALA(**options)
    after.load_state_dict(load_file(tmp_path / "ala.safetensors"))
    assert go_on(after, range(rounds, 4)) == uninterrupted[rounds:]
    assert list(after.weights) == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_state_dict_is_a_copy_in_the_models_order():
    ala = ALA(layers=2, max_epochs=2, batch_size=4)
    assert ala.weights == {}
    ala.initialize(*twins(mlp), (X, Y))
    kept = ala.state_dict()
    assert list(ala.weights) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    before = {name: value.clone() for name, value in kept.items()}
    ala.initialize(*twins(mlp, 1), (X, Y))
    assert_same(kept, before, **EXACT)
    assert any(
        not torch.equal(ala.state_dict()[name], before[name])
        for name in before
        if name.startswith("weights.")
    )


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"eta": 0.0}, "eta"),
        ({"eta": -1.0}, "eta"),
        ({"eta": float("nan")}, "eta"),
        ({"sample": 0.0}, "sample"),
        ({"sample": 1.1}, "sample"),
        ({"layers": -1}, "layers"),
        ({"threshold": -0.1}, "threshold"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"min_epochs": 0}, "min_epochs"),
        ({"start_round": 0}, "start_round"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"layers": 1.5}, "layers"),
        ({"layers": True}, "layers"),
        ({"layers": None}, "layers"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, sentence):
    with pytest.raises(UserError, match=sentence):
        ALA(**options)


def test_layers_that_the_model_does_not_have_are_refused():
    with pytest.raises(UserError, match=r"between 0 and 3.*not 4"):
        ALA(layers=4).initialize(*twins(mlp), (X, Y))
    with pytest.raises(UserError, match=r"nothing_like_it.*4\.weight"):
        ALA(layers=["4", "nothing_like_it"]).governs(mlp())


@pytest.mark.parametrize("pattern", ["4.(", 4, None])
def test_what_is_not_a_pattern_is_refused(pattern):
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match="pattern"):
        ALA(layers=["4", pattern]).initialize(local, received, (X, Y))
    assert_same(local, before, **EXACT)


def test_models_that_are_not_alike_are_refused_and_left_alone():
    local, _ = twins(mlp)
    before = entries(local)
    wider = nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()
    for other in (wider, Attention().double(), mlp()[:4].double(), mlp().float()):
        with pytest.raises(UserError, match="alike"):
            ALA().initialize(local, other, (X, Y))
    assert_same(local, before, **EXACT)


def test_another_model_than_before_is_refused():
    ala = ALA(max_epochs=1)
    ala.initialize(*twins(mlp), (X, Y))
    with pytest.raises(UserError):
        ala.initialize(*twins(TwoInputs), (PAIR, labels(11)))
    tensors = {
        "round": torch.tensor(1),
        "trained": torch.tensor(True),
        "weights.4.weight": torch.ones(3, 5),
    }
    ala.load_state_dict({**tensors, "weights.4.bias": torch.ones(1)})
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match="another model"):
        ala.initialize(local, received, (X, Y))
    assert_same(local, before, **EXACT)


NOT_PAIRS: dict[str, Any] = {
    "inputs": X,
    "no-target": (X,),
    "three": (X, Y, Y),
    "lengths": (X, Y[:-1]),
    "name": "digits",
    "none": None,
    "none-target": (X, None),
    "no-inputs": ((), Y),
    "no-named-inputs": ({}, Y),
    "one-number": (X, Y[0]),
    "numbers": (torch.tensor(1.0), torch.tensor(0)),
    "lists": (X.tolist(), Y.tolist()),
    "objects": (X.numpy().astype(object), Y),
    "unlabelled": TensorDataset(X),
    "unlabelled-loader": DataLoader(TensorDataset(X)),
    "dicts": DataLoader([{"input": x, "label": y} for x, y in zip(X, Y, strict=True)]),
    "triples": DataLoader(TensorDataset(X, Y, Y)),
    "ragged-stream": DataLoader([(X[:3, :2], Y[:3]), (X[3:], Y[3:])], batch_size=None),
    "ragged": DataLoader([(X[i, : i % 4], Y[i]) for i in range(25)]),
    "texts": DataLoader([(X[i], "a class") for i in range(25)]),
    "nones": DataLoader([(X[i], None) for i in range(25)]),
    "single-samples": DataLoader(TensorDataset(X, Y), batch_size=None),
}


@pytest.mark.parametrize("data", NOT_PAIRS.values(), ids=NOT_PAIRS)
def test_data_that_is_not_pairs_is_refused_and_the_model_left_alone(data):
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError):
        ALA().initialize(local, received, data)
    assert_same(local, before, **EXACT)


@pytest.mark.parametrize(
    "tensors", [{}, {"weights.fc.bias": torch.ones(3)}, {"trained": torch.tensor(True)}]
)
def test_a_state_that_is_not_alas_is_refused(tensors):
    with pytest.raises(UserError, match="state"):
        ALA().load_state_dict(tensors)


# --- models that notice their layout -----------------------------------------------------------------------------------


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
def test_a_model_that_flattens_with_view_gives_what_the_paper_says(layers):
    local, received = twins(Views)
    x, y = normal(11, 2, 4, 4), labels(11)
    expected, weights, _ = by_the_paper(local, received, x, y, ALA(layers).governs(local))
    ala = ALA(layers, sample=1.0, batch_size=4, max_epochs=3)
    ala.initialize(local, received, (x, y))
    assert_same(local, expected, **FINE)
    assert_same(ala.weights, weights, **FINE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_learned_in(dtype):
    local, received = twins(mlp)
    local.to(dtype), received.to(dtype)
    ala = ALA(batch_size=4, max_epochs=2, sample=1.0)
    report = ala.initialize(local, received, (POINTS, labels(11)))
    assert (report.epochs, report.fault) == (2, None)
    assert {value.dtype for value in (*ala.weights.values(), *local.parameters())} == {dtype}


# --- numbers that are not finite ---------------------------------------------------------------------------------------

GOOD = (normal(8, 4), labels(8))


def learned_once(**options: Any) -> ALA:
    """An ALA that has one good round behind it."""
    ala = ALA(batch_size=4, max_epochs=2, sample=1.0, **options)
    assert ala.initialize(*twins(mlp, 1), GOOD).fault is None
    assert any((value < 1).any() for value in ala.weights.values())
    return ala


def poisoned(tensor: Tensor, value: float = float("nan")) -> Tensor:
    copied = tensor.clone()
    copied.view(-1)[-1] = value
    return copied


def fails_late(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = itertools.count()
    return lambda output, target: (
        F.cross_entropy(output, target) * (float("inf") if next(calls) >= after else 1)
    )


def infinite_slope(output: Tensor, target: Tensor) -> Tensor:
    """A finite loss whose gradient is not: the slope of the root at zero, times zero."""
    return F.cross_entropy(output, target) + (output * 0).abs().sqrt().sum()


BAD_ROUNDS: dict[str, tuple[Any, Callable[[Any, Any], Tensor]]] = {
    "data": ((poisoned(GOOD[0]), GOOD[1]), F.cross_entropy),
    "loss": (GOOD, lambda output, target: F.cross_entropy(output, target) * float("nan")),
    "late loss": (GOOD, fails_late(1)),
    "gradient": (GOOD, infinite_slope),
}


@pytest.mark.parametrize("case", BAD_ROUNDS)
def test_a_bad_round_leaves_what_was_learned_and_blends_with_it(case):
    data, loss = BAD_ROUNDS[case]
    ala = learned_once()
    before = {name: value.clone() for name, value in ala.weights.items()}
    local, received = twins(mlp, 2)
    old, new = entries(local), entries(received)
    report = ala.initialize(local, received, data, loss=loss)
    assert "weight learning was not finite" in report.fault
    assert (report.epochs, report.losses, report.skipped, ala.round) == (0, (), True, 2)
    assert_same(ala.weights, before, **EXACT)
    blend = {n: old[n] + (new[n] - old[n]) * before[n] if n in before else new[n] for n in old}
    assert_same(local, blend, **EXACT)
    # And the next round goes on from there, as if the bad one had been skipped.
    other = learned_once()
    other.round = 2
    results = []
    for each in (ala, other):
        model, sent = twins(mlp, 3)
        results.append((each.initialize(model, sent, GOOD), entries(model)))
    assert results[0][0] == results[1][0]
    assert results[0][0].epochs == 1
    assert_same(results[0][1], results[1][1], **EXACT)


@pytest.mark.parametrize("case", BAD_ROUNDS)
def test_a_bad_first_round_takes_the_received_model_and_the_initial_stage_is_still_to_come(case):
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
def test_a_local_model_that_is_not_finite_gives_way_to_the_received_one(value):
    ala = learned_once()
    before = {name: tensor.clone() for name, tensor in ala.weights.items()}
    local, received = twins(mlp, 2)
    report = ala.initialize(spoil(local, "4.weight", value), received, GOOD)
    assert "local model is not finite" in report.fault
    assert report.epochs == 0
    assert_same(local, received, **EXACT)
    assert_same(ala.weights, before, **EXACT)
    assert ala.initialize(*twins(mlp, 3), GOOD).fault is None


def test_lower_layers_that_are_not_finite_are_overwritten_without_a_word():
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
    ala = learned_once()
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


def test_infinities_that_both_models_share_are_no_fault():
    local, received = Masked().double(), Masked().double()
    report = ALA(max_epochs=2).initialize(local, received, GOOD)
    assert (report.fault, report.epochs) == (None, 2)
    assert "received" in ALA().initialize(local, spoil(received, "mask"), GOOD).fault


# --- states that are not sound -----------------------------------------------------------------------------------------

SOUND = {
    "round": torch.tensor(3),
    "trained": torch.tensor(True),
    "weights.4.weight": torch.full((3, 5), 0.5),
    "weights.4.bias": torch.full((3,), 0.5),
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights.4.bias": poisoned(torch.ones(3))}, r"4\.bias must be between 0 and 1"),
        ({"weights.4.bias": poisoned(torch.ones(3), float("inf"))}, r"4\.bias must be between"),
        ({"weights.4.bias": poisoned(torch.ones(3), 1.5)}, r"4\.bias must be between"),
        ({"weights.4.bias": poisoned(torch.ones(3), -0.1)}, r"4\.bias must be between"),
        (
            {"weights.4.bias": torch.ones(3, dtype=torch.int64)},
            r"4\.bias must be a tensor of floating",
        ),
        ({"weights.4.bias": [1.0, 1.0, 1.0]}, r"4\.bias must be a tensor"),
        ({"round": torch.tensor(-5)}, "round must be a whole number.*-5"),
        ({"round": torch.tensor(2.5)}, r"round must be.*2\.5"),
        ({"round": torch.tensor([1, 2])}, "round must be"),
        ({"round": torch.tensor(float("nan"))}, "round must be"),
        ({"round": "3"}, "round must be"),
        ({"round": None}, "round must be"),
        ({"round": torch.tensor(2**62)}, "round must be"),
        ({"trained": torch.tensor([True, False])}, "trained must be"),
        ({"trained": torch.tensor(float("nan"))}, "trained must be"),
        ({"trained": True}, "trained must be"),
    ],
)
def test_a_state_that_is_not_sound_is_refused_and_changes_nothing(change, sentence):
    ala = learned_once()
    before = ala.state_dict()
    with pytest.raises(UserError, match=sentence):
        ala.load_state_dict({**SOUND, **change})
    assert_same(ala.state_dict(), before, **EXACT)
    ala.load_state_dict(SOUND)
    assert_same(ala.state_dict(), {name: SOUND[name] for name in ala.state_dict()}, **EXACT)


@pytest.mark.parametrize("state", [None, 5, "state", [SOUND]])
def test_what_is_not_a_dict_is_not_a_state(state):
    with pytest.raises(UserError, match="dict of tensors"):
        ALA().load_state_dict(state)


# --- what else is handed over ------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    """Yields its samples again and again; it may say how many there are."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit

    def __iter__(self):
        for i in itertools.count():
            if i >= self.limit:
                return
            yield X[i % 25], Y[i % 25]


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return 25


class EndlessSampler(Sampler):
    def __init__(self) -> None: ...

    def __iter__(self):
        return itertools.cycle(range(25))


class EndlessSamplerWithLength(EndlessSampler):
    def __len__(self) -> int:
        return 25


def endless_batches():
    while True:
        yield [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        Endless(),
        DataLoader(Endless(), batch_size=64),
        DataLoader(Pairs(X, Y), batch_size=5, sampler=EndlessSampler()),
        DataLoader(Pairs(X, Y), batch_sampler=endless_batches()),
        DataLoader(Endless(10**9), batch_size=7),
    ],
    ids=["stream", "loader", "sampler", "batch-sampler", "long"],
)
def test_data_that_does_not_end_is_refused(data, monkeypatch):
    monkeypatch.setattr("fedala.data.collect.STREAM_LIMIT", 1000)
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match=r"has not ended after 1000 samples.*__len__"):
        ALA().initialize(local, received, data)
    assert_same(local, before, **EXACT)


@pytest.mark.parametrize(
    "data",
    [
        EndlessWithLength(),
        DataLoader(EndlessWithLength(), batch_size=7),
        DataLoader(EndlessWithLength(), batch_size=5),
        DataLoader(Pairs(X, Y), batch_size=5, sampler=EndlessSamplerWithLength()),
        Endless(25),
    ],
    ids=["stream", "loader", "whole-batches", "sampler", "ends"],
)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_stream_is_followed_up_to_its_length(data, monkeypatch):
    monkeypatch.setattr("fedala.data.collect.STREAM_LIMIT", 25)
    assert_same(learned_on(data), learned_on((X, Y)), **FINE)


class WithoutLength(Dataset):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(UserError, match="WithoutLength a __len__"):
        ALA().initialize(*twins(mlp), WithoutLength())


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "per sample": (
        nn.CrossEntropyLoss(reduction="none"),
        r"one number, not a torch.float64 tensor of shape \(10,\)",
    ),
    "float": (lambda output, target: 1.5, "one number, not float"),
    "none": (lambda output, target: None, "one number, not NoneType"),
    "pair": (lambda output, target: (output.mean(), output), "one number, not tuple"),
    "whole number": (lambda output, target: output.argmax(), "one number, not a torch.int64"),
    "constant": (lambda output, target: torch.tensor(1.0), "does not depend on.*4.weight"),
    "detached": (lambda output, target: output.mean().detach(), "does not depend on.*4.weight"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_not_one_number_of_the_model_is_refused(case):
    loss, sentence = LOSSES[case]
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match=sentence):
        ALA().initialize(local, received, (X, Y), loss=loss)
    assert_same(local, before, **EXACT)


def test_a_loss_of_one_element_will_do():
    local, received = twins(mlp)
    ALA(max_epochs=2).initialize(
        local, received, (X, Y), lambda z, y: F.cross_entropy(z, y).reshape(1)
    )
    expected, received = twins(mlp)
    ALA(max_epochs=2).initialize(expected, received, (X, Y), lambda z, y: F.cross_entropy(z, y))
    assert_same(local, expected, **EXACT)


def half_on_meta() -> nn.Module:
    model = mlp().double()
    model[4] = nn.Linear(5, 3, device="meta", dtype=torch.float64)
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.turn = nn.Linear(4, 3), nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.turn).abs()


class PairOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), x


MODELS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "empty": (nn.Sequential, 0, "no parameters"),
    "without parameters": (lambda: nn.BatchNorm1d(4, affine=False), 0, "no parameters"),
    "meta": (lambda: mlp().to("meta"), 1, "device meta"),
    "partly meta": (half_on_meta, 1, "device meta"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), 1, r"0\.weight.*lazy"),
    "complex": (Complex, 2, "turn is torch.complex128"),
    "pair": (lambda: PairOut().double(), 1, "returns a tuple"),
    "function": (lambda: torch.tanh, 1, "nn.Module, not"),
    "state dict": (lambda: mlp().state_dict(), 1, "nn.Module, not OrderedDict"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_blended_is_refused(case):
    make, layers, sentence = MODELS[case]
    with pytest.raises(UserError, match=sentence):
        ALA(layers).initialize(make(), make(), (X, Y))


def test_a_received_model_without_numbers_is_refused():
    local, received = twins(mlp)
    with pytest.raises(UserError, match="device meta"):
        ALA().initialize(local, received.to("meta"), (X, Y))


def test_a_model_of_pairs_can_be_learned_with_a_loss_of_its_own():
    local, received = PairOut().double(), PairOut().double()
    report = ALA(max_epochs=2).initialize(
        local, received, (X, Y), loss=lambda z, y: F.cross_entropy(z[0], y)
    )
    assert report.epochs == 2
