"""Metrics of classifiers and of regressions: over all samples, and as means over the clients.

A class that a set of samples does not have is treated as scikit-learn treats it: F1 counts the
classes among targets or predictions, balanced accuracy those among the targets, and AUC those with
samples inside and outside. A metric that is not defined is NaN. For the means over the clients,
none of these three is defined for a client whose samples are of a single class.
"""

from collections.abc import Callable, Iterable

import numpy as np

from fedala.lanes.evaluation import Predictions
from fedala.metrics import (
    ACCURACY,
    AUC,
    BALANCED_ACCURACY,
    CALIBRATION_ERROR,
    F1,
    MAE,
    MSE,
    R_SQUARED,
    RMSE,
    Metric,
)

#: Confidence bins of the expected calibration error, all of the same width.
BINS = 15


def macro_f1(found: Predictions) -> float:
    """Return the mean F1 of the classes among targets or predictions."""
    labels = np.union1d(found.targets, found.predicted)
    is_hit = found.targets == found.predicted
    hits = _count(found.targets[is_hit], labels)
    either = _count(found.targets, labels) + _count(found.predicted, labels)
    return float(np.mean(2 * hits / either))


def balanced_accuracy(found: Predictions) -> float:
    """Return the mean share of hits among the samples of each class."""
    labels = np.unique(found.targets)
    is_hit = found.targets == found.predicted
    return float(np.mean(_count(found.targets[is_hit], labels) / _count(found.targets, labels)))


