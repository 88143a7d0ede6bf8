"""Max-pooling by two: remembers which of four in a byte, and writes the gradient in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pool_forward(x, y, which, N, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    P: tl.constexpr = H // 2
    Q: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = x + n // (P * Q) * (H * W) + n // Q % P * (2 * W) + n % Q * 2
    best = tl.load(corner, mask=n < N, other=0.0)
    place = tl.zeros((BLOCK,), tl.int8)
    for i in tl.static_range(1, 4):
        value = tl.load(corner + i // 2 * W + i % 2, mask=n < N, other=0.0)
        better = (value > best) | (
            value != value
        )  # the first of equals, and NaN if there is one, as torch does
        best = tl.where(better, value, best)
        place = tl.where(better, i, place).to(tl.int8)
    tl.store(y + n, best, mask=n < N)
    tl.store(which + n, place, mask=n < N)


@triton.jit
def _pool_backward(dy, which, dx, N, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    P: tl.constexpr = H // 2
    Q: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = dx + n // (P * Q) * (H * W) + n // Q % P * (2 * W) + n % Q * 2
    grad, place = tl.load(dy + n, mask=n < N, other=0.0), tl.load(which + n, mask=n < N, other=0)
    for i in tl.static_range(4):
        tl.store(corner + i // 2 * W + i % 2, tl.where(place == i, grad, 0.0), mask=n < N)


class MaxPool(torch.autograd.Function):
    """The stacked pooling of x [lane, b, c, h, w]; lanes, samples and channels are all alike to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        h, w = x.shape[-2:]
        y = x.new_empty(*x.shape[:-2], h // 2, w // 2)
        which = torch.empty_like(y, dtype=torch.int8)
        _pool_forward[(triton.cdiv(y.numel(), 1024),)](x, y, which, y.numel(), h, w, BLOCK=1024)
        ctx.save_for_backward(which)
        ctx.size = h, w
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        h, w = ctx.size
        dy = dy.contiguous()
        make = (
            dy.new_zeros if h % 2 or w % 2 else dy.new_empty
        )  # an odd last row or column is in no window
        dx = make(*dy.shape[:-2], h, w)
        _pool_backward[(triton.cdiv(dy.numel(), 1024),)](
            dy, which, dx, dy.numel(), h, w, BLOCK=1024
        )
        return dx


def arguments(
    mode: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    by_two = (2, (2, 2), [2, 2])
    plain = (
        kernel_size in by_two
        and (stride is None or stride in by_two)
        and padding in (0, (0, 0), [0, 0])
    )
    plain = plain and dilation in (1, (1, 1), [1, 1])
    if not plain or ceil_mode or return_indices or input.dtype != torch.float32 or input.dim() != 4:
        return None
    return MaxPool.apply, (input,), ()
