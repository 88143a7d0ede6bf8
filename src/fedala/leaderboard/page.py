"""The leaderboard as one HTML page: a table for each setting that sorts, and its curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedala.cells.results import Results
from fedala.leaderboard.table import (
    COLUMNS,
    Board,
    Column,
    Row,
    describe_source,
    find_partner,
    list_sources,
)
from fedala.metrics import SHARES
from fedala.paper.comparison import title_of
from fedala.report import html
from fedala.report.arrays import pick_evenly
from fedala.report.headline import count_things
from fedala.report.page.views import MOST_ROWS, Chart, Select, Table
from fedala.report.page.views import Row as TableRow

#: How many methods the chart of a setting shows at first; these are always among them.
FIRST_SHOWN, ALWAYS_SHOWN = 6, ("fedala", "fedavg")
#: The kinds of curves, by their column of the results.
KINDS = {"curve": ("accuracy", "initialised"), "trained_curve": ("accuracy_trained", "trained")}
QUESTION = (
    "What ALA adds to the methods that are ahead of FedALA is the question of this leaderboard: "
    "see “ALA adds”."
)


@dataclass(frozen=True)
class CellView:
    """A cell of the table."""

    text: str
    key: str
    """What it is sorted by; empty if it has no number."""
    style: str = ""
    mark: str = ""
    """The letter of a source."""
    is_best: bool = False


@dataclass(frozen=True)
class RowView:
    """A row of the table."""

    title: str
    sort_title: str
    """Puts a method with ALA behind the one without."""
    style: str
    """The colour of its curve; empty if it has none."""
    spark: str
    """Its curve as points of a polyline in a box of 100 × 100."""
    cells: list[CellView]
    facts: list[str]
    rounds: str
    is_run: bool


@dataclass(frozen=True)
class BoardView:
    """The section of a setting."""

    name: str
    title: str
    caption: str
    sentences: list[str]
    columns: list[Column]
    rows: list[RowView]
    sources: dict[str, str]
    chart: Chart | None
    is_first: bool
    """Whether the page shows it first."""


def make_page(boards: Sequence[Board], results: Results, overview: Sequence[str]) -> str:
    """Return the page as text."""
    series: list[dict[str, Any]] = []
    views = []
    first = next((board for board in boards if board.has_results), boards[0])
    for board in boards:
        views.append(_view_board(board, series, is_first=board is first))
    columns = {}
    for board in boards:
        for name, kind in KINDS.values():
            columns[f"{name}@{board.setting.name}"] = f"accuracy of {kind} models"
    return html.render(
        "fedala.leaderboard",
        "board.html.j2",
        styles=["page.css", "board.css"],
        scripts=["page.js", "board.js"],
        data={"series": series, "columns": columns, "shares": SHARES},
        title="Leaderboard of personalised federated learning",
        overview=overview,
        warnings=[*results.contradictions, *results.unverified],
        columns=COLUMNS,
        views=views,
    )


def _view_board(board: Board, series: list[dict[str, Any]], *, is_first: bool) -> BoardView:
    """Return the section of a setting; its curves are added to `series`."""
    sources = list_sources([board])
    best, columns = {}, board.columns
    for column in columns:
        numbers = [number for row in board.rows if (number := column.number(row)) is not None]
        if column.name in ("accuracy", "published", "trained", "mean", "worst", "final"):
            best[column.name] = max(numbers, default=None)
    span = _find_span(board)
    rows: list[RowView] = []
    lines: list[Row] = []
    for row in board.rows:
        style = ""
        if row.curve("curve"):
            style = f"s{len(series) % 8} m{len(series) % 9}"
            is_shown = len(lines) < FIRST_SHOWN or row.method in ALWAYS_SHOWN
            series.append(_make_series(board, row, is_off=not is_shown))
            lines.append(row)
        rows.append(_view_row(row, columns, style, sources, best, span))
    setting = board.setting
    caption = (
        f"{setting.dataset}, {setting.partition}, {setting.clients} clients, {setting.model}, "
        f"learning rate {setting.lr:g}; accuracies in %, planned {setting.rounds} rounds and "
        f"{count_things(setting.seeds, 'seed')}. A click on a heading sorts."
    )
    return BoardView(
        setting.name,
        setting.title,
        caption,
        board.describe(),
        columns,
        rows,
        sources,
        _make_chart(board, lines) if lines else None,
        is_first,
    )


def _view_row(
    row: Row,
    columns: Sequence[Column],
    style: str,
    sources: dict[str, str],
    best: dict[str, float | None],
    span: tuple[float, float, int],
) -> RowView:
    cells = []
    for column in columns:
        number, text = column.number(row), column.text(row)
        colour = ""
        if column.is_signed and number is not None:
            colour = "gain" if number > 0 else "loss" if number < 0 else ""
        mark = ""
        if column.name == "published" and row.published:
            mark = sources.get(describe_source(row.published), "")
        is_best = number is not None and number == best.get(column.name)
        key = "" if number is None else f"{number:.6g}"
        cells.append(CellView(text, key, colour, mark, is_best))
    rounds = str(row.result.rounds) if row.result else ""
    sort_title = _make_sort_title(row)
    spark = _draw_spark(row, span)
    is_run = row.result is not None
    return RowView(row.title, sort_title, style, spark, cells, row.facts, rounds, is_run)


def _make_sort_title(row: Row) -> str:
    if row.method == "fedala":
        return f"{title_of(find_partner(row.method))}+ALA"
    return row.title


def _find_span(board: Board) -> tuple[float, float, int]:
    """Return the lowest and highest accuracy of all curves of a setting, and the last round."""
    points = [point for row in board.rows for curve in row.curve("curve") for point in curve]
    accuracies = [accuracy for _, accuracy in points]
    last = max((round for round, _ in points), default=0)
    return min(accuracies, default=0), max(accuracies, default=1), last


def _draw_spark(row: Row, span: tuple[float, float, int]) -> str:
    """Return the curve of the first seed, on the axes that all rows share."""
    curves = row.curve("curve")
    low, high, last = span
    if not curves or high <= low or last < 1:
        return ""
    points = []
    for round, accuracy in curves[0]:
        x, y = 100 * round / last, 100 - 100 * (accuracy - low) / (high - low)
        points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)


def _make_series(board: Board, row: Row, *, is_off: bool) -> dict[str, Any]:
    """Return the curves of a method as the script draws them: [seed][round], None for no value."""
    curves = {name: [dict(curve) for curve in row.curve(name)] for name in KINDS}
    rounds = sorted({round for own in curves.values() for curve in own for round in curve})
    values = {}
    for name, own in curves.items():
        if own:
            column = f"{KINDS[name][0]}@{board.setting.name}"
            values[column] = [[curve.get(round) for round in rounds] for curve in own]
    return {
        "label": row.title,
        "group": board.setting.name,
        "isOff": is_off,
        "rounds": rounds,
        "seeds": [seed.seed for seed in row.seeds],
        "values": values,
    }


def _make_chart(board: Board, rows: Sequence[Row]) -> Chart:
    identifier = f"curves-{board.setting.name}"
    names = [f"{name}@{board.setting.name}" for name, _ in KINDS.values()]
    texts = [kind for _, kind in KINDS.values()]
    select = Select(
        f"{identifier}-column", "Models", list(zip(names, texts, strict=True)), "column"
    )
    caption = "Accuracy over the rounds; the buttons above choose the methods"
    return Chart(identifier, "curves", caption, [_make_table(rows)], [select], names)


def _make_table(rows: Sequence[Row]) -> Table:
    """Return the curves as a table with some of the rounds."""
    curves = {row.title: [dict(curve) for curve in row.curve("curve")] for row in rows}
    every = sorted({round for own in curves.values() for curve in own for round in curve})
    lines: list[TableRow] = []
    for round in (every[index] for index in pick_evenly(len(every), MOST_ROWS)):
        texts = []
        for own in curves.values():
            known = [curve[round] for curve in own if round in curve]
            texts.append(f"{100 * sum(known) / len(known):.2f}" if known else "–")
        lines.append([round, *texts])
    return Table("Accuracy of initialised models in %", ["Round", *curves], lines)
