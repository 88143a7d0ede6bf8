"""Gradients of weights that wait for the step, which computes and adds them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedala.cuda.buffers import is_laid_out, make_buffer
from fedala.lanes.late_gradients import LateGradient
from fedala.lanes.trees import broadcast_lanes

Write = Callable[[Any, Tensor, Tensor | None, Tensor | None], None]
"""Of (begun, weights, bias, factors): write gradients, or add them times the factors, [lane]."""


@dataclass(eq=False)
class ProductGradient(LateGradient):
    """The gradient of a layer's weights, and of its bias if it has one."""

    names: tuple[str, ...]
    like: Sequence[Tensor]
    """The parameters themselves."""
    write: Write
    begun: Any
    """What was computed during the backward pass."""

    def densify(self) -> Sequence[Tensor]:
        whole = [make_buffer(value, len(value)) for value in self.like]
        self._write(whole, None)
        return whole

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        if all(is_laid_out(target) for target in targets):
            self._write(targets, factors.float())
            return
        for target, gradient in zip(targets, self.densify(), strict=True):
            target.addcmul_(gradient, broadcast_lanes(factors, gradient).to(target.dtype))

    def _write(self, targets: Sequence[Tensor], factors: Tensor | None) -> None:
        weight, *bias = targets
        self.write(self.begun, weight, bias[0] if bias else None, factors)


def find_place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells a tensor from others: where it is, its shape, and its order of memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tensor.shape, tuple(step for size, step in sides if size > 1)


@dataclass
class LateGradients:
    """Collects the late gradients of a backward pass, by parameter."""

    names: dict[Any, str]
    """The parameters that learn, by the address and shape of their tensors."""
    found: dict[str, list[LateGradient]] = field(default_factory=dict)
    _begun: list[tuple[Any, Callable[[], Any]]] = field(default_factory=list)

    def name(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Name the parameters of a layer; nothing if they are not all known.

        A part of a parameter (the first lane alone, or a gate's rows) is not the parameter, and
        neither is its transpose.
        """
        known = [self.names[key] for key in map(find_place, tensors) if key in self.names]
        return tuple(known) if len(known) == len(tensors) else ()

    def add(self, gradient: LateGradient) -> None:
        for name in gradient.names:
            self.found.setdefault(name, []).append(gradient)

    def begin(self, work: Callable[[], Any]) -> Any:
        """Do some work beside the rest of the backward pass, until `join`.

        Until then, nothing that it reads may be freed: the rest would write over it.
        """
        if not _is_capturing():
            return work()
        stream = _fork()
        self._begun.append((stream, work))
        with torch.cuda.stream(stream):
            return work()

    def join(self) -> None:
        """Wait for all that was begun."""
        _join([stream for stream, _ in self._begun])
        self._begun.clear()


def give_gradients(
    ctx: Any, write: Write, begin: Callable[[], Any] | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a layer's weights and bias, `ctx.params`; None if they are late.

    They can be if both learn. `write` takes what `begin`, if there is something to begin with,
    returned.
    """
    late, ctx.late = ctx.late, None  # a gradient may hold `ctx`: nothing would ever free the circle
    like = [param for param in ctx.params if param is not None]
    learns = all(ctx.needs_input_grad[1 : 1 + len(like)])
    if late and learns and (names := late.name(like)):
        begun = late.begin(begin) if begin else None
        late.add(ProductGradient(names, like, write, begun))
        return None, None
    own, *added = ProductGradient((), like, write, begin() if begin else None).densify()
    return own, added[0] if added else None


def run_on_streams(works: Sequence[Callable[[], None]]) -> None:
    """Do independent pieces of work, side by side if they are captured.

    Outside of a graph, it is launching that takes the time.
    """
    streams = []
    for work in works[1:] if _is_capturing() else ():
        streams.append(stream := _fork())
        with torch.cuda.stream(stream):
            work()
    for work in works[:1] if streams else works:
        work()
    _join(streams)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _fork() -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _join(streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
