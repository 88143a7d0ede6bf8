"""Gradients that are not computed yet.

A gradient as large as the weights is written, read again by the step and thrown away. A late one
knows how to add itself to the weights in one go. Whoever needs it as a tensor asks for that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedala.lanes.trees import align, broadcast_lanes


class LateGradient(ABC):
    """The gradient of one or several parameters, `names`, that is computed when it is used."""

    names: tuple[str, ...]
    #: Whether a sum with whole tensors stays late: most of it is zero, or was before such a sum.
    stays_late: ClassVar[bool] = False

    @abstractmethod
    def densify(self) -> Sequence[Tensor]:
        """Return the gradient of each parameter as a whole tensor."""

    @abstractmethod
    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        """Add the gradients times `factors`, [lane], to tensors like the parameters, in place."""


def number_rows(rows: Tensor, tables: Tensor) -> Tensor:
    """Number rows [lane, …] of tables [lane, row, …] as rows of one table after the other."""
    first = torch.arange(len(tables), device=tables.device) * tables.shape[1]
    return (rows.flatten(1) + first[:, None]).flatten()


class SparseGradient(LateGradient):
    """The gradient of one parameter of this shape, [lane, row, …], which is zero in most rows."""

    stays_late = True
    values: Tensor
    shape: torch.Size

    @abstractmethod
    def find_rows(self, table: Tensor) -> Tensor:
        """Return all rows that are not zero, of the tables of all lanes one after the other.

        Rows may come more than once, and so may some that are zero.
        """

    def save_rows(self, table: Tensor) -> Callable[[], object]:
        """Return what puts the rows back that a step along this gradient changes."""
        flat, rows = table.view(-1, *table.shape[2:]), self.find_rows(table)
        before = flat.index_select(0, rows)
        return lambda: flat.index_copy_(0, rows, before)

    def densify(self) -> Sequence[Tensor]:
        whole = self.values.new_zeros(self.shape)
        self.add_to([whole], self.values.new_ones(len(whole)))
        return [whole]


@dataclass(eq=False)
class PulledGradient(LateGradient):
    """A sparse gradient with that of a proximal term, μ·(w − anchor).

    A step on w itself is one pass over it: w moves towards the anchor, and the few rows are added.
    """

    names: tuple[str, ...]
    sparse: LateGradient
    param: Tensor
    anchor: Tensor
    mu: float | Tensor
    """A number, or one that broadcasts to the parameter."""

    def densify(self) -> Sequence[Tensor]:
        [whole] = self.sparse.densify()
        return [whole.add_(self.mu * (self.param - self.anchor))]

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        [target] = targets
        strength = broadcast_lanes(factors, target).to(target.dtype) * self.mu
        if target.data_ptr() == self.param.data_ptr():
            target.lerp_(self.anchor, -strength)
        else:
            target.add_(strength * (self.param - self.anchor))
        self.sparse.add_to(targets, factors)


@dataclass(eq=False)
class ShiftedGradient(LateGradient):
    """A sparse gradient with that of a linear term, ⟨shift, w⟩: a step is one pass over w."""

    stays_late = True
    names: tuple[str, ...]
    sparse: LateGradient
    shift: Tensor

    def densify(self) -> Sequence[Tensor]:
        [whole] = self.sparse.densify()
        return [whole.add_(self.shift)]

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        [target] = targets
        target.addcmul_(self.shift, broadcast_lanes(factors, target).to(target.dtype))
        self.sparse.add_to(targets, factors)


@dataclass(eq=False)
class ScaledGradient(LateGradient):
    """A sparse gradient times a number of each lane."""

    stays_late = True
    names: tuple[str, ...]
    sparse: LateGradient
    factors: Tensor
    """[lane]."""

    def densify(self) -> Sequence[Tensor]:
        [whole] = self.sparse.densify()
        return [whole.mul_(align(self.factors, whole))]

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        self.sparse.add_to(targets, factors * self.factors)


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


def give_own_memory(values: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield gradients that can be changed in place.

    Torch returns one tensor for two parameters that are added to each other, and a number that is
    repeated for one that is summed up.
    """
    places = set()
    for value in values:
        if value is not None:
            is_repeated = 0 in value.stride() and value.numel() > 1
            if is_repeated or value.data_ptr() in places:
                value = value.clone(memory_format=torch.contiguous_format)
            places.add(value.data_ptr())
        yield value
