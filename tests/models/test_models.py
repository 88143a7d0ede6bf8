"""The paper's models: the printed parameter counts, the shapes, and the computations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala import UserError
from fedala.data import Dataset
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import layers_of, upper
from fedala.lanes.parameters import model_state
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.models import build_model, cnn, fasttext, resnet18
from fedala.simulation import Simulation


def governed(model: nn.Module) -> list[int]:
    """Return the number of weights that ALA learns, for p from all layers down to one."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return [
        sum(sizes[name] for name in upper(model, p)) for p in range(len(layers_of(model)), 0, -1)
    ]


def on_meta(build, *args) -> nn.Module:
    with torch.device("meta"):
        return build(*args)


def test_cnn_counts_of_the_paper():
    """conv1 5·5·1·32+32 = 832, conv2 5·5·32·64+64 = 51264,
    fc1 1024·512+512 = 524800, fc2 512·10+10 = 5130.
    """
    assert governed(on_meta(cnn, (1, 28, 28), 10)) == [582026, 581194, 529930, 5130]


def test_cnn_counts_of_tiny_imagenet():
    """conv1 5·5·3·32+32 = 2432, conv2 51264,
    fc1 10816·512+512 = 5538304, fc2 512·200+200 = 102600.
    """
    assert governed(on_meta(cnn, (3, 64, 64), 200)) == [5694600, 5692168, 5640904, 102600]


def test_resnet18_counts_of_the_paper():
    """fc 5130; blocks of 3×3 convolutions and BatchNorms: 8393728, 2099712, 525568, 147968;
    stem 7·7·3·64+128 = 9536.
    """
    counts = governed(on_meta(resnet18, (3, 64, 64), 10))
    assert counts == [11181642, 11172106, 11024138, 10498570, 8398858, 5130]
    assert [round(count / 1e6, 3) for count in counts] == [
        11.182,
        11.172,
        11.024,
        10.499,
        8.399,
        0.005,
    ]


def test_fasttext_counts_of_the_paper():
    """embedding 98635·32 = 3156320, hidden 32·32+32 = 1056, output 32·4+4 = 132."""
    assert governed(on_meta(fasttext, 98635, 4)) == [3157508, 1188, 132]


@pytest.mark.parametrize(
    ("shape", "flattened"),
    [((1, 28, 28), 1024), ((3, 32, 32), 1600), ((3, 64, 64), 10816), ((1, 16, 16), 64)],
)
def test_cnn_flattened_sizes(shape, flattened):
    model = cnn(shape, 10)
    assert model.fc1.in_features == flattened
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_cnn_computes_what_the_paper_describes():
    torch.manual_seed(0)
    model = cnn((3, 32, 28), 7)
    s, x = model.state_dict(), torch.randn(4, 3, 32, 28)
    out = F.max_pool2d(F.conv2d(x, s["conv1.weight"], s["conv1.bias"]).clamp(min=0), 2)
    out = F.max_pool2d(F.conv2d(out, s["conv2.weight"], s["conv2.bias"]).clamp(min=0), 2)
    out = (out.reshape(4, -1) @ s["fc1.weight"].T + s["fc1.bias"]).clamp(min=0)
    torch.testing.assert_close(model(x), out @ s["fc2.weight"].T + s["fc2.bias"])


def test_fasttext_is_the_mean_of_all_positions_and_two_linear_layers():
    torch.manual_seed(0)
    model = fasttext(50, 4)
    s, x = model.state_dict(), torch.randint(50, (6, 9), dtype=torch.int32)
    x[:, 5:] = 0  # padding counts as a position: its row is zero, and the mean is over all nine
    rows = s["embedding.weight"][x.long()].sum(1) / 9
    hidden = rows @ s["hidden.weight"].T + s["hidden.bias"]
    torch.testing.assert_close(model(x), hidden @ s["fc.weight"].T + s["fc.bias"])


NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def resnet18_names() -> list[str]:
    """Return the entries of torchvision's ResNet-18, in its order."""
    names = ["conv1.weight", *(f"bn1.{n}" for n in NORM)]
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            prefix = f"layer{stage}.{block}"
            for i in (1, 2):
                names += [f"{prefix}.conv{i}.weight", *(f"{prefix}.bn{i}.{n}" for n in NORM)]
            if stage > 1 and block == 0:
                names += [
                    f"{prefix}.downsample.0.weight",
                    *(f"{prefix}.downsample.1.{n}" for n in NORM),
                ]
    return [*names, "fc.weight", "fc.bias"]


