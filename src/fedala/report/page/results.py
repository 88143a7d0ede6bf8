"""The sections on scores and on cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedala.metrics import ACCURACY, Metric
from fedala.report.curves import find_target_rounds, list_seeds
from fedala.report.headline import AgainstMajority, describe_against_majority
from fedala.report.page.views import Cell, Row, Table, difference_cell, label_cell, score_cell
from fedala.report.runs import Run
from fedala.report.series import Series, find_baseline, list_metrics
from fedala.runs.seconds import MEANING

#: The most runs whose rounds are listed.
MOST_RUNS = 10

#: The scores of a summary: their titles, and how the round was chosen.
SCORES = {
    "best": (
        "Best round",
        "the {superlative} of all rounds, picked on test data, as in the paper: optimistic",
    ),
    "best_joined": (
        "Best round, participants",
        "the same over the participants of the round only, as in the paper for ρ < 1",
    ),
    "final": ("Last round", "the last round that was evaluated"),
    "validation_picked": (
        "Picked by validation",
        "test {title} in the round that is best on held-out training data: what to expect in use",
    ),
}
ROUNDS = (
    "Rounds",
    "the best round of each run, by validation samples if there are any; in brackets the round "
    "after which the run stopped early",
)
BELOW_LOCAL = (
    "Clients below Local",
    "share of the clients, in %, that score worse in the last round than with Local, where each "
    "client trains alone",
)


@dataclass(frozen=True)
class Results:
    """The section on scores."""

    tables: list[Table]
    """One for each metric."""
    meanings: list[tuple[str, str]]


@dataclass(frozen=True)
class Cost:
    """The section on seconds, parameters, and the rounds until a score is reached."""

    table: Table
    metric: Metric
    speed: Table | None
    """None if the methods have different metrics."""
    target: str
    """In percent if the metric is a share."""


def task_of(run: Run) -> tuple[str, ...]:
    """Return what the clients learn; scores of different tasks cannot be ranked."""
    options = ("dataset", "partition", "partition_seed", "clients")
    return tuple(str(run.config.get(option)) for option in options)


def view_results(series: Sequence[Series]) -> Results:
    """Return every score, and its difference to FedAvg's."""
    metrics = list_metrics(series)
    tables = []
    for metric in metrics:
        tables.append(_make_table(metric, [one for one in series if one.metric == metric]))
    words = {"superlative": "best", "title": "score"}
    if len(metrics) == 1:
        words = {"superlative": metrics[0].superlative, "title": metrics[0].title}
    meanings = []
    for key, (title, meaning) in SCORES.items():
        if any(key in one.scores for one in series):
            meanings.append((title, meaning.format(**words)))
    meanings.append(ROUNDS)
    if any("clients_below_local" in one.summary for one in series):
        meanings.append(BELOW_LOCAL)
    return Results(tables, meanings)


def _make_table(metric: Metric, series: Sequence[Series]) -> Table:
    keys = [key for key in SCORES if any(key in one.scores for one in series)]
    baselines = []
    for one in series:
        other = find_baseline(one, "fedavg", series)
        baselines.append(None if other is one else other)
    compared = [key for key in ("best", "final") if any(baselines)]
    best = _find_best(series)
    rows = []
    for one, other in zip(series, baselines, strict=True):
        own, task = one.scores, task_of(one.run)
        cells = [score_cell(metric, own.get(key), best.get((task, key), np.nan)) for key in keys]
        for key in compared:
            base = other.scores[key]["mean"] if other else None
            difference = None if base is None else own[key]["mean"] - base
            cells.append(difference_cell(metric, difference))
        rows.append([label_cell(one), *cells])
    for row, one in zip(rows, series, strict=True):
        row.append(Cell(_list_rounds(one)))
    compares_local = any("clients_below_local" in one.summary for one in series)
    if compares_local:
        for row, one in zip(rows, series, strict=True):
            row.append(score_cell(ACCURACY, one.summary.get("clients_below_local")))
    heads = [SCORES[key][0] for key in keys]
    heads += [f"{SCORES[key][0]}, against FedAvg" for key in compared]
    heads += [ROUNDS[0], *[BELOW_LOCAL[0]] * compares_local]
    return Table(_caption(metric, series), ["Method", *heads], rows, style="figures")


