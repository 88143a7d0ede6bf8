"""What is written down about one seed of one method, and how its curves become text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedala.cells.results import SeedResult, number
from fedala.errors import UserError
from fedala.methods import catalogue
from fedala.report.arrays import pick_evenly

#: The most points of a curve in a csv file.
MOST_POINTS = 60
_POINT = re.compile(r"(\d{1,9}):([01](?:\.\d{1,9})?)", re.ASCII)

Curve = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class BoardResult(SeedResult):
    """One seed of one cell. `best` and `final` are of initialised models, before training.

    What is not known is None: trained models are not tested before the first round.
    """

    mean: float | None = number(0, 1)
    """Mean of the clients' accuracies in the best round."""
    worst: float | None = number(0, 1)
    """Mean of the tenth of the clients with the lowest accuracies in the best round."""
    trained: float | None = number(0, 1)
    """Accuracy of trained models, after local training, in the round in which it is best."""
    trained_round: int | None = number(0)
    trained_final: float | None = number(0, 1)
    trained_mean: float | None = number(0, 1)
    trained_worst: float | None = number(0, 1)
    bytes_sent: int | None = number(0)
    """Bytes that a client receives in a round."""
    bytes_uploaded: int | None = number(0)
    clients: int | None = number(0)
    """Clients with test samples."""
    curve: str
    """Round and accuracy of initialised models, such as `0:0.1 10:0.52`."""
    trained_curve: str

    @property
    def schedule(self) -> int:
        """Return the planned rounds if the method's schedule depends on them, otherwise 0.

        A method that is not installed here may have one.
        """
        return super().schedule if is_known(self.method) else self.planned


def is_known(method: str) -> bool:
    """Tell whether a method is registered, with or without ALA."""
    return method.removesuffix("+ala") in catalogue()


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


def summarize_models(rows: Sequence[Mapping[str, Any]], seed: int, best_round: int) -> Any:
    """Return the columns that the lines of metrics.csv give for a seed."""
    own = [row for row in rows if row["seed"] == seed]
    initialized = [row for row in own if row["model"] == "initialized"]
    trained = [row for row in own if row["model"] == "trained" and row["accuracy"] is not None]
    at_best: Mapping[str, Any] = next(
        (row for row in initialized if row["round"] == best_round), {}
    )
    best: Mapping[str, Any] = max(trained, key=lambda row: float(row["accuracy"]), default={})
    last: Mapping[str, Any] = trained[-1] if trained else {}
    return {
        "mean": at_best.get("accuracy_mean"),
        "worst": at_best.get("accuracy_worst"),
        "clients": at_best.get("clients"),
        "trained": best.get("accuracy"),
        "trained_round": best.get("round"),
        "trained_final": last.get("accuracy"),
        "trained_mean": best.get("accuracy_mean"),
        "trained_worst": best.get("accuracy_worst"),
        "bytes_sent": _find_most(own, "bytes_sent"),
        "bytes_uploaded": _find_most(own, "bytes_uploaded"),
        "trained_curve": write_curve((row["round"], row["accuracy"]) for row in trained),
    }


def _find_most(rows: Iterable[Mapping[str, Any]], name: str) -> int | None:
    known = [int(row[name]) for row in rows if row.get(name) is not None]
    return max(known, default=None)
