"""The convolution with other weights in every lane, forward and backward."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from fedala.cuda import convolution_kernels as kernels
from fedala.cuda.buffers import has_many_channels, to_first, to_last
from fedala.cuda.late import LateGradients, give_gradients
from fedala.cuda.pooling import spread_to_winners
from fedala.cuda.tiles import count_parts, find_backward_tile, find_forward_tile, find_weight_tile

#: Offsets from here on do not fit into 32 bits.
FIRST_WIDE = 2**31


@dataclass(frozen=True)
class Shape:
    """The sizes of a convolution of one lane."""

    batch: int
    c: int
    h: int
    w: int
    o: int
    r: int
    s: int
    stride: int
    pad: int

    @property
    def p(self) -> int:
        return (self.h + 2 * self.pad - self.r) // self.stride + 1

    @property
    def q(self) -> int:
        return (self.w + 2 * self.pad - self.s) // self.stride + 1

    @property
    def is_few(self) -> bool:
        """Tell whether there are too few channels to be read side by side."""
        return not has_many_channels(self.c)

    @property
    def few(self) -> int:
        """The number of channels if they are few, else 0."""
        return self.c if self.is_few else 0

    @property
    def width(self) -> int:
        """The channels as the kernels see them: real ones, or those of a row of the kernel."""
        if not self.is_few:
            return self.c
        unit = 8 if self.s * self.c <= 8 and self.pad == 0 else 16
        return triton.cdiv(self.s * self.c, unit) * unit

    @property
    def columns(self) -> int:
        return self.q if self.is_few else self.w

    def arguments(self) -> tuple[int, ...]:
        """Return C, H, W, O, P, Q, R, S, STRIDE, PAD and FEW of the kernels."""
        sizes = self.width, self.h, self.columns, self.o, self.p, self.q, self.r, self.s
        return *sizes, self.stride, self.pad, self.few

    def unfold(self, x: Tensor) -> Tensor:
        """Return x [lane, b, c, h, w] as the kernels take it: [lane, b, h, column, channel]."""
        if not self.is_few:
            return to_last(x).contiguous()
        if x.stride(0) != x.shape[1] * x.stride(1):
            x = x.contiguous()
        y = x.new_empty(*x.shape[:2], self.h, self.q, self.width)
        kernels.unfold_rows[(triton.cdiv(y.numel(), 1024),)](
            x, y, y.numel(), *x.stride()[1:], self.c, self.h, self.w, self.q,
            self.s, self.stride, self.pad, self.width, BLOCK=1024,
        )  # fmt: skip
        return y

    @property
    def is_folded(self) -> bool:
        """Tell whether the gradient of the input is computed in rows, which are then added up.

        Without padding, the columns near the border have few gradients: with kernels of 5×5 on
        12×12 inputs, a third of all products would be with zeros.
        """
        return self.is_few or (self.s > 1 and self.stride == 1 and self.pad == 0)

    def row_arguments(self) -> tuple[int, ...]:
        """Return the kernels' arguments for the gradient of the input."""
        if self.is_few or not self.is_folded:
            return self.arguments()
        sizes = self.s * self.c, self.h, self.q, self.o, self.p, self.q, self.r, 1
        return *sizes, self.stride, self.pad, 0

    def fold(self, dx: Tensor) -> Tensor:
        """Return the gradient of x from that of its rows, or of what `unfold` returned."""
        if not self.is_folded:
            return to_first(dx)
        x = dx.new_empty(*dx.shape[:2], self.h, self.w, self.c)
        kernels.fold_rows[(triton.cdiv(x.numel(), 1024),)](
            dx, x, x.numel(), self.c, self.h, self.w, self.q,
            self.s, self.stride, self.pad, dx.shape[-1], BLOCK=1024,
        )  # fmt: skip
        return to_first(x)