def _list_rounds(one: Series) -> str:
    """Return the best round of each run, and where it stopped early."""
    texts = []
    for watch in one.run.watch(one.result.method):
        text = str(watch.best.round) if watch.best else "–"
        if watch.last and watch.is_over(one.run.patience) and watch.last.round < one.run.rounds:
            text += f" ({watch.last.round})"
        texts.append(text)
    return ", ".join(texts[:MOST_RUNS]) + (", …" if len(texts) > MOST_RUNS else "")


def _find_best(series: Sequence[Series]) -> dict[tuple[tuple[str, ...], str], float]:
    """Return the best score of each kind, task by task."""
    best: dict[tuple[tuple[str, ...], str], float] = {}
    for one in series:
        for name, figure in one.scores.items():
            key = task_of(one.run), name
            best[key] = one.metric.pick_best([figure["mean"], best.get(key, np.nan)])
    return best


def _caption(metric: Metric, series: Sequence[Series]) -> str:
    counts = {len(one.scores["best"]["runs"]) for one in series}
    deviation = ""
    if max(counts) > 1:
        runs = f"{max(counts)} runs" if len(counts) == 1 else "its runs"
        deviation = f", mean ± standard deviation of {runs}"
    counted = "correct" if metric == ACCURACY else "score"
    formula = f"Σ {counted} / Σ samples over the clients, before they train"
    methods = [
        AgainstMajority(one.label, one.scores["best"]["mean"], share)
        for one in series
        if (share := one.run.majority_share) is not None
    ]
    has_newcomers = any(one.result.newcomers for one in series)
    majority = describe_against_majority(methods, has_newcomers=has_newcomers) if methods else ""
    return f"Test {metric.heading}{deviation}; {formula}{f'; {majority}' if majority else '.'}"


def view_cost(series: Sequence[Series]) -> Cost:
    """Return seconds and parameters, and how soon a score is reached."""
    rows: list[Row] = []
    for one in series:
        numbers = one.summary["parameters_per_client_and_round"]
        rows.append(
            [
                label_cell(one),
                f"{one.summary['seconds_per_round']:.3g}",
                f"{one.summary['total_seconds']:,.3g}",
                *(f"{numbers[key]:,}" for key in ("sent", "uploaded", "together")),
            ]
        )
    seconds = ["Seconds per round", "Seconds in total"]
    heads = ["Method", *seconds, "Parameters received", "uploaded", "together"]
    caption = f"Cost; parameters per client and round. {MEANING}"
    if max(len(list_seeds(one.result)) for one in series) > 1:
        caption += " The runs of a method train side by side; the seconds are of all of them, "
        caption += "without seeds that were added later."
    metric, target = series[0].metric, _choose_target(series)
    speed = _make_speed_table(series, target) if len(list_metrics(series)) == 1 else None
    table = Table(caption, heads, rows, style="figures")
    return Cost(table, metric, speed, f"{metric.scale * target:.4g}")


def _make_speed_table(series: Sequence[Series], target: float) -> Table:
    rows: list[Row] = []
    for one in series:
        [target_rounds] = find_target_rounds(one.result, [target])
        rows.append([label_cell(one), *describe_speed(*target_rounds)])
    heads = ["Method", "Rounds", "Seconds", "Runs that reach it"]
    return Table("Convergence speed", heads, rows, style="figures")


def _choose_target(series: Sequence[Series]) -> float:
    """Return 90 % of the best share, in whole percent; of another metric, 10 % from the best."""
    metric = series[0].metric
    bests = np.concatenate([one.result.best for one in series])
    finite = bests[np.isfinite(bests)]
    best = metric.pick_best(finite.tolist()) if finite.size else 0.5
    if metric.is_share:
        return max(1, int(90 * best)) / 100
    return float(f"{best * (0.9 if metric.higher_is_better else 1.1):.3g}")


def describe_speed(rounds: list[int | None], seconds: list[float | None]) -> list[str]:
    """Return mean rounds and seconds of the runs that reach a target, and how many do."""
    pairs = [
        (r, s) for r, s in zip(rounds, seconds, strict=True) if r is not None and s is not None
    ]
    if not pairs:
        return ["–", "–", f"0 of {len(rounds)}"]
    mean_rounds, mean_seconds = np.mean(pairs, axis=0)
    return [f"{mean_rounds:.4g}", f"{mean_seconds:.3g}", f"{len(pairs)} of {len(rounds)}"]
