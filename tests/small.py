"""Small federations for tests: clients of very different sizes, in a few milliseconds."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedala.lanes.parameters import model_state
from fedala.lanes.task import Task
from fedala.lanes.trees import Params
from fedala.methods import catalogue, make
from fedala.records import HistoryRow
from fedala.simulation import Simulation


class Net(nn.Module):
    """A model with every kind of layer and buffer that travels."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.hidden = nn.Linear(12, 6)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.out(self.hidden(x.flatten(1)).relu())


class Doubled(Net):
    """A model that does something after its last layer, which therefore cannot be cut off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def ragged_task(
    sizes: list[int],
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: object,
) -> Task:
    """Make clients of `sizes` training samples each, and a third as many test samples.

    The samples are learnable 6×6 images of three classes.
    """
    random = np.random.default_rng(0)
    tests = [max(1, size // 3) for size in sizes]
    total = sum(sizes) + sum(tests)
    y = torch.from_numpy(random.integers(0, 3, total))
    x = torch.from_numpy(random.normal(size=(total, 1, 6, 6))) + y.view(-1, 1, 1, 1) * 0.5
    cuts = np.cumsum([0, *sizes, *tests])
    parts = [np.arange(a, b) for a, b in pairwise(cuts)]
    precision = "float64" if dtype == torch.float64 else "float32"
    options = {"batch_size": 4, "lr": 0.1, "precision": precision, **settings}
    train, test = parts[: len(sizes)], parts[len(sizes) :]
    return Task(model or Net(), x.to(dtype), y, train, test, **options)  # type: ignore[arg-type]


def start_of(task: Task, make_model: type[nn.Module] = Net):
    def start(seed: int) -> Params:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            state = model_state(make_model())
        return {
            n: v.to(task.device, task.dtype if v.is_floating_point() else v.dtype, copy=True)
            for n, v in state.items()
        }

    return start


#: Where a method's default takes long and shows nothing more: fourteen epochs of fine-tuning.
QUICK = {"fedavg-c": {"fedavg-c.epochs": 2}, "fedprox-c": {"fedprox-c.epochs": 2}}


#: Every method, and ALA on one of each kind: a base that keeps a personal model, a part of the
#: model, that gets a model of its own, one of several, or adds parameters.
KINDS_WITH_ALA = ("ditto+ala", "fedrep+ala", "fedamp+ala", "ifca+ala", "fedcp+ala")
EACH_KIND = [*catalogue(), *KINDS_WITH_ALA]


def evaluate(
    method: str, task: Task, *, settings: dict[str, object] | None = None, **options: object
):
    """Run all rounds of a method: the simulation, its evaluations, its models by (seed, client)."""
    settings = QUICK.get(method) if settings is None else settings
    chosen, start = make(method, settings), start_of(task)
    simulation = Simulation(chosen, task, start, **options)  # type: ignore[arg-type]
    models = {}
    evaluations = list(
        simulation.run(
            lambda personal: models.update({(personal.seed, personal.client): personal.model})
        )
    )
    return simulation, evaluations, models


def simulate(method: str, task: Task, **options: object):
    """Do the same, with the rows of the history instead of the evaluations."""
    simulation, evaluations, models = evaluate(method, task, **options)  # type: ignore[arg-type]
    return simulation, [evaluation.row for evaluation in evaluations], models


def same_rows(a: Sequence[HistoryRow], b: Sequence[HistoryRow], tolerance: float) -> None:
    """Compare two histories in everything but the seconds."""
    assert [(row.seed, row.round) for row in a] == [(row.seed, row.round) for row in b]
    for one, other in zip(a, b, strict=True):
        cells, expected = one.columns(), other.columns()
        for key in cells.keys() - {"seconds"}:
            assert cells[key] == pytest.approx(expected[key], abs=tolerance, nan_ok=True), key


def assert_close(a: Params, b: Params, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        difference = (a[name].double() - b[name].double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"
