"""Gradients that are not computed yet.

A gradient as large as the weights is written, read again by the step and thrown away. A late one
knows how to add itself to the weights in one go. Whoever needs it as a tensor asks for that.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class LateGradient(ABC):
    """The gradient of one or several parameters, `names`, that is computed when it is used."""

    names: tuple[str, ...]

    @abstractmethod
    def densify(self) -> Sequence[Tensor]:
        """Return the gradient of each parameter as a whole tensor."""

    @abstractmethod
    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        """Add the gradients times `factors`, [lane], to tensors like the parameters, in place."""


Gradients = dict[str, Tensor | LateGradient]
"""By parameter: a gradient of its shape, or one that is computed when it is used."""


def list_late(gradients: Gradients) -> list[LateGradient]:
    """Return the late gradients, each once."""
    found = {id(value): value for value in gradients.values() if isinstance(value, LateGradient)}
    return list(found.values())


def join_gradients(
    name: str, param: Tensor, value: Tensor | None, late: Sequence[LateGradient]
) -> Tensor | LateGradient:
    """Return the gradient of a parameter: late if it is used in one place, else the sum of all.

    `value` is None if the rest of the model does not use the parameter.
    """
    if len(late) == 1 and value is None:
        return late[0]
    total = torch.zeros_like(param) if value is None else value
    for gradient in late:
        total = total + gradient.densify()[gradient.names.index(name)]
    return total
