"""Gradients of large embeddings as the rows that a batch used.

A batch of ten texts touches two thousand rows of a table of a hundred thousand. Torch's dense
gradient writes the whole table, and so does the step that follows; in lanes, for every client. Here
the gradient of an embedding is the gradient of its output, with the indices that were looked up. A
step adds it to those rows alone.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedala.lanes.late_gradients import LateGradient, SparseGradient, number_rows
from fedala.lanes.stacked import call_stacked
from fedala.lanes.trees import broadcast_lanes
from fedala.lanes.words import TextWords, WordGradient, keep_word_gradient, mean_embedding

#: Tables with fewer rows than this take the usual way.
LEAST_ROWS = 2048

Read = Callable[[Tensor], Tensor]
"""What a batch reads of tables, [lane, row, …]. It is linear in them."""
ReadSum = Callable[[str, Read], tuple[Tensor, Tensor]]
"""Of a table's name: what is read of a sum of tables, and the derivatives, [share, lane, …]."""


@dataclass(eq=False)
class RowGradient(SparseGradient):
    """The gradient of tables [lane, row, …] as values [lane, n, …] at indices [lane, n]."""

    names: tuple[str, ...]
    indices: Tensor
    values: Tensor
    shape: torch.Size

    def find_rows(self, table: Tensor) -> Tensor:
        return number_rows(self.indices, table)

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        """Add the gradient. The order of addition is fixed: the result is always the same."""
        [table] = targets
        lanes = torch.arange(len(table), device=table.device)[:, None].expand_as(self.indices)
        scaled = self.values * broadcast_lanes(factors, self.values).to(self.values.dtype)
        table.index_put_((lanes, self.indices), scaled, accumulate=True)


@dataclass(eq=False)
class _Found:
    """What a table's look-ups found. It has its own class: vmap takes a plain list apart."""

    name: str
    read_sum: ReadSum | None
    """What looks up a sum of tables, if it is not the table itself that is looked up."""
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Indices and gradients."""
    means: list[tuple[TextWords, Tensor]] = field(default_factory=list)
    """Words and the gradients of their means."""
    slopes: list[Tensor] = field(default_factory=list)
    """The slopes of the sum's shares, [lane, share]."""

    def read(self, ctx: Any, tables: Tensor, read: Read) -> Tensor:
        """Return what a look-up gives; `ctx` keeps its derivatives by the shares."""
        ctx.found, ctx.by_share = self, None
        if self.read_sum is None:
            return read(tables)
        result, ctx.by_share = self.read_sum(self.name, read)
        return result

    def add_slopes(self, ctx: Any, gradient: Tensor) -> None:
        """Add the slopes of the shares at the gradient of a look-up."""
        if ctx.by_share is not None:
            self.slopes.append((ctx.by_share * gradient).flatten(2).sum(2).T)


class _Lookup(torch.autograd.Function):
    """Looks up tables [lane, row, …] at indices [lane, …]. The gradient goes to `found`."""

    @staticmethod
    def forward(ctx: Any, tables: Tensor, indices: Tensor, found: _Found) -> Tensor:
        ctx.save_for_backward(indices)
        lanes = torch.arange(len(tables), device=tables.device).view(-1, *[1] * (indices.dim() - 1))
        return found.read(ctx, tables, lambda tables: tables[lanes, indices])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        ctx.found.add_slopes(ctx, grad)
        ctx.found.rows.append((indices.flatten(1), grad.flatten(1, indices.dim() - 1)))
        return None, None, None


class RowGradients(TorchFunctionMode):
    """While active, puts the gradients of large embeddings into `found`, by parameter name.

    With `read_sum`, it is sums of tables that are looked up, and not those of the model.
    """

    def __init__(self, names: Iterable[str], read_sum: ReadSum | None = None) -> None:
        super().__init__()
        self.found = {name: _Found(name, read_sum) for name in names}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None if _current.name is None else self.found.get(_current.name)
        if found is not None:
            indices, table = args[:2]
            if func is mean_embedding:
                means = keep_word_gradient(indices, table, args[2], found)
                if means is not None:
                    return means
            if func in (F.embedding, mean_embedding):
                rows = call_stacked(_Lookup.apply, (table, indices.long()), (found,))
                return rows if func is F.embedding else rows.mean(1)
        return func(*args, **(kwargs or {}))

    def gradients(self, name: str, shape: torch.Size, padding: int | None) -> list[LateGradient]:
        """Return the gradients of a parameter: the rows of all its look-ups."""
        found = self.found[name]
        gradients: list[LateGradient] = [
            WordGradient((name,), words, values, shape) for words, values in found.means
        ]
        return [*gradients, self._join(name, shape, padding)] if found.rows else gradients

    def list_slopes(self) -> list[Tensor]:
        """Return the slopes of the sums' shares in all look-ups, each [lane, share]."""
        return [slopes for found in self.found.values() for slopes in found.slopes]

    def _join(self, name: str, shape: torch.Size, padding: int | None) -> RowGradient:
        indices, values = (
            torch.cat(parts, 1) for parts in zip(*self.found[name].rows, strict=True)
        )
        if padding is not None:
            nothing = indices == padding
            values = values.masked_fill(nothing.unsqueeze(-1), 0)
            # These zeros may go anywhere. A GPU adds to one row sequentially, so each gets its own.
            indices = torch.where(
                nothing, torch.arange(indices.shape[1], device=indices.device) % shape[1], indices
            )
        return RowGradient((name,), indices, values, shape)


class _Current(threading.local):
    """The embedding whose forward pass is running in this thread."""

    name: str | None = None


_current = _Current()


def large_embeddings(model: nn.Module) -> dict[str, int | None]:
    """Return the weights that have row gradients, and their padding rows.

    Hooks on these modules note from now on when they run.
    """
    found = {}
    for name, module in model.named_modules():
        plain = (
            isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not module.scale_grad_by_freq
        )
        if plain and module.num_embeddings >= LEAST_ROWS and module.weight.requires_grad:
            weight = f"{name}.weight" if name else "weight"
            found[weight] = module.padding_idx
            module.register_forward_pre_hook(
                lambda _, __, weight=weight: setattr(_current, "name", weight)
            )
            module.register_forward_hook(
                lambda *_: setattr(_current, "name", None), always_call=True
            )
    # A table that is also used elsewhere (tied weights) has other gradients too: it stays dense.
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: padding for name, padding in found.items() if uses.count(id(parameters[name])) == 1
    }


def find_padding_rows(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the weights of embeddings with a padding row, and its number."""
    return tuple(
        (f"{name}.weight" if name else "weight", module.padding_idx)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None
    )
