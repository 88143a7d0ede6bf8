"""The records that travel between rooms: rows of the history, diverged clients, personal models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class HistoryRow:
    """One evaluation of one run: a line of `history.csv`."""

    seed: int
    round: int
    accuracy: float
    """Over the test samples of all clients, or of the round's participants (`eval_clients`)."""
    loss: float
    accuracy_joined: float
    """Over the test samples of the round's participants."""
    accuracy_validation: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the participants: `train_loss`, and what the method reports besides."""
    sent: int = 0
    """Numbers that the server sent to each participant."""
    uploaded: int = 0
    """Numbers that each participant uploaded."""
    diverged: int = 0
    """Rounds of single clients that did not count, since the row before."""
    seconds: float = 0.0

    def columns(self) -> dict[str, Any]:
        """Return the row as the cells of `history.csv`, without the method."""
        cells: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "metrics":
                cells |= value
            elif value is not None:
                cells[name] = value
        return cells

    @classmethod
    def from_columns(cls, cells: Mapping[str, Any]) -> "HistoryRow":
        """Make a row of the cells of `history.csv`. Columns that every row has must be there."""
        own = cls.__dataclass_fields__.keys() - {"metrics"}
        present = {name: value for name, value in cells.items() if value is not None}
        metrics = {name: value for name, value in present.items() if name not in {*own, "method"}}
        return cls(**{name: present[name] for name in own & present.keys()}, metrics=metrics)


class WeightSummary(NamedTuple):
    """How one client's ALA weights W of one parameter are spread."""

    client: int
    parameter: str
    mean: float
    shares: Sequence[float]
    """The share of W in each tenth of [0, 1]."""


@dataclass(frozen=True)
class Evaluation:
    """What a simulation reports of one run after one round."""

    row: HistoryRow
    client_scores: np.ndarray
    """[client, (correct answers, summed loss, samples)] on the test samples."""
    weights: Sequence[WeightSummary] = ()
    run: int = 0
    """The position of the run among those of the simulation."""


@dataclass(frozen=True)
class PersonalModel:
    """The model that a client ends with; the global model if the client is None."""

    seed: int
    client: int | None
    model: dict[str, Tensor]
    """Parameters and buffers by name, [1, …]."""
    is_initial: bool = False
    """Whether it is the initial model, because the client never took part."""


@dataclass(frozen=True)
class Fault:
    """A client whose loss or model was not finite after a round of the history."""

    seed: int
    client: int
    round: int
    lane: int
    step: int | None
    """The first training step of the round with such a number, from 1; None if it is not known."""

    def __str__(self) -> str:
        step = f", first in step {self.step}" if self.step else ""
        return (
            f"client {self.client} (seed {self.seed}, lane {self.lane}) "
            f"diverged in round {self.round}{step}"
        )
