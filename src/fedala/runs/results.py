"""The results of a run: one `MethodResult` per method, with its history and headline figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedala.errors import UserError, printable
from fedala.metrics import ACCURACY, Metric, find_metric
from fedala.records import HistoryRow
from fedala.runs.checkpoint import Checkpoints
from fedala.runs.config import Config
from fedala.runs.seconds import average_seconds, sum_seconds

Models = dict[tuple[int, int | None], dict[str, Tensor]]


def best_row(rows: Sequence[HistoryRow], column: str) -> HistoryRow | None:
    """Return the first row with the best score in a column; None if no row has a number.

    In a federation, a score counts the clients that answered. So rounds in which all of them
    answered come first, and the others are compared only if there is no such round.
    """
    candidates = [row for row in rows if not math.isnan(_number(row, column))]
    candidates = [row for row in candidates if row.is_full] or candidates
    is_loss = column.startswith("loss")
    choose = max if not rows or (rows[0].metric.higher_is_better and not is_loss) else min
    return choose(candidates, key=lambda row: _number(row, column), default=None)


def _number(row: HistoryRow, column: str) -> float:
    value = getattr(row, column)
    return math.nan if value is None else float(value)


@dataclass(repr=False)
class MethodResult:
    """The results of one method, over all runs."""

    method: str
    title: str
    history: list[HistoryRow] = field(default_factory=list)
    models: Models = field(default_factory=dict)
    """By seed and client (None: the global model), unless they are saved in a run folder."""
    client_scores: dict[int, np.ndarray] = field(default_factory=dict)
    """By seed: [client, (summed score, summed loss, samples)] of the last evaluation."""
    client_means: dict[int, np.ndarray] = field(default_factory=dict)
    """By seed: each client's score at the last evaluation; NaN without test samples."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The lines of `metrics.csv`, without the method and without empty cells."""
    newcomers: list[dict[str, Any]] = field(default_factory=list)
    """The lines of `newcomers.csv`, without the method."""
    newcomer_clients: list[dict[str, Any]] = field(default_factory=list)
    """The lines of `newcomer_clients.csv`, without the method."""
    checkpoints: Checkpoints | None = None
    best_models: Models = field(default_factory=dict)
    """Like `models`, of each run's best evaluation."""
    best_rounds: list[int | None] = field(default_factory=list)
    """By run: the round of the best models that are kept; None if they are not."""
    picked_by: str = "accuracy"
    """The column of the history that picks the best models."""
    stops: list[int | None] = field(default_factory=list)
    """By run: the round after which it stopped early; None if it did not."""

    def __repr__(self) -> str:
        """Say what the method scores, and not what its models weigh."""
        if not self.history:
            return f"<MethodResult {self.method}: not evaluated yet>"
        metric, seeds = self.metric, len(self.seeds)
        runs = f"; mean of {seeds} runs" if seeds > 1 else ""
        return (
            f"<MethodResult {printable(self.method, 80)}: {metric.title} "
            f"{metric.format(self.best_score)}{metric.unit} in the best round, "
            f"{metric.format(float(self.final.mean()))}{metric.unit} in round "
            f"{max(row.round for row in self.history)}, the last{runs}>"
        )

    @property
    def metric(self) -> Metric:
        """What the scores of the history measure."""
        return self.history[0].metric if self.history else ACCURACY

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, in the order of their figures."""
        return list(dict.fromkeys(row.seed for row in self.history))

    def add_clients(self, seed: int, scores: np.ndarray) -> None:
        """Add what every client scores at the last evaluation of a run."""
        self.client_scores[seed] = scores
        with np.errstate(invalid="ignore"):
            self.client_means[seed] = scores[:, 0] / scores[:, 2]

    def read_tables(
        self, clients: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
    ) -> None:
        """Take this method's rows of `clients.csv` and `metrics.csv`."""
        means: dict[int, dict[int, float]] = {}
        for row in clients:
            if row["method"] == self.method:
                score = float(row[find_metric(row).name])
                means.setdefault(row["seed"], {})[row["client"]] = score
        self.client_means = {
            seed: np.array([own[client] for client in sorted(own)]) for seed, own in means.items()
        }
        for row in metrics:
            if row["method"] == self.method:
                cells = {name: value for name, value in row.items() if value is not None}
                del cells["method"]
                self.metrics.append(cells)

    def read_newcomers(
        self, rows: Iterable[Mapping[str, Any]], clients: Iterable[Mapping[str, Any]]
    ) -> None:
        """Take this method's rows of `newcomers.csv` and `newcomer_clients.csv`."""
        for found, lines in ((self.newcomers, rows), (self.newcomer_clients, clients)):
            for line in lines:
                if line["method"] == self.method:
                    found.append({name: value for name, value in line.items() if name != "method"})

    def newcomer_scores(self) -> dict[int, np.ndarray]:
        """Return, by local epochs, what held-out clients score at each run's last test of them."""
        last = {row["seed"]: row["round"] for row in self.newcomers}
        scores: dict[int, list[float]] = {}
        for row in self.newcomers:
            if row["round"] == last[row["seed"]]:
                score = row[self.metric.name]
                scores.setdefault(row["epochs"], []).append(math.nan if score is None else score)
        return {epochs: np.array(scores[epochs]) for epochs in sorted(scores)}

    @property
    def held_out(self) -> list[int]:
        """The numbers of the clients that were held out."""
        return sorted({line["client"] for line in self.newcomer_clients})

    def _per_run(self, figure: Callable[[list[HistoryRow]], float]) -> np.ndarray:
        histories: dict[int, list[HistoryRow]] = {}
        for row in self.history:
            histories.setdefault(row.seed, []).append(row)
        return np.array([figure(rows) for rows in histories.values()])

    def _picked_by(self, column: str, figure: str) -> np.ndarray:
        """Return each run's figure in the round that is best by a column; NaN without one."""

        def pick(rows: list[HistoryRow]) -> float:
            row = best_row(rows, column)
            return math.nan if row is None else _number(row, figure)

        return self._per_run(pick)

    @property
    def best(self) -> np.ndarray:
        """Each run's score in its best round: the paper's headline, picked on test data."""
        return self._picked_by("score", "score")

    @property
    def best_joined(self) -> np.ndarray:
        """The same over the participants of the round alone, as in the paper's ρ = 0.5 column."""
        return self._picked_by("score_joined", "score_joined")

    @property
    def final(self) -> np.ndarray:
        """Each run's score after the last round."""
        return self._per_run(lambda rows: rows[-1].score)

    @property
    def validation_picked(self) -> np.ndarray | None:
        """Each run's score in the round that the validation samples pick; None without them."""
        criterion = self.history[0].criterion
        return None if criterion == "score" else self._picked_by(criterion, "score")

    @property
    def criterion(self) -> float:
        """The mean over the runs of what picks the round, in that round: points compare by it."""
        column = self.history[0].criterion
        return float(self._picked_by(column, column).mean())

    @property
    def best_score(self) -> float:
        """Mean over the runs of the best round's score."""
        return float(self.best.mean())

    @property
    def best_accuracy(self) -> float:
        """Mean over the runs of the best round's accuracy."""
        if self.metric != ACCURACY:
            raise AttributeError(f"This run measures its {self.metric.title}: use best_score.")
        return self.best_score

    @property
    def seconds_per_round(self) -> float:
        """Mean wall time of a round of all runs together, without the start (`seconds.py`)."""
        return average_seconds([row for row in self.history if row.seed == self.history[0].seed])

    @property
    def total_seconds(self) -> float:
        """Wall time of all rounds of all runs together, with the start and ALA's initial stage."""
        return max(sum_seconds(self.history).values())

    @property
    def diverged(self) -> int:
        """How many client rounds diverged, over all runs."""
        return sum(row.diverged for row in self.history)

    def below_local(self, local: "MethodResult") -> np.ndarray:
        """Return each run's share of clients that score worse than the same client under Local.

        Clients without test samples do not count. Empty if a method is not finished.
        """
        shares = []
        for seed in sorted(self.client_means.keys() & local.client_means.keys()):
            own, other = self.client_means[seed], local.client_means[seed]
            if own.shape == other.shape:
                is_known = np.isfinite(own) & np.isfinite(other)
                gains = own[is_known] - other[is_known]
                is_worse = gains < 0 if self.metric.higher_is_better else gains > 0
                shares.append(is_worse.mean() if is_known.any() else np.nan)
        return np.array(shares)

    def summary(self, local: "MethodResult | None" = None) -> dict[str, Any]:
        """Return the method's part of `summary.json`; `local` is Local in the same run."""
        sent = max(row.sent for row in self.history)
        uploaded = max(row.uploaded for row in self.history)
        summary = {
            "title": self.title,
            self.metric.name: self.scores(),
            "seconds_per_round": self.seconds_per_round,
            "total_seconds": self.total_seconds,
            "parameters_per_client_and_round": {
                "sent": sent,
                "uploaded": uploaded,
                "together": sent + uploaded,
            },
            "client_rounds_that_diverged": self.diverged,
        }
        if local and local is not self and len(shares := self.below_local(local)):
            summary["clients_below_local"] = describe_spread(shares)
        if self.newcomers:
            scores = self.newcomer_scores().items()
            summary["newcomers"] = {
                "clients": self.newcomers[-1]["clients"],
                self.metric.name: {str(epochs): describe_spread(own) for epochs, own in scores},
            }
        if any(row.asked is not None for row in self.history):
            summary["answers"] = self._describe_answers()
        if any(round is not None for round in self.best_rounds):
            summary["best_models"] = {"picked_by": self.picked_by, "rounds": self.best_rounds}
        if any(round is not None for round in self.stops):
            summary["stopped_after_round"] = self.stops
        if self.checkpoints and self.checkpoints.written:
            summary["checkpoints"] = {
                "written": self.checkpoints.written,
                "bytes": self.checkpoints.bytes,
                "seconds": self.checkpoints.seconds,
            }
        return summary

    def _describe_answers(self) -> dict[str, Any]:
        """Say in how many rounds of a federation all clients answered."""
        full = sum(row.is_full for row in self.history)
        which = (
            "rounds in which all clients answered"
            if full
            else (
                "all rounds: there is none in which all clients answered, so the best score may be "
                "that of a few clients"
            )
        )
        return {"rounds": len(self.history), "full_rounds": full, "best_is_picked_from": which}

    def scores(self) -> dict[str, dict[str, Any]]:
        """Return mean, standard deviation and runs of each kind of score."""
        kinds = {"best": self.best, "final": self.final}
        if self.validation_picked is not None:
            kinds["validation_picked"] = self.validation_picked
        if any(row.score != row.score_joined for row in self.history):
            kinds["best_joined"] = self.best_joined
        return {kind: describe_spread(values) for kind, values in kinds.items()}


