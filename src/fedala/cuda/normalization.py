"""Batch normalisation with other statistics in every lane, channels last.

The floor is memory: forward reads x twice and writes y, backward reads x and dy twice and writes
dx. Sums over many rows are split into parts, which are joined in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.buffers import to_first, to_last
from fedala.cuda.compiling import Kernel

ROWS, CHANNELS = 64, 32
#: The most parts of a sum, and the least rows in each.
MOST_PARTS, LEAST_ROWS = 16, 128


@Kernel
@triton.jit
def _moments(x, parts, N, SHARE, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Find means and summed squares of deviations of SHARE rows: parts[2, part, lane, c]."""
    lane, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    x += lane * N * C
    mean = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    before = 0.0
    end = tl.minimum((part + 1) * SHARE, N)
    for start in range(part * SHARE, end, ROWS):
        n = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (n[:, None] < end) & (c[None, :] < C)
        value = tl.load(x + n[:, None] * C + c[None, :], mask=mask, other=0.0)
        count = tl.minimum(end - start, ROWS).to(tl.float32)
        own = tl.sum(value, 0) / count
        deviation = tl.where(mask, value - own[None, :], 0.0)
        step = own - mean
        squares += tl.sum(deviation * deviation, 0) + step * step * (
            before * count / (before + count)
        )
        mean += step * (count / (before + count))
        before += count
    out = parts + (part * tl.num_programs(2) + lane) * C + c
    tl.store(out, mean, mask=c < C)
    tl.store(out + tl.num_programs(1) * tl.num_programs(2) * C, squares, mask=c < C)


@triton.jit
def _join_moments(parts, lane, c, LANES, N, SHARE, COUNT, C, CHANNELS: tl.constexpr):
    mean = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    before = 0.0
    for part in range(0, COUNT):
        at = parts + (part * LANES + lane) * C + c
        own = tl.load(at, mask=c < C, other=0.0)
        count = tl.minimum(N - part * SHARE, SHARE).to(tl.float32)
        step = own - mean
        squares += tl.load(at + COUNT * LANES * C, mask=c < C, other=0.0)
        squares += step * step * (before * count / (before + count))
        mean += step * (count / (before + count))
        before += count
    return mean, squares


