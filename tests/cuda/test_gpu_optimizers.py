"""Optimisers on a GPU: kernels against plain PyTorch, captured steps against eager ones."""

import math

import pytest
import torch
from cuda.test_gpu import go, image_task, small_cnn
from small import assert_close, start_of

from fedala.lanes import Cohort, Optimizer, Recipe, Schedule, UpdateRule
from fedala.lanes.trees import join, tree_map
from fedala.methods import make
from fedala.simulation import Simulation
from fedala.simulation.variants import Variant

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "decay": Optimizer(weight_decay=0.1),
    "momentum": Optimizer(momentum=0.9),
    "nesterov": Optimizer(momentum=0.8, nesterov=True, weight_decay=0.05),
    "clip": Optimizer(clip=0.3),
    "adam": Optimizer("adam", momentum=0.9, weight_decay=0.1),
    "adamw": Optimizer("adamw", momentum=0.85, weight_decay=0.1, beta2=0.95, clip=0.5),
}
LANES = 3


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_is_the_plain_update(name, differ):
    """Twenty steps on parameters of odd sizes, in lanes that have taken different numbers."""
    rule = UpdateRule.of([OPTIMIZERS[name]])
    task = image_task("cuda", optimizer=OPTIMIZERS[name])
    cohort = Cohort(task, [1, 5, 2], [0] * LANES)
    if differ:
        lr = torch.tensor([0.1, 0.02, 0.005], device="cuda")
    else:
        lr = torch.full((1,), 0.05, device="cuda").expand(LANES)
    numbers = {**cohort.optimizer_numbers(), "lr": lr}
    draw = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(LANES, *shape, device="cuda", generator=draw)

    params = {"a": random(33, 7), "b": random(5), "c": random(1, 3, 3, 130)}
    slots = rule.init_slots(params)
    if "steps" in slots:
        slots["steps"] += torch.tensor([0.0, 4.0, 9.0], device="cuda")
    own, plain = (tree_map(torch.clone, (params, slots)) for _ in range(2))
    for _ in range(20):
        gradients = {key: random(*value.shape[1:]) for key, value in params.items()}
        rule.update(task, own[0], dict(gradients), own[1], numbers)
        exact = tree_map(torch.clone, gradients)
        if rule.clips:
            norm = torch.stack([g.flatten(1).square().sum(1) for g in exact.values()]).sum(0).sqrt()
            factor = (numbers["clip"] / (norm + 1e-6)).clamp(max=1)
            exact = {k: g * factor.view(-1, *[1] * (g.dim() - 1)) for k, g in exact.items()}
        if "steps" in plain[1]:
            plain[1]["steps"].add_(1)
        rule._update_each(plain[0], exact, plain[1], numbers)
    assert_close(own[0], plain[0], 2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_steps_are_eager_steps(name):
    options = {"optimizer": OPTIMIZERS[name], "epochs": 3}
    # Where a gradient is near 0, Adam's step has the sign of a rounding error: compare in float64.
    precision, tolerance = ("float64", 1e-9) if name.startswith("adam") else ("float32", 1e-5)
    results = []
    for watches in (False, True):
        task = image_task("cuda", precision, **options)
        order = sorted(range(len(task.parts["train"])), key=lambda c: -task.size(c))
        params = join([start_of(task, small_cnn)(seed) for seed in range(len(order))])
        cohort = Cohort(task, order, [0] * len(order))
        if watches:
            cohort.on_step = lambda losses, state: None  # steps are eager then
        results.append(cohort.fit(params))
    assert_close(*results, tolerance)


def test_captured_steps_of_a_fixed_number_are_eager_steps():
    results = []
    for watches in (False, True):
        task = image_task("cuda", local_steps=7, optimizer=OPTIMIZERS["momentum"])
        order = sorted(range(len(task.parts["train"])), key=lambda c: -task.size(c))
        params = join([start_of(task, small_cnn)(seed) for seed in range(len(order))])
        cohort = Cohort(task, order, [0] * len(order))
        if watches:
            cohort.on_step = lambda losses, state: None
        results.append(cohort.fit(params))
    assert_close(*results, 1e-5)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "pfedme", "per-fedavg", "apple", "fedala"])
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_methods_on_the_gpu_are_those_on_the_cpu(method, name):
    options = {
        "optimizer": OPTIMIZERS[name],
        "keeps_optimizer": True,
        "schedule": Schedule("cosine", warmup=1),
        "lr": 0.01,
    }
    # Where a gradient is near 0, Adam's step has the sign of a rounding error: compare in float64.
    precision, tolerance = ("float64", 1e-6) if name == "adamw" else ("float32", 2e-3)
    if method == "apple":
        options["lr"] = 0.001  # its core steps by N·lr
    rows, models = go(method, image_task("cuda", precision, **options), rounds=3)
    reference, plain = go(method, image_task("cpu", "float64", **options), rounds=3, lanes=1)
    for own, other in zip(rows, reference, strict=True):
        assert own.loss == pytest.approx(other.loss, rel=5e-3)
    for key in plain:
        assert_close(models[key], plain[key], tolerance)


@pytest.mark.parametrize("method", ["fedprox", "ditto", "fedala", "pfedme", "fedphp", "apple"])
def test_points_of_a_sweep_are_runs_alone(method):
    """Learning rates, momenta and a hyperparameter differ between the lanes."""
    field = {"fedprox": "mu", "ditto": "lam", "fedala": "eta", "pfedme": "lam", "fedphp": "lam"}
    name = field.get(method, "eta")
    scale = 0.05 if method == "apple" else 1  # it diverges with a larger η₂
    variants = [
        Variant(
            make(method, {f"{method}.{name}": value * scale}),
            Recipe(lr, Optimizer(momentum=momentum, clip=math.inf)),
        )
        for value, lr, momentum in ((0.1, 0.005, 0.5), (0.3, 0.002, 0.9), (0.5, 0.001, 0.0))
    ]
    task = image_task("cuda")
    models: dict = {}
    simulation = Simulation(
        variants[0].method, task, start_of(task, small_cnn), rounds=2, variants=variants
    )
    list(
        simulation.run(
            lambda p: models.update({(p.run, p.client): {n: v.cpu() for n, v in p.model.items()}})
        )
    )
    for run, variant in enumerate(variants):
        recipe = variant.recipe
        alone = image_task("cuda", lr=recipe.lr, optimizer=recipe.optimizer)
        own: dict = {}
        simulation = Simulation(variant.method, alone, start_of(alone, small_cnn), rounds=2)
        list(
            simulation.run(
                lambda p, own=own: own.update({p.client: {n: v.cpu() for n, v in p.model.items()}})
            )
        )
        for client, model in own.items():
            assert_close(models[run, client], model, 5e-4)
