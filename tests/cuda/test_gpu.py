"""The fast path on a GPU against the plain one. Without a GPU, these tests are skipped."""

import pytest
import torch
from small import EACH_KIND, QUICK, assert_close, ragged_task, start_of
from torch import nn

from fedala import ALA, UserError
from fedala.ala import make_reports
from fedala.cuda.backend import CudaBackend
from fedala.lanes.augmentation import Augmentation
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import upper
from fedala.lanes.local_aggregation import init_state, initialize
from fedala.lanes.normalization import Normalization
from fedala.lanes.task import Task
from fedala.lanes.trees import join
from fedala.lanes.weight_learning import Settings
from fedala.methods import make
from fedala.models import cnn, resnet18
from fedala.simulation import Simulation

pytestmark = pytest.mark.gpu

SIZES = [5, 22, 13, 3, 8, 17, 0]


def small_cnn():
    return cnn((1, 16, 16), 3)


class Normalized(nn.Module):
    """For the methods that refuse a model without normalisation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 7 * 7, 3)

    def forward(self, x):
        x = torch.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.out(x.flatten(1))


#: The model of a method that does not take `small_cnn`.
MODELS = {"fedbn": Normalized}


def model_of(name):
    return MODELS.get(name.removesuffix("+ala"), small_cnn)


def image_task(device, precision="float32", model=small_cnn, side=16, **options):
    with torch.device("meta"):
        skeleton = model()
    task = ragged_task(SIZES, model=skeleton, device=device, precision=precision, **options)
    draw = torch.Generator().manual_seed(0)
    shape = (len(task.y), 3 if model is not small_cnn else 1, side, side)
    images = torch.randn(shape, generator=draw) + task.y.cpu().view(-1, 1, 1, 1) * 0.3
    task.x = images.to(device, task.dtype)
    return task


def go(method, task, model=small_cnn, rounds=2, **options):
    simulation = Simulation(
        make(method, QUICK.get(method)), task, start_of(task, model), rounds=rounds, **options
    )
    models = {}
    evaluations = list(
        simulation.run(
            lambda p: models.update({(p.seed, p.client): {n: v.cpu() for n, v in p.model.items()}})
        )
    )
    return [one.row for one in evaluations], models


@pytest.mark.parametrize("name", EACH_KIND)
def test_lanes_on_the_gpu_are_each_client_alone_on_the_cpu(name):
    """Two rounds: float32 kernels, graphs and lanes, against float64 lane by lane on the CPU.

    At a rate of 0.1, float32 on the CPU is 1 % off for FedRep: a unit of ReLU flips.
    """
    options = {"model": model_of(name), "seeds": (0, 1)}
    rows, models = go(name, image_task("cuda", model=model_of(name), lr=0.05), **options)
    exact = image_task("cpu", "float64", model=model_of(name), lr=0.05)
    reference, plain = go(name, exact, **options, lanes=1)
    for own, other in zip(rows, reference, strict=True):
        assert own.loss == pytest.approx(other.loss, rel=2e-3)
    for key in plain:
        assert_close(models[key], plain[key], 2e-3)


@pytest.mark.parametrize("name", EACH_KIND)
def test_any_number_of_lanes_gives_the_same_on_the_gpu(name):
    """At a rate of 0.05, too: blocks depend on the lanes, so sums are rounded differently."""
    model = model_of(name)
    _, together = go(name, image_task("cuda", model=model, lr=0.05), model)
    _, single = go(name, image_task("cuda", model=model, lr=0.05), model, lanes=1)
    for key in single:
        assert_close(together[key], single[key], 2e-4)


@pytest.mark.parametrize("name", ["fedala", "ditto", "local"])
def test_double_precision_is_exact_in_lanes(name):
    _, together = go(name, image_task("cuda", "float64"))
    _, reference = go(name, image_task("cpu", "float64"), lanes=1)
    for key in reference:
        assert_close(together[key], reference[key], 1e-9)


@pytest.mark.parametrize("name", EACH_KIND)
def test_the_same_seed_gives_the_same_bits(name):
    model = model_of(name)
    (first, models), (again, others) = (
        go(name, image_task("cuda", model=model), model, rounds=3) for _ in range(2)
    )
    assert [row.loss for row in first] == [row.loss for row in again]
    for key in models:
        assert_close(models[key], others[key], 0)


def test_captured_steps_are_the_steps_themselves(monkeypatch):
    task = image_task("cuda")
    order = sorted(range(len(SIZES)), key=lambda client: -SIZES[client])
    params = {
        n: torch.cat([start_of(task, small_cnn)(seed)[n] for seed in range(7)])
        for n in start_of(task, small_cnn)(0)
    }
    cohort = Cohort(task, order, [0] * 7)
    captured = [cohort.fit(params, epochs=2, proximal=(0.1, params)) for _ in range(2)]
    assert task.backend._captured
    monkeypatch.setattr(CudaBackend, "capture_steps", lambda *_: None)
    assert_close(captured[0], captured[1], 0)
    assert_close(captured[0], cohort.fit(params, epochs=2, proximal=(0.1, params)), 1e-6)


@pytest.mark.parametrize("kind", ["floats", "bytes converted on loading", "bytes"])
def test_captured_steps_augment_as_the_steps_themselves(kind, monkeypatch):
    """Every epoch and round replays the same graphs with other transforms."""
    if kind == "bytes":
        monkeypatch.setattr(CudaBackend, "has_room_for_floats", lambda *_: False)
    augmentation = Augmentation(flip=True, padding=3)
    tasks = [image_task("cuda", augmentation=augmentation), image_task("cuda")]
    if kind != "floats":
        pixels = tasks[0].x.mul(40).add(128).clamp(0, 255).to(torch.uint8).cpu()
        samples = tasks[0].model, pixels, tasks[0].y.cpu(), tasks[0].parts["train"]
        options = {"batch_size": 4, "lr": 0.1, "device": "cuda"}
        options["normalization"] = Normalization((0.4,), (0.3,))
        tasks = [Task(*samples, augmentation=one, **options) for one in (augmentation, None)]
    assert (tasks[0].x.dtype == torch.uint8) == (kind == "bytes")
    order = sorted(range(len(SIZES)), key=lambda client: -SIZES[client])
    start = start_of(tasks[0], small_cnn)
    params = join([start(seed) for seed in range(len(SIZES))])

    def train(task, round):
        return Cohort(task, order, [0] * len(SIZES), round=round).fit(params, epochs=3)

    captured = [train(tasks[0], round) for round in (1, 2, 1)]
    plain = train(tasks[1], 1)
    assert tasks[0].backend._captured
    monkeypatch.setattr(CudaBackend, "capture_steps", lambda *_: None)
    assert_close(captured[0], captured[2], 0)
    for round in (1, 2):
        assert_close(captured[round - 1], train(tasks[0], round), 1e-6)
    assert not torch.allclose(captured[0]["fc2.weight"], plain["fc2.weight"], atol=1e-4)


def test_augmented_lanes_on_the_gpu_are_each_client_alone_on_the_cpu():
    augmentation = Augmentation(flip=True, padding=3)
    tasks = [
        image_task(*where, augmentation=augmentation)
        for where in (("cuda", "float64"), ("cpu", "float64"))
    ]
    (rows, models), (expected, plain) = go("fedala", tasks[0]), go("fedala", tasks[1], lanes=1)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=1e-9)
    for key in plain:
        assert_close(models[key], plain[key], 1e-9)


@pytest.mark.parametrize("by_lane", [False, True], ids=["one rate", "a rate for each lane"])
def test_rounds_with_other_rates_replay_the_same_graphs(by_lane, monkeypatch):
    """A graph for each number of lanes that have a full batch, however often the rate changes."""
    task = image_task("cuda")
    order = sorted(range(len(SIZES)), key=lambda client: -SIZES[client])
    start = start_of(task, small_cnn)
    params = join([start(seed) for seed in range(len(SIZES))])
    rates = [0.1, 0.02, 0.3]
    if by_lane:
        rates = [torch.linspace(lr, lr / 2, len(SIZES), device="cuda") for lr in rates]

    def train(round):
        cohort = Cohort(task, order, [0] * len(SIZES), round=round)
        return cohort.fit(params, lr=rates[round - 1])

    captured, graphs = [], []
    for round in (1, 2, 3):
        captured.append(train(round))
        [steps] = task.backend._captured.values()
        graphs.append(dict(steps.graphs))
    batches = max(SIZES) // task.batch_size
    full = {sum(n >= task.batch_size * (i + 1) for n in SIZES) for i in range(batches)}
    assert sorted((first, end) for first, end, _ in graphs[0]) == [(0, n) for n in sorted(full)]
    assert graphs[0] == graphs[1] == graphs[2]
    monkeypatch.setattr(CudaBackend, "capture_steps", lambda *_: None)
    for round in (1, 2, 3):
        assert_close(captured[round - 1], train(round), 1e-6)


def test_a_deep_network_with_batch_normalisation():
    """Normalising batches of four magnifies rounding. The measure is float32 on the CPU."""

    def deep():
        return resnet18((3, 32, 32), 3)

    def models(device, precision, **options):
        return go(
            "fedala", image_task(device, precision, deep, 32, lr=1e-4), deep, rounds=1, **options
        )[1]

    exact, plain = models("cpu", "float64", lanes=1), models("cpu", "float32", lanes=1)
    lanes, double = models("cuda", "float32"), models("cuda", "float64")
    start = start_of(image_task("cpu", "float64", deep, 32), deep)(0)

    def error(found):
        """Return the largest deviation of a parameter, relative to how far training moved it."""
        return max(
            ((found[key][name] - value).norm() / ((value - start[name]).norm() + 1e-5)).item()
            for key in exact
            for name, value in exact[key].items()
            if value.is_floating_point()
        )

    assert error(double) < 1e-9
    assert error(lanes) < 3 * error(plain) < 0.5


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precisions_are_near(precision):
    rows, _ = go("fedala", image_task("cuda", precision), rounds=3)
    exact, _ = go("fedala", image_task("cuda"), rounds=3)
    assert rows[-1].loss == pytest.approx(exact[-1].loss, rel=0.05)


@pytest.mark.parametrize("max_epochs", [3, 20])
def test_a_lane_that_is_not_finite_keeps_its_weights_in_the_kernel_too(max_epochs):
    """A NaN in one client's data changes neither its W nor the others' bits."""
    settings, found = Settings(max_epochs=max_epochs, sample=1.0), []
    for value in (1.0, float("nan")):
        task = image_task("cuda")
        clients = sorted(range(len(SIZES)), key=lambda client: -SIZES[client])
        cohort = Cohort(task, clients, [0] * len(clients), round=2)
        task.x[torch.as_tensor(task.parts["train"][clients[1]])] *= value
        start = start_of(task, small_cnn)
        local, received = (
            join([start(first + i) for i in range(len(clients))]) for first in (0, 50)
        )
        governed = upper(task.model, 1)
        state = init_state(local, governed)
        initialized, state, outcome = initialize(
            cohort,
            settings,
            state,
            local,
            received,
            governed=governed,
        )
        found.append((initialized, state, outcome, received))
    (sound, good, _, _), (initialized, state, outcome, received) = found
    others = [lane for lane in range(len(SIZES)) if lane != 1]
    assert [report.fault is not None for report in make_reports(outcome, settings)] == [
        lane == 1 for lane in range(len(SIZES))
    ]
    assert state["trained"].tolist() == [
        size > 0 and lane != 1 for lane, size in enumerate(cohort.sizes())
    ]
    for name, value in state["weights"].items():
        assert (value[1] == 1).all()
        assert torch.equal(initialized[name][1], received[name][1])
        assert torch.equal(value[others], good["weights"][name][others])
        assert torch.equal(initialized[name][others], sound[name][others])


def test_a_client_without_samples_on_the_gpu():
    local, received = (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).cuda() for _ in range(2))
    report = ALA().initialize(
        local, received, (torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    )
    assert report.skipped
    assert all(map(torch.equal, local.parameters(), received.parameters()))


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(4, 5).cuda(), nn.Linear(5, 3))
    with pytest.raises(UserError, match="spread over cpu, cuda:0"):
        ALA().initialize(model, model, (torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)))


class Views(nn.Module):
    """A model of the user's own that cannot run under vmap."""

    def __init__(self, fussy=True):
        super().__init__()
        self.conv, self.fc, self.fussy = nn.Conv2d(1, 4, 3), nn.Linear(784, 3), fussy

    def forward(self, x):
        h = self.conv(x).relu().flatten(1)
        if self.fussy:
            h.data_ptr()  # a batch of lanes does not have one
        return self.fc(h)


def test_a_model_that_notices_vmap_runs_lane_by_lane_on_the_gpu():
    fussy = image_task("cuda", model=Views)
    fussy.x = fussy.x[:, :1].contiguous()
    plain = image_task("cuda", model=lambda: Views(fussy=False))
    plain.x = plain.x[:, :1].contiguous()
    (rows, _), (expected, _) = go("fedala", fussy, Views), go("fedala", plain, Views)
    assert (fussy.uses_vmap, plain.uses_vmap) == (False, True)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=1e-4)
