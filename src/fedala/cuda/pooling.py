"""Max-pooling by two. A byte remembers which of four won, and the gradient takes one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pool_forward(x, y, winners, N, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    P: tl.constexpr = H // 2
    Q: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = x + n // (P * Q) * (H * W) + n // Q % P * (2 * W) + n % Q * 2
    best = tl.load(corner, mask=n < N, other=0.0)
    winner = tl.zeros((BLOCK,), tl.int8)
    for i in tl.static_range(1, 4):
        value = tl.load(corner + i // 2 * W + i % 2, mask=n < N, other=0.0)
        # The first of equals wins, and NaN if there is one, as in torch.
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        winner = tl.where(better, i, winner).to(tl.int8)
    tl.store(y + n, best, mask=n < N)
    tl.store(winners + n, winner, mask=n < N)


@triton.jit
def _pool_backward(dy, winners, dx, N, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    P: tl.constexpr = H // 2
    Q: tl.constexpr = W // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    corner = dx + n // (P * Q) * (H * W) + n // Q % P * (2 * W) + n % Q * 2
    grad, winner = tl.load(dy + n, mask=n < N, other=0.0), tl.load(winners + n, mask=n < N, other=0)
    for i in tl.static_range(4):
        tl.store(corner + i // 2 * W + i % 2, tl.where(winner == i, grad, 0.0), mask=n < N)


class MaxPool(torch.autograd.Function):
    """The pooling of a stack x [lane, b, c, h, w]. Lanes, samples and channels are all alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        h, w = x.shape[-2:]
        y = x.new_empty(*x.shape[:-2], h // 2, w // 2)
        winners = torch.empty_like(y, dtype=torch.int8)
        _pool_forward[(triton.cdiv(y.numel(), 1024),)](x, y, winners, y.numel(), h, w, BLOCK=1024)
        ctx.save_for_backward(winners)
        ctx.size = h, w
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (winners,) = ctx.saved_tensors
        h, w = ctx.size
        dy = dy.contiguous()
        # An odd last row or column is in no window, and gets no gradient.
        make = dy.new_zeros if h % 2 or w % 2 else dy.new_empty
        dx = make(*dy.shape[:-2], h, w)
        _pool_backward[(triton.cdiv(dy.numel(), 1024),)](
            dy, winners, dx, dy.numel(), h, w, BLOCK=1024
        )
        return dx


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
