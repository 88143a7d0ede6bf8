"""Layers counted from the output, and the cut: computing a model in two halves changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fedala import UserError
from fedala.lanes.layer_order import learn_order
from fedala.lanes.layers import Cut, layers_of, upper
from fedala.models import cnn, fasttext, resnet18

OURS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[tuple[str, ...], ...]]
] = {
    "cnn": (
        lambda: cnn((1, 16, 20), 5),
        lambda: torch.randn(3, 1, 16, 20, dtype=torch.float64),
        (("fc2",), ("fc1",), ("conv2",), ("conv1",)),
    ),
    "resnet18": (
        lambda: resnet18((3, 32, 32), 5),
        lambda: torch.randn(3, 3, 32, 32, dtype=torch.float64),
        (("fc",), ("layer4",), ("layer3",), ("layer2",), ("layer1",), ("conv1", "bn1")),
    ),
    "fasttext": (
        lambda: fasttext(30, 4),
        lambda: torch.randint(30, (3, 9), dtype=torch.int32),
        (("fc",), ("hidden",), ("embedding",)),
    ),
}
"""How it is built, an input, and its layers as METHODS says, output first."""


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Branches(nn.Module):
    """A parameter outside any layer, nested modules, a normalisation without parameters, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
        )
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.embedding(x).mean(1))


# --- which parameters form a layer ----------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_layers_of_the_papers_models(name):
    build, _, layers = OURS[name]
    model = build()
    found = layers_of(model)
    assert len(found) == len(layers)
    for names, prefixes in zip(found, layers, strict=True):
        assert set(names) == {n for n in state(model) if n.split(".")[0] in prefixes}


@pytest.mark.parametrize(
    "build",
    [*(entry[0] for entry in OURS.values()), Branches, Tied],
    ids=[*OURS, "branches", "tied"],
)
def test_every_parameter_is_in_exactly_one_layer(build):
    model = build()
    parameters = dict(model.named_parameters())
    assert sorted(
        name for layer in layers_of(model) for name in layer if name in parameters
    ) == sorted(parameters)


def test_a_foreign_modules_layers_are_its_modules_with_parameters_last_registered_first():
    found = [
        set(layer) & set(dict(Branches().named_parameters())) for layer in layers_of(Branches())
    ]
    assert [names for names in found if names] == [
        {"head.weight", "head.bias"},
        {"blocks.1.1.weight", "blocks.1.1.bias"},
        {"blocks.1.0.weight", "blocks.1.0.bias"},
        {"blocks.0.1.weight", "blocks.0.1.bias"},
        {"blocks.0.0.weight", "blocks.0.0.bias"},
        {"token"},
    ]


def test_upper_names_parameters_only_in_the_models_order():
    model = resnet18((3, 32, 32), 5)
    assert upper(model, 0) == ()
    assert upper(model, 1) == ("fc.weight", "fc.bias")
    assert upper(model, 6) == tuple(dict(model.named_parameters()))
    for p in range(6):
        assert set(upper(model, p)) < set(upper(model, p + 1))
        assert not any("running" in name or "num_batches" in name for name in upper(model, p + 1))


def test_upper_by_patterns():
    model = cnn((1, 16, 16), 5)
    assert upper(model, ["fc2"]) == ("fc2.weight", "fc2.bias")
    assert upper(model, ["fc2", "conv1"]) == (
        "conv1.weight",
        "conv1.bias",
        "fc2.weight",
        "fc2.bias",
    )
    assert upper(model, "fc2, conv1") == upper(model, ["fc2", "conv1"])
    assert upper(model, [r"fc\d\.bias"]) == ("fc1.bias", "fc2.bias")
    assert upper(model, ["fc"]) == ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (5, "0 and 4.*5"),
        (-1, "0 and 4.*-1"),
        (["fc2", "c2"], r"'c2'.*from the start of a name \(did you mean fc2\?\)"),
        (["fc2.wieght"], r"did you mean fc2\.weight"),
        (["top"], r"the model has conv1, conv2, fc1, fc2\.$"),
        ("fc2,,conv1", "patterns of parameters' names, separated by commas"),
        (["fc("], "'fc\\('.*pattern"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers, sentence):
    with pytest.raises(UserError, match=sentence):
        upper(cnn((1, 16, 16), 5), layers)


# --- the cut --------------------------------------------------------------------------------------

CUTS = [(name, p) for name, (_, _, layers) in OURS.items() for p in range(len(layers) + 1)]


