"""The headlines of several methods in several run folders as one table, in any format."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import UserError
from fedala.metrics import ACCURACY, Metric
from fedala.options import suggest
from fedala.report.arrays import mean_std, to_array
from fedala.report.headline import HEADLINES, Headline, has_number, rank_means
from fedala.report.runs import Run
from fedala.report.statistics import paired_t_test, wilcoxon_test
from fedala.runs.results import MethodResult
from fedala.runs.sweep import split_label

#: What may be paired to test a method against the baseline, and the sentence about the test.
PAIRINGS = {
    "seeds": "two-sided paired t-test over the seeds",
    "clients": "two-sided Wilcoxon signed-rank test over the clients' scores "
    "at the last evaluation, each the mean of its seeds",
}
#: The marks of significant differences, by the largest p-value, the smallest first.
MARKS = {0.01: "‡", 0.05: "†"}


@dataclass(frozen=True)
class Cell:
    """One method in one run folder."""

    figure: dict[str, Any]
    """Mean, std and runs, as in a summary."""
    rank: int | None = None
    """1 for the best of its column; None if it is not a number."""
    p_value: float | None = None
    """Of the test against the baseline."""

    @property
    def mark(self) -> str:
        if self.p_value is None:
            return ""
        return next((mark for most, mark in MARKS.items() if self.p_value < most), "")


@dataclass(frozen=True)
class ResultsTable:
    """A table, ready to be written."""

    metric: Metric
    """What all cells measure."""
    figure: str
    """The name of the headline."""
    runs: list[Run]
    heads: list[str]
    """A column for each run folder."""
    titles: dict[str, str]
    """By method: the title of its row."""
    cells: dict[tuple[str, int], Cell]
    """By method and column."""
    baseline: str | None = None
    paired: str = "seeds"
    winners: tuple[str, ...] = ()
    """If only the best point of each sweep is shown: which it is, a sentence for each folder."""

    @property
    def columns(self) -> range:
        return range(len(self.heads))

    def notes(self) -> list[str]:
        """Return the sentences that belong under the table."""
        meaning = HEADLINES[self.figure].meaning
        notes = [f"Test {self.metric.heading}, {meaning}: {self._describe_seeds()}."]
        if len(self.titles) > 1:
            notes.append("In each column, the best is bold and the second best underlined.")
        if self.baseline:
            marks = [f"{mark} p < {most:g}" for most, mark in reversed(MARKS.items())]
            notes.append(
                f"{', '.join(marks)}: differs from {self.titles[self.baseline]} "
                f"({PAIRINGS[self.paired]}; not corrected for multiple comparisons)."
            )
        return [*notes, *self.winners, *self._list_unfinished()]

    def _describe_seeds(self) -> str:
        by_column = []
        for column in self.columns:
            counts = {len(c.figure["runs"]) for (_, own), c in self.cells.items() if own == column}
            by_column.append(_count_seeds(counts))
        if set(by_column) == {"1 seed"}:
            return "1 seed"
        what = "mean ± population standard deviation over "
        if len(set(by_column)) == 1:
            return what + by_column[0]
        named = zip(self.heads, by_column, strict=True)
        return f"{what}the seeds ({'; '.join(f'{head}: {count}' for head, count in named)})"

    def _list_unfinished(self) -> list[str]:
        notes = []
        for head, run in zip(self.heads, self.runs, strict=True):
            for method, result in run.results.items():
                if (round := run.find_missing_rounds(method)) is not None:
                    reached = f"{round} of {run.rounds} rounds"
                    notes.append(f"Unfinished: {result.title} in {head}, {reached}.")
                if run.missing_seeds(method):
                    seeds = f"{len(result.seeds)} of {run.config['seeds']} seeds"
                    notes.append(f"Unfinished: {result.title} in {head}, {seeds}.")
            if run.pending_methods:
                notes.append(f"Not begun in {head}: {', '.join(run.pending_methods)}.")
        return notes


def _count_seeds(counts: set[int]) -> str:
    least, most = min(counts), max(counts)
    if least != most:
        return f"{least} to {most} seeds"
    return f"{most} seed{'' if most == 1 else 's'}"


def make_table(
    runs: Sequence[Run],
    *,
    figure: str | None = None,
    baseline: str | None = None,
    paired: str = "seeds",
    winners: bool = False,
) -> ResultsTable:
    """Return the table of these runs: a row for each method, a column for each folder.

    `figure` is the headline. By default, it is the validation-picked score if every folder has
    it, and otherwise that of the best round. Every method is tested against the `baseline`. With
    `winners`, a method that was swept is there once, under its plain name, at its best point.
    """
    chosen = tuple(describe_winners(run, is_only=len(runs) == 1) for run in runs if run.sweeps)
    if winners:
        if not chosen:
            raise UserError("--winners is about sweeps, and there is none in these folders.")
        runs = [keep_winners(run) for run in runs]
    if baseline is not None:
        baseline = baseline.lower()
        _check_baseline(runs, baseline)
    metric = _find_common_metric(runs)
    figure = figure or _choose_figure(runs)
    cells: dict[tuple[str, int], Cell] = {}
    for column, run in enumerate(runs):
        for method, result in run.results.items():
            cell = Cell(_read_figure(run, result, HEADLINES[figure]))
            if baseline not in (None, method):
                p_value = _test(run, result, run.results[str(baseline)], figure, paired)
                cell = replace(cell, p_value=p_value)
            cells[method, column] = cell
    for column in range(len(runs)):
        _rank(metric, cells, column)
    heads, titles = _name(runs), _titles(runs)
    return ResultsTable(
        metric,
        figure,
        list(runs),
        heads,
        titles,
        cells,
        baseline,
        paired,
        chosen if winners else (),
    )


def keep_winners(run: Run) -> Run:
    """Return a run with only the best point of each sweep, under the plain name of its method."""
    winners = {sweep.winner for sweep in run.sweeps}
    swept = {label for sweep in run.sweeps for label in sweep.points}
    results = {}
    for label, result in run.results.items():
        if label in winners:
            tuned = copy(result)
            tuned.title = split_label(result.title)[0]
            results[split_label(label)[0]] = tuned
        elif label not in swept:
            results[label] = result
    return replace(run, results=results)


def describe_winners(run: Run, *, is_only: bool) -> str:
    """Say which points of a run's sweeps won, and what picked them."""
    titles = ", ".join(run.results[sweep.winner].title for sweep in run.sweeps)
    is_validated = all(sweep.is_validated for sweep in run.sweeps)
    by = "validation samples" if is_validated else "test samples, which is optimistic"
    where = "" if is_only else f" in {run.name}"
    return f"Each method at the best point of its sweep{where}, picked by {by}: {titles}."


