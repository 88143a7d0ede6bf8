"""ALA's weight learning on the last linear layer under cross-entropy, as one kernel.

This is the paper's default for all its models. Each lane has one program, which runs through all
its batches and epochs for as long as the lane needs. Nothing returns to the host in between. The
arithmetic is that of `fedala.lanes.weight_learning`. The kernel is long because a program keeps W
in registers from the first batch to the last.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.compiling import Kernel


@Kernel
@triton.jit
def _learn(
    features, positions, labels, lengths, least, limit,
    w, d, weights, w0, d0, weights0, losses, epochs,
    etas, width, most, threshold,
    B: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    WINDOW: tl.constexpr, RESIDENT: tl.constexpr, KS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    n = tl.load(lengths + lane)
    at_least, at_most = tl.load(least + lane), tl.load(limit + lane)
    eta = tl.load(etas + lane)
    j, c = tl.arange(0, BB), tl.arange(0, BC)
    w += lane * C * F
    d += lane * C * F
    weights += lane * C * F
    bias_w = tl.load(w0 + lane * C + c, mask=c < C, other=0.0)
    bias_d = tl.load(d0 + lane * C + c, mask=c < C, other=0.0)
    bias_weight = tl.load(weights0 + lane * C + c, mask=c < C, other=0.0)
    if RESIDENT:  # all of W fits into registers, so learning reads only samples
        f = tl.arange(0, KS)[:, None, None] * (BF // KS) + tl.arange(0, BF // KS)[None, :, None]
        tile = c[None, None, :] * F + f
        inside = (c[None, None, :] < C) & (f < F)
        old = tl.load(w + tile, mask=inside, other=0.0)
        update = tl.load(d + tile, mask=inside, other=0.0)
        weight = tl.load(weights + tile, mask=inside, other=0.0)
        # A sample's features form KS pieces that are multiplied side by side.
        g = tl.arange(0, KS)[:, None, None] * (BF // KS) + tl.arange(0, BF // KS)[None, None, :]
    epoch = 0
    going = (n > 0) & (at_most > 0)
    while going:
        total = 0.0
        batches = 0.0
        start = 0
        while start < n:
            valid = (j < B) & (start + j < n)
            position = tl.load(positions + lane * width + start + j, mask=valid, other=0).to(
                tl.int64
            )
            label = tl.load(labels + lane * width + start + j, mask=valid, other=-1)
            counts = valid & (label != -100)  # torch's cross-entropy ignores this label
            size = tl.sum(counts.to(tl.float32))
            if RESIDENT:
                rows = features + position[None, :, None] * F + g
                x3 = tl.load(rows, mask=valid[None, :, None] & (g < F), other=0.0)
                logits = tl.sum(tl.dot(x3, old + update * weight, input_precision=PRECISION), 0)
            else:
                logits = tl.zeros((BB, BC), tl.float32)
                for f0 in range(0, F, BF):
                    f = f0 + tl.arange(0, BF)
                    x = tl.load(
                        features + position[:, None] * F + f[None, :],
                        mask=valid[:, None] & (f[None, :] < F),
                        other=0.0,
                    )
                    tile = c[None, :] * F + f[:, None]
                    inside = (c[None, :] < C) & (f[:, None] < F)
                    old = tl.load(w + tile, mask=inside, other=0.0)
                    update = tl.load(d + tile, mask=inside, other=0.0)
                    weight = tl.load(weights + tile, mask=inside, other=0.0)
                    logits = tl.dot(x, old + update * weight, logits, input_precision=PRECISION)
            logits += (bias_w + bias_d * bias_weight)[None, :]
            logits = tl.where((c < C)[None, :], logits, float("-inf"))
            top = tl.max(logits, 1)
            exponentials = tl.exp(logits - top[:, None])
            sums = tl.sum(exponentials, 1)
            hit = c[None, :] == label[:, None]
            own = tl.sum(tl.where(hit, logits, 0.0), 1)
            total += tl.sum(tl.where(counts, tl.log(sums) + top - own, 0.0)) / size
            gradient = (exponentials / sums[:, None] - tl.where(hit, 1.0, 0.0)) / size
            gradient = tl.where(counts[:, None], gradient, 0.0)
            if RESIDENT:
                both = tl.broadcast_to(gradient[None, :, :], (KS, BB, BC))
                slope = tl.dot(tl.permute(x3, (0, 2, 1)), both, input_precision=PRECISION)
                weight = tl.minimum(tl.maximum(weight - eta * (slope * update), 0.0), 1.0)
            else:
                for f0 in range(0, F, BF):
                    f = f0 + tl.arange(0, BF)
                    x = tl.load(
                        features + position[:, None] * F + f[None, :],
                        mask=valid[:, None] & (f[None, :] < F),
                        other=0.0,
                    )
                    tile = c[None, :] * F + f[:, None]
                    inside = (c[None, :] < C) & (f[:, None] < F)
                    update = tl.load(d + tile, mask=inside, other=0.0)
                    weight = tl.load(weights + tile, mask=inside, other=0.0)
                    slope = tl.dot(tl.trans(x), gradient, input_precision=PRECISION)
                    weight = tl.minimum(tl.maximum(weight - eta * (slope * update), 0.0), 1.0)
                    tl.store(weights + tile, weight, mask=inside)
            moved = bias_weight - eta * (tl.sum(gradient, 0) * bias_d)
            bias_weight = tl.minimum(tl.maximum(moved, 0.0), 1.0)
            if not RESIDENT:
                tl.debug_barrier()  # the next batch reads the W that this one has written
            batches += 1.0
            start += B
        tl.store(losses + lane * most + epoch, total / batches)
        tl.debug_barrier()
        epoch += 1
        # The initial stage (at_most > at_least) lasts until the last ten of at least eleven
        # losses have settled.
        i = tl.arange(0, 16)
        last = tl.load(
            losses + lane * most + epoch - WINDOW + i,
            mask=(i < WINDOW) & (epoch > WINDOW),
            other=0.0,
        )
        mean = tl.sum(last) / WINDOW
        spread = tl.sqrt(tl.sum(tl.where(i < WINDOW, (last - mean) * (last - mean), 0.0)) / WINDOW)
        settled = (epoch > WINDOW) & (spread < threshold)
        going = (epoch < at_least) | ((epoch < at_most) & (settled == 0))
    if RESIDENT:
        tl.store(weights + tile, weight, mask=inside)
    tl.store(weights0 + lane * C + c, bias_weight, mask=c < C)
    tl.store(epochs + lane, epoch)


class Head(NamedTuple):
    """The last linear layer: weight [lane, class, feature] and bias [lane, class]."""

    weight: Tensor
    bias: Tensor


def learn_weights(
    features: Tensor,
    positions: Tensor,
    labels: Tensor,
    lengths: Tensor,
    least: Tensor,
    limit: Tensor,
    local: Head,
    update: Head,
    weights: Head,
    *,
    batch_size: int,
    eta: float | Tensor,
    threshold: float,
    most: int,
    window: int,
    precision: str = "tf32x3",
) -> tuple[Tensor, Tensor]:
    """Learn `weights` in place. Return each lane's epoch losses and number of epochs.

    `eta` is a number, or [lane]. A lane learns for `least` epochs. If `limit` is higher, it then
    learns until its loss has settled or `limit` is reached. Losses after a lane's last epoch are
    NaN.
    """
    lanes, classes, width = local.weight.shape
    losses = torch.full((lanes, most), float("nan"), device=features.device)
    epochs = torch.zeros(lanes, dtype=torch.int32, device=features.device)
    (w, w0), (d, d0) = ((h.weight.contiguous(), h.bias.contiguous()) for h in (local, update))
    bc, bf = max(16, triton.next_power_of_2(classes)), max(16, triton.next_power_of_2(width))
    resident = bc * bf <= 16384
    _learn[(lanes,)](
        features.contiguous(), positions.contiguous(), labels.contiguous(),
        lengths.int(), least.int(), limit.int(),
        w, d, weights.weight, w0, d0, weights.bias, losses, epochs,
        _per_lane(eta, losses), positions.shape[1], most, threshold,
        B=batch_size, C=classes, F=width,
        BB=max(16, triton.next_power_of_2(batch_size)), BC=bc,
        BF=bf if resident else max(32, 2048 // bc),
        WINDOW=window, RESIDENT=resident, KS=max(1, min(8, bf // 16)),
        PRECISION=precision, num_warps=8,
    )  # fmt: skip
    return losses, epochs


def _per_lane(number: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as float32 [lane], in memory of its own."""
    if isinstance(number, Tensor):
        return number.float().contiguous()
    return like.new_full((len(like),), number)
