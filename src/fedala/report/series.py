"""Every method of every run folder, as charts and tables show it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedala.metrics import Metric
from fedala.report.arrays import Array, mean_std
from fedala.report.labels import label_results, make_identity
from fedala.report.runs import Run
from fedala.runs.results import MethodResult


@dataclass(frozen=True)
class Series:
    """One method of one run folder: a line in every chart."""

    run: Run
    result: MethodResult
    label: str
    index: int
    group: int
    """The same for methods whose scores can be compared client by client."""

    @property
    def metric(self) -> Metric:
        return self.result.metric

    @cached_property
    def scores(self) -> dict[str, dict[str, Any]]:
        return self.result.scores()

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.result.summary(self.run.results.get("local"))

    @cached_property
    def client_scores(self) -> Array:
        """Every client's score, mean of the runs; empty before the method's last evaluation."""
        return mean_std(self.run.client_scores(self.result.method))[0]

    @cached_property
    def weights(self) -> tuple[Array, list[list[Any]]] | None:
        return self.run.recorded_weights(self.result.method)


def list_series(runs: Sequence[Run]) -> list[Series]:
    """List every method of every folder, under labels that are unique.

    A method that several folders have with the same options and results is listed once.
    """
    entries: list[tuple[Run, MethodResult, int]] = []
    seen = set()
    for run in runs:
        group = next(i for i, other in enumerate(runs) if run.is_comparable_to(other))
        for result in run.results.values():
            key = group, make_identity(run, result)
            if key not in seen:
                entries.append((run, result, group))
            seen.add(key)
    labels = label_results(entries)
    return [
        Series(run, result, label, index, group)
        for index, ((run, result, group), label) in enumerate(zip(entries, labels, strict=True))
    ]


def list_metrics(series: Iterable[Series]) -> list[Metric]:
    """Return what the scores of these methods measure, each metric once."""
    return list(dict.fromkeys(one.metric for one in series))


def find_baseline(one: Series, method: str, series: Sequence[Series]) -> Series | None:
    """Find FedAvg or Local to compare with: in the same folder, or else in a comparable one."""
    candidates = [
        other for other in series if other.result.method == method and other.group == one.group
    ]
    own = [other for other in candidates if other.run is one.run]
    return next(iter([*own, *candidates]), None)
