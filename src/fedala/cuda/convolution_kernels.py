"""The kernels of the convolution with other weights in every lane.

cuDNN sees lanes as groups, which is slow, and unfolding writes every patch to memory. These kernels
are implicit matrix products. A program computes one block of the output and gathers the patches on
the way, channels last: a patch is then a few long runs of memory.

An image with few channels has no such runs. So `unfold_rows` lays the S·C numbers that a row of the
kernel covers side by side, padded to C' of them, for each output column. What is left is a
convolution with kernels of R×1 over C' channels. FEW is then the number of real channels, else 0.

The gradient of the input without padding takes the same way back: first that of such rows, which
needs only the kernel's R rows and leaves out no column, and then `fold_rows` adds up its S columns.

With POOL, a convolution ends with max-pooling by two and ReLU. The four outputs of a window are
neighbours in a block, so they never reach memory. A byte remembers which of them won, or that none
did (4), for `pool_backward`.
"""

import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from fedala.cuda.compiling import Kernel
from fedala.cuda.products import dot, passes_relu


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
    return {
        True: Kernel(triton.jit(kernel)),
        False: Kernel(triton.jit(do_not_specialize=free)(general)),
    }


@triton.jit
def _find_outputs(m, P, Q, POOL: tl.constexpr):
    """Return sample, row and column of outputs; with POOL, those of a window stand together."""
    if POOL:
        n = m // 4
        row, column = n // (Q // 2) % (P // 2), n % (Q // 2)
        return n // ((P // 2) * (Q // 2)), row * 2 + m % 4 // 2, column * 2 + m % 2
    else:
        return m // (P * Q), m // Q % P, m % Q