def _count(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return how often each label occurs."""
    counts: np.ndarray = np.bincount(values, minlength=int(labels.max()) + 1)[labels]
    return counts


def one_vs_rest_auc(found: Predictions) -> float:
    """Return the mean area under the ROC curve of each class against the rest."""
    if not np.isfinite(found.probabilities).all():
        return float("nan")
    areas = []
    for label in np.unique(found.targets):
        is_inside = found.targets == label
        inside, outside = is_inside.sum(), (~is_inside).sum()
        if outside:
            ranks = _rank(found.probabilities[:, label])
            wins = ranks[is_inside].sum() - inside * (inside + 1) / 2
            areas.append(wins / (inside * outside))
    return float(np.mean(areas)) if areas else float("nan")


def _rank(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values, from 1; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts - 1) / 2
    ranks: np.ndarray = means[inverse]
    return ranks


def calibration_error(found: Predictions) -> float:
    """Return the expected calibration error: Σ share of a bin·|accuracy − mean confidence|."""
    confidence = found.probabilities.max(1).astype(np.float64)
    if not np.isfinite(confidence).all():
        return float("nan")
    inner_edges = np.linspace(0, 1, BINS + 1)[1:-1]
    bins = np.digitize(confidence, inner_edges, right=True)
    gaps = np.bincount(bins, (found.targets == found.predicted) - confidence)
    return float(np.abs(gaps).sum() / len(confidence))


def mean_absolute_error(found: Predictions) -> float:
    """Return the mean of the absolute errors of all samples and outputs."""
    return float(np.abs(_errors(found)).mean())


def root_mean_squared_error(found: Predictions) -> float:
    """Return the root of the mean of the squared errors of all samples and outputs."""
    return float(np.sqrt((_errors(found) ** 2).mean()))


def r_squared(found: Predictions) -> float:
    """Return 1 − Σ error² / Σ (target − mean target)²: its mean over outputs that vary."""
    spread = ((found.targets - found.targets.mean(0, dtype=np.float64)) ** 2).sum(0)
    errors = (_errors(found) ** 2).sum(0)
    varies = spread > 0
    if not varies.any():
        return float("nan")
    return float(np.mean(1 - errors[varies] / spread[varies]))


def _errors(found: Predictions) -> np.ndarray:
    """Return predictions minus targets, [sample, …]; all NaN if one is not finite."""
    if not np.isfinite(found.predicted).all():
        return np.full(found.predicted.shape, np.nan)
    errors: np.ndarray = found.predicted.astype(np.float64) - found.targets
    return errors


def share_of_majority(labels: np.ndarray) -> float:
    """Return the share of the most frequent class: what a model scores that always says it."""
    return float(np.bincount(labels).max() / len(labels))


_Measures = dict[Metric, Callable[[Predictions], float]]

_OF_CLASSES: _Measures = {
    F1: macro_f1,
    BALANCED_ACCURACY: balanced_accuracy,
    AUC: one_vs_rest_auc,
    CALIBRATION_ERROR: calibration_error,
}
_OF_NUMBERS: _Measures = {
    MAE: mean_absolute_error,
    RMSE: root_mean_squared_error,
    R_SQUARED: r_squared,
}
#: Those that compare classes.
_OF_SEVERAL_CLASSES = {one.name for one in (F1, BALANCED_ACCURACY, AUC)}
#: How the clients' scores spread: suffixes of the score's name.
_SPREAD = ("mean", "std", "worst")
#: The metrics of single predictions, by the score of the run; other scores have none.
_DETAILED = {ACCURACY: _OF_CLASSES, MSE: _OF_NUMBERS, MAE: _OF_NUMBERS}


def list_plain_figures(metric: Metric) -> list[str]:
    """Return the figures of a model that its scores give."""
    name = metric.name
    return ["clients", "samples", name, "loss", *(f"{name}_{end}" for end in _SPREAD)]


def list_figures(metric: Metric) -> list[str]:
    """Return all figures of a model, in the order of the columns of `metrics.csv`."""
    names = [one.name for one in _DETAILED.get(metric, {})]
    all_names = (*list_plain_figures(metric), *names, *(f"{name}_mean" for name in names))
    return list(dict.fromkeys(all_names))  # the score itself may be the mean absolute error


def summarize_scores(scores: np.ndarray, metric: Metric = ACCURACY) -> dict[str, float]:
    """Return score and loss over all samples, and how scores spread over the clients.

    `scores` is [client, (summed score, summed loss, samples)]. Clients without samples do not
    count. The worst are the tenth of the clients with the worst scores, at least one.
    """
    scores = scores[scores[:, 2] > 0]
    if not len(scores):
        return {"clients": 0, "samples": 0}
    total, loss, samples = scores.sum(0)
    own = np.sort(scores[:, 0] / scores[:, 2])
    own = own if metric.higher_is_better else own[::-1]
    worst = own[: max(1, len(own) // 10)]
    means = (len(scores), int(samples), float(total / samples), float(loss / samples))
    with np.errstate(invalid="ignore", over="ignore"):  # scores of a model that diverged
        spread = (float(own.mean()), float(own.std()), float(worst.mean()))
    return dict(zip(list_plain_figures(metric), (*means, *spread), strict=True))


def list_details(metric: Metric) -> list[Metric]:
    """Return what single predictions say beside a score."""
    return [one for one in _DETAILED.get(metric, {}) if one != metric]


def measure_predictions(found: Predictions, metric: Metric) -> dict[str, float]:
    """Return every metric of single predictions by its name; NaN if it is not defined."""
    return {one.name: measure(found) for one, measure in _DETAILED[metric].items()}


def summarize_predictions(
    clients: Iterable[Predictions], metric: Metric = ACCURACY
) -> dict[str, float]:
    """Return every metric over all samples, and its mean over the clients that have it."""
    clients = list(clients)
    if not clients:
        return {}
    pooled = Predictions(*map(np.concatenate, zip(*clients, strict=True)))
    figures = measure_predictions(pooled, metric)
    own = [measure_predictions(found, metric) for found in clients]
    has_several = [len(np.unique(found.targets)) > 1 for found in clients]
    for name in tuple(figures):
        counted = has_several if name in _OF_SEVERAL_CLASSES else [True] * len(own)
        values = np.array([one[name] for one, counts in zip(own, counted, strict=True) if counts])
        defined = values[~np.isnan(values)]
        figures[f"{name}_mean"] = float(defined.mean()) if len(defined) else float("nan")
    return figures
