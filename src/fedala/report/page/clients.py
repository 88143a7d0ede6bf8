"""The sections on single clients: their scores, and the samples that they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedala.metrics import LABEL_ACCURACY
from fedala.report.arrays import Array
from fedala.report.page.views import (
    MOST_CLIENTS,
    Chart,
    Row,
    Select,
    Table,
    difference_cell,
    label_cell,
)
from fedala.report.runs import Run, distinct_splits
from fedala.report.series import Series, find_baseline, list_metrics

_MOST_CLASSES = 100


@dataclass(frozen=True)
class Clients:
    """The section on the clients' scores."""

    chart: Chart
    gains: list[Table]


def view_clients(series: Sequence[Series]) -> Clients | None:
    """Return who gains and who loses; None before the last evaluation of all methods."""
    known = [one for one in series if one.client_scores.size]
    if not known:
        return None
    metrics = list_metrics(known)
    groups = [one.group for one in known]
    baselines = []
    for one in known:
        if one.result.method in ("fedavg", "local") and groups.count(one.group) > 1:
            baselines.append(one)
    controls = []
    title = " or ".join(metric.title for metric in metrics)
    if baselines:
        shown = [(str(one.index), f"difference to {one.label}") for one in baselines]
        choices = [("score", title), *shown]
        controls.append(Select("clients-show", "Show", choices, "show"))
    orders = [
        ("client", "by number"),
        ("samples", "by samples"),
        ("value", "by the first method's value"),
    ]
    controls.append(Select("clients-order", "Order", orders, "order"))
    tables = []
    for group in dict.fromkeys(groups):
        tables.append(_make_score_table([one for one in known if one.group == group]))
    for base in baselines:
        tables += _make_difference_tables(known, base)
    caption = f"Every client's test {title} in the last round, mean of the runs."
    chart = Chart("clients-chart", "clients", caption, tables, controls)
    gains = [_make_gain_table(known, one) for one in baselines]
    return Clients(chart, [table for table in gains if table.rows])


def _make_score_table(series: Sequence[Series]) -> Table:
    metric = series[0].metric
    samples = series[0].run.test_samples()
    rows: list[Row] = []
    for client in range(min(MOST_CLIENTS, len(samples))):
        cells = []
        for one in series:
            own = one.client_scores
            has_value = client < len(own) and not np.isnan(own[client])
            cells.append(metric.format(own[client]) if has_value else "–")
        rows.append([series[0].run.name_client(client), f"{samples[client]:.0f}", *cells])
    caption = f"{metric.heading.capitalize()} by client"
    if len(samples) > MOST_CLIENTS:
        caption += f"; the first {MOST_CLIENTS} of {len(samples)}, all of them in clients.csv"
    return Table(caption, ["Client", "Test samples", *(one.label for one in series)], rows)


def _list_compared(series: Sequence[Series], base: Series) -> list[Series]:
    """Return the methods that are compared with FedAvg or Local, client by client."""
    return [
        one
        for one in series
        if one is not base
        and find_baseline(one, base.result.method, series) is base
        and one.client_scores.shape == base.client_scores.shape
    ]


def _subtract(one: Series, base: Series) -> Array:
    with np.errstate(invalid="ignore"):  # infinite under both
        return one.client_scores - base.client_scores


def _make_difference_tables(series: Sequence[Series], base: Series) -> list[Table]:
    """Return every client's difference to FedAvg or Local; nothing if there is none to compare."""
    compared, metric = _list_compared(series, base), base.metric
    if not compared:
        return []
    differences = [_subtract(one, base) for one in compared]
    rows: list[Row] = []
    for client in range(min(MOST_CLIENTS, len(base.client_scores))):
        cells = [difference_cell(metric, float(values[client])) for values in differences]
        rows.append([base.run.name_client(client), *cells])
    unit = f"in points of {metric.title}" if metric.is_share else metric.title
    caption = f"Difference to {base.label} by client, {unit}"
    return [Table(caption, ["Client", *(one.label for one in compared)], rows, style="figures")]


def _make_gain_table(series: Sequence[Series], base: Series) -> Table:
    """Return how many clients have a better or worse score than with FedAvg or Local."""
    metric = base.metric
    rows: list[Row] = []
    for one in _list_compared(series, base):
        difference = _subtract(one, base)
        difference = difference[np.isfinite(difference)]
        if difference.size:
            gains = difference if metric.higher_is_better else -difference
            gain, lose = int((gains > 0).sum()), int((gains < 0).sum())
            most = [
                difference_cell(metric, float(difference.mean())),
                difference_cell(metric, float(difference[gains.argmax()]) if gain else None),
                difference_cell(metric, float(difference[gains.argmin()]) if lose else None),
            ]
            rows.append([label_cell(one), gain, int((difference == 0).sum()), lose, *most])
    counts = ["Clients that gain", "equal", "that lose"]
    heads = ["Method", *counts, "Mean difference", "Gains most", "Loses most"]
    unit = f"in points of {metric.title}" if metric.is_share else metric.title
    caption = f"Against {base.label}, {unit}; every client counts the same."
    return Table(caption, heads, rows, style="figures")


def view_split(runs: Sequence[Run]) -> Chart | None:
    """Return a chart of the samples by client and class; None if no run has recorded them."""
    known = distinct_splits(runs)
    if not known:
        return None
    controls = []
    if len(known) > 1:
        names = [f"{run.name}: {run.config.get('partition')}" for run in known]
        choices = [(str(index), name) for index, name in enumerate(names)]
        controls.append(Select("split-run", "Folder", choices, "run"))
    classes = " or ".join(dict.fromkeys(_name_classes(run) for run in known))
    caption = f"The area of a circle is the number of samples that a client has of a {classes}."
    tables = [_make_split_table(run) for run in known]
    return Chart("split-chart", "split", caption, tables, controls)


def _make_split_table(run: Run) -> Table:
    counts, clients, names = run.count_samples()
    names = names[:_MOST_CLASSES]
    rows: list[Row] = []
    for client, own in zip(clients[:MOST_CLIENTS], counts, strict=False):
        rows.append(
            [run.name_client(client), *(f"{n:.0f}" for n in own[: len(names)]), f"{own.sum():.0f}"]
        )
    rest = "" if counts.shape == (len(rows), len(names)) else "; the rest is in split.csv"
    what = _name_classes(run)
    caption = f"Samples by client and {what}, {run.name}{rest}"
    # A sample may have several labels: their sum is not the number of samples.
    return Table(
        caption, ["Client", *names, f"{what}s together" if what == "label" else "together"], rows
    )


def _name_classes(run: Run) -> str:
    return "label" if run.metric == LABEL_ACCURACY else "class"
