"""What the models of a run score on new data, measured as the run measured it."""

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala.errors import UserError, import_optional, printable, spreadsheet_safe
from fedala.lanes.evaluation import MIXED_BATCH, PredictionLog, score_lanes
from fedala.lanes.features import Sharing
from fedala.lanes.losses import (
    CrossEntropy,
    Loss,
    LossFunction,
    MultiLabel,
    OwnLoss,
    Regression,
)
from fedala.lanes.task import Task
from fedala.metrics import ACCURACY, LABEL_ACCURACY, MAE, Metric, describe_majority
from fedala.runs.config import Config
from fedala.runs.tables import csv_text
from fedala.simulation.metrics import list_details, measure_predictions, share_of_majority
from fedala.simulation.model_scores import has_details
from fedala.trained.samples import Samples

Client = int | str | None
"""A client's name or number; None: the global model."""


@dataclass(frozen=True)
class ModelScore:
    """What one model scores on one set of samples: means over the samples."""

    client: Client
    score: float
    loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `metrics.csv` has of single predictions, by its columns, if it is defined."""
    majority_share: float | None = None
    """The share of the most frequent class among the samples; None without classes."""


@dataclass(frozen=True)
class Scores:
    """What models score on new data. If it is a single one, its figures are also these."""

    metric: Metric
    models: tuple[ModelScore, ...]
    notes: tuple[str, ...] = ()
    """Sentences: which samples the models were tested on, if it was not all of them."""

    def __getitem__(self, client: Client) -> ModelScore:
        """Return what a client's model scores, by its name or number; with None, the global one."""
        named = [one for one in self.personal if isinstance(one.client, str)]
        names = [str(one.client) for one in named]
        client = as_name(client, names)
        for one in self.models:
            if one.client == client:
                return one
        if isinstance(client, int) and 0 <= client < len(self.personal) == len(named):
            return self.personal[client]  # the clients have names
        known = ", ".join(printable(str(one.client), 50) for one in self.models[:10])
        raise KeyError(f"There is no score of {client!r}; there are those of {known}.")

    def __iter__(self) -> Iterator[ModelScore]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    @property
    def personal(self) -> tuple[ModelScore, ...]:
        return tuple(one for one in self.models if one.client is not None)

    @property
    def _only(self) -> ModelScore:
        if len(self.models) != 1:
            raise AttributeError("These are the scores of several models: use scores[client].")
        return self.models[0]

    @property
    def score(self) -> float:
        return self._only.score

    @property
    def accuracy(self) -> float:
        if self.metric != ACCURACY:
            raise AttributeError(f"The score of this run is its {self.metric.title}: use score.")
        return self.score

    @property
    def loss(self) -> float:
        return self._only.loss

    @property
    def samples(self) -> int:
        return self._only.samples

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._only.metrics

    @property
    def majority_share(self) -> float | None:
        return self._only.majority_share

    @property
    def majority_shares(self) -> list[float]:
        """The shares of the most frequent class, of all models."""
        return [one.majority_share for one in self if one.majority_share is not None]

    def __repr__(self) -> str:
        shown = [f"{_title(one.client)} {self._format(one)}" for one in self.models[:3]]
        rest = f", … ({len(self.models)} models)" if len(self.models) > 3 else ""
        return f"Scores({self.metric.title}: {', '.join(shown)}{rest})"

    @property
    def _details(self) -> list[Metric]:
        """What there is beside the score, for any of the models."""
        return [
            one for one in list_details(self.metric) if any(one.name in m.metrics for m in self)
        ]

    @property
    def heads(self) -> list[str]:
        """The heads of a table for readers."""
        details = [one.heading for one in self._details]
        return ["model", self.metric.heading, "loss", "samples", *details]

    def list_cells(self) -> list[list[str]]:
        """Return the rows of a table for readers."""
        rows = []
        for one in self:
            figures = [self.metric.format(one.score), f"{one.loss:.4g}", f"{one.samples:,}"]
            for metric in self._details:
                value = one.metrics.get(metric.name)
                figures.append("–" if value is None else metric.format(value))
            rows.append([_title(one.client), *figures])
        return rows

    def list_rows(self, score: str = "score") -> list[dict[str, Any]]:
        """Return all figures of each model; `score` is what the column of the score is called."""
        rows = []
        for one in self:
            row = {"client": one.client, score: one.score, "loss": one.loss, "samples": one.samples}
            row |= {metric.name: one.metrics.get(metric.name) for metric in self._details}
            if self.majority_shares:
                row["majority_share"] = one.majority_share
            rows.append(row)
        return rows

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.heads)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.list_cells()
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.list_sentences())
        return f"<table><tr>{head}</tr>{body}</table>{notes}"

    def list_sentences(self) -> list[str]:
        """Return what is said below the table."""
        shares = self.majority_shares
        comparison = [f"For comparison, {describe_majority(shares)}."] if shares else []
        return [*comparison, *self.notes]

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each model; client None: the global one.

        The columns are client, score, loss, samples, the `metrics`, and majority_share.
        """
        pandas = import_optional("pandas", "pandas", "notebook", "A frame")
        return pandas.DataFrame(self.list_rows())

    def csv(self) -> str:
        """Return the same as the text of a csv file. The score has the name of its metric."""
        rows = [
            {name: spreadsheet_safe(value) for name, value in row.items()}
            for row in self.list_rows(self.metric.name)
        ]
        return csv_text([*rows[0]], rows, header=True)

    def _format(self, one: ModelScore) -> str:
        return f"{self.metric.format(one.score)}{self.metric.unit}"


def _title(client: Client) -> str:
    return "global model" if client is None else f"client {client}"


def have_numbers(names: Iterable[str]) -> bool:
    """Tell whether clients are called by whole numbers: then a number is a name, not a position."""
    return any(re.fullmatch(r"-?\d+(\.0*)?", name) for name in names)


def as_name(client: Client, names: Sequence[str]) -> Client:
    """Return a client that is given by a number as a name, if clients are called by numbers."""
    return str(client) if isinstance(client, Integral) and have_numbers(names) else client


def find_loss(config: Config, metric: Metric, own: LossFunction | None) -> Loss:
    """Return the loss that the run's evaluations measured."""
    if own is not None:
        return OwnLoss(own, metric)
    if config.loss == "own":
        raise UserError(
            "This run has a loss of its own, a Python function: give it to load again, as loss=…."
        )
    if metric == ACCURACY:
        return CrossEntropy()
    if metric == LABEL_ACCURACY:
        return MultiLabel()
    return Regression("mae" if metric == MAE else config.loss or "mse")


