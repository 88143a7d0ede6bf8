"""The linear layer with other weights in every lane.

Batches are small, so the time goes into reading the weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.compiling import Kernel
from fedala.cuda.late import LateGradients, give_gradients
from fedala.cuda.products import dot, passes_relu

#: With more rows than this, the library's own matrix product is faster.
MOST_ROWS = 64
#: As many programs as keep an H200 busy.
MOST_PROGRAMS = 640


@Kernel
@triton.jit
def _linear_forward(
    x, w, bias, y, B, SHARE, I: tl.constexpr, O: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y[lane, b, o] = Σ x[lane, b, i] · w[lane, o, i], or SHARE terms of each sum."""
    lane, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o, b = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BB)
    x += lane * B * I
    w += lane * O * I
    end = tl.minimum((part + 1) * SHARE, I)
    acc = tl.zeros((BO, BB), tl.float32)
    for start in range(part * SHARE, end, BK):
        i = start + tl.arange(0, BK)
        weight = tl.load(
            w + o[:, None] * I + i[None, :], mask=(o[:, None] < O) & (i[None, :] < end), other=0.0
        )
        rows = tl.load(
            x + b[:, None] * I + i[None, :], mask=(b[:, None] < B) & (i[None, :] < end), other=0.0
        )
        acc = dot(weight, tl.trans(rows), acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    if RELU:
        acc = tl.where(passes_relu(acc), acc, 0.0)
    tl.store(
        y + (part * tl.num_programs(1) + lane) * B * O + b[None, :] * O + o[:, None],
        acc,
        mask=(o[:, None] < O) & (b[None, :] < B),
    )


@Kernel
@triton.jit
def _finish_forward(
    parts, bias, y, COUNT: tl.constexpr, SIZE, B, O,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of all sums, and then the bias."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(COUNT):
        total += tl.load(parts + part * SIZE + n, mask=n < SIZE, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n // (B * O) * O + n % O, mask=n < SIZE, other=0.0)
    if RELU:
        total = tl.where(passes_relu(total), total, 0.0)
    tl.store(y + n, total, mask=n < SIZE)


@triton.jit
def _load_gradient(dy, y, at, mask, RELU: tl.constexpr):
    """Load a block of the gradient of outputs; of those that ReLU stopped, it is zero."""
    grad = tl.load(dy + at, mask=mask, other=0.0)
    if RELU:
        out = tl.load(y + at, mask=mask, other=0.0)
        grad = tl.where(passes_relu(out), grad, 0.0)
    return grad


@Kernel
@triton.jit
def _linear_backward_input(
    dy, y, w, dx, B, I: tl.constexpr, O: tl.constexpr, RELU: tl.constexpr,
    BB: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx[lane, b, i] = Σ dy[lane, b, o] · w[lane, o, i]."""
    lane = tl.program_id(1).to(tl.int64)
    i, b = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, BB)
    dy += lane * B * O
    y += lane * B * O
    w += lane * O * I
    acc = tl.zeros((BB, BI), tl.float32)
    for start in range(0, O, BK):
        o = start + tl.arange(0, BK)
        mask = (b[:, None] < B) & (o[None, :] < O)
        grad = _load_gradient(dy, y, b[:, None] * O + o[None, :], mask, RELU)
        weight = tl.load(
            w + o[:, None] * I + i[None, :], mask=(o[:, None] < O) & (i[None, :] < I), other=0.0
        )
        acc = dot(grad, weight, acc, PRECISION)
    tl.store(
        dx + lane * B * I + b[:, None] * I + i[None, :],
        acc,
        mask=(b[:, None] < B) & (i[None, :] < I),
    )


@Kernel
@triton.jit
def _linear_backward_weight(
    dy, y, x, dw, db, factors, factor_stride, B, I: tl.constexpr, O: tl.constexpr,
    RELU: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dw[lane, o, i] = Σ dy[lane, b, o] · x[lane, b, i], db[lane, o] = Σ dy[lane, b, o].

    With ADD, these times the lane's factor are added to what is there: to the weights themselves.
    """
    lane = tl.program_id(2).to(tl.int64)
    o, i = tl.program_id(1) * BO + tl.arange(0, BO), tl.program_id(0) * BI + tl.arange(0, BI)
    b = tl.arange(0, BB)
    mask = (b[None, :] < B) & (o[:, None] < O)
    grad = _load_gradient(dy, y, lane * B * O + b[None, :] * O + o[:, None], mask, RELU)
    rows = tl.load(
        x + lane * B * I + b[:, None] * I + i[None, :],
        mask=(b[:, None] < B) & (i[None, :] < I),
        other=0.0,
    )
    acc = dot(grad, rows, tl.zeros((BO, BI), tl.float32), PRECISION)
    sums = tl.sum(grad, 1)
    dw += lane * O * I + o[:, None] * I + i[None, :]
    db += lane * O + o
    mask = (o[:, None] < O) & (i[None, :] < I)
    if ADD:
        factor = tl.load(factors + lane * factor_stride)
        acc = tl.load(dw, mask=mask, other=0.0) + factor * acc
    tl.store(dw, acc, mask=mask)
    if HAS_BIAS and tl.program_id(0) == 0:
        if ADD:
            sums = tl.load(db, mask=o < O, other=0.0) + factor * sums
        tl.store(db, sums, mask=o < O)


def _split_sum(terms: int, programs: int) -> tuple[int, int]:
    """Return how many terms a part of a sum has, and how many parts: one, two, four or eight."""
    count = 8
    while count > 1 and (programs * count > MOST_PROGRAMS or terms < count * 64):
        count //= 2
    share = triton.cdiv(terms, count * 64) * 64
    return share, triton.cdiv(terms, share)


class Linear(torch.autograd.Function):
    """The linear layer of a stack, with ReLU if `relu`.

    x is [lane, b, i], weights are [lane, o, i], and bias is [lane, o].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        precision: str,
        relu: bool,
        late: LateGradients | None,
    ) -> Tensor:
        ctx.late, ctx.params = late, (w, bias)
        x, w = x.contiguous(), w.contiguous()
        (lanes, batch, i), o = x.shape, w.shape[1]
        y = x.new_empty(lanes, batch, o)
        rows = max(16, triton.next_power_of_2(batch))
        added, has_bias = w if bias is None else bias.contiguous(), bias is not None
        # Few outputs and lanes leave most of the device idle: then, parts of the sum fill it.
        share, count = _split_sum(i, triton.cdiv(o, 32) * lanes)
        parts = x.new_empty(count, *y.shape) if count > 1 else y
        _linear_forward[(triton.cdiv(o, 32), lanes, count)](
            x, w, added, parts, batch, share, i, o, has_bias and count == 1, relu and count == 1,
            BB=rows, BO=32, BK=64, PRECISION=precision, num_warps=2,
        )  # fmt: skip
        if count > 1:
            _finish_forward[(triton.cdiv(y.numel(), 512),)](
                parts, added, y, count, y.numel(), batch, o, has_bias, relu, BLOCK=512
            )
        ctx.save_for_backward(x, w, *([y] if relu else []))
        ctx.precision, ctx.rows = precision, rows
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *outputs = ctx.saved_tensors
        dy = dy.contiguous()
        y, relu = outputs[0] if outputs else dy, bool(outputs)
        (lanes, batch, i), o = x.shape, w.shape[1]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            # With few lanes, larger blocks. Those of more rows exceed the memory of many GPUs.
            is_small = lanes <= 4 and ctx.rows == 16
            tile = {"BI": 32, "BK": 128} if is_small else {"BI": 64, "BK": 32}
            _linear_backward_input[(triton.cdiv(i, tile["BI"]), lanes)](
                dy, y, w, dx, batch, i, o, relu,
                BB=ctx.rows, **tile, PRECISION=ctx.precision, num_warps=4, num_stages=4,
            )  # fmt: skip

        def write(_: Any, dw: Tensor, db: Tensor | None, factors: Tensor | None) -> None:
            given = (dy, 0) if factors is None else (factors, factors.stride(0))
            _linear_backward_weight[(triton.cdiv(i, 64), triton.cdiv(o, 32), lanes)](
                dy, y, x, dw, dw if db is None else db, *given, batch, i, o,
                relu, factors is not None, db is not None,
                BB=ctx.rows, BO=32, BI=64, PRECISION=ctx.precision, num_warps=2,
            )  # fmt: skip

        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = give_gradients(ctx, write)
        return dx, dw, db, None, None, None


def match_call(
    mode: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False
) -> Any:
    """Return how to call the kernels, or None if they do not cover this layer."""
    if (
        x.dim() != 2
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or x.shape[0] > MOST_ROWS
    ):
        return None
    return Linear.apply, (x, weight, bias), (mode.precision, relu, mode.late)
