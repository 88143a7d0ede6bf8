"""Test each lane's model on its own samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedala.errors import UserError, first_line
from fedala.lanes.features import Sharing, compute_features, select_rows
from fedala.lanes.losses import Regression, align
from fedala.lanes.outputs import scores_of
from fedala.lanes.samples import Samples, to_device
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, take, tree_map

#: Samples per batch for a model whose outputs depend on their batch.
MIXED_BATCH = 512


class Score(NamedTuple):
    """Per lane: summed score (correct answers), summed loss, samples."""

    score: Tensor
    loss: Tensor
    samples: Tensor


class Predictions(NamedTuple):
    """What a model says of one client's samples, on the host."""

    targets: np.ndarray
    """[sample]; numbers to predict may be [sample, output]."""
    predicted: np.ndarray
    """The class with the highest score, or the predicted numbers: as `targets`."""
    probabilities: np.ndarray
    """[sample, class]; numbers to predict have no class."""


class PredictionLog:
    """Collects what each lane's model says of its samples, in their order."""

    def __init__(self) -> None:
        self._batches: dict[int, list[tuple[np.ndarray, ...]]] = {}

    def add(
        self, task: Task, lanes: Sequence[int], ends: Sequence[int], output: Any, y: Tensor
    ) -> None:
        """Note a batch, [lane, sample, class], in which lane i has `ends[i]` samples.

        It leaves the device at once: the scores of all samples may not fit there.
        """
        output = scores_of(output)
        if isinstance(task.loss, Regression):
            predicted, y = align(output.to(task.dtype), y)
            probabilities = output.new_empty(*y.shape[:2], 0)
        else:
            predicted, probabilities = output.argmax(-1), output.to(task.dtype).softmax(-1)
        figures = [t.cpu().numpy() for t in (y, predicted, probabilities)]
        for position, (lane, end) in enumerate(zip(lanes, ends, strict=True)):
            own = tuple(figure[position, :end] for figure in figures)
            self._batches.setdefault(lane, []).append(own)

    def collect(self, lanes: int) -> list[Predictions | None]:
        """Return the predictions of each lane; None for a lane without samples."""
        return [
            Predictions(*map(np.concatenate, zip(*self._batches[lane], strict=True)))
            if lane in self._batches
            else None
            for lane in range(lanes)
        ]


@torch.no_grad()
def score_lanes(
    task: Task,
    params: Params,
    rows: Sequence[np.ndarray],
    key: Any,
    sharing: Sharing,
    log: PredictionLog | None = None,
) -> Score:
    """Score each lane's model on the samples `rows[lane]`.

    `key`, if it is not None, names these rows: what is made of them is kept for the next time.
    `log` gets what the models say of each sample.
    """
    order, samples = _order_samples(task, rows, key)
    with task.use_mode(training=False):
        score = _score_each_alone if task.mixes_samples else _score_together
        scores, loss = score(task, params, order, samples, sharing, log)
    found = Score(scores, loss, samples.counts)
    if order == list(range(len(order))):
        return found
    back = to_device(task.device, sorted(range(len(order)), key=order.__getitem__))
    return Score(*(figures[back] for figures in found))


def _order_samples(task: Task, rows: Sequence[np.ndarray], key: Any) -> tuple[list[int], Samples]:
    """Return the lanes by their number of samples, the longest first, and the samples so."""
    if key in task.evaluation_samples:
        return task.evaluation_samples[key]
    order = sorted(range(len(rows)), key=lambda lane: -len(rows[lane]))
    found = order, Samples((rows[lane] for lane in order), task.device)
    if key is not None:
        if len(task.evaluation_samples) > 16:  # other clients every round
            task.evaluation_samples.clear()
        task.evaluation_samples[key] = found
    return found


def _score_together(
    task: Task,
    params: Params,
    order: list[int],
    samples: Samples,
    sharing: Sharing,
    log: PredictionLog | None,
) -> Tensor:
    """Return scores and losses, [2, lane], of all lanes side by side.

    No output depends on its neighbours, so shorter lanes are padded. Padding is not counted.
    """
    lanes = len(order)
    cut = task.cut(sharing.count_own_layers(task, params), params, sum(samples.lengths))
    table, where = compute_features(task, cut, params, samples, sharing, order)
    needed = {name for layer in task.layers[: cut.p] for name in layer}
    state = {name: value for name, value in params.items() if name in needed}
    if order != list(range(lanes)):
        state = take(state, order)
    if lanes == 1:
        state = tree_map(task.lay_out, state)
    figures = torch.zeros(2, lanes, device=task.device, dtype=task.dtype)
    width = max(1, 8 * task.chunk // lanes)
    for start in range(0, where.shape[1], width):
        columns = slice(start, min(start + width, where.shape[1]))
        active = slice(0, sum(length > start for length in samples.lengths))
        x = select_rows(task, table, where[active, columns])
        y = task.targets(samples.matrix[active, columns])
        output = task.outputs(take(state, active), x, cut) if cut.p else x
        column = torch.arange(columns.start, columns.stop, device=task.device)
        real = column < samples.counts[active, None]
        ends = [min(length - start, y.shape[1]) for length in samples.lengths[active]]
        scores, losses = task.summed_scores(output, y, real, ends)
        figures[0, active] += scores
        figures[1, active] += losses
        if log:
            log.add(task, order[active], ends, output, y)
    return figures


def _score_each_alone(
    task: Task,
    params: Params,
    order: list[int],
    samples: Samples,
    sharing: Sharing,
    log: PredictionLog | None,
) -> Tensor:
    """Return the same for a model whose outputs depend on their batch: lane by lane, unpadded."""
    figures = torch.zeros(2, len(order), device=task.device, dtype=task.dtype)
    for position, lane in enumerate(order):
        state = tree_map(task.lay_out, take(params, slice(lane, lane + 1)))
        own = samples.matrix[position : position + 1, : samples.lengths[position]]
        for rows in _split_batches(own):
            if rows.shape[1]:
                y = task.targets(rows)
                output = _run_mixed(task, state, rows)
                real = torch.ones_like(rows, dtype=torch.bool)
                scores, losses = task.summed_scores(output, y, real, [rows.shape[1]])
                figures[0, position] += scores[0]
                figures[1, position] += losses[0]
                if log:
                    log.add(task, [lane], [rows.shape[1]], output, y)
    return figures


def _split_batches(rows: Tensor) -> Sequence[Tensor]:
    """Split [1, sample] into batches, none of them of a single sample if that can be helped."""
    size = MIXED_BATCH - 1 if rows.shape[1] % MIXED_BATCH == 1 else MIXED_BATCH
    return torch.split(rows, size, 1)


def _run_mixed(task: Task, state: Params, rows: Tensor) -> Any:
    """Run a model whose outputs depend on their batch, or that fails on a batch of one."""
    try:
        return task.outputs(state, task.inputs(rows))
    except Exception as error:  # whatever the user's model may raise
        if rows.shape[1] > 1:
            raise
        raise UserError(
            "A client has a single sample to test, and the model cannot run on a batch of one: "
            f"{first_line(error)}. Give every client at least two."
        ) from error
