"""Functions of whole stacks under `vmap`: a layer that is called per lane runs once for all lanes.

Torch's own rules for layers with other weights in every lane are slow or, for gradients, dense. A
function of stacks, with the lane as first dimension, can replace such a layer: `call_stacked` calls
it from inside or outside `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _PerLane(torch.autograd.Function):
    """A stacked function as vmap sees it, for one lane; vmap's rule puts the lanes together."""

    @staticmethod
    def forward(stacked: Callable[..., Tensor], rest: Any, *tensors: Tensor | None) -> Tensor:
        return stacked(*(None if t is None else t.unsqueeze(0) for t in tensors), *rest).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, stacked: Any, rest: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        lanes = [
            None
            if t is None
            else t.expand(info.batch_size, *t.shape)
            if dim is None
            else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        return stacked(*lanes, *rest), 0


def call_stacked(
    stacked: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: tuple[Any, ...]
) -> Tensor:
    """Return one lane's result of `stacked(*tensors, *rest)`; `rest` is the same for all lanes."""
    if any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in tensors):
        result: Tensor = _PerLane.apply(stacked, rest, *tensors)  # type: ignore[no-untyped-call]
        return result
    return _PerLane.forward(stacked, rest, *tensors)
