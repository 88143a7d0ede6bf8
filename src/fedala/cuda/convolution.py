"""The convolution with other weights in every lane, forward and backward."""

from typing import Any

import torch
import triton
from torch import Tensor

from fedala.cuda.convolution_kernels import (
    add_parts,
    conv_backward_input,
    conv_backward_weight,
    conv_forward,
    last_backward_input,
    last_backward_weight,
    last_forward,
)


def _find_block(size: int, most: int) -> int:
    """Return a power of two that covers `size`, from 16 (the tensor cores' least) to `most`."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _has_many_channels(c: int, o: int) -> bool:
    """Tell whether the `last_…` kernels can take the channels, 32 at a time.

    The first layer of an image model has one or three.
    """
    return c % 32 == 0 and o % 32 == 0


def _find_tile(rows: int, inner: int) -> dict[str, int]:
    """Return the fastest block sizes on an H200.

    `rows` is the number of outputs, `inner` the number of channels in the sum.
    """
    if rows <= 64 and inner % 64 == 0:
        return {"BM": 16, "BK": 64, "num_warps": 2, "num_stages": 3}
    return {"BM": 64, "BK": 32, "num_warps": 4, "num_stages": 4}


class Convolution(torch.autograd.Function):
    """The convolution of a stack of lanes.

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
    ) -> Tensor:
        lanes, batch, c, h, v = x.shape
        _, o, _, r, s = w.shape
        p, q = (h + 2 * pad - r) // stride + 1, (v + 2 * pad - s) // stride + 1
        ctx.shape = shape = (c, h, v, o, p, q, r, s, stride, pad)
        y = x.new_empty(lanes, batch, o, p, q)
        has_bias = bias is not None
        added = w if bias is None else bias.contiguous()
        rows, bo = batch * p * q, _find_block(o, 64)
        if last := _has_many_channels(c, o):
            x = x.permute(0, 1, 3, 4, 2).contiguous()
            w = w.flatten(3).permute(0, 3, 1, 2).contiguous()
            kernel, tile = last_forward[special], _find_tile(rows, c)
        else:
            x, w = x.contiguous(), w.contiguous()
            kernel, tile = conv_forward, {"BM": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
        kernel[(triton.cdiv(rows, tile["BM"]), triton.cdiv(o, bo), lanes)](
            x, w, added, y, batch, *shape, has_bias, BO=bo, PRECISION=precision, **tile
        )
        ctx.save_for_backward(x, w)
        ctx.precision, ctx.has_bias, ctx.last, ctx.special = precision, has_bias, last, special
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = dy.permute(0, 1, 3, 4, 2).contiguous() if ctx.last else dy.contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _backward_input(ctx, dy, w)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = _backward_weight(ctx, dy, x)
        return dx, dw, db if ctx.has_bias else None, None, None, None, None


def _backward_input(ctx: Any, dy: Tensor, w: Tensor) -> Tensor:
    c, h, v, o, *_ = ctx.shape
    lanes, batch = dy.shape[:2]
    dx = dy.new_empty(lanes, batch, c, h, v)
    kernel = last_backward_input[ctx.special] if ctx.last else conv_backward_input
    bc, tile = _find_block(c, 64), _find_tile(batch * h * v, o if ctx.last else 32)
    kernel[(triton.cdiv(batch * h * v, tile["BM"]), triton.cdiv(c, bc), lanes)](
        dy, w, dx, batch, *ctx.shape, BC=bc, PRECISION=ctx.precision, **tile
    )
    return dx


def _backward_weight(ctx: Any, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights and bias."""
    c, _, _, o, p, q, r, s, _, _ = ctx.shape
    lanes, batch = dy.shape[:2]
    weights, rows = o * c * r * s, batch * p * q
    dw, db = x.new_empty(lanes, o, c, r, s), x.new_empty(lanes, o)
    # If the weights are few and the sum is long, parts of the sum fill the device.
    share = triton.cdiv(triton.cdiv(rows, max(1, min(16, rows // 256))), 64) * 64
    count = triton.cdiv(rows, share)
    parts = x.new_empty(count, lanes, weights + o)
    bo = _find_block(o, 64)
    blocks = {"BO": bo, "PRECISION": ctx.precision}
    if ctx.last:
        bc = 32
        last_backward_weight[ctx.special][
            (triton.cdiv(o, bo) * triton.cdiv(c, bc) * r * s, count, lanes)
        ](dy, x, parts, batch, share, *ctx.shape, BC=bc, BK=32, **blocks, num_warps=2)
    else:
        bn = _find_block(c * r * s + 1, 64)
        tiles = triton.cdiv(c * r * s + 1, bn)
        blocks |= {"BN": bn, "BK": 64, "TILES": tiles}
        conv_backward_weight[(triton.cdiv(o, bo) * tiles, count, lanes)](
            dy, x, parts, batch, share, *ctx.shape, **blocks, num_warps=4, num_stages=2
        )
    sizes = {"COUNT": count, "WEIGHTS": weights, "ALL": weights + o}
    shifts = r * s if ctx.last else 0
    add_parts[(triton.cdiv(weights + o, 1024), lanes)](
        parts, dw, db, lanes, **sizes, SHIFTS=shifts, BLOCK=1024
    )
    return dw, db


def match_call(
    mode: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Return how to call the kernels, or None if they do not cover this convolution."""

    def find_side(value: Any) -> int | None:
        values = {value} if isinstance(value, int) else set(value)
        return values.pop() if len(values) == 1 else None

    step, pad = find_side(stride), None if isinstance(padding, str) else find_side(padding)
    is_plain = groups == 1 and find_side(dilation) == 1 and step is not None and pad is not None
    if not is_plain or x.dtype != torch.float32 or x.dim() != 4:
        return None
    return Convolution.apply, (x, weight, bias), (step, pad, mode.precision, mode.special)
