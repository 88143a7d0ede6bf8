"""Which models a run tests besides the initialised one, when, and what is noted about each.

Evaluation t takes place after t rounds. The initialised and the received model are then those that
round t + 1 begins with. The trained model is the one that round t has ended with, so what it scores
waits from one round to the next, and is part of a checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedala.lanes import State, Task
from fedala.lanes.evaluation import Predictions
from fedala.metrics import ACCURACY, MAE, MSE, Metric
from fedala.records import INITIALIZED, ModelFigures
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.client_states import Lane
from fedala.simulation.metrics import (
    list_figures,
    list_plain_figures,
    summarize_predictions,
    summarize_scores,
)
from fedala.simulation.scores import ScoreTable, settle


@dataclass(frozen=True)
class EvaluationSchedule:
    """What is tested and recorded in which round."""

    rounds: int
    eval_every: int
    record_weights: int = 0
    kinds: Sequence[str] = (INITIALIZED,)
    """The kinds of models that are tested."""
    metrics_every: int | None = None
    """Rounds between detailed metrics; 0: only at the last evaluation; None: never."""

    def is_evaluated(self, evaluation: int) -> bool:
        """Tell whether there is an evaluation after so many rounds."""
        return evaluation % self.eval_every == 0 or evaluation == self.rounds

    def is_detailed(self, evaluation: int, *, is_last: bool = False) -> bool:
        """Tell whether an evaluation makes the detailed metrics."""
        if self.metrics_every is None:
            return False
        return is_last or evaluation == self.rounds or self._is_due(evaluation, self.metrics_every)

    def _is_due(self, evaluation: int, every: int) -> bool:
        """Tell whether this is the first evaluation of the next `every` rounds."""
        return every > 0 and evaluation % every < self.eval_every

    def tests_newcomers(self, evaluation: int, every: int, is_last: bool) -> bool:
        """Tell whether held-out clients are tested at an evaluation."""
        return is_last or (evaluation % self.eval_every == 0 and self._is_due(evaluation, every))

    def has_further_kinds(self) -> bool:
        """Tell whether other models than the initialised one are tested."""
        return len(self.kinds) > 1

    def reports_round(self, round: int) -> bool:
        """Tell whether the next evaluation tells about the round that is being trained."""
        is_wanted = self.has_further_kinds() or self.is_detailed(round)
        return is_wanted and self.is_evaluated(round)

    def make_request(
        self, round: int, *, train: bool, evaluates_received: bool, evaluates_absent: bool
    ) -> RoundRequest:
        """Return what round `round`, from 1, asks of its participants."""
        evaluation, is_last = round - 1, not train
        evaluate = is_last or evaluation % self.eval_every == 0
        weights_due = is_last or self._is_due(evaluation, self.record_weights)
        predicts = set[str]()
        if evaluate and self.is_detailed(evaluation, is_last=is_last):
            predicts |= {*self.kinds} - {"trained"}
        if train and self.is_evaluated(round) and self.is_detailed(round):
            predicts |= {*self.kinds} & {"trained"}
        return RoundRequest(
            round,
            train,
            evaluate,
            evaluate_after_training=evaluates_absent and train,
            record_weights=evaluate and self.record_weights > 0 and weights_due,
            evaluate_received=evaluate and evaluates_received,
            evaluate_trained=train and "trained" in self.kinds and self.is_evaluated(round),
            predicts=predicts,
        )


def has_details(task: Task) -> bool:
    """Tell whether there are detailed metrics: of one class for each sample, or of numbers."""
    if task.loss.metric != ACCURACY:
        return task.loss.metric in (MSE, MAE)
    y = task.y
    return isinstance(y, torch.Tensor) and y.dim() == 1 and not y.is_floating_point()


@dataclass
class ModelLog:
    """What a round finds out about each kind of model."""

    runs: int
    clients: int
    metric: Metric
    """What the scores measure."""
    _scores: dict[str, ScoreTable] = field(default_factory=dict)
    _predictions: dict[str, dict[Lane, Predictions]] = field(default_factory=dict)

    def add(self, result: CohortResult) -> None:
        """Note the scores of further kinds of models, and what all kinds predict."""
        for kind, scores in result.further_scores.items():
            empty = np.zeros((self.runs, self.clients, 1, 3))
            self._scores.setdefault(kind, ScoreTable(empty)).add(result.lanes, [scores])
        for kind, predictions in result.predictions.items():
            own = self._predictions.setdefault(kind, {})
            for lane, found in zip(result.lanes, predictions, strict=True):
                if found is not None:
                    own[lane] = found

    def has_scores(self, kind: str) -> bool:
        """Tell whether models of a further kind were tested."""
        return kind in self._scores

    def settle(self, diverged: Collection[Lane]) -> None:
        """Bring the scores to the host. A trained model that diverged does not count."""
        for kind, table in self._scores.items():
            settle([table], skip=diverged if kind == "trained" else ())
        for lane in diverged:
            self._predictions.get("trained", {}).pop(lane, None)

    def summarize(
        self, kind: str, run: int, scores: np.ndarray | None = None, clients: Any = slice(None)
    ) -> dict[str, float]:
        """Return the figures of one kind of model in a run; none if it was not tested.

        `scores`, [client, 3], replaces the log's own. Only `clients` count.
        """
        if scores is None:
            if kind not in self._scores:
                return {}
            scores = self._scores[kind].values[run, :, 0]
        counted = set(np.arange(self.clients)[clients].tolist())
        predictions = self._predictions.get(kind, {})
        lanes = [lane for lane in sorted(predictions) if lane[0] == run and lane[1] in counted]
        detailed = summarize_predictions((predictions[lane] for lane in lanes), self.metric)
        return {**detailed, **summarize_scores(scores[clients], self.metric)}


@dataclass(frozen=True)
class TrainedRound:
    """What the next evaluation tells about the round before it, by run."""

    traffic: np.ndarray
    """[run, (bytes sent to a client, bytes that it uploaded)]"""
    figures: np.ndarray
    """[run, figure]: those of the trained model; NaN if unknown."""
    metric: Metric
    """What the scores measure."""

    @classmethod
    def collect(cls, log: ModelLog, sent: Sequence[int], uploaded: int) -> "TrainedRound":
        """Collect it at the end of a round, from the bytes to each run's clients and back."""
        names = list_figures(log.metric)
        figures = np.full((len(sent), len(names)), np.nan)
        for run in range(len(sent)):
            for name, value in log.summarize("trained", run).items():
                figures[run, names.index(name)] = value
        traffic = np.array([[count, uploaded] for count in sent], dtype=np.int64)
        return cls(traffic, figures, log.metric)

    def state(self) -> State:
        """Return it as tensors."""
        return {
            "traffic": torch.from_numpy(self.traffic),
            "figures": torch.from_numpy(self.figures),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], runs: int, metric: Metric) -> "TrainedRound":
        """Return what `state` was made of.

        Earlier versions had the figures of an accuracy in the state of every run. Of another score,
        they knew the plain ones, which come first.
        """
        traffic, figures = state["traffic"].numpy(), state["figures"].numpy()
        width, former = len(list_figures(metric)), len(list_figures(ACCURACY))
        if traffic.shape != (runs, 2) or figures.shape not in ((runs, width), (runs, former)):
            raise ValueError("another run's state")
        if figures.shape[1] != width:
            # What they called the worst tenth were the lowest scores.
            count = len(list_plain_figures(metric)) - (not metric.higher_is_better)
            known = figures[:, :count]
            figures = np.full((runs, width), np.nan)
            figures[:, : known.shape[1]] = known
        return cls(traffic, figures, metric)

    def trained_model(self, run: int) -> dict[str, float]:
        """Return the figures of the trained model in a run; none if it was not tested."""
        names = list_figures(self.metric)
        figures = dict(zip(names, self.figures[run].tolist(), strict=True))
        known = {name: value for name, value in figures.items() if not np.isnan(value)}
        for name in {"clients", "samples"} & known.keys():
            known[name] = int(known[name])
        return known


def list_models(
    log: ModelLog,
    kinds: Sequence[str],
    run: int,
    initialized: np.ndarray,
    clients: Any,
    before: TrainedRound | None,
    *,
    is_detailed: bool,
) -> list[ModelFigures]:
    """Return the figures of each kind of model that was tested in a run.

    `initialized`, [client, 3], is what the initialised models score; `clients` of them count.
    """
    traffic: dict[str, float] = {}
    if before:
        sent, uploaded = before.traffic[run].tolist()
        traffic = {"bytes_sent": sent, "bytes_uploaded": uploaded}
    models = []
    for kind in kinds:
        if kind == INITIALIZED:
            figures = log.summarize(kind, run, initialized, clients)
        elif kind == "trained":
            figures = before.trained_model(run) if before else {}
        else:
            figures = log.summarize(kind, run)
        if figures:
            wanted = (list_figures if is_detailed else list_plain_figures)(log.metric)
            known = {name: figures[name] for name in wanted if name in figures}
            finite = {name: value for name, value in known.items() if not np.isnan(value)}
            models.append(ModelFigures(kind, {**finite, **traffic}))
    return models
