"""Plain loops over clients with whole modules, for the references of the methods.

Nothing here knows of lanes or stacked parameters. `fedala.lanes.randomness.draw` is shared, so that
both sides see the same batches.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from oracles import PaperALA
from torch import Tensor, nn

from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.lanes.trees import Params

Loss = Callable[[nn.Module, np.ndarray], Tensor]


def module(task: Task, state: Params) -> nn.Module:
    """Return a new model with a one-lane state."""
    model = copy.deepcopy(task.model).to(task.dtype)
    model.load_state_dict({name: value[0] for name, value in state.items()})
    return model


def lane(model: nn.Module, names: Sequence[str] | None = None) -> Params:
    """Return a module's state as one lane, to compare with."""
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
    """Yield the rows of each batch, without the last partial one.

    A client that has less than one batch trains on all it has.
    """
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


def features_of(net: nn.Module, x: Tensor) -> Tensor:
    """Return what enters the last layer of `small.Net`."""
    x = torch.max_pool2d(net.norm(net.conv(x)).relu(), 2)
    return net.hidden(x.flatten(1)).relu()


def mmd_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return the maximum mean discrepancy over all pairs, one after another."""

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        pairs = [
            sum(torch.exp(-((p - q) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))
            for p in a
            for q in b
        ]
        return sum(pairs) / len(pairs)

    return similarity(a, a) + similarity(b, b) - 2 * similarity(a, b)


def cross_entropy(task: Task) -> Loss:
    return lambda model, rows: F.cross_entropy(model(task.x[rows]), task.y[rows])


def descend(model: nn.Module, loss: Loss, rounds: Iterator[np.ndarray], lr: float) -> nn.Module:
    """Return a copy of the model after a step of `torch.optim.SGD` for each batch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for rows in rounds:
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()
    return model


def changed(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the model with other values of some parameters."""
    model = copy.deepcopy(model)
    model.load_state_dict(values, strict=False)
    return model


def combine(models: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """Return Σ weight·model. Counters are those of the first model."""
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
    """Return the mean loss over all test samples, each client's model on its own."""
    loss, parts = cross_entropy(task), task.parts["test"]
    tested = zip((copy.deepcopy(model).eval() for model in models), parts, strict=True)
    return sum(len(rows) * loss(model, rows).item() for model, rows in tested) / sum(
        map(len, parts)
    )


class PlainALA(PaperALA):
    """One client's ALA by the paper, with the settings that the methods' tests use."""

    EPOCHS, ETA = 12, 2.0
    SETTINGS: ClassVar = {"ala.max_epochs": EPOCHS, "ala.eta": ETA}

    def __init__(
        self, task: Task, client: int, names: Sequence[str] = ("out.weight", "out.bias")
    ) -> None:
        rows, options = task.parts["train"][client], {"batch_size": task.batch_size}
        options |= {"client": client, "max_epochs": self.EPOCHS}
        super().__init__(task.x, task.y, rows, names, eta=self.ETA, **options)


def take_part(model: nn.Module, other: nn.Module, is_taken: Callable[[str], bool]) -> nn.Module:
    """Return a copy of a model with the tensors of another whose names are taken."""
    return changed(model, {n: v for n, v in other.state_dict().items() if is_taken(n)})


def share_a_part(
    task: Task,
    initial: Params,
    stays: Callable[[str], bool],
    rounds: int,
    *,
    train: Callable[[nn.Module, int, int], nn.Module] | None = None,
    blended: Sequence[str] = (),
) -> tuple[nn.Module, list[nn.Module], list[nn.Module]]:
    """Run rounds of a method whose clients keep the tensors that `stays` names to themselves.

    Return the server's model, of which the shared part means something, each client's model before
    the next training, and after the last. `train(model, client, round)` replaces an epoch of SGD.
    ALA blends the parameters in `blended`.
    """
    sizes = [len(rows) for rows in task.parts["train"]]
    clients = range(len(sizes))

    def descend_once(model: nn.Module, client: int, round: int) -> nn.Module:
        rows = batches(task, client, round=round)
        return descend(model, cross_entropy(task), rows, task.recipe.lr)

    server = module(task, initial)
    local = [server for _ in clients]
    ala = [PlainALA(task, client, blended) for client in clients]
    for round in range(1, rounds + 2):
        start = [take_part(server, own, stays) for own in local]
        if blended:
            start = [ala[i](start[i], local[i], server, round=round) for i in clients]
        if round <= rounds:
            local = [(train or descend_once)(start[i], i, round) for i in clients]
            server = mean(local, sizes)
    return server, start, local
