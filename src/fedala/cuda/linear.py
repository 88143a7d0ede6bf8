"""The linear layer with other weights in every lane.

Batches are small, so the time goes into reading the weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.products import dot

#: With more rows than this, the library's own matrix product is faster.
MOST_ROWS = 64


@triton.jit
def _linear_forward(
    x, w, bias, y, B, I: tl.constexpr, O: tl.constexpr, HAS_BIAS: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y[lane, b, o] = Σ x[lane, b, i] · w[lane, o, i]."""
    lane = tl.program_id(1).to(tl.int64)
    o, b = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BB)
    x += lane * B * I
    w += lane * O * I
    acc = tl.zeros((BO, BB), tl.float32)
    for start in range(0, I, BK):
        i = start + tl.arange(0, BK)
        weight = tl.load(
            w + o[:, None] * I + i[None, :], mask=(o[:, None] < O) & (i[None, :] < I), other=0.0
        )
        rows = tl.load(
            x + b[:, None] * I + i[None, :], mask=(b[:, None] < B) & (i[None, :] < I), other=0.0
        )
        acc = dot(weight, tl.trans(rows), acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    tl.store(
        y + lane * B * O + b[None, :] * O + o[:, None],
        acc,
        mask=(o[:, None] < O) & (b[None, :] < B),
    )


@triton.jit
def _linear_backward_input(
    dy, w, dx, B, I: tl.constexpr, O: tl.constexpr,
    BB: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx[lane, b, i] = Σ dy[lane, b, o] · w[lane, o, i]."""
    lane = tl.program_id(1).to(tl.int64)
    i, b = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, BB)
    dy += lane * B * O
    w += lane * O * I
    acc = tl.zeros((BB, BI), tl.float32)
    for start in range(0, O, BK):
        o = start + tl.arange(0, BK)
        grad = tl.load(
            dy + b[:, None] * O + o[None, :], mask=(b[:, None] < B) & (o[None, :] < O), other=0.0
        )
        weight = tl.load(
            w + o[:, None] * I + i[None, :], mask=(o[:, None] < O) & (i[None, :] < I), other=0.0
        )
        acc = dot(grad, weight, acc, PRECISION)
    tl.store(
        dx + lane * B * I + b[:, None] * I + i[None, :],
        acc,
        mask=(b[:, None] < B) & (i[None, :] < I),
    )


@triton.jit
def _linear_backward_weight(
    dy, x, dw, db, B, I: tl.constexpr, O: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dw[lane, o, i] = Σ dy[lane, b, o] · x[lane, b, i], db[lane, o] = Σ dy[lane, b, o]."""
    lane = tl.program_id(2).to(tl.int64)
    o, i = tl.program_id(1) * BO + tl.arange(0, BO), tl.program_id(0) * BI + tl.arange(0, BI)
    b = tl.arange(0, BB)
    grad = tl.load(
        dy + lane * B * O + b[None, :] * O + o[:, None],
        mask=(b[None, :] < B) & (o[:, None] < O),
        other=0.0,
    )
    rows = tl.load(
        x + lane * B * I + b[:, None] * I + i[None, :],
        mask=(b[:, None] < B) & (i[None, :] < I),
        other=0.0,
    )
    acc = dot(grad, rows, tl.zeros((BO, BI), tl.float32), PRECISION)
    tl.store(
        dw + lane * O * I + o[:, None] * I + i[None, :],
        acc,
        mask=(o[:, None] < O) & (i[None, :] < I),
    )
    if tl.program_id(0) == 0:
        tl.store(db + lane * O + o, tl.sum(grad, 1), mask=o < O)


class Linear(torch.autograd.Function):
    """The linear layer of a stack: x [lane, b, i], weights [lane, o, i], bias [lane, o]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        (lanes, batch, i), o = x.shape, w.shape[1]
        y = x.new_empty(lanes, batch, o)
        rows = max(16, triton.next_power_of_2(batch))
        _linear_forward[(triton.cdiv(o, 32), lanes)](
            x, w, w if bias is None else bias.contiguous(), y, batch, i, o, bias is not None,
            BB=rows, BO=32, BK=64, PRECISION=precision, num_warps=2,
        )  # fmt: skip
        ctx.save_for_backward(x, w)
        ctx.precision, ctx.has_bias, ctx.rows = precision, bias is not None, rows
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        (lanes, batch, i), o = x.shape, w.shape[1]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            _linear_backward_input[(triton.cdiv(i, 32), lanes)](
                dy, w, dx, batch, i, o,
                BB=ctx.rows, BI=32, BK=64, PRECISION=ctx.precision, num_warps=2,
            )  # fmt: skip
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = torch.empty_like(w), w.new_empty(lanes, o)
            _linear_backward_weight[(triton.cdiv(i, 128), triton.cdiv(o, 32), lanes)](
                dy, x, dw, db, batch, i, o,
                BB=ctx.rows, BO=32, BI=128, PRECISION=ctx.precision, num_warps=4,
            )  # fmt: skip
        return dx, dw, db if ctx.has_bias else None, None


def match_call(mode: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return how to call the kernels, or None if they do not cover this layer."""
    if (
        x.dim() != 2
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or x.shape[0] > MOST_ROWS
    ):
        return None
    return Linear.apply, (x, weight, bias), (mode.precision,)