def _find_common_metric(runs: Sequence[Run]) -> Metric:
    """Return what all runs measure. Refuse runs that measure different things."""
    metrics = {result.metric: run for run in runs for result in run.results.values()}
    if len(metrics) > 1:
        named = ", ".join(f"{metric.title} in {run.path}" for metric, run in metrics.items())
        raise UserError(f"One table cannot hold figures of different kinds: {named}.")
    return next(iter(metrics), ACCURACY)


def _check_baseline(runs: Sequence[Run], baseline: str) -> None:
    for run in runs:
        if baseline not in run.results:
            raise UserError(
                f"There is no {baseline} in {run.path} to compare with"
                f"{suggest(baseline, run.results)}: every folder needs the baseline."
            )


def _choose_figure(runs: Sequence[Run]) -> str:
    results = [result for run in runs for result in run.results.values()]
    has_validation = all(result.validation_picked is not None for result in results)
    return "validation" if has_validation else "best"


def _read_figure(run: Run, result: MethodResult, headline: Headline) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = result.scores()
    if headline.key not in figures:
        raise UserError(
            f"{result.title} in {run.path} has no {result.metric.title} {headline.meaning}: "
            "the run held no validation samples out (--validation). Use --figure best or final."
        )
    return figures[headline.key]


def _rank(metric: Metric, cells: dict[tuple[str, int], Cell], column: int) -> None:
    """Rank the cells of a column."""
    own = {key: c for key, c in cells.items() if key[1] == column and has_number(c.figure)}
    ranks = rank_means(metric, (cell.figure["mean"] for cell in own.values()))
    for key, cell in own.items():
        cells[key] = replace(cell, rank=ranks[cell.figure["mean"]])


def _name(runs: Sequence[Run]) -> list[str]:
    """Name columns by dataset and partition, or by folder if several have the same."""
    names = []
    for run in runs:
        dataset = Path(str(run.config.get("dataset", "unknown data"))).name
        names.append(f"{dataset}, {run.config.get('partition', 'unknown partition')}")
    return [
        name if names.count(name) == 1 else run.name for name, run in zip(names, runs, strict=True)
    ]


def _titles(runs: Sequence[Run]) -> dict[str, str]:
    """Return the title of each method, or its name if several have the same title."""
    titles: dict[str, str] = {}
    for run in runs:
        for method, result in run.results.items():
            titles.setdefault(method, result.title)
    shown = list(titles.values())
    return {name: title if shown.count(title) == 1 else name for name, title in titles.items()}


# --- the paired test ----------------------------------------------------------------------------


def _test(run: Run, one: MethodResult, base: MethodResult, figure: str, paired: str) -> float:
    """Return the p-value of the difference between two methods of a folder."""
    key = HEADLINES[figure].key
    if paired == "seeds":
        values = [_by_seed(result, key) for result in (one, base)]
        test, advice = paired_t_test, "run more, or use --paired clients"
    else:
        seeds = set(one.seeds) & set(base.seeds)
        values = [_by_client(run, result, seeds) for result in (one, base)]
        test, advice = wilcoxon_test, "clients.csv has them after a method's last round"
    shared = sorted(values[0].keys() & values[1].keys())
    differences = np.array([values[0][key] - values[1][key] for key in shared])
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2:
        raise UserError(
            f"A paired test of {one.title} against {base.title} needs the scores of at least "
            f"two {paired}, and {run.path} has {len(differences)}: {advice}."
        )
    return test(differences.tolist())


def _by_seed(result: MethodResult, key: str) -> dict[int, float]:
    return dict(zip(result.seeds, getattr(result, key).tolist(), strict=True))


def _by_client(run: Run, result: MethodResult, seeds: set[int]) -> dict[int, float]:
    """Return each client's score at the last evaluation, the mean of these seeds."""
    method, metric = result.method, result.metric
    rows = [row for row in run.clients if row["method"] == method and row["seed"] in seeds]
    array, (_, clients) = to_array(rows, ("seed", "client"), metric.name)
    return dict(zip(clients, mean_std(array[..., 0])[0].tolist(), strict=True))
