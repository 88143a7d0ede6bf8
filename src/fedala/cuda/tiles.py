"""Block sizes of the convolution's kernels, by measurement on an H200.

A large block reads less and computes more. With few lanes, large blocks leave most of the GPU idle:
there, small ones are faster. So the sizes depend on how many blocks of 64 rows there are. Those of
a kernel for all sizes do not depend on the lanes, so that each layer needs one version of it.
"""

import math

import triton

Tile = dict[str, int]


def find_block(size: int, most: int) -> int:
    """Return a power of two that covers `size`, from 16 (the tensor cores' least) to `most`."""
    return min(most, max(16, triton.next_power_of_2(size)))


#: (most blocks of 64 rows, (rows, columns, terms of the sum at a time, warps, stages)).
_FORWARD = (
    (66, (32, 64, 64, 4, 3)),
    (132, (64, 64, 64, 4, 3)),
    (600, (64, 64, 32, 4, 4)),
    (math.inf, (128, 64, 32, 8, 3)),
)
#: Of images with few channels, whose unfolded rows are 8 or 16 numbers, and of those with more.
_FORWARD_NARROW = ((math.inf, (64, 32, 16, 2, 2)),)
_FORWARD_UNFOLDED = ((math.inf, (64, 32, 32, 2, 3)),)
_BACKWARD = (
    (100, (16, 32, 64, 2, 3)),
    (280, (32, 32, 64, 2, 3)),
    (2000, (64, 32, 32, 4, 4)),
    (math.inf, (128, 32, 32, 4, 3)),
)
_BACKWARD_FOLDED = (
    (600, (32, 64, 64, 4, 3)),
    (math.inf, (32, 32, 16, 2, 4)),
)
#: Of kernels for all sizes. A few rows are less than a block of the others.
_GENERAL_FORWARD = ((math.inf, (64, 64, 64, 4, 3)),)
_GENERAL_FORWARD_FEW_ROWS = ((math.inf, (16, 128, 32, 4, 4)),)
_GENERAL_FORWARD_WIDE = ((math.inf, (128, 128, 32, 8, 3)),)
_GENERAL_BACKWARD = ((math.inf, (32, 64, 64, 4, 3)),)
_Table = tuple[tuple[float, tuple[int, ...]], ...]


def find_forward_tile(
    rows: int, inner: int, outer: int, lanes: int, *, special: bool, pad: int, is_few: bool
) -> Tile:
    """Return the block sizes of the forward pass.

    There are so many `rows` of outputs, and sums over so many channels, `inner`: of an image with
    few of them, those of an unfolded row.
    """
    tile = _pick(_choose_forward(rows, inner, outer, special, is_few), rows, outer, lanes)
    if pad and inner % tile["BK"]:
        tile["BK"] = 32
    return tile | {"BO": find_block(outer, tile.pop("BN"))}


def find_backward_tile(
    rows: int, inner: int, outer: int, lanes: int, *, special: bool, is_folded: bool
) -> Tile:
    """Return the block sizes of the gradient of the input, or of its rows if these are folded."""
    table = _BACKWARD_FOLDED if is_folded else _BACKWARD
    tile = _pick(table if special else _GENERAL_BACKWARD, rows, outer, lanes)
    tile["BK"] = find_block(inner, tile["BK"])
    tile["BC"] = find_block(outer, tile.pop("BN"))
    # Two warps have registers for the sums of five small blocks.
    blocks = triton.cdiv(outer, tile["BC"])
    most = 5 if is_folded and tile["num_warps"] == 2 else 1
    return tile | {"BLOCKS": max(n for n in range(1, most + 1) if blocks % n == 0)}


def find_weight_tile(weights: int, inner: int, outer: int, lanes: int, *, pad: int) -> Tile:
    """Return the block sizes of the gradient of so many weights per output."""
    bo, warps = find_block(outer, 64), 2
    if inner % 32 == 0:
        bn = 64 if lanes >= 10 and not pad else 32
    else:
        bn = 16 if pad or lanes >= 20 else find_block(weights, 32)
        warps = 1 if bo * bn <= 512 else 2
    return {"BO": bo, "BN": bn, "BK": 32, "num_warps": warps, "num_stages": 3}


def count_parts(rows: int, programs: int) -> int:
    """Return into how many parts a sum over `rows` is split, so that programs fill the device."""
    enough = 1024 if rows >= 8192 else 512
    return max(1, min(triton.cdiv(enough, programs), rows // 128))


def _choose_forward(rows: int, inner: int, outer: int, special: bool, is_few: bool) -> _Table:
    if inner % 32:
        return _FORWARD_NARROW
    if is_few:
        return _FORWARD_UNFOLDED
    if special:
        return _FORWARD
    if rows <= 64:
        return _GENERAL_FORWARD_FEW_ROWS
    return _GENERAL_FORWARD_WIDE if rows >= 512 and outer >= 128 else _GENERAL_FORWARD


def _pick(table: _Table, rows: int, outer: int, lanes: int) -> Tile:
    blocks = triton.cdiv(rows, 64) * triton.cdiv(outer, 64) * lanes
    sizes = next(sizes for most, sizes in table if blocks <= most)
    return dict(zip(("BM", "BN", "BK", "num_warps", "num_stages"), sizes, strict=True))
