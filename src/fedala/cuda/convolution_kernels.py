"""The kernels of the convolution with other weights in every lane.

cuDNN sees lanes as groups, which is slow, and unfolding writes every patch to memory. These kernels
are implicit matrix products. A program computes one block of the output and gathers the patches on
the way. The offset of a patch in memory is the sum of the output's offset and the weight's, so a
block of patches costs a block of additions. Neighbours in memory are neighbours in the block.

`conv_…` kernels take channels first, `last_…` kernels take channels last, 32 at a time.
"""

import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from fedala.cuda.products import dot


def _make_versions(kernel: Callable[..., None]) -> dict[bool, Any]:
    """Return a kernel that is compiled for each size (True), and one for all sizes (False).

    The first is the fastest, and is for models with two or three convolutions. With twenty, the
    user would wait for twenty compilations.
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
def conv_forward(
    x, w, bias, y, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y[lane, o, m] = Σ w[lane, o, k] · x[lane, m, k].

    Outputs are m = (b, p, q), the sum is over k = (c, r, s).
    """
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    K: tl.constexpr = C * R * S
    # Offsets in a large batch exceed 32 bits.
    b, p, q = (m // (P * Q)).to(tl.int64), m // Q % P, m % Q
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
        acc = dot(weight, patch, acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    out = y + lane * B * O * P * Q + (b * (O * P * Q) + m % (P * Q))[None, :] + o[:, None] * (P * Q)
    tl.store(out, acc, mask=(o[:, None] < O) & (m[None, :] < B * P * Q))


@triton.jit
def conv_backward_input(
    dy, w, dx, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx[lane, c, m] = Σ w[lane, c, k] · dy[lane, m, k].

    Inputs are m = (b, h, v), the sum is over k = (o, r, s) with p·stride + r = h + pad.
    """
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
        offset = c[:, None] * (R * S) + (o * (C * R * S) + k % (R * S))[None, :]
        weight = tl.load(w + offset, mask=(c[:, None] < C) & (k[None, :] < K), other=0.0)
        acc = dot(weight, grad, acc, PRECISION)
    out = (
        dx + lane * B * C * H * W + (b * (C * H * W) + m % (H * W))[None, :] + c[:, None] * (H * W)
    )
    tl.store(out, acc, mask=(c[:, None] < C) & (m[None, :] < B * H * W))


@triton.jit
def conv_backward_weight(
    dy, x, parts, B, SHARE: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dw[lane, o, n] = Σ dy[lane, o, k] · x[lane, n, k], with n = (c, r, s).

    The sum is over k = (b, p, q). The column n = N is the bias, and its x is 1. Each program adds
    up SHARE terms. `add_parts` adds the parts in a fixed order, so that the bits are always the
    same.
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
        position = (b * (O * P * Q) + k % (P * Q))[None, :] + o[:, None] * (P * Q)
        grad = tl.load(dy + position, mask=(o[:, None] < O) & (k[None, :] < end), other=0.0)
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
        acc = dot(grad, tl.trans(patch), acc, PRECISION)
    out = parts + (part * tl.num_programs(2) + lane) * O * (N + 1)
    position = tl.where(n[None, :] == N, O * N + o[:, None], o[:, None] * N + n[None, :])
    tl.store(out + position, acc, mask=(o[:, None] < O) & (n[None, :] <= N))


@_make_versions
def last_forward(
    x, w, bias, y, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y of `conv_forward` from x [lane, b, h, v, c] and w [lane, (r, s), o, c].

    The outer loop is over shifts (r, s), the inner one over channels.
    """
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
        acc = dot(patch, tl.trans(weight), acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[None, :]
    out = y + lane * B * O * P * Q + (b * (O * P * Q) + m % (P * Q))[None, :] + o[:, None] * (P * Q)
    tl.store(out, tl.trans(acc), mask=(o[:, None] < O) & (m[None, :] < B * P * Q))


@_make_versions
def last_backward_input(
    dy, w, dx, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx of `conv_backward_input` from dy [lane, b, p, q, o] and w [lane, (r, s), o, c]."""
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
        acc = dot(grad, weight, acc, PRECISION)
    out = (
        dx + lane * B * C * H * W + (b * (C * H * W) + m % (H * W))[None, :] + c[:, None] * (H * W)
    )
    tl.store(out, tl.trans(acc), mask=(c[:, None] < C) & (m[None, :] < B * H * W))


@_make_versions
def last_backward_weight(
    dy, x, parts, B, SHARE,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dw of `conv_backward_weight` from dy [lane, b, p, q, o] and x [lane, b, h, v, c].

    Each program has one shift (r, s). The parts are [(r, s), o, c].
    """
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
        offset = ((k // (P * Q) * H + h) * W + v) * C
        patch = tl.load(
            x + offset[:, None] + c[None, :], mask=inside[:, None] & (c[None, :] < C), other=0.0
        )
        acc = dot(tl.trans(grad), patch, acc, PRECISION)
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
def add_parts(parts, dw, db, LANES, COUNT, WEIGHTS, ALL, SHIFTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the parts of the gradients of weights and bias.

    If SHIFTS > 0, the parts are [(r, s), o, c].
    """
    lane = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = i
    if SHIFTS > 0:
        offset = tl.where(i < WEIGHTS, i % SHIFTS * (WEIGHTS // SHIFTS) + i // SHIFTS, i)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, COUNT):
        total += tl.load(parts + (part * LANES + lane) * ALL + offset, mask=i < ALL, other=0.0)
    tl.store(dw + lane * WEIGHTS + i, total, mask=i < WEIGHTS)
    tl.store(db + lane * (ALL - WEIGHTS) + i - WEIGHTS, total, mask=(i >= WEIGHTS) & (i < ALL))
