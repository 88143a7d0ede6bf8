"""The sections on accuracies and on cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedala.report.curves import find_target_rounds, list_seeds, sum_seconds
from fedala.report.page.views import Row, Table, difference_cell, label_cell, percent_cell
from fedala.report.runs import Run
from fedala.report.series import Series, find_baseline

#: The accuracies of a summary: their titles, and how the round was chosen.
ACCURACIES = {
    "best": (
        "Best round",
        "the highest of all rounds, picked on test data, as in the paper: optimistic",
    ),
    "best_joined": (
        "Best round, participants",
        "the same over the participants of the round only, as in the paper for ρ < 1",
    ),
    "final": ("Last round", "the last round that was evaluated"),
    "validation_picked": (
        "Picked by validation",
        "test accuracy in the round that is best on held-out training data: what to expect in use",
    ),
}
BELOW_LOCAL = (
    "Clients below Local",
    "share of the clients, in %, that are less accurate in the last round than with Local, where "
    "each client trains alone",
)


@dataclass(frozen=True)
class Results:
    """The section on accuracies."""

    table: Table
    meanings: list[tuple[str, str]]


@dataclass(frozen=True)
class Cost:
    """The section on seconds, parameters, and the rounds until an accuracy is reached."""

    table: Table
    speed: Table
    target: int
    """In percent."""


def task_of(run: Run) -> tuple[str, ...]:
    """Return what the clients learn; accuracies of different tasks cannot be ranked."""
    options = ("dataset", "partition", "partition_seed", "clients")
    return tuple(str(run.config.get(option)) for option in options)


def view_results(series: Sequence[Series]) -> Results:
    """Return every accuracy, and its difference to FedAvg's."""
    figures = [one.summary["accuracy"] for one in series]
    keys = [key for key in ACCURACIES if any(key in own for own in figures)]
    baselines = []
    for one in series:
        other = find_baseline(one, "fedavg", series)
        baselines.append(None if other is one else other)
    compared = [key for key in ("best", "final") if any(baselines)]
    best = _find_best(series)
    rows = []
    for one, own, other in zip(series, figures, baselines, strict=True):
        task = task_of(one.run)
        cells = [percent_cell(own.get(key), best.get((task, key), 0.0)) for key in keys]
        for key in compared:
            base = other.summary["accuracy"][key]["mean"] if other else None
            cells.append(difference_cell(None if base is None else own[key]["mean"] - base))
        rows.append([label_cell(one), *cells])
    compares_local = any("clients_below_local" in one.summary for one in series)
    if compares_local:
        for row, one in zip(rows, series, strict=True):
            row.append(percent_cell(one.summary.get("clients_below_local")))
    heads = [ACCURACIES[key][0] for key in keys]
    heads += [f"{ACCURACIES[key][0]}, against FedAvg" for key in compared]
    heads += [BELOW_LOCAL[0]] * compares_local
    table = Table(_caption(figures), ["Method", *heads], rows, style="figures")
    meanings = [ACCURACIES[key] for key in keys]
    return Results(table, meanings + [BELOW_LOCAL] * compares_local)


def _find_best(series: Sequence[Series]) -> dict[tuple[tuple[str, ...], str], float]:
    """Return the highest accuracy of each kind, task by task."""
    best: dict[tuple[tuple[str, ...], str], float] = {}
    for one in series:
        for name, figure in one.summary["accuracy"].items():
            key = task_of(one.run), name
            best[key] = float(np.fmax(figure["mean"], best.get(key, 0.0)))
    return best


def _caption(figures: Sequence[dict[str, Any]]) -> str:
    counts = {len(own["best"]["runs"]) for own in figures}
    deviation = ""
    if max(counts) > 1:
        runs = f"{max(counts)} runs" if len(counts) == 1 else "its runs"
        deviation = f", mean ± standard deviation of {runs}"
    formula = "Σ correct / Σ samples over the clients, before they train"
    return f"Test accuracy in %{deviation}; {formula}."


def view_cost(series: Sequence[Series]) -> Cost:
    """Return seconds and parameters, and how soon an accuracy is reached."""
    rows: list[Row] = []
    for one in series:
        numbers = one.summary["parameters_per_client_and_round"]
        rows.append(
            [
                label_cell(one),
                f"{one.summary['seconds_per_round']:.3g}",
                f"{float(sum_seconds(one.result)[-1]):,.0f}",
                *(f"{numbers[key]:,}" for key in ("sent", "uploaded", "together")),
            ]
        )
    seconds = ["Seconds per round", "Seconds in total"]
    heads = ["Method", *seconds, "Parameters received", "uploaded", "together"]
    caption = "Cost; parameters per client and round."
    if max(len(list_seeds(one.result)) for one in series) > 1:
        caption += " The runs of a method train side by side; the seconds are of all of them."
    target = _choose_target(series)
    speed: list[Row] = []
    for one in series:
        [target_rounds] = find_target_rounds(one.result, [target / 100])
        speed.append([label_cell(one), *describe_speed(*target_rounds)])
    speed_heads = ["Method", "Rounds", "Seconds", "Runs that reach it"]
    return Cost(
        Table(caption, heads, rows, style="figures"),
        Table("Convergence speed", speed_heads, speed, style="figures"),
        target,
    )


def _choose_target(series: Sequence[Series]) -> int:
    """Return 90 % of the highest accuracy, as a whole number of percent."""
    bests = np.concatenate([one.result.best for one in series])
    finite = bests[np.isfinite(bests)]
    best = float(finite.max()) if finite.size else 0.5
    return max(1, int(90 * best))


def describe_speed(rounds: list[int | None], seconds: list[float | None]) -> list[str]:
    """Return mean rounds and seconds of the runs that reach a target, and how many do."""
    pairs = [
        (r, s) for r, s in zip(rounds, seconds, strict=True) if r is not None and s is not None
    ]
    if not pairs:
        return ["–", "–", f"0 of {len(rounds)}"]
    mean_rounds, mean_seconds = np.mean(pairs, axis=0)
    return [f"{mean_rounds:.4g}", f"{mean_seconds:.3g}", f"{len(pairs)} of {len(rounds)}"]
