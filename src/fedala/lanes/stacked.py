"""Functions of whole stacks under `vmap`: a layer that is called per lane runs once for all lanes.

Torch's own rules for layers with other weights in every lane are slow or, for gradients, dense. A
function of stacks, with the lane as first dimension, can replace such a layer: `call_stacked` calls
it from inside or outside `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter


def call_stacked(
    stacked: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: tuple[Any, ...]
) -> Tensor:
    """Return one lane's result of `stacked(*tensors, *rest)`; `rest` is the same for all lanes.

    Under `vmap`, this is what torch does for an `autograd.Function` with a rule of its own. Torch
    takes a third of a millisecond for it: as long as all the arithmetic of a small layer.
    """
    if not any(t is not None and _functorch.is_batchedtensor(t) for t in tensors):
        single = (None if t is None else t.unsqueeze(0) for t in tensors)
        return stacked(*single, *rest).squeeze(0)
    # The innermost of the functions `vmap`, `grad`, … around this call.
    transform: Any = retrieve_current_functorch_interpreter()
    level = transform.level()
    if not isinstance(transform, VmapInterpreter):  # the model's `grad`; the lanes are outside it
        tensors = [_leave_gradient(t, level) for t in tensors]
        with transform.lower():
            return call_stacked(stacked, tensors, rest)
    lanes = transform.batch_size()
    pairs = [(t, None) if t is None else _functorch._unwrap_batched(t, level) for t in tensors]
    with transform.lower():
        if all(dimension is None for _, dimension in pairs):  # the lanes are an outer vmap's
            return call_stacked(stacked, tensors, rest)
        stacks = (_move_lanes(t, dimension, lanes) for t, dimension in pairs)
        result = stacked(*stacks, *rest)
    return _functorch._add_batch_dim(result, 0, level)


def _leave_gradient(tensor: Tensor | None, level: int) -> Tensor | None:
    """Return a tensor as it is outside a gradient that does not depend on it."""
    if tensor is None or tensor.requires_grad or _functorch.maybe_get_level(tensor) != level:
        return tensor
    return _functorch._unwrap_for_grad(tensor, level)


def _move_lanes(tensor: Tensor | None, dimension: int | None, lanes: int) -> Tensor | None:
    """Return a tensor with its lanes in front. Without a lane dimension, all lanes share it."""
    if tensor is None:
        return None
    if dimension is None:
        return tensor.expand(lanes, *tensor.shape)
    return tensor.movedim(dimension, 0)
