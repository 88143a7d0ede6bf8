"""The kernels against torch's own functions, lane by lane; on a CPU through Triton's interpreter, on a GPU for real."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from fedala.cuda.kernels import LaneKernels
from fedala.cuda.weights import Head, learn_weights
from fedala.lanes.weight_learning import are_losses_finite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def agree(function, *inputs, tolerance=1e-5, special=True):
    """The stacked function under vmap, and each lane called plainly, against float64; gradients as well."""
    lanes = len(inputs[0])
    inputs = [value.to(DEVICE) for value in inputs]
    leaves = [value.requires_grad_() if value.is_floating_point() else value for value in inputs]
    double = [
        value.detach().double().requires_grad_() if value.is_floating_point() else value
        for value in inputs
    ]
    expected = torch.stack([function(*(value[lane] for value in double)) for lane in range(lanes)])
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected)
    floats = [value for value in double if value.is_floating_point()]
    wanted = torch.autograd.grad(expected, floats, slope)
    own = [value for value in leaves if value.is_floating_point()]
    with LaneKernels(special=special):
        together = vmap(function)(*leaves)
        alone = torch.stack([function(*(value[lane] for value in leaves)) for lane in range(lanes)])
    for result in (together, alone):
        found = torch.autograd.grad(result, own, slope.float(), retain_graph=True)
        for a, b in zip((result, *found), (expected, *wanted), strict=True):
            assert ((a.double() - b).norm() / b.norm().clamp_min(1e-12)).item() < tolerance


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize(
    ("channels", "side", "out", "kernel", "stride", "pad", "batch", "lanes"),
    [
        (1, 9, 8, 5, 1, 0, 2, 2),  # an image's first layer
        (3, 9, 5, 3, 2, 1, 2, 2),
        (2, 7, 3, 1, 2, 0, 2, 2),
        (32, 6, 64, 3, 1, 0, 2, 2),  # channels enough for the other kernels
        (32, 7, 32, 3, 2, 1, 2, 3),
        (64, 2, 64, 3, 1, 1, 3, 2),
    ],
)
@pytest.mark.parametrize(("bias", "special"), [(True, True), (False, False)])
def test_convolution(channels, side, out, kernel, stride, pad, batch, lanes, bias, special):
    inputs = [
        random(lanes, batch, channels, side, side),
        random(lanes, out, channels, kernel, kernel, seed=1),
    ]
    if bias:
        inputs.append(random(lanes, out, seed=2))
    agree(lambda x, w, b=None: F.conv2d(x, w, b, stride, pad), *inputs, special=special)


@pytest.mark.parametrize(("batch", "inside", "outside"), [(10, 40, 33), (1, 5, 3), (64, 16, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(batch, inside, outside, bias):
    inputs = [random(3, batch, inside), random(3, outside, inside, seed=1)]
    agree(F.linear, *inputs, *([random(3, outside, seed=2)] if bias else []))


@pytest.mark.parametrize("sides", [(6, 8), (7, 5)])
def test_pooling(sides):
    agree(lambda x: F.max_pool2d(x, 2), random(2, 3, 4, *sides))


def test_pooling_of_equals_and_of_nan_is_torchs():
    x = (
        torch.tensor([[1.0, 1.0, 0.0, 2.0], [1.0, 1.0, float("nan"), 3.0]], device=DEVICE)
        .view(1, 1, 2, 4)
        .requires_grad_()
    )
    with LaneKernels():
        own = F.max_pool2d(x, 2)
    torch.testing.assert_close(own, F.max_pool2d(x, 2), equal_nan=True)
    [gradient] = torch.autograd.grad(own.nan_to_num().sum(), x)
    assert gradient.flatten().tolist()[:2] == [1.0, 0.0]


@pytest.mark.parametrize(("batch", "classes"), [(10, 7), (3, 100), (1, 2)])
def test_cross_entropy(batch, classes):
    target = torch.randint(0, classes, (3, batch), generator=torch.Generator().manual_seed(0))
    if batch > 1:
        target[0, 1] = -100  # ignored, as torch does
    agree(F.cross_entropy, random(3, batch, classes), target)


def test_what_has_no_kernel_goes_its_usual_way():
    x, w = random(2, 4, 6, 6).to(DEVICE), random(4, 2, 3, 3).to(DEVICE)
    with LaneKernels():
        grouped = F.conv2d(x, w, groups=2)
        smoothed = F.cross_entropy(
            x.flatten(1), torch.tensor([0, 1], device=DEVICE), label_smoothing=0.1
        )
    assert torch.equal(grouped, F.conv2d(x, w, groups=2))
    assert torch.equal(
        smoothed,
        F.cross_entropy(x.flatten(1), torch.tensor([0, 1], device=DEVICE), label_smoothing=0.1),
    )


@pytest.mark.parametrize("classes", [5, 200], ids=["in registers", "in memory"])
def test_weight_learning_is_the_plain_loops(classes):
    """ALA on a last linear layer, against the paper's equations written out: ragged lanes, one without samples, all stages."""
    lanes, width, batch, threshold = 4, 72, 4, 0.02
    draw = torch.Generator().manual_seed(0)
    features, labels = (
        torch.randn(60, width, generator=draw),
        torch.randint(0, classes, (60,), generator=draw),
    )
    lengths, places = torch.tensor([13, 9, 0, 4]), torch.randint(0, 60, (lanes, 13), generator=draw)
    ignored = places[0, 1]
    assert ignored not in (places[0, 12], places[1, 8]), (
        "a batch of ignored samples alone has no loss"
    )
    labels[ignored] = -100
    w, g = (torch.randn(lanes, classes, width, generator=draw) * 0.1 for _ in range(2))
    w0, g0 = (torch.randn(lanes, classes, generator=draw) for _ in range(2))
    least, limit = torch.tensor([1, 2, 1, 3]), torch.tensor([13, 2, 5, 3])
    learned = Head(torch.ones_like(w).to(DEVICE), torch.ones_like(w0).to(DEVICE))
    moved = [t.to(DEVICE) for t in (features, places, labels[places], lengths, least, limit)]
    local, update = (
        Head(w.to(DEVICE), w0.to(DEVICE)),
        Head((g - w).to(DEVICE), (g0 - w0).to(DEVICE)),
    )
    losses, epochs = learn_weights(
        *moved,
        local,
        update,
        learned,
        batch_size=batch,
        eta=1.0,
        threshold=threshold,
        most=15,
        window=10,
    )
    for lane in range(lanes):
        weight, bias, history = torch.ones(classes, width), torch.ones(classes), []
        while int(lengths[lane]) and (
            len(history) < least[lane]
            or (
                len(history) < limit[lane]
                and not (len(history) > 10 and np.std(history[-10:]) < threshold)
            )
        ):
            each = []
            for rows in places[lane, : lengths[lane]].split(batch):
                hat = (w[lane] + (g[lane] - w[lane]) * weight).requires_grad_()
                hat0 = (w0[lane] + (g0[lane] - w0[lane]) * bias).requires_grad_()
                loss = F.cross_entropy(features[rows] @ hat.T + hat0, labels[rows])
                slope, slope0 = torch.autograd.grad(loss, (hat, hat0))
                weight = (weight - slope * (g[lane] - w[lane])).clamp(0, 1)
                bias = (bias - slope0 * (g0[lane] - w0[lane])).clamp(0, 1)
                each.append(loss.item())
            history.append(np.mean(each))
        assert epochs[lane].item() == len(history)
        assert torch.allclose(learned.weight[lane].cpu(), weight, atol=1e-5)
        assert torch.allclose(learned.bias[lane].cpu(), bias, atol=1e-5)
        assert np.allclose(losses[lane, : len(history)].cpu(), history, atol=1e-5)
        assert losses[lane, len(history) :].isnan().all()