@pytest.mark.parametrize(("name", "p"), CUTS, ids=[f"{name}-{p}" for name, p in CUTS])
def test_the_two_halves_are_the_whole(name, p):
    build, sample, layers = OURS[name]
    torch.manual_seed(0)
    model, x = build().double().eval(), sample()
    cut = Cut(model, p)
    with torch.no_grad():
        assert torch.equal(cut.upper(state(model), cut.lower(state(model), x)), model(x))
    assert cut.cuts == (p < len(layers))


@pytest.mark.parametrize(("name", "p"), CUTS, ids=[f"{name}-{p}" for name, p in CUTS])
def test_each_half_looks_at_its_own_layers_alone(name, p):
    """The lower half of one model and the upper half of another are the joined model."""
    build, sample, _ = OURS[name]
    torch.manual_seed(0)
    below, above, mixed, x = (
        build().double().eval(),
        build().double().eval(),
        build().double().eval(),
        sample(),
    )
    names = {name for layer in layers_of(mixed)[:p] for name in layer}
    mixed.load_state_dict(
        {n: (above if n in names else below).state_dict()[n] for n in state(mixed)}
    )
    part = {n: value for n, value in state(above).items() if n in names}
    cut = Cut(build().to("meta").eval(), p)  # no weights of its own to fall back on
    with torch.no_grad():
        assert torch.equal(cut.upper(part, cut.lower(state(below), x)), mixed(x))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Reduces(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.fc, self.end = nn.Linear(4, 5), nn.Linear(5, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.fc(self.body(x)))


class Shapes(nn.Module):
    """The features change before the last layer, which may get them by keyword."""

    def __init__(self, shape: Callable[[Tensor], Tensor], keyword: bool = False) -> None:
        super().__init__()
        self.body, self.fc, self.shape, self.keyword = (
            nn.Linear(4, 5),
            nn.Linear(5, 3),
            shape,
            keyword,
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.shape(self.body(x))
        return self.fc(input=features) if self.keyword else self.fc(features)


class TiedBelow(Tied):
    """The output layer registered first: it holds the weight that the embedding uses."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.decoder, self.embedding = nn.Linear(4, 9), nn.Embedding(9, 4)
        self.embedding.weight = self.decoder.weight


class Head(nn.Module):
    """A last layer with a buffer in a part of it that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(3, 5)), nn.BatchNorm1d(5, affine=False)
        self.norm.running_mean = torch.randn(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.weight.T


POINTS = torch.linspace(-1, 1, 24).reshape(6, 4)
PATHS = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
FOREIGN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "sequential": (plain, POINTS),
    "branches": (Branches, POINTS),
    "log-softmax": (lambda: Reduces(lambda z: z.log_softmax(1)), POINTS),
    "in place": (lambda: Reduces(lambda z: z.clamp_(min=0)), POINTS),
    "tied": (Tied, torch.arange(24).reshape(6, 4) % 9),
    "tied below": (TiedBelow, torch.arange(24).reshape(6, 4) % 9),
    "rows of features": (lambda: Shapes(torch.tanh), PATHS),
    "flattened": (lambda: Shapes(lambda h: h.flatten(0, 1)), PATHS),
    "two positions first": (lambda: Shapes(lambda h: h.transpose(0, 1)), PATHS[:, :2]),
    "three positions first": (lambda: Shapes(lambda h: h.transpose(0, 1)), PATHS),
    "mean of the batch": (lambda: Shapes(lambda h: h - h.mean(0)), POINTS),
    "keyword": (lambda: Shapes(torch.tanh, keyword=True), POINTS),
    "buffer in the head": (lambda: nn.Sequential(nn.Linear(4, 5), Head()), POINTS),
}


@pytest.mark.parametrize("p", [0, 1, 2])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_module_in_two_halves_is_the_whole(name, p):
    """As ALA uses it: weights that are not the skeleton's, and samples from a table."""
    build, x = FOREIGN[name]
    torch.manual_seed(0)
    model, skeleton = build().eval(), build().eval()
    cut = Cut(skeleton, p, (state(model), x[:2]))
    with torch.no_grad():
        features = cut.lower(state(model), x)
        if cut.p:
            needed = {n: state(model)[n] for layer in layers_of(model)[: cut.p] for n in layer}
            torch.testing.assert_close(cut.upper(needed, features[[3, 1]]), model(x[[3, 1]]))
        else:
            assert torch.equal(features, model(x))


def test_a_last_layer_whose_output_is_the_models_is_cut_off():
    """Otherwise ALA would run the whole module in every epoch: exact, but slow."""
    model = plain()
    assert Cut(model, 1, (state(model), POINTS[:2])).cuts
    assert not Cut(model, 2, (state(model), POINTS[:2])).cuts
    assert not Cut(model, 1).cuts


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_cut_and_what_is_not(name):
    build, x = FOREIGN[name]
    model = build().eval()
    before = [p.requires_grad for p in model.parameters()]
    assert Cut(model, 1, (state(model), x[:2])).cuts == (
        name in ("sequential", "branches", "rows of features")
    )
    assert [p.requires_grad for p in model.parameters()] == before
    assert not any(module._forward_hooks for module in model.modules())


# --- last layers of every kind --------------------------------------------------------------------


class Listed(nn.Module):
    """A last layer that is no module with a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.list = nn.ParameterList(
            [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.zeros(3))]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.list[0] + self.list[1]


class WholeBuffers(nn.Module):
    """A last layer with a buffer of whole numbers and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
        self.fc.register_buffer("order", torch.tensor([2, 0, 1]))
        self.fc.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.fc.register_forward_hook(lambda fc, args, output: output[:, fc.order] * fc.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


class SixRows(nn.Module):
    """Takes batches of six samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x.view(6, 4)))


def after(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *last)


IMAGES = torch.linspace(-1, 1, 96).reshape(6, 1, 4, 4)
#: How the model is built, its inputs, how many parameters its last layer has, and whether it can
#: be cut off.
LAST: dict[str, tuple[Callable[[], nn.Module], Tensor, int, bool]] = {
    "batch norm": (lambda: after(nn.BatchNorm1d(6)), POINTS, 2, True),
    "layer norm": (lambda: after(nn.LayerNorm(6)), POINTS, 2, True),
    "group norm": (lambda: after(nn.GroupNorm(2, 6)), POINTS, 2, True),
    "prelu": (lambda: after(nn.PReLU()), POINTS, 1, True),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Conv2d(2, 3, 3)), IMAGES, 2, True),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        ),
        IMAGES,
        2,
        True,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Identity(), nn.Embedding(9, 3)),
        torch.arange(24).reshape(6, 4) % 9,
        1,
        False,
    ),
    "weight norm": (lambda: after(weight_norm(nn.Linear(6, 3))), POINTS, 3, True),
    "spectral norm": (lambda: after(spectral_norm(nn.Linear(6, 3, bias=False))), POINTS, 1, True),
    "parameter list": (Listed, POINTS, 2, False),
    "buffers": (WholeBuffers, POINTS, 2, True),
    "fixed batch": (SixRows, POINTS, 2, False),
}


@pytest.mark.parametrize("name", LAST)
def test_a_last_layer_of_any_kind_is_cut_off_or_left(name):
    build, x, parameters, cuts = LAST[name]
    torch.manual_seed(0)
    model, skeleton = build().eval(), build().eval()
    assert len(upper(model, 1)) == parameters
    cut = Cut(skeleton, 1, (state(model), x[:2]))
    assert cut.cuts == cuts
    with torch.no_grad():
        features = cut.lower(state(model), x)
        needed = {n: state(model)[n] for layer in layers_of(model)[: cut.p] for n in layer}
        torch.testing.assert_close(cut.upper(needed, features), model(x))
    assert not any(value.requires_grad for _, value in model.named_buffers())


def test_a_parametrised_weight_and_its_bias_are_one_layer():
    model = after(weight_norm(nn.Linear(6, 3)))
    assert len(layers_of(model)) == 2
    assert upper(model, 1) == (
        "2.bias",
        "2.parametrizations.weight.original0",
        "2.parametrizations.weight.original1",
    )
    alone = weight_norm(nn.Linear(6, 3))
    assert len(layers_of(alone)) == 1


class LanguageModel(nn.Module):
    """Scores each next word with the table that also embeds the words."""

    def __init__(self, score: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
        self.head, self.score = nn.Linear(4, 9), score
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.score(self, self.body(self.table(words))[0])


@pytest.mark.parametrize(
    "score",
    [
        lambda model, h: model.head(h),  # h is not contiguous: torch multiplies, and then adds
        lambda model, h: model.head(h.contiguous()),
        lambda model, h: model.head(h[:, -1]),
        lambda model, h: F.linear(h, model.table.weight, model.head.bias),
    ],
    ids=["every word", "contiguous", "last word", "function"],
)
def test_a_tied_weight_and_the_bias_beside_it_are_one_layer(score):
    model = LanguageModel(score)
    learn_order(model, torch.randint(9, (2, 6)))
    assert upper(model, 1) == ("table.weight", "head.bias")
    assert len(layers_of(model)) == 2
