"""Write the leaderboard: Markdown, LaTeX, csv and one HTML page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedala.cells.report_files import write_texts
from fedala.cells.results import Results
from fedala.errors import UserError, spreadsheet_safe
from fedala.leaderboard.page import QUESTION, make_page
from fedala.leaderboard.table import (
    COLUMNS,
    Board,
    Column,
    Row,
    describe_source,
    list_sources,
    make_boards,
)
from fedala.report.formats import (
    LATEX_PACKAGES,
    escape_latex,
    escape_markdown,
    latex_table,
    markdown_table,
)
from fedala.report.headline import count_things
from fedala.runs.tables import csv_text

#: The columns of the Markdown and LaTeX tables; the csv file and the page have all.
_PRINTED = (
    *("accuracy", "with_ala", "gain", "published", "trained", "worst", "final", "seconds"),
    *("down", "up"),
)


def write(results: Results, folder: Path) -> list[Path]:
    """Write the leaderboard in every format."""
    if not results.seeds:
        raise UserError("There is no result to report: fedala leaderboard run makes some.")
    boards = make_boards(results)
    texts = {
        "leaderboard.md": make_markdown(results),
        "leaderboard.tex": make_latex(boards),
        "leaderboard.csv": make_csv(boards),
        "index.html": make_page(boards, results, describe(boards)),
    }
    return write_texts(folder, texts)


def describe(boards: Sequence[Board]) -> list[str]:
    """Say in sentences what was run, where FedALA stands, and what the question is."""
    run = [board for board in boards if board.has_results]
    cells = sum(row.result is not None for board in boards for row in board.rows)
    settings = count_things(len(run), "setting")
    sentences = [f"{count_things(cells, 'cell')} in {settings} have been run."]
    for board in boards:
        published = [one for one in board.describe() if one.startswith("Among the published")]
        sentences += [f"{board.setting.title}: {one[0].lower()}{one[1:]}" for one in published[:1]]
        if published:
            break
    return [*sentences, QUESTION]


def make_markdown(results: Results) -> str:
    """Return a table for each setting that has results, and a list of published numbers if not."""
    boards = make_boards(results)
    parts = [" ".join(describe(boards))]
    for board in sorted(boards, key=lambda board: not board.has_results):
        lines = _format_board(board) if board.has_results else _list_published(board)
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _list_published(board: Board) -> list[str]:
    """Return the published numbers of a setting that has not been run."""
    sources = list_sources([board])
    numbers = []
    for row in board.rows:
        if row.published:
            mark = sources.get(describe_source(row.published), "")
            text = f"{escape_markdown(row.title)} {row.published.accuracy:.2f}"
            numbers.append(f"{text}<sup>{mark}</sup>")
    heading = f"### {board.setting.title}"
    lines = [
        heading,
        "",
        " ".join(board.describe()),
        "",
        f"Not run yet. Published: {', '.join(numbers)}.",
    ]
    return [*lines, "", *_list_sources(sources)]


def _list_sources(sources: dict[str, str]) -> list[str]:
    return [f"<sup>{mark}</sup> {escape_markdown(source)}.<br>" for source, mark in sources.items()]


def _format_board(board: Board) -> list[str]:
    sources = list_sources([board])
    rows = _format_rows(board, escape_markdown, "–", "<sup>{}</sup>")
    heads = [*(column.heading for column in _list_columns(board)), "How"]
    lines = [f"### {board.setting.title}", "", " ".join(board.describe()), ""]
    lines += [*markdown_table(heads, rows), ""]
    return [*lines, escape_markdown(_describe_machines(board)), "", *_list_sources(sources)]


def _list_columns(board: Board) -> list[Column]:
    return [column for column in board.columns if column.name in _PRINTED]


def _format_rows(
    board: Board, escape: Callable[[str], str], nothing: str, mark: str
) -> list[list[str]]:
    """Return the cells of each row. `mark` is the template for the letter of a source."""
    sources = list_sources([board])
    rows = []
    for row in board.rows:
        texts = []
        for column in _list_columns(board):
            text = escape(column.text(row)) or nothing
            if column.name == "published" and row.published:
                text += mark.format(sources.get(describe_source(row.published), ""))
            texts.append(text)
        rows.append([escape(row.title), *texts, escape(_shorten(row))])
    return rows


def _shorten(row: Row) -> str:
    """Return how a number came about, without machine and version, which stand below the table."""
    machine = {text for seed in row.seeds for text in (seed.device, seed.version)}
    return "; ".join(fact for fact in row.facts if fact not in machine)


def _describe_machines(board: Board) -> str:
    machines = dict.fromkeys(
        f"{seed.device}, {seed.version}" for row in board.rows for seed in row.seeds
    )
    return f"Run on: {'; '.join(machines)}."


def make_latex(boards: Sequence[Board]) -> str:
    """Return a booktabs table for each setting that has results."""
    tables = [_format_latex(board) for board in boards if board.has_results]
    return "\n".join([LATEX_PACKAGES, *tables])


def _format_latex(board: Board) -> str:
    heads = ["Method", *(column.heading for column in _list_columns(board)), "How"]
    rows = _format_rows(board, escape_latex, "---", "$^{{{}}}$")
    notes = [f"{board.setting.title}.", *board.describe(), _describe_machines(board)]
    sources = [
        f"$^{{{mark}}}$ {escape_latex(source)}." for source, mark in list_sources([board]).items()
    ]
    return latex_table(
        f"l{'r' * (len(heads) - 2)}l",
        [list(map(escape_latex, heads))],
        [rows],
        caption=" ".join([*map(escape_latex, notes), *sources]),
        label=f"leaderboard:{board.setting.name}",
    )


def make_csv(boards: Sequence[Board]) -> str:
    """Return a line for every row of every setting."""
    lines = []
    for board in boards:
        for row in board.rows:
            line: dict[str, object] = {"setting": board.setting.name, "method": row.method}
            for column in COLUMNS:
                number = column.number(row)
                line[column.name] = None if number is None else round(number, 4)
            line |= {
                "rounds": row.result.rounds if row.result else None,
                "seeds": len(row.seeds),
                "best_round": row.result.best_round if row.result else None,
                "still_rising": str(row.is_rising).lower() if row.result else None,
                "how": "; ".join(row.facts),
                "source": describe_source(row.published) if row.published else None,
            }
            lines.append({name: spreadsheet_safe(value) for name, value in line.items()})
    return csv_text(list(lines[0]), lines, header=True)
