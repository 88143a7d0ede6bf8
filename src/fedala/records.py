"""The records that travel between rooms: rows of the history, diverged clients, personal models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedala.errors import printable
from fedala.metrics import ACCURACY, LOSS, Metric, find_metric

#: The model that is always evaluated: the initialised personal model, before training.
INITIALIZED = "initialized"
#: The kinds of models that a run can evaluate.
MODEL_KINDS = (INITIALIZED, "trained", "received", "global")


@dataclass(frozen=True)
class HistoryRow:
    """One evaluation of one run, and the training after it: a line of `history.csv`."""

    seed: int
    round: int
    """How many rounds have been aggregated. The training is that of the next round."""
    score: float
    """Over the test samples of all clients, or of the round's participants (`eval_clients`)."""
    loss: float
    score_joined: float
    """Over the test samples of the round's participants."""
    score_validation: float | None = None
    loss_validation: float | None = None
    """Only if it picks the best round (`pick_by`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the participants: `train_loss`, and what the method reports besides."""
    sent: int = 0
    """Numbers that the server sent to each participant."""
    uploaded: int = 0
    """Numbers that each participant uploaded."""
    diverged: int = 0
    """Rounds of single clients that did not count, since the row before."""
    seconds: float = 0.0
    metric: Metric = ACCURACY
    """What the scores measure."""
    asked: int | None = None
    """In a federation: the clients to which the server turned in this round."""
    answered: int | None = None
    """Those of them whose answers counted. The scores are those of these clients."""

    @property
    def is_full(self) -> bool:
        """Tell whether all clients answered. On one machine, they always do."""
        return self.asked == self.answered

    @property
    def criterion(self) -> str:
        """The field that picks the best round: that of validation samples if there are any."""
        if self.loss_validation is not None:
            return "loss_validation"
        return "score" if self.score_validation is None else "score_validation"

    @property
    def criterion_metric(self) -> Metric:
        """What the criterion measures."""
        return LOSS if self.criterion == "loss_validation" else self.metric

    @property
    def accuracy(self) -> float:
        """The score, if it is the accuracy."""
        self._require_accuracy()
        return self.score

    @property
    def accuracy_joined(self) -> float:
        self._require_accuracy()
        return self.score_joined

    @property
    def accuracy_validation(self) -> float | None:
        self._require_accuracy()
        return self.score_validation

    def _require_accuracy(self) -> None:
        if self.metric != ACCURACY:
            raise AttributeError(f"The score of this run is its {self.metric.title}: use score.")

    def columns(self) -> dict[str, Any]:
        """Return the row as the cells of `history.csv`, without the method."""
        cells: dict[str, Any] = {}
        names = self.metric.columns
        for name, value in vars(self).items():
            if name == "metrics":
                cells |= value
            elif value is not None and name != "metric":
                cells[names.get(name, name)] = value
        return cells

    @classmethod
    def from_columns(cls, cells: Mapping[str, Any]) -> "HistoryRow":
        """Make a row of the cells of `history.csv`. Columns that every row has must be there."""
        metric = find_metric(cells)
        own = cls.columns_of(metric)
        present = {name: value for name, value in cells.items() if value is not None}
        fields = {own[name]: value for name, value in present.items() if name in own}
        rest = present.keys() - own.keys() - {"method"}
        metrics = {name: value for name, value in present.items() if name in rest}
        return cls(**fields, metrics=metrics, metric=metric)

    @classmethod
    def columns_of(cls, metric: Metric) -> dict[str, str]:
        """Return the fields of a row by their columns in `history.csv`."""
        fields = cls.__dataclass_fields__.keys() - {"metrics", "metric"}
        return {metric.columns.get(name, name): name for name in fields}


class WeightSummary(NamedTuple):
    """How one client's ALA weights W of one parameter are spread."""

    client: int
    parameter: str
    mean: float
    shares: Sequence[float]
    """The share of W in each tenth of [0, 1]."""


class ModelFigures(NamedTuple):
    """What one kind of model scores: cells of a line of `metrics.csv`."""

    model: str
    """One of `MODEL_KINDS`."""
    figures: Mapping[str, float]
    """By column, without those that are not known."""


class NewcomerScores(NamedTuple):
    """What clients that take no part in training score after some local epochs of their own."""

    epochs: int
    scores: np.ndarray
    """[newcomer, (summed score, summed loss, samples)] on the test samples."""
    diverged: int = 0
    """How many of them ended with numbers that are not finite."""


@dataclass(frozen=True)
class Evaluation:
    """What a simulation reports of one run after one round."""

    row: HistoryRow
    client_scores: np.ndarray = field(repr=False)
    """[client, (summed score, summed loss, samples)] on the test samples."""
    weights: Sequence[WeightSummary] = field(default=(), repr=False)
    models: Sequence[ModelFigures] = field(default=(), repr=False)
    """The kinds of models that were tested; empty if no details are due."""
    run: int = 0
    """The position of the run among those of the simulation."""
    newcomers: Sequence[NewcomerScores] = ()
    """Those of held-out clients, if they were tested."""


@dataclass(frozen=True)
class PersonalModel:
    """The model that a client ends with; the global model if the client is None."""

    seed: int
    client: int | None
    model: dict[str, Tensor] = field(repr=False)
    """Parameters and buffers by name, [1, …]."""
    is_initial: bool = False
    """Whether it is the initial model, because the client never took part."""
    run: int = 0


@dataclass(frozen=True)
class Fault:
    """A client whose loss or model was not finite after its training."""

    seed: int
    client: int
    round: int
    """How many rounds had been aggregated, as in a `HistoryRow`: the training is the next one's."""
    lane: int
    step: int | None
    """The first training step of the round with such a number, from 1; None if it is not known."""
    run: int = 0
    client_name: str = ""

    def __str__(self) -> str:
        step = f", first in step {self.step}" if self.step else ""
        name = f"{printable(self.client_name, 100)}; " if self.client_name else ""
        return (
            f"client {self.client} ({name}seed {self.seed}, lane {self.lane}) "
            f"diverged in round {self.round + 1}{step}"
        )