@triton.jit
def _count_outputs(P, Q, POOL: tl.constexpr):
    """Return how many outputs of a sample count: an odd last row or column is in no window."""
    if POOL:
        return (P // 2) * (Q // 2) * 4
    else:
        return P * Q


@triton.jit
def _first_largest(a, i, b, j):
    """Return the larger one and its place. The first of equals wins, and NaN, as in torch."""
    second = (b > a) | ((b == a) & (j < i)) | (b != b)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def _store_outputs(
    acc, y, winners, first, rows, o, O, POOL: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr
):
    """Store a block [m, o] of outputs, or the winners of its windows."""
    if POOL:
        places = tl.broadcast_to(tl.arange(0, 4)[None, :, None], (BM // 4, 4, BO))
        windows = tl.reshape(acc, (BM // 4, 4, BO))
        best, winner = tl.reduce((windows, places), 1, _first_largest)
        alive = passes_relu(best)
        n = first // 4 + tl.arange(0, BM // 4)
        at = n.to(tl.int64)[:, None] * O + o[None, :]
        mask = (n[:, None] < rows // 4) & (o[None, :] < O)
        tl.store(y + at, tl.where(alive, best, 0.0), mask=mask)
        tl.store(winners + at, tl.where(alive, winner, 4).to(tl.int8), mask=mask)
    else:
        m = first + tl.arange(0, BM)
        at = m.to(tl.int64)[:, None] * O + o[None, :]
        tl.store(y + at, acc, mask=(m[:, None] < rows) & (o[None, :] < O))


@Kernel
@triton.jit
def unfold_rows(
    x, y, COUNT, image_stride, c_stride, h_stride, w_stride,
    C: tl.constexpr, H, W, Q, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set y[image, h, q, (s, c)] = x[image, c, h, q·stride − pad + s]."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u, q = n % WIDTH, n // WIDTH % Q
    row = n // WIDTH // Q
    v = q * STRIDE - PAD + u // C
    inside = (n < COUNT) & (u < S * C) & (v >= 0) & (v < W)
    at = row // H * image_stride + row % H * h_stride + v * w_stride + u % C * c_stride
    tl.store(y + n, tl.load(x + at, mask=inside, other=0.0), mask=n < COUNT)


@Kernel
@triton.jit
def fold_rows(
    y, x, COUNT, C: tl.constexpr, H, W, Q,
    S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up in x[image, h, v, c] what `unfold_rows` has spread."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, v, row = n % C, n // C % W, n // C // W
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        q = v + PAD - s
        inside = (n < COUNT) & (q >= 0) & (q % STRIDE == 0) & (q // STRIDE < Q)
        at = (row * Q + q // STRIDE) * WIDTH + s * C + c
        total += tl.load(y + at, mask=inside, other=0.0)
    tl.store(x + n, total, mask=n < COUNT)


@triton.jit
def _locate_weights(o, k, C, R: tl.constexpr, S: tl.constexpr, FEW: tl.constexpr):
    """Return the offsets of weights [o, k], with k = (r, s, c), and which of them exist."""
    if FEW > 0:  # they lie in memory as [o, c, r, s]
        r, u = k // C, k % C
        return ((o * FEW + u % FEW) * R + r) * S + u // FEW, (u < S * FEW) & (r < R)
    else:
        return o * (R * S * C) + k, k < R * S * C


@_make_versions
def forward(
    x, w, bias, y, winners, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, FEW: tl.constexpr,
    HAS_BIAS: tl.constexpr, POOL: tl.constexpr,
    BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y[lane, m, o] = Σ x[lane, m, k] · w[lane, o, k].

    Outputs are m = (b, p, q), the sum is over k = (r, s, c). With padding, BK must divide C.
    """
    lane = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BM
    m = first + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    columns: tl.constexpr = 1 if FEW else S
    each = _count_outputs(P, Q, POOL)
    rows = B * each
    b, p, q = _find_outputs(m, P, Q, POOL)
    top, left = p * STRIDE - PAD, q if FEW else q * STRIDE - PAD
    # Offsets in a large batch exceed 32 bits; those from the block's first sample do not.
    x += (lane * B + first // each) * C * H * W
    corner = ((b - first // each) * H + top) * W + left
    w += lane * O * R * S * (FEW if FEW else C)
    K = R * columns * C
    acc = tl.zeros((BM, BO), tl.float32)
    for i in range(0, (K + BK - 1) // BK):
        k = i * BK + tl.arange(0, BK)
        if PAD > 0:  # the block lies in one shift
            shift = i // (C // BK)
            h, v = top + shift // columns, left + shift % columns
            inside = (m < rows) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            offset = (shift // columns * W + shift % columns) * C + (k - shift * C)
        else:
            shift, inside = k // C, m < rows
            offset = (shift // columns * W + shift % columns) * C + k % C
        patch = tl.load(
            x + (corner * C)[:, None] + offset[None, :],
            mask=inside[:, None] & (k[None, :] < K),
            other=0.0,
        )
        at, exists = _locate_weights(o[:, None], k[None, :], C, R, S, FEW)
        weight = tl.load(w + at, mask=(o[:, None] < O) & exists, other=0.0)
        acc = dot(patch, tl.trans(weight), acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[None, :]
    y += lane * B * (each // 4 if POOL else each) * O
    winners += lane * B * (each // 4) * O
    _store_outputs(acc, y, winners, first, rows, o, O, POOL, BM, BO)


@_make_versions
def backward_input(
    dy, w, dx, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, FEW: tl.constexpr,
    WIDE: tl.constexpr, BLOCKS: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx[lane, m, c] = Σ dy[lane, m, k] · w[lane, k, c].

    Inputs are m = (h, v, b), the sum is over k = (r, s, o) with p·stride + r = h + pad. A block has
    few rows h and columns v, and near the border most of the shifts (r, s) lead outside of the
    output. They are left out. A program computes BLOCKS blocks of channels from what it has read.
    With WIDE, the offsets in a lane's dy do not fit into 32 bits.
    """
    lane = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BM
    m = first + tl.arange(0, BM)
    c = tl.program_id(1) * (BLOCKS * BC) + tl.arange(0, BC)
    columns: tl.constexpr = 1 if FEW else S
    rows = B * H * W
    b, h, v = m % B, m // (B * W) + PAD, m // B % W + (0 if FEW else PAD)
    if WIDE:
        b = b.to(tl.int64)
    dy += lane * B * O * P * Q
    w += lane * O * R * S * (FEW if FEW else C)
    # The rows and columns of this block, and the shifts that lead from them into the output.
    final = tl.minimum(first + BM, rows) - 1
    top, bottom = first // (B * W), final // (B * W)
    left, right = first // B % W, final // B % W
    if top < bottom:
        left, right = 0, W - 1
    low_r = tl.maximum(top + PAD - (P - 1) * STRIDE, 0)
    high_r = tl.minimum(bottom + PAD, R - 1)
    low_s, high_s = 0, 0
    if FEW == 0:
        low_s = tl.maximum(left + PAD - (Q - 1) * STRIDE, 0)
        high_s = tl.minimum(right + PAD, S - 1)
    span = (high_s - low_s + 1) * ((O + BK - 1) // BK)
    corner = ((b * P + h) * Q + v) * O
    sums = (tl.zeros((BM, BC), tl.float32),) * BLOCKS
    for i in range(0, (high_r - low_r + 1) * span):
        r, j = low_r + i // span, i % span
        s, o = low_s + j // ((O + BK - 1) // BK), j % ((O + BK - 1) // BK) * BK + tl.arange(0, BK)
        p, q = h - r, v - s
        at = corner - (r * Q + s) * O
        inside = (m < rows) & (p >= 0) & (q >= 0)
        if STRIDE > 1:
            inside = inside & (p % STRIDE == 0)
            p = p // STRIDE
            if FEW == 0:
                inside = inside & (q % STRIDE == 0)
                q = q // STRIDE
            at = ((b * P + p) * Q + q) * O
        inside = inside & (p < P) & (q < Q)
        grad = tl.load(
            dy + at[:, None] + o[None, :], mask=inside[:, None] & (o[None, :] < O), other=0.0
        )
        added = ()
        for n in tl.static_range(BLOCKS):
            own = c + n * BC
            k = (r * columns + s) * C + own
            place, exists = _locate_weights(o[:, None], k[None, :], C, R, S, FEW)
            mask = (o[:, None] < O) & (own[None, :] < C) & exists
            weight = tl.load(w + place, mask=mask, other=0.0)
            added = added + (dot(grad, weight, sums[n], PRECISION),)  # noqa: RUF005 (for Triton)
        sums = added
    b = (m % B).to(tl.int64)
    dx += lane * B * C * H * W
    row = (((b * H + m // (B * W)) * W + m // B % W) * C)[:, None]
    for n in tl.static_range(BLOCKS):
        own = c + n * BC
        mask = (m[:, None] < rows) & (own[None, :] < C)
        tl.store(dx + row + own[None, :], sums[n], mask=mask)


@_make_versions
def backward_weight(
    dy, x, dw, db, factors, factor_stride, B, SHARE,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, FEW: tl.constexpr,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dw[lane, o, n] = Σ dy[lane, k, o] · x[lane, k, n], and the bias's gradient.

    Weights are n = (r, s, c), the sum is over k = (b, p, q). With padding, BN must divide C. Each
    program adds up SHARE terms.
    If they are the WHOLE sum, dw and db are the gradients; with ADD, these times the lane's factor
    are added to what is there. If not, dw has the parts of both gradients. `add_parts` adds them in
    a fixed order, so that the bits are always the same. With WIDE, the offsets in a lane's x or dy
    do not fit into 32 bits.
    """
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    columns: tl.constexpr = 1 if FEW else S
    N = R * columns * C
    tiles = (N + BN - 1) // BN
    o = tl.program_id(0) // tiles * BO + tl.arange(0, BO)
    first = tl.program_id(0) % tiles * BN
    n = first + tl.arange(0, BN)
    # With padding, the block lies in one shift.
    shift = first // C if PAD > 0 else n // C
    offset = (shift // columns * W + shift % columns) * C + (n - shift * C)
    dy += lane * B * O * P * Q
    x += lane * B * C * H * W
    acc = tl.zeros((BO, BN), tl.float32)
    bias = tl.zeros((BO,), tl.float32)
    end = tl.minimum((part + 1) * SHARE, B * P * Q)
    for start in range(0, SHARE, BK):
        k = part * SHARE + start + tl.arange(0, BK)
        inside = k < end
        b, top, left = k // (P * Q), k // Q % P * STRIDE - PAD, k % Q
        if WIDE:
            b, k = b.to(tl.int64), k.to(tl.int64)
        if FEW == 0:
            left = left * STRIDE - PAD
        grad = tl.load(
            dy + k[:, None] * O + o[None, :], mask=inside[:, None] & (o[None, :] < O), other=0.0
        )
        if PAD > 0:
            h, v = top + shift // columns, left + shift % columns
            inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        patch = tl.load(
            x + (((b * H + top) * W + left) * C)[:, None] + offset[None, :],
            mask=inside[:, None] & (n[None, :] < N),
            other=0.0,
        )
        acc = dot(tl.trans(grad), patch, acc, PRECISION)
        bias += tl.sum(grad, 0)
    if WHOLE:
        dw += lane * (O * N)
        db += lane * O + o
    else:
        dw += (part * tl.num_programs(2) + lane) * (O * N + O)
        db = dw + O * N + o
    dw += o[:, None] * N + n[None, :]
    mask = (o[:, None] < O) & (n[None, :] < N)
    if ADD:
        factor = tl.load(factors + lane * factor_stride)
        acc = tl.load(dw, mask=mask, other=0.0) + factor * acc
    tl.store(dw, acc, mask=mask)
    if HAS_BIAS and first == 0:
        if ADD:
            bias = tl.load(db, mask=o < O, other=0.0) + factor * bias
        tl.store(db, bias, mask=o < O)


@Kernel
@triton.jit(do_not_specialize=["LANES", "COUNT", "WEIGHTS", "O", "SIZE"])
def add_parts(
    parts, dw, db, factors, factor_stride, LANES, COUNT, WEIGHTS, O, SIZE,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, FEW: tl.constexpr,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of the gradients of weights and bias; a part has SIZE numbers.

    With ADD, the gradients times the lane's factor are added to what is there.
    """
    lane = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_weight, is_bias = i < WEIGHTS, (i >= WEIGHTS) & (i < WEIGHTS + O)
    at = i
    if FEW > 0:  # from [o, c, r, s] to [o, r, (s, c)]
        s, r, c = i % S, i // S % R, i // (R * S) % FEW
        at = i // (FEW * R * S) * (R * C) + r * C + s * FEW + c
    at = tl.where(is_weight, at, SIZE - O + i - WEIGHTS)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, COUNT, PARTS):  # loads that do not wait for each other
        part = first + tl.arange(0, PARTS)
        start = (part * LANES + lane) * SIZE
        mask = (is_weight | is_bias)[None, :] & (part[:, None] < COUNT)
        total += tl.sum(tl.load(parts + start[:, None] + at[None, :], mask=mask, other=0.0), 0)
    at_weight, at_bias = lane * WEIGHTS + i, lane * O + i - WEIGHTS
    if ADD:
        total *= tl.load(factors + lane * factor_stride)
        total += tl.load(dw + at_weight, mask=is_weight, other=0.0)
        if HAS_BIAS:
            total += tl.load(db + at_bias, mask=is_bias, other=0.0)
    tl.store(dw + at_weight, total, mask=is_weight)
    if HAS_BIAS:
        tl.store(db + at_bias, total, mask=is_bias)
