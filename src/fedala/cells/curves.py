"""Curves as text: accuracies over the rounds, such as `0:0.1 10:0.52`."""

import re
from collections.abc import Iterable

from fedala.errors import UserError
from fedala.report.arrays import pick_evenly

#: The most points of a curve in a csv file.
MOST_POINTS = 60
_POINT = re.compile(r"(\d{1,9}):([01](?:\.\d{1,9})?)", re.ASCII)

Curve = list[tuple[int, float]]


def write_curve(points: Iterable[tuple[int, float]]) -> str:
    """Return a curve as text, with some of its points if there are many."""
    points = list(points)
    chosen = [points[index] for index in pick_evenly(len(points), MOST_POINTS)]
    return " ".join(f"{round}:{accuracy:.4f}" for round, accuracy in chosen)


def read_curve(text: str) -> Curve:
    """Return the points of a curve; refuse anything else."""
    points: Curve = []
    for word in text.split():
        match = _POINT.fullmatch(word)
        accuracy = float(match[2]) if match else 2.0
        if match is None or accuracy > 1 or (points and points[-1][0] >= int(match[1])):
            raise UserError(
                f"a curve is made of rounds in order with their accuracies, such as 0:0.1 10:0.52, "
                f"not {text[:80]!r}."
            )
        points.append((int(match[1]), accuracy))
    return points
