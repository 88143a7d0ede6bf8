"""Which samples a step takes: ragged lanes, as positions in the dataset."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Groups = tuple[tuple[int, ...], ...]
"""Lanes that have the same lower layers, together."""


class Samples:
    """Each lane's samples. They are brought to the device when they are first used there."""

    def __init__(self, rows: Iterable[np.ndarray], device: torch.device) -> None:
        self.rows, self.device = list(rows), device
        self.lengths = [len(row) for row in self.rows]
        self._grouped: dict[Groups, tuple[list[Tensor], Tensor]] = {}

    @cached_property
    def matrix(self) -> Tensor:
        """[lane, sample]: positions in the dataset, padded with zeros."""
        return pad_rows(self.rows, self.device)

    @cached_property
    def counts(self) -> Tensor:
        """[lane]: the number of samples."""
        return to_device(self.device, self.lengths)

    def group(self, groups: Groups) -> tuple[list[Tensor], Tensor]:
        """Return the samples of each group of lanes, and each lane's rows in their joined table."""
        if groups not in self._grouped:
            positions, filled = [np.empty(0, np.int64)] * len(self.rows), 0
            for lane in (lane for group in groups for lane in group):
                positions[lane] = np.arange(filled, filled := filled + self.lengths[lane])
            joined = [np.concatenate([self.rows[lane] for lane in group]) for group in groups]
            on_device = [to_device(self.device, torch.from_numpy(rows)) for rows in joined]
            self._grouped[groups] = on_device, pad_rows(positions, self.device)
        return self._grouped[groups]


def iterate_steps(
    lengths: Sequence[int], size: int, *, drop_last: bool
) -> Iterator[tuple[slice, slice]]:
    """Yield the steps of one pass over ragged lanes, the longest first: (lanes, samples).

    Lanes with a full batch form one step. Lanes whose last batch is shorter form a step of their
    own for each length. With `drop_last`, a lane's shorter batch counts only if it is its first.
    """
    for start in range(0, max(lengths, default=0), size):
        full = sum(n >= start + size for n in lengths)
        if full:
            yield slice(0, full), slice(start, start + size)
        if drop_last and start > 0:
            continue
        lane = full
        while lane < len(lengths) and lengths[lane] > start:
            end = lane + sum(n == lengths[lane] for n in lengths[lane:])
            yield slice(lane, end), slice(start, lengths[lane])
            lane = end


@dataclass(frozen=True)
class TrainingLength:
    """How long a client trains: so many epochs, or so many steps in as many epochs as they take.

    A lane's last partial batch is dropped, unless it is its first.
    """

    epochs: int = 1
    steps: int | None = None

    def count_steps(self, samples: int, size: int) -> int:
        """Return how many steps a lane of so many samples takes."""
        if self.steps is not None:
            return self.steps if samples else 0
        return self.epochs * _steps_per_epoch(samples, size)

    def count_epochs(self, samples: Sequence[int], size: int) -> int:
        """Return how many epochs the lanes begin."""
        if self.steps is None:
            return self.epochs
        shortest = min((_steps_per_epoch(own, size) for own in samples if own), default=1)
        return -(-self.steps // shortest)

    def iterate_steps(
        self, samples: Sequence[int], size: int, epoch: int
    ) -> Iterator[tuple[slice, slice]]:
        """Yield the steps of one epoch, as `iterate_steps` does."""
        for lanes, columns in iterate_steps(samples, size, drop_last=True):
            if self.steps is None:
                yield lanes, columns
                continue
            # The longest lanes come first. They take the most steps in an epoch and end first.
            first = lanes.start
            before = columns.start // size
            while first < lanes.stop and (
                epoch * _steps_per_epoch(samples[first], size) + before >= self.steps
            ):
                first += 1
            if first < lanes.stop:
                yield slice(first, lanes.stop), columns


def _steps_per_epoch(samples: int, size: int) -> int:
    return max(samples // size, int(samples > 0))


def order_samples(rows: np.ndarray, draw: np.random.Generator | None) -> np.ndarray:
    """Return the samples in the order of one epoch: shuffled, or as they are without a draw."""
    return rows if draw is None else rows[draw.permutation(len(rows))]


def pad_rows(rows: Sequence[Any], device: torch.device) -> Tensor:
    """Put ragged rows of positions into one matrix on the device, padded with zeros."""
    longest = max((len(row) for row in rows), default=0)
    matrix = np.zeros((len(rows), longest), dtype=np.int64)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return to_device(device, torch.from_numpy(matrix))


def to_device(device: torch.device, values: Any) -> Tensor:
    """Copy numbers of the host to the device.

    They come from pinned memory, so that the host does not wait for the device.
    """
    tensor: Tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