@Kernel
@triton.jit
def _normalize(
    x, parts, gamma, beta, running_mean, running_var, saved, y,
    N, SHARE, COUNT, C, momentum, eps,
    USES_BATCH: tl.constexpr, TRACKS: tl.constexpr, AFFINE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute y = (x − mean) · γ/√(var + ε) + β. The first program keeps the statistics."""
    lane, lanes = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, known = lane * C + c, c < C
    if USES_BATCH:
        mean, squares = _join_moments(parts, lane, c, lanes, N, SHARE, COUNT, C, CHANNELS)
        scale = 1 / tl.sqrt_rn(squares / N + eps)
    else:
        mean = tl.load(running_mean + at, mask=known, other=0.0)
        scale = 1 / tl.sqrt_rn(tl.load(running_var + at, mask=known, other=1.0) + eps)
    if tl.program_id(0) == 0:
        tl.store(saved + at, mean, mask=known)
        tl.store(saved + lanes * C + at, scale, mask=known)
        if USES_BATCH and TRACKS:
            old = tl.load(running_mean + at, mask=known, other=0.0)
            tl.store(running_mean + at, old + momentum * (mean - old), mask=known)
            old = tl.load(running_var + at, mask=known, other=0.0)
            tl.store(running_var + at, old + momentum * (squares / (N - 1) - old), mask=known)
    mask = (n[:, None] < N) & known[None, :]
    place = (lane * N + n)[:, None] * C + c[None, :]
    value = (tl.load(x + place, mask=mask, other=0.0) - mean[None, :]) * scale[None, :]
    if AFFINE:
        value = value * tl.load(gamma + at, mask=known, other=0.0)[None, :]
        value += tl.load(beta + at, mask=known, other=0.0)[None, :]
    tl.store(y + place, value, mask=mask)


@Kernel
@triton.jit
def _slopes(dy, x, saved, parts, N, SHARE, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Add up Σ dy and Σ dy · x̂ over SHARE rows: parts[2, part, lane, c]."""
    lane, part, lanes = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(2)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mean = tl.load(saved + lane * C + c, mask=c < C, other=0.0)
    scale = tl.load(saved + (lanes + lane) * C + c, mask=c < C, other=0.0)
    first, second = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    end = tl.minimum((part + 1) * SHARE, N)
    for start in range(part * SHARE, end, ROWS):
        n = start + tl.arange(0, ROWS)
        mask = (n[:, None] < end) & (c[None, :] < C)
        place = (lane * N + n)[:, None] * C + c[None, :]
        grad = tl.load(dy + place, mask=mask, other=0.0)
        unit = (tl.load(x + place, mask=mask, other=0.0) - mean[None, :]) * scale[None, :]
        first += tl.sum(grad, 0)
        second += tl.sum(grad * unit, 0)
    out = parts + (part * lanes + lane) * C + c
    tl.store(out, first, mask=c < C)
    tl.store(out + tl.num_programs(1) * lanes * C, second, mask=c < C)


@Kernel
@triton.jit
def _normalize_backward(
    dy, x, saved, parts, gamma, dx, dgamma, dbeta, N, COUNT, C,
    USES_BATCH: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute dx = γ/σ · (dy − mean of dy − x̂ · mean of dy·x̂). The first program keeps dγ, dβ."""
    lane, lanes = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, known = lane * C + c, c < C
    first, second = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for part in range(0, COUNT):
        own = parts + (part * lanes + lane) * C + c
        first += tl.load(own, mask=known, other=0.0)
        second += tl.load(own + COUNT * lanes * C, mask=known, other=0.0)
    if tl.program_id(0) == 0:
        tl.store(dbeta + at, first, mask=known)
        tl.store(dgamma + at, second, mask=known)
    mean = tl.load(saved + at, mask=known, other=0.0)
    scale = tl.load(saved + lanes * C + at, mask=known, other=0.0)
    mask = (n[:, None] < N) & known[None, :]
    place = (lane * N + n)[:, None] * C + c[None, :]
    value = tl.load(dy + place, mask=mask, other=0.0)
    if USES_BATCH:
        unit = (tl.load(x + place, mask=mask, other=0.0) - mean[None, :]) * scale[None, :]
        value -= (first / N)[None, :] + unit * (second / N)[None, :]
    if AFFINE:
        scale *= tl.load(gamma + at, mask=known, other=0.0)
    tl.store(dx + place, value * scale[None, :], mask=mask)


class BatchNorm(torch.autograd.Function):
    """The normalisation of a stack x [lane, b, c, h, w] or [lane, b, c]. Changes running values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        uses_batch: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        rows = _to_rows(x)
        lanes, n, c = len(rows), rows[0, ..., 0].numel(), rows.shape[-1]
        ctx.share = share = triton.cdiv(triton.cdiv(n, MOST_PARTS), LEAST_ROWS) * LEAST_ROWS
        ctx.count = count = triton.cdiv(n, share)
        saved, y = rows.new_empty(2, lanes, c), torch.empty_like(rows)
        parts = rows.new_empty(2, count, lanes, c) if uses_batch else saved
        blocks = triton.cdiv(c, CHANNELS)
        if uses_batch:
            _moments[(blocks, count, lanes)](rows, parts, n, share, c, ROWS, CHANNELS)
        tensors = gamma, beta, running_mean, running_var
        given = [saved if t is None else t.contiguous() for t in tensors]
        _normalize[(triton.cdiv(n, ROWS), blocks, lanes)](
            rows, parts, *given, saved, y, n, share, count, c, momentum, eps,
            uses_batch, running_mean is not None, gamma is not None, ROWS, CHANNELS,
        )  # fmt: skip
        for kept, own in zip(tensors[2:], given[2:], strict=True):
            if uses_batch and kept is not None and own is not kept:
                kept.copy_(own)
        ctx.save_for_backward(rows, saved, given[0])
        ctx.uses_batch, ctx.is_affine = uses_batch, gamma is not None
        return _from_rows(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, saved, gamma = ctx.saved_tensors
        dy = _to_rows(dy)
        lanes, n, c = len(rows), rows[0, ..., 0].numel(), rows.shape[-1]
        parts, dx = rows.new_empty(2, ctx.count, lanes, c), torch.empty_like(rows)
        slopes = rows.new_empty(2, lanes, c)
        blocks = triton.cdiv(c, CHANNELS)
        _slopes[(blocks, ctx.count, lanes)](dy, rows, saved, parts, n, ctx.share, c, ROWS, CHANNELS)
        _normalize_backward[(triton.cdiv(n, ROWS), blocks, lanes)](
            dy, rows, saved, parts, gamma, dx, slopes[0], slopes[1], n, ctx.count, c,
            ctx.uses_batch, ctx.is_affine, ROWS, CHANNELS,
        )  # fmt: skip
        affine = (slopes[0], slopes[1]) if ctx.is_affine else (None, None)
        return _from_rows(dx), None, None, *affine, None, None, None


def _to_rows(x: Tensor) -> Tensor:
    """Return [lane, …, c] in this order of memory."""
    return (to_last(x) if x.dim() == 5 else x).contiguous()


def _from_rows(rows: Tensor) -> Tensor:
    return to_first(rows) if rows.dim() == 5 else rows


def match_call(
    mode: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Return how to call the kernels, or None if they do not cover this normalisation."""
    has_one = (weight is None) != (bias is None) or (running_mean is None) != (running_var is None)
    uses_batch = training or running_mean is None
    rows = input.numel() // max(1, input.shape[1])
    if has_one or input.dtype != torch.float32 or input.dim() not in (2, 4):
        return None
    if (uses_batch and rows < 2) or not isinstance(momentum, float):  # torch has a sentence for it
        return None
    tensors = input, running_mean, running_var, weight, bias
    return BatchNorm.apply, tensors, (uses_batch, momentum, eps)
