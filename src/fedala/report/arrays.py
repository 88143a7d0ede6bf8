"""Rows of a run's tables as arrays, and their mean over the runs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedala.errors import UserError

Rows = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]

_MOST_ELEMENTS = 5_000_000


def to_array(rows: Rows, axes: Sequence[str], *values: str) -> tuple[Array, list[list[Any]]]:
    """Return [*axes, value] of the rows, NaN if there is no such row, and the keys of each axis.

    Keys are sorted, except parameters, which keep the order of the model.
    """
    keys: list[list[Any]] = []
    for axis in axes:
        own = list(dict.fromkeys(row[axis] for row in rows))
        keys.append(own if axis == "parameter" else sorted(own))
    shape = [len(own) for own in keys]
    if math.prod(shape) > _MOST_ELEMENTS:
        raise UserError(
            f"The run has more clients, rounds and parameters than a report can show: {shape}."
        )
    array = np.full([*shape, len(values)], np.nan)
    index = []
    for axis, own in zip(axes, keys, strict=True):
        position = {key: i for i, key in enumerate(own)}
        index.append([position[row[axis]] for row in rows])
    cells = [[row.get(value) for value in values] for row in rows]
    array[tuple(index)] = np.array(cells, dtype=float).reshape(len(rows), len(values))
    return array, keys  # a cell that is None has become NaN


def mean_std(values: Array, axis: int = 0) -> tuple[Array, Array]:
    """Return mean and population deviation of the values that are known; NaN if there is none.

    Scores of runs that diverged may be infinite: so is their mean, which has no deviation.
    """
    is_known = ~np.isnan(values)
    count = is_known.sum(axis)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(is_known, values, 0).sum(axis) / count
        squares = np.where(is_known, values - np.expand_dims(mean, axis), 0) ** 2
        deviation = np.sqrt(squares.sum(axis) / count)
    return mean, deviation


def pick_evenly(size: int, most: int) -> list[int]:
    """Return at most `most` indices of `size` things, evenly spaced, with both ends."""
    return sorted({int(index) for index in np.linspace(0, size - 1, min(size, most)).round()})