def describe_spread(values: np.ndarray) -> dict[str, Any]:
    """Return mean, standard deviation and values of a figure that each run has."""
    with np.errstate(invalid="ignore"):  # the scores of runs that diverged may be infinite
        mean, std = float(values.mean()), float(values.std())
    return {"mean": mean, "std": std, "runs": values.tolist()}


@dataclass(repr=False)
class RunResult:
    """The results of a run, by method. With a single method, its figures are the result's own."""

    config: Config
    methods: dict[str, MethodResult]
    folder: Path | None = None
    client_names: tuple[str, ...] = ()
    """By client; empty if the data do not name them."""
    majority_share: float | None = None
    """What a model scores that always answers with the most frequent class of the test samples."""

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return the summary of each method."""
        local = self.methods.get("local")
        return {name: method.summary(local) for name, method in self.methods.items()}

    def name_client(self, number: int) -> str:
        """Return a client's name, or its number without one."""
        return self.client_names[number] if self.client_names else str(number)

    @property
    def _only(self) -> MethodResult:
        if len(self.methods) != 1:
            first = next(iter(self.methods))
            raise AttributeError(
                f"This result holds several methods: use result.methods[{first!r}]."
            )
        return next(iter(self.methods.values()))

    @property
    def history(self) -> list[HistoryRow]:
        """The evaluations of the only method."""
        return self._only.history

    @property
    def best_score(self) -> float:
        """The only method's score in its best round: mean over the runs."""
        return self._only.best_score

    @property
    def best_accuracy(self) -> float:
        """The only method's accuracy in its best round: mean over the runs."""
        return self._only.best_accuracy

    @property
    def newcomers(self) -> list[dict[str, Any]]:
        return self._only.newcomers

    @property
    def models(self) -> Models:
        """The only method's last models by seed and client, unless a folder keeps them."""
        return self._only.models

    @property
    def best_models(self) -> Models:
        """The only method's models of the best evaluation, unless a folder keeps them."""
        return self._only.best_models


def locate_folder(run: Path | str | RunResult) -> Path:
    """Return the run folder that is meant: by its path, or by the result of the run."""
    if not isinstance(run, RunResult):
        return Path(run)
    if run.folder is None:
        raise UserError(
            "This result has no run folder, so its models are in result.models alone: "
            "keep a run in a folder with run(out=…), such as run(out='runs/mine')."
        )
    return run.folder
