"""The next batch of every lane, gathered in one kernel, and the bookkeeping after a step."""

import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.compiling import Kernel


@Kernel
@triton.jit
def _gather(
    x, y, order, column, x_batch, y_batch, order_stride, SIZE, WIDTH, Y_WIDTH, BLOCK: tl.constexpr
):
    """Copy the samples order[lane, column + i] to batch[lane, i]."""
    i = tl.program_id(0).to(tl.int64)
    start = tl.load(column)
    row = tl.load(order + i // SIZE * order_stride + start + i % SIZE)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_batch + i * WIDTH + n, tl.load(x + row * WIDTH + n, mask=n < WIDTH), mask=n < WIDTH)
    if tl.program_id(1) == 0:
        for first in range(0, Y_WIDTH, BLOCK):
            m = first + tl.arange(0, BLOCK)
            target = tl.load(y + row * Y_WIDTH + m, mask=m < Y_WIDTH)
            tl.store(y_batch + i * Y_WIDTH + m, target, mask=m < Y_WIDTH)


@Kernel
@triton.jit(do_not_specialize=["LANES"])
def _end_step(total, losses, column, LANES, SIZE, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for first in range(0, LANES, BLOCK):
        mask = first + lane < LANES
        value = tl.load(total + first + lane, mask=mask) + tl.load(losses + first + lane, mask=mask)
        tl.store(total + first + lane, value, mask=mask)
    tl.store(column, tl.load(column) + SIZE)


def gather_batch(
    x: Tensor, y: Tensor, order: Tensor, column: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return the samples at order[lane, column … column + size], with the lanes in front."""
    lanes = len(order)
    x_batch = x.new_empty(lanes, size, *x.shape[1:])
    y_batch = y.new_empty(lanes, size, *y.shape[1:])
    width, y_width = x[0].numel(), y[0].numel()
    _gather[(lanes * size, triton.cdiv(width, 1024))](
        x, y, order, column, x_batch, y_batch, order.stride(0), size, width, y_width, BLOCK=1024
    )
    return x_batch, y_batch


def end_step(total: Tensor, losses: Tensor, column: Tensor, size: int) -> None:
    """Add the losses to each lane's total, and go to the next batch."""
    _end_step[(1,)](total, losses.contiguous(), column, len(total), size, BLOCK=128)
