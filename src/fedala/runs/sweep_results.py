"""What a sweep has found: the best point of each method, and whether the grid was wide enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedala.runs.leaders import are_validated, find_winners
from fedala.runs.results import MethodResult, describe_spread
from fedala.runs.sweep import Dimension, Point, read_dimensions, split_label


@dataclass(frozen=True)
class Sweep:
    """The points of one method. All of them have results."""

    method: str
    dimensions: list[Dimension]
    points: dict[str, Point]
    """By label."""
    results: dict[str, MethodResult]

    @property
    def is_validated(self) -> bool:
        """Whether validation samples pick the round and the point."""
        return are_validated(self.results.values())

    def format_criterion(self, label: str) -> str:
        """Return the figure by which points are compared, the mean over the seeds, as text."""
        result = self.results[label]
        return result.history[0].criterion_metric.format(result.criterion)

    def test_score(self, label: str) -> dict[str, Any]:
        """Return what a point scores on test samples, in the round that is picked for it."""
        result = self.results[label]
        picked = result.validation_picked if self.is_validated else result.best
        assert picked is not None
        return describe_spread(picked)

    @property
    def winner(self) -> str:
        """The label of the best point: the first of equals, or the first if none is a number."""
        return self.equals[0].method

    @property
    def equals(self) -> list[MethodResult]:
        """The best points: the winner first, then those that are equal to it."""
        return find_winners(list(self.results.values()))

    @property
    def title(self) -> str:
        """The title of the method."""
        return split_label(self.results[self.winner].title)[0]

    def edges(self) -> list[str]:
        """Say at which ends of the grid the winner stands, such as `lr=0.1 is the largest`."""
        point = self.points[self.winner]
        found = []
        for dimension in self.dimensions:
            value = point.get(dimension.name, "")
            if end := dimension.find_end(value):
                found.append(f"{dimension.name}={value} is the {end}")
        return found

    def summary(self) -> dict[str, Any]:
        """Return the sweep's part of `summary.json`."""
        winner = self.results[self.winner]
        metric, criterion = winner.metric, winner.history[0].criterion
        return {
            "winner": self.winner,
            "picked_by": metric.columns.get(criterion, criterion),
            "criterion": winner.criterion,
            metric.name: self.test_score(self.winner),
            "at_the_edge": self.edges(),
        }


def find_sweeps(swept: Mapping[str, str], results: Mapping[str, MethodResult]) -> list[Sweep]:
    """Return the sweep of each method that has several points with results."""
    by_method: dict[str, dict[str, Point]] = {}
    for label in results:
        method, point = split_label(label)
        if point:
            by_method.setdefault(method, {})[label] = point
    dimensions = read_dimensions(swept)
    sweeps = []
    for method, points in by_method.items():
        if len(points) > 1:
            names = next(iter(points.values()))
            own = [one for one in dimensions if one.name in names]
            sweeps.append(Sweep(method, own, points, {label: results[label] for label in points}))
    return sweeps
