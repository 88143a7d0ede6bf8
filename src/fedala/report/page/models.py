"""The section on the kinds of models that were evaluated: a table for each, so none are mixed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedala.metrics import METRICS, Metric
from fedala.records import MODEL_KINDS
from fedala.report.arrays import mean_std
from fedala.report.page.views import Cell, Row, Table, label_cell
from fedala.report.series import Series

#: The kinds of models: their titles, and what they are.
KINDS = {
    "initialized": (
        "Initialised personal models",
        "each client's own model as it starts a round, before it trains: the model that the paper "
        "tests, and every other section of this page",
    ),
    "trained": (
        "Trained personal models",
        "each client's own model right after the local training of the last round, as most other "
        "papers report it; only clients that took part in that round count",
    ),
    "received": (
        "Received models",
        "the model that the server sends, tested by each client on its own samples before anything "
        "is done to it; only clients that take part in the evaluation's round count",
    ),
    "global": (
        "Global model",
        "the server's one model, tested on the samples of all clients together",
    ),
}


def _describe_score(metric: Metric) -> dict[str, tuple[str, str]]:
    """Return heading and meaning of a score and of its spread over the clients."""
    name, title = metric.name, metric.title
    return {
        name: (title.capitalize(), "over the samples of all clients"),
        f"{name}_mean": (
            f"{title}, mean".capitalize(),
            "of the clients, each counted once",
        ),
        f"{name}_std": (f"{title}, deviation".capitalize(), "standard deviation over the clients"),
        f"{name}_worst": (
            f"{title}, worst tenth".capitalize(),
            "mean of the tenth of the clients with the worst, at least one",
        ),
    }


_MEAN_OF_SEVERAL_CLASSES = "mean of the clients' own, without those of one class"
#: The figures of a table: their headings, and what they are.
FIGURES = {
    **{name: text for metric in METRICS for name, text in _describe_score(metric).items()},
    # Accuracies are usually alone in a table, so their headings are short.
    "accuracy": ("Accuracy", "correct answers of all clients / samples of all clients"),
    "accuracy_mean": ("Mean", "of the clients' accuracies; every client counts the same"),
    "accuracy_std": ("Deviation", "standard deviation of the clients' accuracies"),
    "accuracy_worst": (
        "Worst tenth",
        "mean accuracy of the tenth of the clients with the lowest, at least one",
    ),
    "f1": ("Macro F1", "mean F1 of the classes"),
    "balanced_accuracy": ("Balanced accuracy", "mean accuracy of the classes"),
    "auc": ("AUC", "mean area under the ROC curve of each class against the rest"),
    "ece": ("ECE", "expected calibration error, 15 bins; 0 is best"),
    "f1_mean": ("Macro F1, clients", _MEAN_OF_SEVERAL_CLASSES),
    "balanced_accuracy_mean": ("Balanced accuracy, clients", _MEAN_OF_SEVERAL_CLASSES),
    "auc_mean": ("AUC, clients", _MEAN_OF_SEVERAL_CLASSES),
    "ece_mean": ("ECE, clients", "mean of the clients' own"),
    "rmse": ("RMSE", "root of the mean squared error"),
    "r2": ("R²", "1 − squared errors / squared distances from the mean target; 1 is best"),
    "rmse_mean": ("RMSE, clients", "mean of the clients' own"),
    "r2_mean": ("R², clients", "mean of the clients' own, without those of equal targets"),
    "loss": ("Loss", "mean loss of all samples"),
    "bytes_sent": ("Bytes received", "by a client in the last round"),
    "bytes_uploaded": ("Bytes uploaded", "by a client in the last round"),
}
#: Those that are not shares, and amounts.
_NUMBERS = {name for metric in METRICS if not metric.is_share for name in _describe_score(metric)}
_NUMBERS |= {"rmse", "r2", "rmse_mean", "r2_mean"}
_AMOUNTS = {"loss", "bytes_sent", "bytes_uploaded"}


@dataclass(frozen=True)
class Models:
    """The section on the kinds of models."""

    tables: list[Table]
    meanings: list[tuple[str, str]]


def view_models(series: Sequence[Series]) -> Models | None:
    """Return what each kind of model scores at the last evaluation; None if nothing is recorded."""
    found = {
        (one.index, kind): average_figures(one, kind) for one in series for kind in MODEL_KINDS
    }
    present = {name for figures in found.values() for name in figures}
    names = [name for name in FIGURES if name in present]
    # A page may show runs of different scores.
    shares = [name for name in names if name not in _NUMBERS | _AMOUNTS]
    is_mixed = bool(shares) and not _NUMBERS.isdisjoint(names)
    tables = []
    for kind, (title, meaning) in KINDS.items():
        rows: list[Row] = []
        for one in series:
            figures = found[one.index, kind]
            if figures:
                rows.append([label_cell(one), *(figures.get(name, Cell("–")) for name in names)])
        if rows:
            units = dict.fromkeys(shares, ", %") if is_mixed else {}
            heads = ["Method", *(FIGURES[name][0] + units.get(name, "") for name in names)]
            unit = ", in %" if shares and not is_mixed else ""
            caption = f"{title}{unit}: {meaning}."
            tables.append(Table(caption, heads, rows, style="figures"))
    if not tables:
        return None
    return Models(tables, [FIGURES[name] for name in names])


def average_figures(one: Series, kind: str) -> dict[str, Cell]:
    """Return the figures of a kind of model at each run's last evaluation, over the runs."""
    last = {row.seed: row.round for row in one.result.history}  # runs may stop early
    kinds = [row for row in one.result.metrics if row["model"] == kind]
    rows = [row for row in kinds if row["round"] == last.get(row["seed"])]
    cells = {}
    for name in FIGURES:
        values = np.array([row[name] for row in rows if name in row], dtype=float)
        if values.size:
            cells[name] = _make_cell(name, values)
    return cells


def _make_cell(name: str, values: np.ndarray) -> Cell:
    """Return mean and deviation of a figure over the runs, in percent if it is a share."""
    mean, deviation = (float(part) for part in mean_std(values))
    has_spread = values.size > 1 and np.isfinite(deviation)
    if name.startswith("bytes"):
        return Cell(f"{mean:,.0f}")
    if name in _NUMBERS:
        return Cell(f"{mean:.4g}", f"{deviation:.2g}" if has_spread else "")
    scale, digits = (1, 4) if name == "loss" else (100, 2)
    spread = f"{scale * deviation:.{digits}f}" if has_spread else ""
    return Cell(f"{scale * mean:.{digits}f}", spread)
