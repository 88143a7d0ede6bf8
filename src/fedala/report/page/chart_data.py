"""The numbers that the page's script draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedala.metrics import SHARES, Metric
from fedala.report.arrays import Array, pick_evenly
from fedala.report.curves import (
    TITLES,
    collect_curves,
    find_target_rounds,
    list_columns,
    list_seeds,
)
from fedala.report.page.results import describe_speed
from fedala.report.page.views import MOST_CLIENTS, MOST_POINTS
from fedala.report.page.weights import mean_over_clients
from fedala.report.runs import Run, distinct_splits
from fedala.report.series import Series
from fedala.runs.seconds import sum_seconds


def collect_chart_data(runs: Sequence[Run], series: Sequence[Series]) -> dict[str, Any]:
    """Return the data of all charts, ready for JSON."""
    return {
        "series": [_collect_curves(one) for one in series],
        "columns": TITLES,
        "shares": SHARES,
        "metrics": [_describe_metric(one.metric) for one in series],
        "clients": [_round_values(one.client_scores[:MOST_CLIENTS]) for one in series],
        "samples": [_to_counts(one.run.test_samples()) for one in series],
        "names": [_list_names(one) for one in series],
        "kinds": [one.group for one in series],
        "splits": [_collect_split(run) for run in distinct_splits(runs)],
        "weights": [_collect_weights(one) for one in series if one.weights is not None],
    }


def _list_names(one: Series) -> list[str]:
    """Return how the chart names each client; nothing if clients have no names."""
    count = min(MOST_CLIENTS, len(one.client_scores)) if one.run.client_names else 0
    return [one.run.name_client(client) for client in range(count)]


def _describe_metric(metric: Metric) -> dict[str, Any]:
    return {"name": metric.name, "title": metric.title, "isShare": metric.is_share}


def _collect_curves(one: Series) -> dict[str, Any]:
    rounds, _ = collect_curves(one.result, "loss")
    chosen = pick_evenly(len(rounds), MOST_POINTS)
    seconds = np.array(list(sum_seconds(one.result.history).values()))
    # The page asks for shares in whole percent, and for nothing else.
    percents = [target / 100 for target in range(101)] if one.metric.is_share else []
    values = {}
    for name in list_columns(one.result):
        curve = collect_curves(one.result, name)[1][:, chosen]
        curve[:, np.isinf(curve).any(0)] = np.nan  # the mean of these rounds is infinite
        values[name] = _round_values(curve)
    return {
        "label": one.label,
        "rounds": [rounds[index] for index in chosen],
        "seconds": _round_values(seconds[chosen]),
        "seeds": list_seeds(one.result),
        "values": values,
        "speed": [describe_speed(*pair) for pair in find_target_rounds(one.result, percents)],
    }


def _collect_split(run: Run) -> dict[str, Any]:
    counts, clients, classes = run.count_samples()
    return {
        "classes": classes,
        "counts": [_to_counts(row) for row in counts[:MOST_CLIENTS]],
        "numbers": clients[:MOST_CLIENTS],
        "clients": len(counts),
    }


def _collect_weights(one: Series) -> dict[str, Any]:
    assert one.weights is not None
    array, (seeds, rounds, clients, parameters) = one.weights
    return {
        "label": one.label,
        "seeds": seeds,
        "rounds": rounds,
        "clients": clients[:MOST_CLIENTS],
        "names": [one.run.name_client(client) for client in clients[:MOST_CLIENTS]],
        "parameters": parameters,
        # [seed][round][client][parameter]
        "mean": _round_values(array[:, :, :MOST_CLIENTS, :, 0]),
        # [seed][round][parameter][bin]
        "shares": _round_values(mean_over_clients(array)[..., 1:]),
    }


def _round_values(values: Array) -> Any:
    """Return nested lists of numbers with five digits."""
    if values.ndim:
        return [_round_values(part) for part in values]
    return float(f"{float(values):.5g}")


def _to_counts(values: Array) -> list[int]:
    return [int(value) for value in np.nan_to_num(values)]
