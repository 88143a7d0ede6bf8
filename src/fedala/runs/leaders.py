"""Which points of a sweep, and which methods of a run, are the best."""

import math
from collections.abc import Iterable, Sequence

from fedala.runs.results import MethodResult
from fedala.runs.sweep import split_label


def are_validated(results: Iterable[MethodResult]) -> bool:
    """Tell whether validation samples pick the round of every method, and the point of a sweep."""
    return all(one.validation_picked is not None for one in results)


def find_winners(points: Sequence[MethodResult]) -> list[MethodResult]:
    """Find the best points of a sweep: several if equal; the first if none is a number.

    Validation samples decide if there are any, and otherwise test samples.
    """
    means = [one.criterion for one in points]
    best = points[0].history[0].criterion_metric.pick_best(means)
    return [one for one, mean in zip(points, means, strict=True) if mean == best] or [points[0]]


def find_leaders(results: Sequence[MethodResult]) -> tuple[str, list[MethodResult]]:
    """Find the methods with the best mean score, by the key of the score that compares them.

    That is `validation_picked` if validation samples have picked every method's round, else `best`.
    A sweep takes part with the point that its own samples pick. There are several if they are
    equal, and none if no score is a number.
    """
    sweeps: dict[str, list[MethodResult]] = {}
    for one in results:
        if one.history:
            method, point = split_label(one.method)
            sweeps.setdefault(f"{method}[]" if point else method, []).append(one)
    compared = []
    for name, points in sweeps.items():
        compared += find_winners(points)[:1] if name.endswith("[]") else points
    key = "validation_picked" if compared and are_validated(compared) else "best"
    means = [one.scores()[key]["mean"] for one in compared]
    best = compared[0].metric.pick_best(means) if compared else math.nan
    return key, [one for one, mean in zip(compared, means, strict=True) if mean == best]


def find_best(results: Sequence[MethodResult]) -> tuple[str, MethodResult | None]:
    """Find the first of the methods with the best mean score; see `find_leaders`."""
    key, leaders = find_leaders(results)
    return key, leaders[0] if leaders else None
