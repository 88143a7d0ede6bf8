"""What the clients of a round uploaded, and how it is averaged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedala.lanes.messages import Message
from fedala.lanes.samples import to_device
from fedala.lanes.trees import take, tree_map

#: The bytes of uploads that are copied at a time while they are averaged. On a CPU, they stay in
#: its cache, and are too few for torch to use several threads, which would wait for each other.
BLOCKS = {"cpu": 2**17, "cuda": 2**24}
#: The fewest columns of a block: each lane of a block may cost a call.
LEAST_COLUMNS = 1024


class Piece(NamedTuple):
    """What one cohort uploaded: a message of several lanes, and the lanes that count."""

    message: Message
    lanes: Sequence[int]
    clients: Sequence[int]


@dataclass(frozen=True, repr=False)
class Uploads:
    """What the participants of one round uploaded, in the order of their numbers.

    The uploads stay in the tensors that the cohorts made. `average` adds them up block by block, so
    that it takes little more memory than they do.
    """

    clients: Sequence[int]
    weights: Tensor
    """[client]: the numbers of training samples, float64."""
    pieces: Sequence[Piece]

    def __repr__(self) -> str:
        return f"<Uploads of {len(self)} clients>"

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[tuple[int, Message]]:
        """Yield each client with its message, as one lane."""
        for client, (piece, lane) in zip(self.clients, self._sources(), strict=True):
            yield client, take(self.pieces[piece].message, slice(lane, lane + 1))

    def stack(self) -> Message:
        """Return all uploads as one message, a lane for each client: a copy."""
        sources = self._sources()
        lanes = to_device(self.weights.device, [lane for _, lane in sources])
        stacked: Message = tree_map(
            lambda *values: _copy_lanes(values, sources, lanes),
            *(piece.message for piece in self.pieces),
        )
        return stacked

    def average(self, weights: Tensor | None = None) -> Message:
        """Return the weighted mean as one lane; by default, weighted by training samples.

        Integer counters are not averaged: the first client's stay.
        """
        weights = self.weights if weights is None else weights
        return self.sum(weights / weights.sum())

    def sum(self, shares: Tensor) -> Message:
        """Return Σ share·upload as one lane. Of integer counters, the first client's stay."""
        sources = self._sources()
        lanes = to_device(shares.device, [lane for _, lane in sources])

        def add(*values: Tensor) -> Tensor:
            if not values[0].is_floating_point():
                piece, lane = sources[0]
                return values[piece][lane : lane + 1].clone()
            return _sum(values, sources, lanes, shares.to(values[0].dtype))

        added: Message = tree_map(add, *(piece.message for piece in self.pieces))
        return added

    def _sources(self) -> list[tuple[int, int]]:
        """Return, for each client, the piece and the lane in it that hold its upload."""
        found = {
            client: (number, lane)
            for number, piece in enumerate(self.pieces)
            for lane, client in zip(piece.lanes, piece.clients, strict=True)
        }
        return [found[client] for client in self.clients]


def _sum(
    values: Sequence[Tensor],
    sources: Sequence[tuple[int, int]],
    lanes: Tensor,
    shares: Tensor,
) -> Tensor:
    """Return Σ share·value as one lane, copying a block of columns at a time."""
    # Columns in the order of memory (one lane may stand channels last) are views, not copies.
    strides = values[0].stride()
    order = sorted(range(1, len(strides)), key=lambda dimension: -strides[dimension])
    sorted_values = [value.permute(0, *order) for value in values]
    flat = [value.reshape(len(value), -1) for value in sorted_values]
    width, shape = flat[0].shape[1], sorted_values[0].shape[1:]
    step = choose_columns(flat[0], len(sources))
    # A single column is added up in another order than several: it never is a block of its own.
    starts = range(0, max(width - 1, 1), step)
    sums = []
    for start, end in zip(starts, [*starts[1:], width], strict=True):
        # A block has no name, so that it is freed before the next one is copied.
        columns = [value[:, start:end] for value in flat]
        sums.append(torch.tensordot(shares, _copy_lanes(columns, sources, lanes), 1))
    whole = sums[0] if len(sums) == 1 else torch.cat(sums)
    back = sorted(range(len(order)), key=order.__getitem__)
    return whole.view(1, *shape).permute(0, *(1 + position for position in back)).contiguous()


def choose_columns(value: Tensor, lanes: int) -> int:
    """Return how many columns of so many lanes are a block."""
    block = BLOCKS.get(value.device.type, BLOCKS["cpu"])
    return max(LEAST_COLUMNS, block // (lanes * value.element_size()))


def _copy_lanes(
    values: Sequence[Tensor], sources: Sequence[tuple[int, int]], lanes: Tensor
) -> Tensor:
    """Copy the clients' lanes out of the pieces, in the order of `sources`."""
    if len(values) == 1:
        return values[0].index_select(0, lanes)
    return torch.stack([values[piece][lane] for piece, lane in sources])
