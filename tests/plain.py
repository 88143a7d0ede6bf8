"""Clients one after another, with whole modules and plain loops: what the methods' references are written with.

Nothing here knows of lanes or stacked parameters. `fedala.lanes.randomness.draw` is shared,
so that both sides see the same batches.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.lanes.trees import Params

Loss = Callable[[nn.Module, np.ndarray], Tensor]


def module(task: Task, state: Params) -> nn.Module:
    """A model of its own with a one-lane state."""
    model = copy.deepcopy(task.model).to(task.dtype)
    model.load_state_dict({name: value[0] for name, value in state.items()})
    return model


def lane(model: nn.Module, names: Sequence[str] | None = None) -> Params:
    """A module's state as one lane, to compare with."""
    state = model.state_dict()
    return {name: state[name].detach().unsqueeze(0) for name in (state if names is None else names)}


def batches(
    task: Task,
    client: int,
    *,
    round: int,
    epochs: int = 1,
    purpose: str = "batches",
    size: int | None = None,
) -> Iterator[np.ndarray]:
    """Rows of each batch: the last partial one is dropped, but a client that has less than one batch trains on all it has."""
    rows, size = task.parts["train"][client], size or task.batch_size
    for epoch in range(epochs):
        order = rows
        if task.shuffle:
            order = rows[
                draw(0, purpose, client=client, round=round, epoch=epoch).permutation(len(rows))
            ]
        if 0 < len(order) < size:
            yield order
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def cross_entropy(task: Task) -> Loss:
    return lambda model, rows: F.cross_entropy(model(task.x[rows]), task.y[rows])


def descend(model: nn.Module, loss: Loss, rounds: Iterator[np.ndarray], lr: float) -> nn.Module:
    """A copy of the model after a step of `torch.optim.SGD` for each batch, on the parameters that require a gradient."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for rows in rounds:
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()
    return model


def changed(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model with other values of some parameters."""
    model = copy.deepcopy(model)
    model.load_state_dict(values, strict=False)
    return model


def combine(models: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """Σ weight·model; of a counter, the first one's."""
    result = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    for name, value in result.state_dict().items():
        if value.is_floating_point():
            value.copy_(
                sum(state[name] * weight for state, weight in zip(states, weights, strict=True))
            )
    return result


def mean(models: Sequence[nn.Module], sizes: Sequence[int]) -> nn.Module:
    return combine(models, [size / sum(sizes) for size in sizes])


def mean_loss(task: Task, models: Sequence[nn.Module]) -> float:
    """Over all test samples, each client's model on its own."""
    loss, parts = cross_entropy(task), task.parts["test"]
    tested = zip((copy.deepcopy(model).eval() for model in models), parts, strict=True)
    return sum(len(rows) * loss(model, rows).item() for model, rows in tested) / sum(
        map(len, parts)
    )


class PlainALA:
    """One client's ALA on the named parameters, by the book: a whole model is built and run for every mini-batch."""

    EPOCHS, ETA = 12, 2.0
    SETTINGS: ClassVar = {"ala.max_epochs": EPOCHS, "ala.eta": ETA}

    def __init__(
        self, task: Task, client: int, names: Sequence[str] = ("out.weight", "out.bias")
    ) -> None:
        self.task, self.client, self.names = task, client, names
        self.weights: dict[str, Tensor] = {}

    def __call__(
        self, start: nn.Module, local: nn.Module, received: nn.Module, *, round: int
    ) -> nn.Module:
        """`start` with the blend of `local` and `received` on the named parameters."""
        task, rows = self.task, self.task.parts["train"][self.client]
        old, new = (dict(model.state_dict()) for model in (local, received))
        if len(rows) == 0 or all(torch.equal(old[name], new[name]) for name in self.names):
            return changed(start, {name: new[name] for name in self.names})
        initial = not self.weights
        if initial:
            self.weights = {name: torch.ones_like(old[name]) for name in self.names}
        chosen = draw(0, "ala sample", client=self.client, round=round).permutation(len(rows))
        rows = rows[np.sort(chosen[: max(1, int(0.8 * len(rows) + 1e-9))])]
        losses: list[float] = []
        while not losses or (initial and len(losses) < self.EPOCHS and not self.settled(losses)):
            epoch = []
            for batch in np.split(rows, range(task.batch_size, len(rows), task.batch_size)):
                hat = changed(start, self.hat(old, new)).eval()
                loss = cross_entropy(task)(hat, batch)
                loss.backward()
                for name, parameter in hat.named_parameters():
                    if name in self.names:
                        step = parameter.grad * (new[name] - old[name])
                        self.weights[name] = (self.weights[name] - self.ETA * step).clamp(0, 1)
                epoch.append(loss.item())
            losses.append(float(np.mean(epoch)))
        return changed(start, self.hat(old, new))

    def hat(self, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: old[name] + (new[name] - old[name]) * self.weights[name] for name in self.names
        }

    @staticmethod
    def settled(losses: list[float]) -> bool:
        return len(losses) > 10 and float(np.std(losses[-10:])) < 0.01