@pytest.mark.parametrize("classes", [5, 200], ids=["in registers", "in memory"])
@pytest.mark.parametrize("what", ["features", "local"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is NumPy
def test_weight_learning_that_is_not_finite_shows_in_its_losses(classes, what):
    """The kernel's clipping turns NaN into a number, so W alone would not tell."""
    lanes, width = 3, 24
    draw = torch.Generator().manual_seed(0)
    features, places = torch.randn(12, width, generator=draw), torch.arange(12).reshape(lanes, 4)
    w, d = (
        Head(torch.randn(lanes, classes, width, generator=draw), torch.randn(lanes, classes))
        for _ in range(2)
    )
    if what == "features":
        features[places[1, 3], 5] = float("nan")
    else:
        w.weight[1, 2, 3] = float("inf")
    counts = [torch.tensor(numbers) for numbers in ([4, 4, 0], [1, 1, 1], [3, 3, 3])]
    moved = [t.to(DEVICE) for t in (features, places, places % classes, *counts)]
    local, update = (Head(*(t.to(DEVICE) for t in head)) for head in (w, d))
    learned = Head(*(torch.ones_like(t) for t in local))
    done = learn_weights(
        *moved, local, update, learned, batch_size=2, eta=1.0, threshold=0.0, most=3, window=10
    )
    assert are_losses_finite(*done).tolist() == [True, False, True]
