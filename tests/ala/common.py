"""Small models and data that the tests of ALA share."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala import ALA


def twins(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return a local and a received model in float64.

    They differ everywhere, running statistics included.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        local, received = make().double(), make().double()
        for model in (local, received):
            for parameter in model.parameters():  # a BatchNorm starts alike in every model
                parameter.data += 0.1 * torch.randn_like(parameter)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer += torch.rand_like(buffer)
                else:
                    buffer += int(torch.randint(1, 9, ()))
    return local, received


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def labels(size: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(classes, size=size))


def entries(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters and buffers."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value.detach().clone() for name, value in named}


def assert_same(
    model: nn.Module | dict[str, Tensor], expected: nn.Module | dict[str, Tensor], **kwargs: Any
) -> None:
    a, b = (entries(m) if isinstance(m, nn.Module) else m for m in (model, expected))
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **kwargs
        )


EXACT = {"rtol": 0, "atol": 0}
FINE = {"rtol": 1e-10, "atol": 1e-12}


def line(weight: float, bias: float) -> nn.Module:
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(weight)
        model.bias.fill_(bias)
    return model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def numbers(tensors: dict[str, Tensor]) -> list[float]:
    return [value.item() for value in tensors.values()]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def script_loss(values: Sequence[float], then: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that takes these values, batch after batch, and has no gradient."""
    remaining = iter(values)
    return lambda output, target: output.sum() * 0 + next(remaining, then)


ONE = (torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
TWO = (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
POINTS = normal(11, 4)
PAIR = (normal(11, 4), normal(11, 2, seed=1))
X, Y = normal(25, 4), labels(25)


def learn_on(data: Any, **options: Any) -> dict[str, Tensor]:
    local, received = twins(mlp)
    ALA(layers=2, batch_size=4, max_epochs=2, **options).initialize(local, received, data)
    return entries(local)


GOOD = (normal(8, 4), labels(8))


def make_learned_ala(**options: Any) -> ALA:
    """Return an ALA that has one good round behind it."""
    ala = ALA(batch_size=4, max_epochs=2, sample=1.0, **options)
    assert ala.initialize(*twins(mlp, 1), GOOD).fault is None
    assert any((value < 1).any() for value in ala.weights.values())
    return ala


def poison(tensor: Tensor, value: float = float("nan")) -> Tensor:
    copied = tensor.clone()
    copied.view(-1)[-1] = value
    return copied
