"""What is written down about one seed of a run folder."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedala.cells.cell import format_value
from fedala.cells.curves import write_curve
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.results import best_row
from fedala.runs.seconds import average_seconds

#: A line of metrics.csv.
Line = Mapping[str, Any]


def summarize(
    config: Config, seed: int, rows: Sequence[HistoryRow], lines: Sequence[Line]
) -> dict[str, Any]:
    """Return the columns of a result that a seed's history and the lines of metrics.csv give."""
    rows = list(rows)
    best, joined = (best_row(rows, column) or rows[0] for column in ("score", "score_joined"))
    own = [line for line in lines if line["seed"] == seed]
    return {
        "seed": seed,
        "method": config.method,
        "set": " ".join(f"{key}={format_value(value)}" for key, value in config.set.items()),
        "shuffle": config.shuffle,
        "rounds": rows[-1].round,
        "planned": config.rounds,
        "eval_every": config.eval_every,
        "best": best.accuracy,
        "best_round": best.round,
        "best_joined": joined.accuracy_joined,
        "final": rows[-1].accuracy,
        "seconds_per_round": average_seconds(rows),
        "together": config.seeds,
        "diverged": sum(row.diverged > 0 for row in rows),
        "sent": max(row.sent for row in rows),
        "uploaded": max(row.uploaded for row in rows),
        "curve": write_curve((row.round, row.accuracy) for row in rows),
        **_summarize_models(own, best.round),
    }


def _summarize_models(lines: Sequence[Line], best_round: int) -> dict[str, Any]:
    """Return the columns of both kinds of models; those that were not tested are None."""
    initialized = [line for line in lines if line["model"] == "initialized"]
    trained = [
        line for line in lines if line["model"] == "trained" and line["accuracy"] is not None
    ]
    at_best: Line = next((line for line in initialized if line["round"] == best_round), {})
    best: Line = max(trained, key=lambda line: float(line["accuracy"]), default={})
    last: Line = trained[-1] if trained else {}
    return {
        "mean": at_best.get("accuracy_mean"),
        "worst": at_best.get("accuracy_worst"),
        "clients": at_best.get("clients"),
        "trained": best.get("accuracy"),
        "trained_round": best.get("round"),
        "trained_final": last.get("accuracy"),
        "trained_mean": best.get("accuracy_mean"),
        "trained_worst": best.get("accuracy_worst"),
        "bytes_sent": _find_most(lines, "bytes_sent"),
        "bytes_uploaded": _find_most(lines, "bytes_uploaded"),
        "trained_curve": write_curve((line["round"], line["accuracy"]) for line in trained),
    }


def _find_most(lines: Iterable[Line], name: str) -> int | None:
    known = [int(line[name]) for line in lines if line.get(name) is not None]
    return max(known, default=None)
