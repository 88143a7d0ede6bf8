"""Write the table of results as LaTeX, Markdown and csv."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedala.errors import UserError, spreadsheet_safe
from fedala.io.files import write_file
from fedala.report.formats import (
    LATEX_PACKAGES,
    escape_latex,
    escape_markdown,
    latex_table,
    markdown_table,
)
from fedala.report.headline import format_figure
from fedala.report.results_table import ResultsTable
from fedala.runs.tables import csv_text


def to_markdown(table: ResultsTable) -> str:
    """Return a table, and its notes below it."""
    rows = []
    for method, title in table.titles.items():
        cells = [_markdown_cell(table, method, column) for column in table.columns]
        rows.append([escape_markdown(title), *cells])
    lines = markdown_table([escape_markdown(head) for head in table.heads], rows)
    return "\n".join([*lines, "", " ".join(map(escape_markdown, table.notes())), ""])


def _markdown_cell(table: ResultsTable, method: str, column: int) -> str:
    cell = table.cells.get((method, column))
    if cell is None:
        return "—"
    text = escape_markdown(format_figure(table.metric, cell.figure))
    emphasis = {1: f"**{text}**", 2: f"<ins>{text}</ins>"}
    return emphasis.get(cell.rank or 0, text) + cell.mark


def to_latex(table: ResultsTable) -> str:
    """Return a booktabs table, with its notes as the caption."""
    rows = []
    for method, title in table.titles.items():
        cells = [_latex_cell(table, method, column) for column in table.columns]
        rows.append([escape_latex(title), *cells])
    text = latex_table(
        "l" + "c" * len(table.heads),
        [["Method", *map(escape_latex, table.heads)]],
        [rows],
        caption=_replace_marks(" ".join(map(escape_latex, table.notes()))),
        label="tab:results",
    )
    return f"{LATEX_PACKAGES}\n{text}"


def _latex_cell(table: ResultsTable, method: str, column: int) -> str:
    cell = table.cells.get((method, column))
    if cell is None:
        return "---"
    text = escape_latex(format_figure(table.metric, cell.figure))
    emphasis = {1: f"\\textbf{{{text}}}", 2: f"\\underline{{{text}}}"}
    return emphasis.get(cell.rank or 0, text) + _replace_marks(cell.mark)


def _replace_marks(text: str) -> str:
    return text.replace("†", r"$^\dagger$").replace("‡", r"$^\ddagger$")


def to_csv(table: ResultsTable) -> str:
    """Return a line for each method and folder, with all digits; shares are from 0 to 1."""
    lines = []
    for (method, column), cell in sorted(table.cells.items(), key=lambda item: item[0][1]):
        run, figure = table.runs[column], cell.figure
        line: dict[str, Any] = {
            "column": table.heads[column],
            "folder": run.name,
            "dataset": run.config.get("dataset"),
            "partition": run.config.get("partition"),
            "method": method,
            "title": table.titles[method],
            "figure": table.figure,
            "mean": figure["mean"],
            "std": figure["std"] if len(figure["runs"]) > 1 else None,
            "seeds": len(figure["runs"]),
            "rank": cell.rank,
        }
        if table.baseline:
            line |= {"baseline": table.baseline, "paired": table.paired, "p": cell.p_value}
        lines.append({name: spreadsheet_safe(value) for name, value in line.items()})
    return csv_text(list(lines[0]), lines, header=True)


#: The formats: the file that each is written to, and what writes it.
FORMATS: dict[str, tuple[str, Callable[[ResultsTable], str]]] = {
    "latex": ("table.tex", to_latex),
    "markdown": ("table.md", to_markdown),
    "csv": ("table.csv", to_csv),
}


def write(table: ResultsTable, formats: Iterable[str], folder: Path) -> list[Path]:
    """Write the table into a folder, which is made if need be."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in formats:
            file, to_text = FORMATS[name]
            write_file(folder / file, to_text(table).encode(), durable=False)
            written.append(folder / file)
    except OSError as error:
        raise UserError(f"The table cannot be written to {folder}: {error.strerror}.") from None
    return written