class Convolution(torch.autograd.Function):
    """The convolution of a stack of lanes, with max-pooling by two and ReLU if `pool`.

    x is [lane, b, c, h, w], weights are [lane, o, c, r, s], and bias is [lane, o].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        stride: int,
        pad: int,
        precision: str,
        special: bool,
        pool: bool,
        late: LateGradients | None,
    ) -> Tensor:
        lanes, batch, c, h, v = x.shape
        _, o, _, r, s = w.shape
        shape = Shape(batch, c, h, v, o, r, s, stride, pad)
        ctx.late, ctx.params = late, (w, bias)
        x, w = shape.unfold(x), (w if shape.is_few else to_last(w)).contiguous()
        p, q = (shape.p // 2, shape.q // 2) if pool else (shape.p, shape.q)
        y = x.new_empty(lanes, batch, p, q, o)
        winners = torch.empty_like(y, dtype=torch.int8) if pool else y
        rows = batch * p * q * (4 if pool else 1)
        tile = find_forward_tile(
            rows, shape.width, o, lanes, special=special, pad=pad, is_few=shape.is_few
        )
        grid = triton.cdiv(rows, tile["BM"]), triton.cdiv(o, tile["BO"]), lanes
        kernels.forward[special][grid](
            x, w, w if bias is None else bias.contiguous(), y, winners, batch,
            *shape.arguments(), bias is not None, pool, PRECISION=precision, **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, w, *([winners] if pool else []))
        ctx.shape, ctx.precision, ctx.special = shape, precision, special
        return to_first(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *winners = ctx.saved_tensors
        dy = to_last(dy).contiguous()
        if winners:
            dy = spread_to_winners(dy, winners[0], ctx.shape.p, ctx.shape.q)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _backward_input(ctx, dy, w)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = _backward_weight(ctx, dy, x)
        return dx, dw, db, *[None] * 6


def _backward_input(ctx: Any, dy: Tensor, w: Tensor) -> Tensor:
    shape: Shape = ctx.shape
    lanes = len(dy)
    width, h, columns, *others = shape.row_arguments()
    dx = dy.new_empty(lanes, shape.batch, h, columns, width)
    rows = shape.batch * h * columns
    tile = find_backward_tile(
        rows, shape.o, width, lanes, special=ctx.special, is_folded=shape.is_folded
    )
    grid = triton.cdiv(rows, tile["BM"]), triton.cdiv(width, tile["BC"] * tile["BLOCKS"]), lanes
    kernels.backward_input[ctx.special][grid](
        dy, w, dx, shape.batch, width, h, columns, *others, dy[0].numel() >= FIRST_WIDE,
        PRECISION=ctx.precision, **tile,
    )  # fmt: skip
    return shape.fold(dx)


def _backward_weight(ctx: Any, dy: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weights and bias, if they are not late."""
    shape: Shape = ctx.shape
    lanes, o, width = len(dy), shape.o, shape.width
    shifts = shape.r * (1 if shape.is_few else shape.s)
    rows, size = shape.batch * shape.p * shape.q, o * width * shifts + o
    tile = find_weight_tile(width * shifts, width, o, lanes, pad=shape.pad)
    tiles = triton.cdiv(o, tile["BO"]) * triton.cdiv(width * shifts, tile["BN"])
    # If the weights are few and the sum is long, parts of the sum fill the device.
    share = triton.cdiv(rows, count_parts(rows, tiles * lanes) * 64) * 64
    count = triton.cdiv(rows, share)
    is_wide = max(dy[0].numel(), x[0].numel()) >= FIRST_WIDE

    def multiply(dw: Tensor, db: Tensor | None, factors: Tensor | None, is_whole: bool) -> None:
        given = (dw, 0) if factors is None else (factors, factors.stride(0))
        kernels.backward_weight[ctx.special][(tiles, count, lanes)](
            dy, x, dw, dw if db is None else db, *given, shape.batch, share, *shape.arguments(),
            is_wide, is_whole, factors is not None, not is_whole or db is not None,
            PRECISION=ctx.precision, **tile,
        )  # fmt: skip

    def begin() -> Tensor:
        parts = x.new_empty(count, lanes, size)
        multiply(parts, None, None, is_whole=False)
        return parts

    def write_whole(_: None, dw: Tensor, db: Tensor | None, factors: Tensor | None) -> None:
        multiply(dw, db, factors, is_whole=True)

    # A gradient that is larger than what it is computed from need not be written before the step.
    if count == 1 and not shape.is_few and size > rows * (o + width):
        return give_gradients(ctx, write_whole)
    return give_gradients(ctx, partial(_write_parts, shape), begin)


def _write_parts(
    shape: Shape, parts: Tensor, dw: Tensor, db: Tensor | None, factors: Tensor | None
) -> None:
    """Add up the parts of the gradients, or add them times the factors to what is there."""
    count, lanes, size = parts.shape
    given = (parts, 0) if factors is None else (factors, factors.stride(0))
    weights = dw[0].numel()
    together = min(16, triton.next_power_of_2(count))
    block = max(128, 1024 // together)
    kernels.add_parts[(triton.cdiv(weights + shape.o, block), lanes)](
        parts, dw, dw if db is None else db, *given, lanes, count, weights, shape.o, size,
        shape.width, shape.r, shape.s, shape.few,
        ADD=factors is not None, HAS_BIAS=db is not None, PARTS=together, BLOCK=block,
    )  # fmt: skip


def match_call(
    mode: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    pool: bool = False,
) -> Any:
    """Return how to call the kernels, or None if they do not cover this convolution."""

    def find_side(value: Any) -> int | None:
        values = {value} if isinstance(value, int) else set(value)
        return values.pop() if len(values) == 1 else None

    step, pad = find_side(stride), None if isinstance(padding, str) else find_side(padding)
    is_plain = groups == 1 and find_side(dilation) == 1 and step is not None and pad is not None
    if not is_plain or x.dtype != torch.float32 or x.dim() != 4:
        return None
    options = step, pad, mode.precision, mode.special, pool, mode.late
    return Convolution.apply, (x, weight, bias), options
