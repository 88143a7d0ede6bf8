"""The kernels against torch's own functions, lane by lane.

On a CPU they run in Triton's interpreter, on a GPU for real.
"""

import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import has_settled, learn_by_the_paper
from small import assert_close, ragged_task, start_of
from torch import nn
from torch.func import functional_call, vmap

pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from fedala.cuda import convolution, tiles
from fedala.cuda import late as late_module
from fedala.cuda.ala_kernel import Head, learn_weights
from fedala.cuda.ala_learner import learn_head
from fedala.cuda.batches import end_step
from fedala.cuda.buffers import make_buffer
from fedala.cuda.kernels import LaneKernels
from fedala.cuda.late import LateGradients, find_place
from fedala.lanes.blocks import conv_pool_relu, linear_relu
from fedala.lanes.cohort import Cohort
from fedala.lanes.local_aggregation import init_state, initialize
from fedala.lanes.trees import join
from fedala.lanes.weight_learning import Settings, are_losses_finite, learn_in_batches
from fedala.models.resnet import BasicBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def agree(function, *inputs, tolerance=1e-5, special=True):
    """Compare a function under vmap, and in each lane alone, with float64: values and gradients."""
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


#: Channels, side, outputs, kernel, stride, padding, batch, lanes.
FEW_CHANNELS = [
    (1, 9, 8, 5, 1, 0, 2, 2),  # the first layer of an image model
    (3, 9, 5, 3, 2, 1, 2, 2),
    (2, 7, 3, 1, 2, 0, 2, 2),
    (6, 7, 10, 5, 1, 2, 2, 2),
]
MANY_CHANNELS = [  # the other kernels, which take seconds
    ((32, 6, 64, 3, 1, 0, 2, 2), True),
    ((32, 7, 32, 3, 2, 1, 2, 3), False),
    ((64, 2, 64, 3, 1, 1, 3, 2), True),
    ((16, 8, 16, 3, 1, 1, 4, 2), True),  # the sums of its weights' gradient have parts
    ((32, 6, 32, 1, 2, 0, 2, 2), False),  # the short cut of a residual network
]


@pytest.mark.parametrize(
    ("sizes", "special"),
    [*((sizes, special) for sizes in FEW_CHANNELS for special in (True, False)), *MANY_CHANNELS],
)
def test_convolution(sizes, special):
    """With and without a bias, too."""
    channels, side, out, kernel, stride, pad, batch, lanes = sizes
    inputs = [
        random(lanes, batch, channels, side, side),
        random(lanes, out, channels, kernel, kernel, seed=1),
    ]
    if special:
        inputs.append(random(lanes, out, seed=2))
    agree(lambda x, w, b=None: F.conv2d(x, w, b, stride, pad), *inputs, special=special)


@pytest.mark.parametrize("blocks", [sizes for _, sizes in tiles._BACKWARD_FOLDED])
def test_the_gradient_of_the_input_in_rows(blocks, monkeypatch):
    """With every table of blocks, whatever the number of lanes, and with wide offsets."""
    monkeypatch.setattr(tiles, "_BACKWARD_FOLDED", ((float("inf"), blocks),))
    inputs = random(2, 2, 32, 8, 8), random(2, 64, 32, 5, 5, seed=1)
    agree(F.conv2d, *inputs)
    monkeypatch.setattr(convolution, "FIRST_WIDE", 0)
    agree(F.conv2d, *inputs)


@pytest.mark.parametrize(
    ("sizes", "special"),
    [
        ((1, 12, 8, 5, 1, 0, 2, 2), True),
        ((3, 9, 5, 3, 2, 1, 3, 2), True),  # an odd last row is in no window
        ((16, 7, 8, 3, 1, 1, 2, 2), False),
        ((32, 6, 32, 3, 1, 0, 2, 2), True),
    ],
)
def test_convolution_with_pooling_and_relu(sizes, special):
    channels, side, out, kernel, stride, pad, batch, lanes = sizes
    agree(
        lambda x, w, b: conv_pool_relu(x, w, b, stride, pad),
        random(lanes, batch, channels, side, side),
        random(lanes, out, channels, kernel, kernel, seed=1),
        random(lanes, out, seed=2),
        special=special,
    )


