"""Write the leaderboard: Markdown, csv and one HTML page."""

from collections.abc import Sequence
from pathlib import Path

from fedala.cells.report_files import write_texts
from fedala.cells.results import Results
from fedala.errors import UserError, spreadsheet_safe
from fedala.leaderboard.page import QUESTION, make_page
from fedala.leaderboard.table import (
    COLUMNS,
    Board,
    Row,
    describe_source,
    list_sources,
    make_boards,
)
from fedala.report.formats import escape_markdown, markdown_table
from fedala.report.headline import count_things
from fedala.runs.tables import csv_text

#: The columns of the Markdown tables; the csv file and the page have all.
_MARKDOWN = (
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
    columns = [column for column in board.columns if column.name in _MARKDOWN]
    sources = list_sources([board])
    rows = []
    for row in board.rows:
        texts = []
        for column in columns:
            text = escape_markdown(column.text(row)) or "–"
            if column.name == "published" and row.published:
                text += f"<sup>{sources.get(describe_source(row.published), '')}</sup>"
            texts.append(text)
        rows.append([escape_markdown(row.title), *texts, escape_markdown(_shorten(row))])
    heads = [*(column.heading for column in columns), "How"]
    lines = [f"### {board.setting.title}", "", " ".join(board.describe()), ""]
    lines += [*markdown_table(heads, rows), ""]
    return [*lines, _describe_machines(board), "", *_list_sources(sources)]


def _shorten(row: Row) -> str:
    """Return how a number came about, without machine and version, which stand below the table."""
    machine = {text for seed in row.seeds for text in (seed.device, seed.version)}
    return "; ".join(fact for fact in row.facts if fact not in machine)


def _describe_machines(board: Board) -> str:
    machines = dict.fromkeys(
        f"{seed.device}, {seed.version}" for row in board.rows for seed in row.seeds
    )
    return f"Run on: {escape_markdown('; '.join(machines))}."


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
