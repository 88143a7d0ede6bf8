"""Metrics of classifiers: over all samples, and as means over the clients.

A class that a set of samples does not have is treated as scikit-learn treats it: F1 counts the
classes among targets or predictions, balanced accuracy those among the targets, and AUC those with
samples inside and outside. A metric that is not defined is NaN.
"""

from collections.abc import Callable, Iterable

import numpy as np

from fedala.lanes.evaluation import Predictions

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


METRICS: dict[str, Callable[[Predictions], float]] = {
    "f1": macro_f1,
    "balanced_accuracy": balanced_accuracy,
    "auc": one_vs_rest_auc,
    "ece": calibration_error,
}


def summarize_scores(scores: np.ndarray) -> dict[str, float]:
    """Return accuracy and loss over all samples, and how accuracies spread over the clients.

    `scores` is [client, (correct answers, summed loss, samples)]. Clients without samples do not
    count. The worst are the tenth of the clients with the lowest accuracy, at least one.
    """
    scores = scores[scores[:, 2] > 0]
    if not len(scores):
        return {"clients": 0, "samples": 0}
    correct, loss, samples = scores.sum(0)
    accuracies = np.sort(scores[:, 0] / scores[:, 2])
    worst = accuracies[: max(1, len(accuracies) // 10)]
    return {
        "clients": len(scores),
        "samples": int(samples),
        "accuracy": float(correct / samples),
        "loss": float(loss / samples),
        "accuracy_mean": float(accuracies.mean()),
        "accuracy_std": float(accuracies.std()),
        "accuracy_worst": float(worst.mean()),
    }


def summarize_predictions(clients: Iterable[Predictions]) -> dict[str, float]:
    """Return every metric over all samples, and its mean over the clients that have it."""
    clients = list(clients)
    if not clients:
        return {}
    pooled = Predictions(*map(np.concatenate, zip(*clients, strict=True)))
    figures = {name: metric(pooled) for name, metric in METRICS.items()}
    for name, metric in METRICS.items():
        own = np.array([metric(found) for found in clients])
        defined = own[~np.isnan(own)]
        figures[f"{name}_mean"] = float(defined.mean()) if len(defined) else float("nan")
    return figures


#: The figures of a model that its scores give.
PLAIN_FIGURES = (
    *("clients", "samples", "accuracy", "loss"),
    *("accuracy_mean", "accuracy_std", "accuracy_worst"),
)
#: All figures of a model, in the order of the columns of `metrics.csv`.
FIGURES = (
    *PLAIN_FIGURES,
    *METRICS,
    *(f"{name}_mean" for name in METRICS),
)
