"""What the history of a method says, round by round."""

from collections.abc import Sequence

import numpy as np

from fedala.metrics import METRICS
from fedala.report.arrays import Array, to_array
from fedala.runs.results import MethodResult
from fedala.runs.seconds import sum_seconds

FURTHER_MODELS = {
    "trained": "trained personal models",
    "received": "received models",
    "global": "global model",
}

#: Columns of the history, as charts name them.
TITLES = {
    **{metric.name: f"test {metric.title}" for metric in METRICS},
    **{f"{metric.name}_joined": f"test {metric.title} of the participants" for metric in METRICS},
    **{f"{metric.name}_validation": f"validation {metric.title}" for metric in METRICS},
    **{
        f"{metric.name}_{kind}": f"test {metric.title} of the {models}"
        for metric in METRICS
        for kind, models in FURTHER_MODELS.items()
    },
    "loss": "test loss",
    "loss_validation": "validation loss",
    "train_loss": "training loss",
    "ala_weight": "mean of W",
    "ala_epochs": "epochs of weight learning",
    "ala_capped": "share of initial stages cut off",
    "diverged": "clients that diverged",
}


def collect_curves(result: MethodResult, column: str) -> tuple[list[int], Array]:
    """Return the evaluated rounds, and a column of the history as [seed, round].

    It is NaN if a seed has not reached the round.
    """
    rows = [row.columns() for row in result.history]
    array, (_, rounds) = to_array(rows, ("seed", "round"), column)
    return rounds, array[..., 0]


def list_seeds(result: MethodResult) -> list[int]:
    """Return the seeds of the history, in order."""
    return sorted({row.seed for row in result.history})


def list_columns(result: MethodResult) -> list[str]:
    """Return the columns of the history that change with the method, without those on its cost."""
    hidden = {"method", "seed", "round", "sent", "uploaded", "seconds"}
    if not any(row.diverged for row in result.history):
        hidden.add("diverged")
    names: dict[str, None] = {}
    for row in result.history:  # not every row has them all: nothing is trained before the first
        names |= dict.fromkeys(row.columns())
    return [name for name in names if name not in hidden]


def find_target_rounds(
    result: MethodResult, targets: Sequence[float]
) -> list[tuple[list[int | None], list[float | None]]]:
    """Find when each seed's score is first as good as the target, for each of the targets.

    Return the round of each seed and the seconds until then; None if it never gets there.
    """
    rounds, values = collect_curves(result, result.metric.name)
    seconds = sum_seconds(result.history)
    sign = 1 if result.metric.higher_is_better else -1
    # The best so far only grows, so a binary search finds the first round that reaches a target.
    best = np.fmax.accumulate(np.nan_to_num(sign * values, nan=-np.inf), axis=1)
    answers: list[tuple[list[int | None], list[float | None]]] = []
    for target in targets:
        first = [int(np.searchsorted(run, sign * target)) for run in best]
        indices = [index if index < len(rounds) else None for index in first]
        answers.append(
            (
                [None if index is None else rounds[index] for index in indices],
                [None if index is None else seconds[rounds[index]] for index in indices],
            )
        )
    return answers
