"""Options, models and losses that ALA refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ala.common import EXACT, PAIR, X, Y, assert_same, entries, labels, mlp, twins
from ala.models import Attention, TwoInputs
from torch import Tensor, nn

from fedala import ALA, UserError


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
    with pytest.raises(UserError, match=r"nothing_like_it.*the model has 0, 2, 4"):
        ALA(layers=["4", "nothing_like_it"]).governs(mlp())


@pytest.mark.parametrize("pattern", ["4.(", 4, None])
def test_an_invalid_pattern_is_refused(pattern):
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match="pattern"):
        ALA(layers=["4", pattern]).initialize(local, received, (X, Y))
    assert_same(local, before, **EXACT)


def test_models_that_are_not_alike_are_refused_and_not_changed():
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


def test_a_loss_may_be_a_tensor_of_one_element():
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


class DictOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.fc(x)}


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
    "dict": (lambda: DictOut().double(), 1, "returns a dict"),
    "function": (lambda: torch.tanh, 1, "nn.Module, not"),
    "class": (lambda: nn.Linear, 1, "not the class Linear. Make an instance"),
    "state dict": (lambda: mlp().state_dict(), 1, "not a state dict. Load it into a model"),
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


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda y: y + 1, r"from 0 to 2, as the model gives 3 scores, and there is a label 3\."),
        (lambda y: y - 1, "there is a label -1"),
        (lambda y: y.float(), r"whole numbers \[sample\] as labels.*are torch.float32"),
        (lambda y: y.bool(), "are torch.bool"),
        (lambda y: y[:, None], r"are torch.int64 of shape \(\d+, 1\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused_and_nothing_is_changed(loss, change, sentence):
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match=sentence):
        ALA(sample=1.0).initialize(local, received, (X, change(Y)), loss)
    assert_same(local, before, **EXACT)


@pytest.mark.parametrize(
    "change", [lambda y: y.int(), lambda y: y.byte(), lambda y: F.one_hot(y, 3).double()]
)
def test_labels_of_other_types_and_probabilities_are_taken(change):
    one, other = (twins(mlp) for _ in range(2))
    reports = [
        ALA().initialize(*pair, (X, y)) for pair, y in ((one, Y), (other, change(Y)))
    ]  # fmt: skip
    assert reports[0].epochs == reports[1].epochs > 1


def test_a_model_that_takes_whole_batches_alone_is_tried_with_one():
    class TenAtOnce(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(10, -1))

    torch.manual_seed(3)
    pair = TenAtOnce(X.shape[1], 3).double(), TenAtOnce(X.shape[1], 3).double()
    assert ALA(sample=1.0, batch_size=10).initialize(*pair, (X[:20], Y[:20])).epochs > 1
    with pytest.raises(UserError, match="there is a label 7"):
        ALA(batch_size=10, sample=1.0).initialize(*pair, (X[:20], Y[:20] + 5))


def test_ignored_labels_are_taken():
    y = Y.clone()
    y[::3] = -100
    assert ALA().initialize(*twins(mlp), (X, y)).epochs > 1


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("cross_entropy", r"function of \(output, target\).*not 'cross_entropy'"),
        (nn.CrossEntropyLoss, "not the class CrossEntropyLoss"),
    ],
)
def test_a_loss_that_is_not_a_function_is_refused(loss, sentence):
    with pytest.raises(UserError, match=sentence):
        ALA().initialize(*twins(mlp), (X, Y), loss)
