"""What a round collects until it is over."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fedala.lanes import Message
from fedala.lanes.uploads import Piece
from fedala.methods import ServerRound
from fedala.metrics import Metric
from fedala.records import INITIALIZED, Fault, HistoryRow, ModelFigures
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.client_states import Lane
from fedala.simulation.model_scores import ModelLog
from fedala.simulation.scores import ScoreTable, WeightLog, settle


@dataclass
class RoundResults:
    """One round of all runs: what was sent, and what the cohorts have done so far."""

    request: RoundRequest
    joined: list[list[int]]
    servers: list[ServerRound]
    sent: list[Message]
    scores: ScoreTable
    absent_scores: ScoreTable | None
    """What clients score until they take part again; None if nobody asks."""
    began: float
    models: ModelLog
    uploads: list[tuple[Sequence[Lane], Message]] = field(default_factory=list)
    weights: WeightLog = field(default_factory=WeightLog)
    faults: list[Fault] = field(default_factory=list)
    diverged: set[Lane] = field(default_factory=set)
    explained: set[Lane] = field(default_factory=set)
    """Diverged lanes whose first bad step has been looked for."""
    uploaded: int = 0
    """Numbers that each participant uploaded."""
    _metrics: list[tuple[Sequence[Lane], dict[str, Tensor]]] = field(default_factory=list)

    def add_figures(self, result: CohortResult) -> None:
        """Note the metrics, scores and weights of a cohort. They stay on the device."""
        self._metrics.append((result.lanes, result.metrics))
        self.weights.add(result.lanes, result.weights)
        self.scores.add(result.lanes, result.scores)
        self.models.add(result)
        if self.absent_scores:
            self.absent_scores.add(result.lanes, result.scores_after_training)

    def counted(self) -> Iterator[Lane]:
        """Yield the lanes whose uploads count."""
        for lanes, _ in self.uploads:
            yield from (lane for lane in lanes if lane not in self.diverged)

    def list_pieces(self, run: int, complete: Callable[[Message], Message]) -> list[Piece]:
        """Return the uploads of one run that count, each as `complete` makes it."""
        return pick_pieces(self.uploads, set(self.counted()), run, complete)

    def settle(self) -> None:
        """Bring the scores from the device to the host.

        A client whose round did not count keeps the scores that it had before.
        """
        if self.absent_scores:
            settle([self.scores, self.absent_scores], skip=self.diverged)
        else:
            settle([self.scores])
        self.models.settle(self.diverged)

    def make_row(
        self,
        run: int,
        clients: Any,
        models: Sequence[ModelFigures] = (),
        *,
        metric: Metric,
        validated: Sequence[str] = (),
        **cells: Any,
    ) -> HistoryRow:
        """Make the row of one run, with the score of `clients`; `cells` are its other fields.

        Further kinds of `models` get a column each for their score. `validated` says what of the
        validation samples is recorded: `score`, `loss`.
        """
        further = {
            f"{metric.name}_{model}": figures[metric.name]
            for model, figures in models
            if model != INITIALIZED and metric.name in figures
        }
        score, loss = self.scores.share(run, clients, 0)
        if validated:
            figures = dict(zip(("score", "loss"), self.scores.share(run, clients, 1), strict=True))
            cells |= {f"{name}_validation": figures[name] for name in validated}
        return HistoryRow(
            round=self.request.round - 1,
            score=score,
            loss=loss,
            score_joined=self.scores.share(run, self.joined[run], 0)[0],
            metrics={**self._average_metrics(run), **further},
            uploaded=self.uploaded,
            seconds=time.perf_counter() - self.began,
            metric=metric,
            **cells,
        )

    @cached_property
    def _metrics_on_host(self) -> dict[str, dict[Lane, float]]:
        """Each metric by lane, brought from the device once for all runs."""
        values: dict[str, dict[Lane, float]] = {}
        for lanes, metrics in self._metrics:
            for name, figures in metrics.items():
                values.setdefault(name, {}).update(zip(lanes, figures.tolist(), strict=True))
        return values

    def _average_metrics(self, run: int) -> dict[str, float]:
        """Return the mean of each metric over the participants of a run, without NaN."""
        means = {}
        for name, values in self._metrics_on_host.items():
            own = [v for lane, v in values.items() if lane[0] == run and not np.isnan(v)]
            means[name] = float(np.mean(own)) if own else float("nan")
        return means


def pick_pieces(
    uploads: Sequence[tuple[Sequence[Lane], Message]],
    wanted: Collection[Lane],
    run: int,
    complete: Callable[[Message], Message],
) -> list[Piece]:
    """Return the uploads of those lanes of a run that are wanted, each as `complete` makes it."""
    pieces = []
    for lanes, upload in uploads:
        own = [
            (position, lane[1])
            for position, lane in enumerate(lanes)
            if lane[0] == run and lane in wanted
        ]
        if own:
            positions, clients = zip(*own, strict=True)
            pieces.append(Piece(complete(upload), positions, clients))
    return pieces