def test_layers_after_one_another_pass_on_channels_last():
    def network(x, w1, w2, b):
        return F.max_pool2d(F.conv2d(conv_pool_relu(x, w1, None, 1, 0), w2, b, 1, 1), 2).flatten(1)

    agree(
        network,
        random(2, 2, 3, 10, 10),
        random(2, 16, 3, 3, 3, seed=1),
        random(2, 8, 16, 3, 3, seed=2),
        random(2, 8, seed=3),
    )


def test_nan_passes_through_pooling_and_relu():
    x = torch.full((1, 1, 4, 4), float("nan"), device=DEVICE)
    with LaneKernels():
        assert conv_pool_relu(x, torch.ones(1, 1, 1, 1, device=DEVICE), None, 1, 0).isnan().all()
        ones = torch.ones(2, 4, device=DEVICE)
        assert linear_relu(x[0, 0], ones, None).isnan().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side", [8, 18], ids=["whole sums", "sums in parts"])
def test_late_gradients_add_what_they_would_be(bias, side):
    """For a convolution of each kind and a linear layer: w + f·∂L/∂w, and ∂L/∂w itself."""
    shapes = {"first": (16, 3, 3, 3), "second": (16, 16, 3, 3), "last": (5, 64)}
    params = {f"{name}.weight": random(2, *shape) for name, shape in shapes.items()}
    if bias:
        params |= {f"{n}.bias": random(2, s[0], seed=3) for n, s in shapes.items()}
    params = {name: make_buffer(value.to(DEVICE), 2).copy_(value) for name, value in params.items()}
    x = random(2, 4, 3, side, side).to(DEVICE)

    def network(own, x):
        x = conv_pool_relu(x, own["first.weight"], own.get("first.bias"), 1, 0)
        x = F.conv2d(x, own["second.weight"], own.get("second.bias"), 1, 1)
        x = F.max_pool2d(x, 2).mean((2, 3)).repeat(1, 4)
        return F.linear(x, own["last.weight"], own.get("last.bias")).sigmoid().mean()

    def gradients(own):
        own = {name: value.detach().requires_grad_() for name, value in own.items()}
        found = torch.autograd.grad(
            vmap(network)(own, x).sum(), list(own.values()), allow_unused=True
        )
        return dict(zip(own, found, strict=True))

    expected = gradients(params)
    known = {find_place(value): name for name, value in params.items()}
    with LaneKernels() as kernels, kernels.keep_late(known) as late:
        assert all(value is None for value in gradients(params).values())
    factors = torch.tensor([0.5, -2.0], device=DEVICE)
    assert set(late.found) == set(params)
    for [gradient] in late.found.values():
        before = [params[name].clone() for name in gradient.names]
        contiguous = [v.clone(memory_format=torch.contiguous_format) for v in before]
        gradient.add_to([params[name] for name in gradient.names], factors)
        gradient.add_to(contiguous, factors)  # in another order of memory
        for name, old, other, own in zip(
            gradient.names, before, contiguous, gradient.densify(), strict=True
        ):
            torch.testing.assert_close(own, expected[name], rtol=1e-4, atol=1e-3)
            wanted = old + factors.view(-1, *[1] * (old.dim() - 1)) * own
            torch.testing.assert_close(params[name], wanted, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(other, wanted, rtol=1e-5, atol=1e-4)
            params[name].copy_(old)


def test_nothing_of_a_step_outlives_it():
    """Late gradients hold what they are computed from. Not even a collector would find a circle."""
    shapes = {"conv.weight": (16, 16, 3, 3), "conv.bias": (16,), "fc.weight": (5, 16)}
    params = {n: random(2, *s).to(DEVICE).requires_grad_() for n, s in shapes.items()}
    params = {n: make_buffer(v, 2).copy_(v).detach().requires_grad_() for n, v in params.items()}

    def network(own, x):
        x = F.conv2d(x, own["conv.weight"], own["conv.bias"], 1, 1).relu().mean((2, 3))
        return F.linear(x, own["fc.weight"], None).square().mean()

    for side in (6, 18):  # gradients as a whole, and in parts
        known = {find_place(value): name for name, value in params.items()}
        with LaneKernels() as kernels, kernels.keep_late(known) as late:
            losses = vmap(network)(params, random(2, 4, 16, side, side).to(DEVICE))
            torch.autograd.grad(
                losses, list(params.values()), torch.ones_like(losses), allow_unused=True
            )
        assert set(late.found) == set(params)
        held = weakref.ref(late), weakref.ref(late.found["conv.weight"][0])
        del late, losses, kernels
        assert [one() for one in held] == [None, None]


def test_what_runs_beside_the_backward_pass_keeps_what_it_reads(monkeypatch):
    """Freed earlier, the memory would be used again while the other stream still reads it."""
    waited = []
    monkeypatch.setattr(late_module, "_is_capturing", lambda: True)
    monkeypatch.setattr(late_module, "_fork", object)
    monkeypatch.setattr(late_module, "_join", waited.extend)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    gradient, late = torch.ones(3), LateGradients({})
    kept = weakref.ref(gradient)
    assert late.begin(partial(torch.sum, gradient)) == 3
    del gradient
    assert kept() is not None
    late.join()
    assert len(waited) == 1
    assert kept() is None


def test_a_part_of_a_parameter_has_no_late_gradient():
    """Lane by lane, or gate by gate, a layer sees the beginning of a parameter's memory."""
    params = random(2, 6, 4).to(DEVICE).requires_grad_()
    x = random(3, 4, seed=1).to(DEVICE)
    known = {find_place(params): "weight"}
    with LaneKernels() as kernels, kernels.keep_late(known) as late:
        lane = F.linear(x, params[0]).sum()
        gate = vmap(lambda w: F.linear(x, w[:3]))(params).sum()
        [gradient] = torch.autograd.grad(lane + gate, params)
    assert not late.found
    expected = torch.zeros_like(params)
    expected[0] += x.sum(0)
    expected[:, :3] += x.sum(0)
    torch.testing.assert_close(gradient, expected)


def test_neither_a_transpose_nor_a_detached_weight_has_a_late_gradient():
    weight, bias = (random(2, *s, seed=2).to(DEVICE).requires_grad_() for s in ((4, 4), (4,)))
    x = random(3, 4, seed=1).to(DEVICE)
    known = {find_place(weight): "weight", find_place(bias): "bias"}
    with LaneKernels() as kernels, kernels.keep_late(known) as late:
        turned = vmap(lambda w: F.linear(x, w.t()))(weight)
        frozen = vmap(lambda w, b: F.linear(x, w.detach(), b))(weight, bias)
        found = torch.autograd.grad((turned + 2 * frozen).sum(), (weight, bias))
    assert not late.found
    sums = x.sum(0)[:, None].expand(4, 4)
    torch.testing.assert_close(found[0], sums.expand(2, 4, 4))
    torch.testing.assert_close(found[1], torch.full_like(bias, 6))


def test_losses_may_have_any_strides():
    total, column = torch.zeros(3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    end_step(total, torch.arange(6.0, device=DEVICE)[::2], column, 10)
    assert (total.tolist(), column.tolist()) == ([0, 2, 4], [10])


@pytest.mark.parametrize(("batch", "inside", "outside"), [(10, 40, 33), (1, 5, 3), (64, 16, 7)])
@pytest.mark.parametrize("layer", [F.linear, linear_relu], ids=["linear", "with ReLU"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(batch, inside, outside, layer, bias):
    inputs = [random(3, batch, inside), random(3, outside, inside, seed=1)]
    agree(
        lambda x, w, b=None: layer(x, w, b),
        *inputs,
        *([random(3, outside, seed=2)] if bias else []),
    )


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("sides", [(), (7, 5), (16, 20)], ids=str)
def test_batch_normalization(training, affine, sides):
    lanes, channels = 2, 5
    x = 3 * random(lanes, 4, channels, *sides) + 2
    own = [random(lanes, channels, seed=i) for i in (1, 2)] if affine else []
    running = [random(lanes, channels, seed=3), random(lanes, channels, seed=4).square() + 0.5]
    running = [value.to(DEVICE) for value in running]
    kept = [value.clone() for value in running]

    def normalize(x, mean, var, *own):
        return F.batch_norm(x, mean, var, *(own or (None, None)), training, 0.3, 1e-5)

    leaves = [value.to(DEVICE).requires_grad_() for value in (x, *own)]
    double = [value.detach().double().requires_grad_() for value in leaves]
    stats = [value.double() for value in kept]
    expected = torch.stack(
        [normalize(*(v[lane] for v in (double[0], *stats, *double[1:]))) for lane in range(lanes)]
    )
    slope = random(*expected.shape, seed=5).to(expected)
    wanted = torch.autograd.grad(expected, double, slope)
    with LaneKernels():
        found = vmap(normalize)(leaves[0], *running, *leaves[1:])
    slopes = torch.autograd.grad(found, leaves, slope.float())
    for a, b in zip((found, *slopes, *running), (expected, *wanted, *stats), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)
    assert torch.equal(running[0], kept[0]) != training
    with LaneKernels():
        for lane in range(lanes):
            one = normalize(*(v[lane] for v in (leaves[0], *kept, *leaves[1:])))
            torch.testing.assert_close(one, found[lane], rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """The parts of a residual network, small: its stem, and a block with a short cut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.block, self.fc = BasicBlock(16, 32, 2), nn.Linear(32, 3)

    def forward(self, x):
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        return self.fc(self.block(x).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_a_residual_network(training):
    """Its losses, gradients and running values, with kernels that are compiled for all sizes."""
    torch.manual_seed(0)
    model = Residual().train(training).to(DEVICE)
    lanes, learning = 2, [name for name, _ in model.named_parameters()]
    states = [{n: v.clone() for n, v in Residual().state_dict().items()} for _ in range(lanes)]
    x, y = random(lanes, 6, 3, 20, 20).to(DEVICE), torch.arange(6, device=DEVICE) % 3

    def run(dtype, together):
        state = {}
        for name in states[0]:
            value = torch.stack([own[name] for own in states]).to(DEVICE)
            value = value.to(dtype) if value.is_floating_point() else value
            state[name] = value.requires_grad_() if name in learning else value

        def loss(own, x):
            return F.cross_entropy(functional_call(model, own, (x,)), y)

        inputs = x.to(dtype)
        if together:
            with LaneKernels(special=False):
                losses = vmap(loss)(state, inputs)
        else:
            each = ({n: v[lane] for n, v in state.items()} for lane in range(lanes))
            losses = torch.stack([loss(own, inputs[i]) for i, own in enumerate(each)])
        slopes = torch.autograd.grad(losses.sum(), [state[name] for name in learning])
        running = {n: v for n, v in state.items() if n not in learning}
        return {"loss": losses.detach(), **dict(zip(learning, slopes, strict=True)), **running}

    exact, found = run(torch.float64, False), run(torch.float32, True)
    for name, value in exact.items():
        error = (found[name].double() - value.double()).norm() / (value.double().norm() + 1e-6)
        assert error < 2e-4, f"{name}: {error}"


def test_a_model_of_somebody_else_gets_results_in_the_usual_order_of_memory():
    x, w = random(2, 3, 4, 6, 6).to(DEVICE), random(2, 16, 4, 3, 3).to(DEVICE)
    with LaneKernels(is_own=False):
        result = vmap(lambda x, w: F.conv2d(x, w).view(3, -1))(x, w)
    assert result.shape == (2, 3, 256)


@pytest.mark.parametrize(("batch", "classes"), [(10, 7), (3, 100), (1, 2)])
def test_cross_entropy(batch, classes):
    target = torch.randint(0, classes, (3, batch), generator=torch.Generator().manual_seed(0))
    if batch > 1:
        target[0, 1] = -100  # ignored, as torch does
    agree(F.cross_entropy, random(3, batch, classes), target)


def test_a_function_without_a_kernel_runs_as_usual():
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
def test_weight_learning_is_the_papers(classes):
    """ALA on a last linear layer: ragged lanes, one without samples, all stages."""
    lanes, width, batch, threshold = 4, 72, 4, 0.02
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, width, generator=draw)
    labels = torch.randint(0, classes, (60,), generator=draw)
    lengths = torch.tensor([13, 9, 0, 4])
    positions = torch.randint(0, 60, (lanes, 13), generator=draw)
    ignored = positions[0, 1]
    assert ignored not in (positions[0, 12], positions[1, 8]), "a batch must not be all ignored"
    labels[ignored] = -100
    w, g = (torch.randn(lanes, classes, width, generator=draw) * 0.1 for _ in range(2))
    w0, g0 = (torch.randn(lanes, classes, generator=draw) for _ in range(2))
    least, limit = torch.tensor([1, 2, 1, 3]), torch.tensor([13, 2, 5, 3])
    tensors = (features, positions, labels[positions], lengths, least, limit)
    weights = Head(torch.ones_like(w).to(DEVICE), torch.ones_like(w0).to(DEVICE))
    losses, epochs = learn_weights(
        *(tensor.to(DEVICE) for tensor in tensors),
        Head(w.to(DEVICE), w0.to(DEVICE)),
        Head((g - w).to(DEVICE), (g0 - w0).to(DEVICE)),
        weights,
        batch_size=batch,
        eta=1.0,
        threshold=threshold,
        most=15,
        window=10,
    )

    def loss(head, rows):
        return F.cross_entropy(features[rows] @ head["weight"].T + head["bias"], labels[rows])

    for lane in range(lanes):

        def is_enough(history, lane=lane):
            if lengths[lane] == 0 or len(history) >= limit[lane]:
                return True
            return len(history) >= least[lane] and has_settled(history, threshold)

        expected, history = learn_by_the_paper(
            loss,
            {"weight": w[lane], "bias": w0[lane]},
            {"weight": g[lane], "bias": g0[lane]},
            {"weight": torch.ones_like(w[lane]), "bias": torch.ones_like(w0[lane])},
            positions[lane, : lengths[lane]].split(batch),
            eta=1.0,
            is_enough=is_enough,
        )
        assert epochs[lane].item() == len(history)
        assert torch.allclose(weights.weight[lane].cpu(), expected["weight"], atol=1e-5)
        assert torch.allclose(weights.bias[lane].cpu(), expected["bias"], atol=1e-5)
        assert np.allclose(losses[lane, : len(history)].cpu(), history, atol=1e-5)
        assert losses[lane, len(history) :].isnan().all()


@pytest.mark.parametrize("freeze", [False, True])
def test_both_learners_initialize_the_same_models(freeze):
    """The same problem, solved by the kernel and batch by batch, in lanes of all kinds."""
    sizes = [13, 9, 8, 5, 4, 1, 0]
    task = ragged_task(sizes, dtype=torch.float32, device=DEVICE)
    start = start_of(task)
    local, received = (join([start(first + i) for i in range(len(sizes))]) for first in (0, 50))
    received["out.weight"][2], received["out.bias"][2] = (
        local["out.weight"][2],
        local["out.bias"][2],
    )
    governed = ("out.weight", "out.bias")
    settings = Settings(max_epochs=14, eta=2.0, freeze=freeze)
    state = init_state(local, governed)
    state["trained"][1::3] = True
    results, calls = [], []
    for learner in (learn_head, learn_in_batches):

        def learn(problem, learner=learner):
            calls.append(problem.cut.p)
            return learner(problem)

        cohort = Cohort(task, range(len(sizes)), [0] * len(sizes), round=2)
        results.append(
            initialize(cohort, settings, state, local, received, governed=governed, learner=learn)
        )
    (models, learned, outcome), (expected, reference, plain) = results
    assert calls == [1, 1]
    assert_close(models, expected, 1e-5)
    assert_close(learned["weights"], reference["weights"], 1e-5)
    assert learned["trained"].tolist() == reference["trained"].tolist()
    for name in ("epochs", "initial", "faults"):
        assert getattr(outcome, name).tolist() == getattr(plain, name).tolist()
    assert len(set(outcome.epochs.tolist())) > 1 or freeze
    assert outcome.epochs[2] == outcome.epochs[6] == 0
    for own, other, epochs in zip(outcome.losses, plain.losses, plain.epochs, strict=True):
        assert own[:epochs].tolist() == pytest.approx(other[:epochs].tolist(), abs=1e-5)


def test_a_head_that_the_kernel_has_no_room_for_is_learned_in_batches(monkeypatch):
    def refuse(*args, **options):
        raise OutOfResources(2, 1, "shared memory")

    task = ragged_task([9, 5], dtype=torch.float32, device=DEVICE)
    start = start_of(task)
    local, received = (join([start(first), start(first + 1)]) for first in (0, 50))
    governed, results = ("out.weight", "out.bias"), []
    for learner in (learn_in_batches, learn_head):
        state = init_state(local, governed)
        cohort = Cohort(task, [0, 1], [0, 0], round=2)
        arguments = (cohort, Settings(max_epochs=2), state, local, received)
        results.append(initialize(*arguments, governed=governed, learner=learner))
        monkeypatch.setattr("fedala.cuda.ala_kernel.learn_weights", refuse)
    (expected, _, _), (initialized, _, outcome) = results
    assert outcome.epochs.tolist() == [2, 2]
    assert_close(initialized, expected, 0)


def test_a_head_without_samples_learns_nothing():
    task = ragged_task([0, 0], dtype=torch.float32, device=DEVICE)
    start = start_of(task)
    local, received = (join([start(first), start(first + 1)]) for first in (0, 50))
    governed = ("out.weight", "out.bias")
    initialized, _, outcome = initialize(
        Cohort(task, [0, 1], [0, 0], round=2),
        Settings(),
        init_state(local, governed),
        local,
        received,
        governed=governed,
        learner=learn_head,
    )
    assert outcome.epochs.tolist() == [0, 0]
    assert_close(initialized, received, 0)


@pytest.mark.parametrize("classes", [5, 200], ids=["in registers", "in memory"])
@pytest.mark.parametrize("what", ["features", "local"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is NumPy
def test_weight_learning_that_is_not_finite_shows_in_its_losses(classes, what):
    """The kernel's clipping turns NaN into a number, so W alone would not show it."""
    lanes, width = 3, 24
    draw = torch.Generator().manual_seed(0)
    features, positions = torch.randn(12, width, generator=draw), torch.arange(12).reshape(lanes, 4)
    w, d = (
        Head(torch.randn(lanes, classes, width, generator=draw), torch.randn(lanes, classes))
        for _ in range(2)
    )
    if what == "features":
        features[positions[1, 3], 5] = float("nan")
    else:
        w.weight[1, 2, 3] = float("inf")
    counts = [torch.tensor(numbers) for numbers in ([4, 4, 0], [1, 1, 1], [3, 3, 3])]
    moved = [t.to(DEVICE) for t in (features, positions, positions % classes, *counts)]
    local, update = (Head(*(t.to(DEVICE) for t in head)) for head in (w, d))
    learned = Head(*(torch.ones_like(t) for t in local))
    done = learn_weights(
        *moved, local, update, learned, batch_size=2, eta=1.0, threshold=0.0, most=3, window=10
    )
    assert are_losses_finite(*done).tolist() == [True, False, True]
