"""The section on a sweep: what every point of the grid scores, and which one is picked."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedala.report.page.views import Cell, Row, Table, score_cell
from fedala.report.runs import Run
from fedala.report.tables import describe_sweep
from fedala.runs.sweep_results import Sweep


@dataclass(frozen=True)
class Sweeps:
    """A table for each method, and sentences on its best point."""

    tables: list[Table]
    findings: list[str]
    warnings: list[str]


def view_sweeps(runs: Sequence[Run]) -> Sweeps | None:
    """Return the grids of all runs; None if nothing was swept."""
    sweeps = [sweep for run in runs for sweep in run.sweeps]
    if not sweeps:
        return None
    sentences = [describe_sweep(sweep) for sweep in sweeps]
    return Sweeps(
        [_make_table(sweep) for sweep in sweeps],
        [first for first, *_ in sentences],
        [sentence for _, *rest in sentences for sentence in rest],
    )


def _make_table(sweep: Sweep) -> Table:
    """Return a matrix if two options were swept, and otherwise a line for each point."""
    by = "validation samples" if sweep.is_validated else "test samples"
    metric = sweep.results[sweep.winner].metric
    caption = (
        f"{sweep.title}: test {metric.heading} in the round that {by} pick. "
        "The best point is emphasised."
    )
    names = [one.name for one in sweep.dimensions]
    if len(names) == 2 and not any(one.is_random for one in sweep.dimensions):
        return _make_matrix(sweep, caption)
    rows: list[Row] = []
    for label, point in sweep.points.items():
        values = [point.get(name, "–") for name in names]
        rows.append([*values, sweep.format_criterion(label), _score(sweep, label)])
    return Table(caption, [*names, f"Best on {by}", "Test"], rows, style="figures")


def _make_matrix(sweep: Sweep, caption: str) -> Table:
    down, across = sweep.dimensions
    labels = {tuple(point.values()): label for label, point in sweep.points.items()}
    rows: list[Row] = []
    for first in down.values:
        cells: list[Cell | str] = []
        for second in across.values:
            label = labels.get((first, second))
            cells.append("–" if label is None else _score(sweep, label))
        rows.append([f"{down.name} = {first}", *cells])
    heads = ["", *(f"{across.name} = {value}" for value in across.values)]
    return Table(caption, heads, rows, style="figures")


def _score(sweep: Sweep, label: str) -> Cell:
    figure = sweep.test_score(label)
    best = figure["mean"] if label == sweep.winner else float("nan")
    return score_cell(sweep.results[label].metric, figure, best)
