"""Max-pooling by two. A byte remembers which of four won, and the gradient takes one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.buffers import to_first, to_last
from fedala.cuda.compiling import Kernel


@triton.jit
def _find_corner(n, H, W, C):
    """Return where the window of a result lies in [image, h, w, c]."""
    P, Q = H // 2, W // 2
    row = n // C // Q
    return ((row // P * H + row % P * 2) * W + n // C % Q * 2) * C + n % C


@Kernel
@triton.jit
def _pool_forward(
    x, y, winners, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = x + _find_corner(n, H, W, C)
    best = tl.load(corner, mask=n < N, other=0.0)
    winner = tl.zeros((BLOCK,), tl.int8)
    for i in tl.static_range(1, 4):
        value = tl.load(corner + (i // 2 * W + i % 2) * C, mask=n < N, other=0.0)
        # The first of equals wins, and NaN if there is one, as in torch.
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        winner = tl.where(better, i, winner).to(tl.int8)
    tl.store(y + n, best, mask=n < N)
    tl.store(winners + n, winner, mask=n < N)


@Kernel
@triton.jit
def _pool_backward(
    dy, winners, dx, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = dx + _find_corner(n, H, W, C)
    grad, winner = tl.load(dy + n, mask=n < N, other=0.0), tl.load(winners + n, mask=n < N, other=4)
    for i in tl.static_range(4):
        at = corner + (i // 2 * W + i % 2) * C
        tl.store(at, tl.where(winner == i, grad, 0.0), mask=n < N)


def spread_to_winners(dy: Tensor, winners: Tensor, h: int, w: int) -> Tensor:
    """Return the gradient [lane, b, h, w, c] of what was pooled, from that of the results."""
    # An odd last row or column is in no window, and gets no gradient.
    make = dy.new_zeros if h % 2 or w % 2 else dy.new_empty
    dx = make(*dy.shape[:2], h, w, dy.shape[-1])
    _pool_backward[(triton.cdiv(dy.numel(), 1024),)](
        dy, winners, dx, dy.numel(), h, w, dy.shape[-1], BLOCK=1024
    )
    return dx


class MaxPool(torch.autograd.Function):
    """The pooling of a stack x [lane, b, c, h, w], channels first or last in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_last, ctx.sides = to_last(x).is_contiguous(), x.shape[1:]
        rows = _to_rows(x, ctx.is_last)
        *images, h, w, c = rows.shape
        y = rows.new_empty(*images, h // 2, w // 2, c)
        winners = torch.empty_like(y, dtype=torch.int8)
        _pool_forward[(triton.cdiv(y.numel(), 1024),)](
            rows, y, winners, y.numel(), h, w, c, BLOCK=1024
        )
        ctx.save_for_backward(winners)
        return _from_rows(y, ctx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (winners,) = ctx.saved_tensors
        dx = spread_to_winners(_to_rows(dy, ctx.is_last), winners, *ctx.sides[2:])
        return _from_rows(dx, ctx)


def _to_rows(x: Tensor, is_last: bool) -> Tensor:
    """Return [lane, image, h, w, c] in this order of memory; channels first count as images."""
    return to_last(x).contiguous() if is_last else x.contiguous().flatten(1, 2).unsqueeze(-1)


def _from_rows(rows: Tensor, ctx: Any) -> Tensor:
    return to_first(rows) if ctx.is_last else rows.squeeze(-1).unflatten(1, ctx.sides[:2])


def match_call(
    mode: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return how to call the kernels, or None if they do not cover this pooling."""
    by_two = (2, (2, 2), [2, 2])
    is_plain = (
        kernel_size in by_two
        and (stride is None or stride in by_two)
        and padding in (0, (0, 0), [0, 0])
        and dilation in (1, (1, 1), [1, 1])
        and not ceil_mode
        and not return_indices
    )
    if not is_plain or input.dtype != torch.float32 or input.dim() != 4:
        return None
    return MaxPool.apply, (input,), ()
