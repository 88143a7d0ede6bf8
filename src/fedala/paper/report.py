"""Write the paper's tables with our numbers: Markdown, LaTeX, csv and an HTML page."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedala.cells.report_files import write_texts
from fedala.cells.results import Results
from fedala.errors import UserError, spreadsheet_safe
from fedala.io.untrusted import read_file
from fedala.paper.comparison import describe, list_comparisons, make_sheets
from fedala.paper.experiments import drawings
from fedala.paper.formats import LEGEND, PREAMBLE, to_latex, to_markdown
from fedala.report import html
from fedala.runs.tables import csv_text

#: Bytes of a figure, at most.
_LARGEST = 2**25


@dataclass(frozen=True)
class Picture:
    """A figure on the page."""

    text: str
    """What it shows, as caption and for screen readers."""
    data: str
    """The png file in base64."""


def write(results: Results, folder: Path, pictures: Iterable[Path] = ()) -> list[Path]:
    """Write the tables in every format; the page also shows `pictures` (.png)."""
    if not results.seeds:
        raise UserError("There is no result to report: fedala paper run makes some.")
    texts = {
        "tables.md": make_markdown(results),
        "tables.tex": PREAMBLE + "\n" + "\n".join(map(to_latex, make_sheets(results))),
        "tables.csv": _make_csv(results),
        "index.html": _make_page(results, pictures),
    }
    return write_texts(folder, texts)


def make_markdown(results: Results) -> str:
    """Return all tables as Markdown."""
    tables = "\n".join(map(to_markdown, make_sheets(results)))
    return f"{describe(results)}\n\n{LEGEND}\n\n{tables}"


def _make_csv(results: Results) -> str:
    rows = []
    for row in list_comparisons(results):
        rows.append({key: spreadsheet_safe(value) for key, value in row.items()})
    return csv_text(list(rows[0]), rows, header=True) if rows else ""


def _make_page(results: Results, pictures: Iterable[Path]) -> str:
    return html.render(
        "fedala.paper",
        "paper_report.html.j2",
        styles=["paper_report.css"],
        shows_images=True,
        title="FedALA: the paper and ours",
        legend=LEGEND,
        overview=describe(results),
        sheets=make_sheets(results),
        pictures=[_read_picture(path) for path in pictures],
    )


def _read_picture(path: Path) -> Picture:
    titles = [one.title for name, one in drawings().items() if path.stem.startswith(name)]
    text = f"{path.stem}: {titles[0]}" if titles else path.stem
    try:
        return Picture(text, base64.b64encode(read_file(path, _LARGEST)).decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
