"""Convolution with other weights in every lane, forward and backward, without ever writing the patches.

cuDNN sees lanes as groups and is slow at it; unfolding writes every patch to memory. These kernels are implicit
matrix products, one block of output per program, that gather the patches as they go. Where a patch stands in memory
is a sum of two offsets, of the output's place and of the weight's, so a block of patches costs a block of additions;
neighbours in memory are neighbours in the block.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def _in_two_versions(kernel: Callable[..., None]) -> dict[bool, Any]:
    """A kernel compiled for each size that comes (True: the fastest), and one for all sizes (False: compiled once).

    A model with two or three convolutions gets the first; one with twenty would make its user wait for twenty compilations.
    """
    sizes = ("B", "C", "H", "W", "O", "P", "Q", "SHARE")
    general = types.FunctionType(
        kernel.__code__, kernel.__globals__, kernel.__name__, kernel.__defaults__
    )
    general.__annotations__ = {
        name: kind for name, kind in kernel.__annotations__.items() if name not in sizes
    }
    general.__module__, general.__qualname__ = kernel.__module__, f"{kernel.__qualname__}_general"
    free = [name for name in sizes if name not in ("C", "O")]
    return {True: triton.jit(kernel), False: triton.jit(do_not_specialize=free)(general)}


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _conv_forward(
    x, w, bias, y, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[lane, o, m] = Σ w[lane, o, k] · x[lane, m, k], places m = (b, p, q), sum over k = (c, r, s)."""
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    K: tl.constexpr = C * R * S
    b, p, q = (
        (m // (P * Q)).to(tl.int64),
        m // Q % P,
        m % Q,
    )  # a large batch's places exceed 32 bits
    top, left = p * STRIDE - PAD, q * STRIDE - PAD
    x += lane * B * C * H * W
    w += lane * O * K
    corner = b * (C * H * W) + top * W + left
    acc = tl.zeros((BO, BM), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        r, s = k // S % R, k % S
        inside = (k[:, None] < K) & (m[None, :] < B * P * Q)
        if PAD > 0:
            h, v = top[None, :] + r[:, None], left[None, :] + s[:, None]
            inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        patch = tl.load(
            x + corner[None, :] + (k // (R * S) * (H * W) + r * W + s)[:, None],
            mask=inside,
            other=0.0,
        )
        weight = tl.load(
            w + o[:, None] * K + k[None, :], mask=(o[:, None] < O) & (k[None, :] < K), other=0.0
        )
        acc = _dot(weight, patch, acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    out = y + lane * B * O * P * Q + (b * (O * P * Q) + m % (P * Q))[None, :] + o[:, None] * (P * Q)
    tl.store(out, acc, mask=(o[:, None] < O) & (m[None, :] < B * P * Q))


@triton.jit
def _conv_backward_input(
    dy, w, dx, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[lane, c, m] = Σ w[lane, c, k] · dy[lane, m, k], places m = (b, h, v), over k = (o, r, s), p·stride + r = h + pad."""
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    K: tl.constexpr = O * R * S
    b, h, v = m // (H * W), m // W % H + PAD, m % W + PAD
    dy += lane * B * O * P * Q
    w += lane * O * C * R * S
    acc = tl.zeros((BC, BM), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        o, r, s = k // (R * S), k // S % R, k % S
        p, q = h[None, :] - r[:, None], v[None, :] - s[:, None]
        inside = (k[:, None] < K) & (m[None, :] < B * H * W) & (p >= 0) & (q >= 0)
        if STRIDE > 1:
            inside = inside & (p % STRIDE == 0) & (q % STRIDE == 0)
            p, q = p // STRIDE, q // STRIDE
        inside = inside & (p < P) & (q < Q)
        grad = tl.load(
            dy + (b * (O * P * Q))[None, :] + (o * (P * Q))[:, None] + p * Q + q,
            mask=inside,
            other=0.0,
        )
        place = c[:, None] * (R * S) + (o * (C * R * S) + k % (R * S))[None, :]
        weight = tl.load(w + place, mask=(c[:, None] < C) & (k[None, :] < K), other=0.0)
        acc = _dot(weight, grad, acc, PRECISION)
    out = (
        dx + lane * B * C * H * W + (b * (C * H * W) + m % (H * W))[None, :] + c[:, None] * (H * W)
    )
    tl.store(out, acc, mask=(c[:, None] < C) & (m[None, :] < B * H * W))


@triton.jit
def _conv_backward_weight(
    dy, x, parts, B, SHARE: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[lane, o, n] = Σ dy[lane, o, k] · x[lane, n, k] over k = (b, p, q), n = (c, r, s); n = N is the bias, whose x is 1.

    The sum is cut into parts of SHARE, added up afterwards in a fixed order, so that the result is the same every time.
    """
    lane = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) // TILES * BO + tl.arange(0, BO)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    N: tl.constexpr = C * R * S
    r, s = n // S % R, n % S
    offset = n // (R * S) * (H * W) + r * W + s
    dy += lane * B * O * P * Q
    x += lane * B * C * H * W
    acc = tl.zeros((BO, BN), tl.float32)
    end = tl.minimum((part + 1) * SHARE, B * P * Q)
    for start in range(0, SHARE, BK):
        k = part * SHARE + start + tl.arange(0, BK)
        b, top, left = k // (P * Q), k // Q % P * STRIDE - PAD, k % Q * STRIDE - PAD
        place = (b * (O * P * Q) + k % (P * Q))[None, :] + o[:, None] * (P * Q)
        grad = tl.load(dy + place, mask=(o[:, None] < O) & (k[None, :] < end), other=0.0)
        inside = (n[:, None] < N) & (k[None, :] < end)
        if PAD > 0:
            h, v = top[None, :] + r[:, None], left[None, :] + s[:, None]
            inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        patch = tl.load(
            x + (b * (C * H * W) + top * W + left)[None, :] + offset[:, None],
            mask=inside,
            other=0.0,
        )
        patch = tl.where(n[:, None] == N, 1.0, patch)
        acc = _dot(grad, tl.trans(patch), acc, PRECISION)
    out = parts + (part * tl.num_programs(2) + lane) * O * (N + 1)
    place = tl.where(n[None, :] == N, O * N + o[:, None], o[:, None] * N + n[None, :])
    tl.store(out + place, acc, mask=(o[:, None] < O) & (n[None, :] <= N))


@_in_two_versions
def _last_forward(
    x, w, bias, y, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same from x [lane, b, h, v, c] and w [lane, (r, s), o, c]: one shift (r, s) after another, channels inside."""
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    b, top, left = (m // (P * Q)).to(tl.int64), m // Q % P * STRIDE - PAD, m % Q * STRIDE - PAD
    x += lane * B * C * H * W
    w += lane * O * C * R * S
    acc = tl.zeros((BM, BO), tl.float32)
    for i in range(0, R * S * (C // BK)):
        shift, c = i // (C // BK), i % (C // BK) * BK + tl.arange(0, BK)
        h, v = top + shift // S, left + shift % S
        inside = m < B * P * Q
        if PAD > 0:
            inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        patch = tl.load(
            x + (((b * H + h) * W + v) * C)[:, None] + c[None, :], mask=inside[:, None], other=0.0
        )
        weight = tl.load(
            w + (shift * O + o)[:, None] * C + c[None, :], mask=o[:, None] < O, other=0.0
        )
        acc = _dot(patch, tl.trans(weight), acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[None, :]
    out = y + lane * B * O * P * Q + (b * (O * P * Q) + m % (P * Q))[None, :] + o[:, None] * (P * Q)
    tl.store(out, tl.trans(acc), mask=(o[:, None] < O) & (m[None, :] < B * P * Q))


@_in_two_versions
def _last_backward_input(
    dy, w, dx, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same from dy [lane, b, p, q, o] and w [lane, (r, s), o, c]."""
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b, h, v = m // (H * W), m // W % H + PAD, m % W + PAD
    dy += lane * B * O * P * Q
    w += lane * O * C * R * S
    acc = tl.zeros((BM, BC), tl.float32)
    for i in range(0, R * S * (O // BK)):
        shift, o = i // (O // BK), i % (O // BK) * BK + tl.arange(0, BK)
        p, q = h - shift // S, v - shift % S
        inside = (m < B * H * W) & (p >= 0) & (q >= 0)
        if STRIDE > 1:
            inside = inside & (p % STRIDE == 0) & (q % STRIDE == 0)
            p, q = p // STRIDE, q // STRIDE
        inside = inside & (p < P) & (q < Q)
        grad = tl.load(
            dy + (((b * P + p) * Q + q) * O)[:, None] + o[None, :], mask=inside[:, None], other=0.0
        )
        weight = tl.load(
            w + (shift * O + o)[:, None] * C + c[None, :], mask=c[None, :] < C, other=0.0
        )
        acc = _dot(grad, weight, acc, PRECISION)
    out = (
        dx + lane * B * C * H * W + (b * (C * H * W) + m % (H * W))[None, :] + c[:, None] * (H * W)
    )
    tl.store(out, tl.trans(acc), mask=(c[:, None] < C) & (m[None, :] < B * H * W))


@_in_two_versions
def _last_backward_weight(
    dy, x, parts, B, SHARE,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same from dy [lane, b, p, q, o] and x [lane, b, h, v, c], a shift (r, s) per program, into parts [(r, s), o, c]."""
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    tiles = (C + BC - 1) // BC
    shift = tl.program_id(0) % (R * S)
    o = tl.program_id(0) // (R * S) // tiles * BO + tl.arange(0, BO)
    c = tl.program_id(0) // (R * S) % tiles * BC + tl.arange(0, BC)
    dy += lane * B * O * P * Q
    x += lane * B * C * H * W
    acc = tl.zeros((BO, BC), tl.float32)
    bias = tl.zeros((BO,), tl.float32)
    end = tl.minimum((part + 1) * SHARE, B * P * Q)
    for start in range(0, SHARE, BK):
        k = part * SHARE + start + tl.arange(0, BK)
        h, v = k // Q % P * STRIDE - PAD + shift // S, k % Q * STRIDE - PAD + shift % S
        grad = tl.load(
            dy + k[:, None] * O + o[None, :], mask=(k[:, None] < end) & (o[None, :] < O), other=0.0
        )
        inside = k < end
        if PAD > 0:
            inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        place = ((k // (P * Q) * H + h) * W + v) * C
        patch = tl.load(
            x + place[:, None] + c[None, :], mask=inside[:, None] & (c[None, :] < C), other=0.0
        )
        acc = _dot(tl.trans(grad), patch, acc, PRECISION)
        bias += tl.sum(grad, 0)
    out = parts + (part * tl.num_programs(2) + lane) * (O * C * R * S + O)
    tl.store(
        out + (shift * O + o)[:, None] * C + c[None, :],
        acc,
        mask=(o[:, None] < O) & (c[None, :] < C),
    )
    if tl.program_id(0) % (R * S) + tl.program_id(0) // (R * S) % tiles == 0:
        tl.store(out + O * C * R * S + o, bias, mask=o < O)


@triton.jit(do_not_specialize=["LANES", "COUNT", "WEIGHTS", "ALL"])
def _add_parts(
    parts, dw, db, LANES, COUNT, WEIGHTS, ALL, SHIFTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds up the parts of the weights' and the bias' gradient; with SHIFTS, the parts stand as [(r, s), o, c]."""
    lane = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = i
    if SHIFTS > 0:
        place = tl.where(i < WEIGHTS, i % SHIFTS * (WEIGHTS // SHIFTS) + i // SHIFTS, i)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, COUNT):
        total += tl.load(parts + (part * LANES + lane) * ALL + place, mask=i < ALL, other=0.0)
    tl.store(dw + lane * WEIGHTS + i, total, mask=i < WEIGHTS)
    tl.store(db + lane * (ALL - WEIGHTS) + i - WEIGHTS, total, mask=(i >= WEIGHTS) & (i < ALL))


def _block(size: int, most: int) -> int:
    """A power of two that covers `size`, from 16 (the least that the tensor cores take) to `most`."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _channels_last(c: int, o: int) -> bool:
    """Whether there are channels enough to go through them 32 at a time; the first layer of an image model has one or three."""
    return c % 32 == 0 and o % 32 == 0


def _tile(rows: int, inner: int) -> dict[str, int]:
    """Block sizes that were the fastest on an H200, for `rows` of output and `inner` channels to sum over."""
    if rows <= 64 and inner % 64 == 0:
        return {"BM": 16, "BK": 64, "num_warps": 2, "num_stages": 3}
    return {"BM": 64, "BK": 32, "num_warps": 4, "num_stages": 4}


class Convolution(torch.autograd.Function):
    """The stacked convolution: x [lane, b, c, h, w] with weights [lane, o, c, r, s] and bias [lane, o]."""

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
    ) -> Tensor:
        lanes, batch, c, h, v = x.shape
        _, o, _, r, s = w.shape
        p, q = (h + 2 * pad - r) // stride + 1, (v + 2 * pad - s) // stride + 1
        ctx.shape = shape = (c, h, v, o, p, q, r, s, stride, pad)
        y = x.new_empty(lanes, batch, o, p, q)
        has_bias = bias is not None
        added = w if bias is None else bias.contiguous()
        rows, bo = batch * p * q, _block(o, 64)
        if last := _channels_last(c, o):
            x, w = (
                x.permute(0, 1, 3, 4, 2).contiguous(),
                w.flatten(3).permute(0, 3, 1, 2).contiguous(),
            )
            kernel, tile = _last_forward[special], _tile(rows, c)
        else:
            x, w = x.contiguous(), w.contiguous()
            kernel, tile = _conv_forward, {"BM": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
        kernel[(triton.cdiv(rows, tile["BM"]), triton.cdiv(o, bo), lanes)](
            x, w, added, y, batch, *shape, has_bias, BO=bo, PRECISION=precision, **tile
        )  # fmt: skip
        ctx.save_for_backward(x, w)
        ctx.precision, ctx.has_bias, ctx.last, ctx.special = precision, has_bias, last, special
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        c, h, v, o, p, q, r, s, _, _ = ctx.shape
        dy = dy.permute(0, 1, 3, 4, 2).contiguous() if ctx.last else dy.contiguous()
        lanes, batch = dy.shape[:2]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = x.new_empty(lanes, batch, c, h, v)
            kernel = _last_backward_input[ctx.special] if ctx.last else _conv_backward_input
            bc, tile = _block(c, 64), _tile(batch * h * v, o if ctx.last else 32)
            kernel[(triton.cdiv(batch * h * v, tile["BM"]), triton.cdiv(c, bc), lanes)](
                dy, w, dx, batch, *ctx.shape, BC=bc, PRECISION=ctx.precision, **tile
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            weights, rows = o * c * r * s, batch * p * q
            dw, db = w.new_empty(lanes, o, c, r, s), w.new_empty(lanes, o)
            # Parts fill the device where the weights are few and the sum is long.
            share = triton.cdiv(triton.cdiv(rows, max(1, min(16, rows // 256))), 64) * 64
            count = triton.cdiv(rows, share)
            parts = x.new_empty(count, lanes, weights + o)
            bo = _block(o, 64)
            if ctx.last:
                bc = 32
                _last_backward_weight[ctx.special][
                    (triton.cdiv(o, bo) * triton.cdiv(c, bc) * r * s, count, lanes)
                ](
                    dy,
                    x,
                    parts,
                    batch,
                    share,
                    *ctx.shape,
                    BO=bo,
                    BC=bc,
                    BK=32,
                    PRECISION=ctx.precision,
                    num_warps=2,
                )
            else:
                bn = _block(c * r * s + 1, 64)
                tiles = triton.cdiv(c * r * s + 1, bn)
                _conv_backward_weight[(triton.cdiv(o, bo) * tiles, count, lanes)](
                    dy, x, parts, batch, share, *ctx.shape, BO=bo, BN=bn, BK=64, TILES=tiles, PRECISION=ctx.precision,
                    num_warps=4, num_stages=2,
                )  # fmt: skip
            _add_parts[(triton.cdiv(weights + o, 1024), lanes)](
                parts,
                dw,
                db,
                lanes,
                COUNT=count,
                WEIGHTS=weights,
                ALL=weights + o,
                SHIFTS=r * s if ctx.last else 0,
                BLOCK=1024,
            )
        return dx, dw, db if ctx.has_bias else None, None, None, None, None


def arguments(
    mode: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """How to call the kernels, or None for a convolution that they do not do."""

    def single(value: Any) -> int | None:
        values = {value} if isinstance(value, int) else set(value)
        return values.pop() if len(values) == 1 else None

    step, pad = single(stride), None if isinstance(padding, str) else single(padding)
    plain = groups == 1 and single(dilation) == 1 and step is not None and pad is not None
    if not plain or x.dtype != torch.float32 or x.dim() != 4:
        return None
    return Convolution.apply, (x, weight, bias), (step, pad, mode.precision, mode.special)
