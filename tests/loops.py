"""Plain loops, one client and one whole module at a time: what the methods' own tests hold the lanes against.

Nothing here knows of lanes or stacked parameters; only the draws of the batches are the package's, so that both see the same.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from small import Net, start_of
from torch import Tensor

from fedala.cohort import Task
from fedala.randomness import draw

State = dict[str, Tensor]
PARAMETERS = [name for name, _ in Net().named_parameters()]


def initial(task: Task, seed: int = 0) -> State:
    return {name: value[0] for name, value in start_of(task)(seed).items()}


def module(state: State) -> Net:
    """A module of its own with this state, in training mode."""
    model = Net().double()
    model.load_state_dict(state)
    return model


def state(model: Net) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def features(model: Net, x: Tensor) -> Tensor:
    """What enters the last layer."""
    x = torch.max_pool2d(model.norm(model.conv(x)).relu(), 2)
    return model.hidden(x.flatten(1)).relu()


def batches(task: Task, client: int, round: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """A client's batches: the last partial one is dropped, unless it is the only one."""
    rows = task.parts["train"][client]
    rows = rows[draw(seed, "batches", client=client, round=round).permutation(len(rows))]
    size = task.batch_size
    ends = [0, len(rows)] if len(rows) < size else range(0, len(rows) + 1, size)
    for a, b in pairwise(ends):
        if b > a:
            yield task.x[rows[a:b]], task.y[rows[a:b]]


def combine(states: list[State], weights: list[float]) -> State:
    """Σ weight·state; counters are the first one's."""

    def total(name: str) -> Tensor:
        if not states[0][name].is_floating_point():
            return states[0][name]
        return sum(weight * s[name] for weight, s in zip(weights, states, strict=True))  # type: ignore[return-value]

    return {name: total(name) for name in states[0]}


def mean(states: list[State], task: Task) -> State:
    sizes = [len(rows) for rows in task.parts["train"]]
    return combine(states, [size / sum(sizes) for size in sizes])


def losses(task: Task, models: list[State]) -> float:
    """The mean loss over all test samples, each client's model on its own."""
    total, count = 0.0, 0
    for client, model in enumerate(models):
        rows = task.parts["test"][client]
        total += F.cross_entropy(module(model).eval()(task.x[rows]), task.y[rows], reduction="sum").item()
        count += len(rows)
    return total / count


class PlainALA:
    """One client's ALA on the output layer, on all samples in order, its initial stage `EPOCHS` epochs."""

    EPOCHS, ETA = 3, 2.0
    SETTINGS: ClassVar = {"ala.sample": 1.0, "ala.max_epochs": EPOCHS, "ala.eta": ETA}
    NAMES = ("out.weight", "out.bias")

    def __init__(self) -> None:
        self.weights: State = {}

    def __call__(self, task: Task, client: int, received: State, local: State) -> State:
        rows = task.parts["train"][client]
        if not len(rows) or all(torch.equal(received[name], local[name]) for name in self.NAMES):
            return dict(received)
        epochs = 1 if self.weights else self.EPOCHS
        self.weights = self.weights or {name: torch.ones_like(received[name]) for name in self.NAMES}
        for _ in range(epochs):
            for a in range(0, len(rows), task.batch_size):
                model = module(self.blend(received, local)).eval()
                batch = rows[a : a + task.batch_size]
                F.cross_entropy(model(task.x[batch]), task.y[batch]).backward()
                for name in self.NAMES:
                    gradient = model.get_parameter(name).grad * (received[name] - local[name])
                    self.weights[name] = (self.weights[name] - self.ETA * gradient).clamp(0, 1)
        return self.blend(received, local)

    def blend(self, received: State, local: State) -> State:
        return {
            name: local[name] + (value - local[name]) * self.weights[name] if name in self.NAMES else value
            for name, value in received.items()
        }
