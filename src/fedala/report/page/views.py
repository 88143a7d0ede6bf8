"""What the templates show: tables, charts and their controls, without markup."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedala.metrics import Metric
from fedala.report.headline import has_deviation
from fedala.report.series import Series

#: The most points of a curve, rows of a table, and clients on the page; the csv files have all.
MOST_POINTS, MOST_ROWS, MOST_CLIENTS = 400, 25, 200
#: The most rounds of a table of W, which has a column for each.
MOST_COLUMNS = 12


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than text."""

    text: str
    deviation: str = ""
    style: str = ""
    """Classes of the style sheet."""
    is_best: bool = False
    has_key: bool = False
    """Whether the colour of a method stands before it."""


Row = Sequence[Cell | str | int]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names the row."""

    caption: str
    heads: Sequence[object]
    rows: Sequence[Row]
    style: str = ""


@dataclass(frozen=True)
class Select:
    """A control that changes a chart."""

    identifier: str
    label: str
    choices: Sequence[tuple[str, str]]
    """Values and texts."""
    control: str
    """What the script calls it."""


@dataclass(frozen=True)
class Chart:
    """A chart that the script draws, with its controls and the same figures as tables."""

    identifier: str
    kind: str
    caption: str
    tables: Sequence[Table]
    controls: Sequence[Select] = ()
    columns: Sequence[str] = field(default_factory=tuple)
    """Columns of the history that it can show."""


@dataclass(frozen=True)
class Section:
    """A section of the page; `name` is its template, `view` what the template shows."""

    name: str
    title: str
    view: Any


def label_cell(series: Series) -> Cell:
    """Return a method's label with its colour."""
    style = f"s{series.index % 8} m{series.index % 9}"
    return Cell(series.label, style=style, has_key=True)


def score_cell(metric: Metric, figure: dict[str, Any] | None, best: float = np.inf) -> Cell:
    """Return a score of a summary; the `best` one is emphasised."""
    if figure is None:
        return Cell("–")
    deviation = metric.format(figure["std"]) if has_deviation(figure) else ""
    return Cell(metric.format(figure["mean"]), deviation, is_best=figure["mean"] == best)


def difference_cell(metric: Metric, difference: float | None) -> Cell:
    """Return a difference between two scores, in points if they are shares, with its sign.

    Two infinite scores have none.
    """
    if difference is None or np.isnan(difference):
        return Cell("–")
    sign = "+" if difference >= 0 else ""
    text = f"{sign}{metric.format(difference)}".replace("-", "−")
    gain = difference if metric.higher_is_better else -difference
    return Cell(text, style="gain" if gain > 0 else "loss" if gain < 0 else "")