class Examiner:
    """Runs models on one set of samples, as the run's own evaluation does."""

    def __init__(self, skeleton: nn.Module, samples: Samples, precision: str, loss: Loss) -> None:
        """`skeleton` is a model of the run: one that the samples fit."""
        everything = np.arange(len(samples.x))
        # The samples are prepared, so the task must not scale them once more.
        self.task = Task(
            skeleton,
            samples.x,
            samples.y,
            [everything],
            loss=loss,
            precision=precision,
            scale=False,
        )

    def score(
        self,
        client: Client,
        model: Mapping[str, Tensor],
        skeleton: nn.Module,
        rows: np.ndarray | None = None,
    ) -> ModelScore:
        """Return what saved weights of a model score, on some of the samples or on all."""
        if self.task.model is not skeleton:
            self.task.use_model(skeleton)
        state = {name: value.unsqueeze(0) for name, value in model.items()}
        for name in self.task.transient:
            buffer = self.task.model.get_buffer(name).detach()
            dtype = self.task.dtype if buffer.is_floating_point() else buffer.dtype
            state[name] = buffer.to(dtype).unsqueeze(0)
        own = self.task.parts["train"][0] if rows is None else rows
        log = PredictionLog() if has_details(self.task) else None
        found = score_lanes(self.task, state, [own], None, Sharing(), log)
        score, loss, count = (float(figure.double()) for figure in found)
        if not count:
            return ModelScore(client, np.nan, np.nan, 0)
        means = (client, score / count, loss / count, int(count))
        [said] = log.collect(1) if log else [None]
        if said is None:
            return ModelScore(*means)
        metric = self.task.loss.metric
        figures = measure_predictions(said, metric)
        known = {name: value for name, value in figures.items() if not np.isnan(value)}
        share = share_of_majority(said.targets) if metric == ACCURACY else None
        return ModelScore(*means, known, share)


@torch.no_grad()
def compute_outputs(model: nn.Module, x: Tensor, precision: str) -> Tensor:
    """Return what a model in evaluation mode says of prepared samples, batch by batch."""
    y = torch.zeros(len(x), dtype=torch.int64)
    task = Task(model, x, y, [np.arange(len(x))], precision=precision, scale=False)
    size = MIXED_BATCH if task.mixes_samples else task.chunk
    outputs: list[Tensor] = []
    with task.use_mode(training=False), task.autocast():
        for rows in torch.split(torch.arange(len(x)), size):
            output = model(task.inputs(rows))
            if not isinstance(output, Tensor):
                raise UserError(
                    f"The model returns a {type(output).__name__}, and predict needs a tensor: "
                    "take the model itself, with personal(client)."
                )
            outputs.append(output)
    return torch.cat(outputs).to(task.dtype)
