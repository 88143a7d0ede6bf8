"""Fit a mean and a standard deviation for every feature or channel, on training samples alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedala.data.federation import Federation
from fedala.errors import UserError
from fedala.lanes.normalization import Normalization, check_normalizable

Array = np.ndarray[Any, Any]

_CHUNK = 2**20  # numbers that are added up at a time


def fit_normalization(federation: Federation, *, is_channels_last: bool = False) -> Normalization:
    """Return the figures that give each channel mean 0 and standard deviation 1.

    They are those of all clients' training samples together. Test and validation samples do not
    count. A channel whose training samples are all equal gets the standard deviation 1. Images of
    bytes are counted as pixels from 0 to 1.
    """
    dataset = federation.dataset
    check_normalizable(dataset.x, dataset.name)
    # In the order of the data, so that the figures do not depend on who holds which samples.
    rows = np.sort(np.concatenate([np.arange(0), *federation.train]))
    if not len(rows):
        raise UserError(
            "normalize = standard needs the training samples of all clients, and there are none "
            "here: give the figures themselves, as mean/std with a number for each feature."
        )
    axis = -1 if is_channels_last else 1
    measure = _measure_bytes if dataset.x.dtype == torch.uint8 else _measure_floats
    mean, std = measure(dataset.x, rows, axis)
    return Normalization(tuple(mean.tolist()), tuple(std.tolist()), is_channels_last)


def _read_channels(x: Tensor, rows: Array, axis: int) -> Iterator[Array]:
    """Yield the numbers at `rows`, some at a time, as channels × numbers."""
    count = max(1, _CHUNK // x[0].numel())
    for first in range(0, len(rows), count):
        part = x[torch.from_numpy(rows[first : first + count])].numpy()
        yield np.moveaxis(part, axis, 0).reshape(x.shape[axis], -1)


def _measure_bytes(x: Tensor, rows: Array, axis: int) -> tuple[Array, Array]:
    """Return the exact mean and standard deviation of bytes/255, rounded once."""
    counts = np.zeros((x.shape[axis], 256), np.int64)
    for part in _read_channels(x, rows, axis):
        for channel, own in zip(counts, part, strict=True):
            channel += np.bincount(own, minlength=256)
    means, stds = [], []
    values = range(256)
    for pixels in counts.tolist():
        total = sum(pixels)
        first = sum(count * value for count, value in zip(pixels, values, strict=True))
        second = sum(count * value**2 for count, value in zip(pixels, values, strict=True))
        spread = total * second - first**2  # a whole number: nothing is lost in the difference
        means.append(first / (255 * total))
        stds.append((spread / total**2) ** 0.5 / 255 if spread else 1.0)
    return np.array(means), np.array(stds)


def _measure_floats(x: Tensor, rows: Array, axis: int) -> tuple[Array, Array]:
    """Return the mean and standard deviation in float64, in two passes.

    NumPy adds up in one thread and in a fixed order, so that a resumed run gets the same figures.
    """
    total, low, high = 0, np.inf, -np.inf
    sums: Any = 0.0
    for part in _read_channels(x, rows, axis):
        total += part.shape[1]
        sums = sums + part.sum(1, dtype=np.float64)
        low, high = np.minimum(low, part.min(1)), np.maximum(high, part.max(1))
    mean = sums / total
    squares: Any = 0.0
    for part in _read_channels(x, rows, axis):
        squares = squares + np.square(part - mean[:, None]).sum(1)
    std = np.sqrt(squares / total)
    is_constant = (low == high) | (std < np.finfo(np.float32).tiny)
    return np.where(is_constant, low, mean), np.where(is_constant, 1.0, std)