def test_resnet18_has_the_well_known_names_and_shapes():
    state = on_meta(resnet18, (3, 64, 64), 1000).state_dict()
    assert len(resnet18_names()) == 122
    assert list(state) == resnet18_names()
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.1.conv2.weight": (64, 64, 3, 3),
        "layer2.0.conv1.weight": (128, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.0.conv1.weight": (512, 256, 3, 3),
        "layer4.1.bn2.running_var": (512,),
        "fc.weight": (1000, 512),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
    assert (
        sum(
            value.numel()
            for name, value in state.items()
            if "running" not in name and "num_" not in name
        )
        == 11689512
    )


@torch.no_grad()
def resnet18_by_hand(s: dict[str, Tensor], x: Tensor, training: bool) -> Tensor:
    """He et al. (2016), table 1, 18 layers: the first convolutions of conv3_x to conv5_x stride."""

    def norm(x: Tensor, name: str) -> Tensor:
        if training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        else:
            mean, var = s[f"{name}.running_mean"], s[f"{name}.running_var"]
        scale = s[f"{name}.weight"] / (var + 1e-5).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + s[f"{name}.bias"][:, None, None]

    def block(x: Tensor, name: str, stride: int) -> Tensor:
        out = norm(
            F.conv2d(x, s[f"{name}.conv1.weight"], stride=stride, padding=1), f"{name}.bn1"
        ).clamp(min=0)
        out = norm(F.conv2d(out, s[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in s:
            x = norm(
                F.conv2d(x, s[f"{name}.downsample.0.weight"], stride=stride), f"{name}.downsample.1"
            )
        return (out + x).clamp(min=0)

    x = norm(F.conv2d(x, s["conv1.weight"], stride=2, padding=3), "bn1").clamp(min=0)
    x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
    for stage in (1, 2, 3, 4):
        x = block(x, f"layer{stage}.0", stride=1 if stage == 1 else 2)
        x = block(x, f"layer{stage}.1", stride=1)
    return x.mean((2, 3)) @ s["fc.weight"].T + s["fc.bias"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_resnet18_computes_what_published_weights_expect(training):
    torch.manual_seed(0)
    model = resnet18((3, 64, 64), 10).double().train(training)
    for name, value in model.named_buffers():
        if name.endswith(("mean", "var")):
            value.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    wanted = resnet18_by_hand(dict(model.state_dict()), x, training)
    torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-8, atol=1e-8)


def text_task(vocabulary: int = 7, clients: int = 4) -> Task:
    """Short texts, full of index 0; lanes of different lengths, sorted."""
    random = np.random.default_rng(0)
    sizes = [8 - client for client in range(clients)]
    x = torch.from_numpy(random.integers(vocabulary, size=(sum(sizes), 5))).to(torch.int32)
    x[:, -1] = 0
    y = torch.from_numpy(random.integers(3, size=sum(sizes)))
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return Task(on_meta(fasttext, vocabulary, 3), x, y, rows, rows, batch_size=3, lr=0.5, epochs=2)


def test_row_0_starts_at_zero():
    assert (fasttext(7, 3).embedding.weight[0] == 0).all()
    assert (fasttext(7, 3).embedding.weight[1:] != 0).any()


def test_row_0_never_learns_in_any_lane_and_the_others_do():
    start = {
        name: value.repeat(4, *[1] * (value.ndim - 1))
        for name, value in model_state(fasttext(7, 3)).items()
    }
    trained = Cohort(text_task(), [0, 1, 2, 3], [0] * 4).fit(start)
    assert (trained["embedding.weight"][:, 0] == 0).all()
    moved = (trained["embedding.weight"] != start["embedding.weight"]).any(-1)
    assert moved[:, 1:].any(1).all()


@pytest.mark.parametrize("lanes", [1, None], ids=["one lane", "all lanes"])
def test_row_0_stays_zero_where_ala_governs_the_embedding(lanes):
    models = []
    method = make("fedala", {"fedala.layers": 3, "fedala.max_epochs": 3})
    simulation = Simulation(
        method, text_task(), lambda seed: model_state(fasttext(7, 3)), rounds=3, lanes=lanes
    )
    list(simulation.run(lambda personal: models.append(personal.model["embedding.weight"][0])))
    assert len(models) == 5
    assert all((weight[0] == 0).all() and (weight[1:] != 0).all() for weight in models)


LABELS = torch.tensor([0, 1, 2, 0])
IMAGES = Dataset("pictures", torch.zeros(4, 3, 20, 24, dtype=torch.uint8), LABELS, 3)
TEXTS = Dataset("letters", torch.ones(4, 200, dtype=torch.int32), LABELS, 3, vocabulary=9)
TABLE = Dataset("measurements", torch.zeros(4, 6), LABELS, 3)


def test_a_model_is_built_to_fit_its_data():
    assert build_model("cnn", IMAGES)(torch.zeros(2, 3, 20, 24)).shape == (2, 3)
    assert build_model("resnet18", IMAGES).eval()(torch.zeros(2, 3, 20, 24)).shape == (2, 3)
    assert build_model("fasttext", TEXTS)(torch.zeros(2, 200, dtype=torch.int32)).shape == (2, 3)
    assert build_model("fasttext", TEXTS).embedding.num_embeddings == 9


@pytest.mark.parametrize("sides", [(15, 28), (28, 15), (8, 8), (1, 1)])
def test_images_too_small_for_the_cnn_are_refused(sides):
    with pytest.raises(UserError, match=f"16×16.*{sides[0]}×{sides[1]}"):
        cnn((1, *sides), 10)


@pytest.mark.parametrize(
    ("model", "dataset", "sentence"),
    [
        ("cnn", TEXTS, "cnn reads images, and letters"),
        ("resnet18", TEXTS, "resnet18 reads images, and letters"),
        ("cnn", TABLE, "cnn reads images, and measurements"),
        ("fasttext", IMAGES, "fasttext reads texts, and pictures"),
        ("fasttext", TABLE, "fasttext reads texts, and measurements"),
        ("resnet", IMAGES, "no model 'resnet'.*resnet18"),
    ],
)
def test_a_model_that_cannot_read_the_data_is_refused(model, dataset, sentence):
    with pytest.raises(UserError, match=sentence):
        build_model(model, dataset)
