"""Cross-entropy of small batches: the loss and its gradient in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.compiling import Kernel

#: The most logits of a lane. They must fit into the registers of one program.
MOST_LOGITS = 16384


@Kernel
@triton.jit
def _cross_entropy(
    logits, target, loss, slope, IGNORE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    b, c = tl.arange(0, BB), tl.arange(0, BC)
    inside = (b[:, None] < B) & (c[None, :] < C)
    offset = lane * B * C + b[:, None] * C + c[None, :]
    label = tl.load(target + lane * B + b, mask=b < B, other=IGNORE)
    counts = label != IGNORE
    size = tl.sum(counts.to(tl.float32))
    x = tl.load(logits + offset, mask=inside, other=float("-inf"))
    x = tl.where(b[:, None] < B, x, 0.0)
    top = tl.max(x, 1)
    exponentials = tl.exp(x - top[:, None])
    sums = tl.sum(exponentials, 1)
    hit = c[None, :] == label[:, None]
    own = tl.sum(tl.where(hit, x, 0.0), 1)
    tl.store(loss + lane, tl.sum(tl.where(counts, tl.log(sums) + top - own, 0.0)) / size)
    gradient = (exponentials / sums[:, None] - tl.where(hit, 1.0, 0.0)) / size
    tl.store(slope + offset, tl.where(counts[:, None], gradient, 0.0), mask=inside)


class CrossEntropy(torch.autograd.Function):
    """The mean loss of each lane from logits [lane, b, c] and targets [lane, b]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        lanes, batch, classes = logits.shape
        loss, slope = logits.new_empty(lanes), torch.empty_like(logits)
        rows, columns = triton.next_power_of_2(batch), triton.next_power_of_2(classes)
        _cross_entropy[(lanes,)](
            logits, target, loss, slope,
            IGNORE=ignore, B=batch, C=classes, BB=rows, BC=columns, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None, None], None, None


def match_call(
    mode: Any,
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return how to call the kernel, or None if it does not cover this loss."""
    has_options = any(value is not None for value in (weight, size_average, reduce))
    if has_options or reduction != "mean" or label_smoothing:
        return None
    if input.dim() != 2 or target.dim() != 1:
        return None
    if input.dtype != torch.float32 or target.dtype != torch.int64:
        return None
    rows, columns = (triton.next_power_of_2(side) for side in input.shape)
    if rows * columns > MOST_LOGITS:
        return None
    return CrossEntropy.apply, (input, target), (ignore_index,)
