"""`fedala report`: one HTML page of one or several runs, or one table for a paper."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedala.cli.output import keep_lines, print_line, say
from fedala.errors import UserError
from fedala.report import page, plots, results_formats
from fedala.report.headline import HEADLINES
from fedala.report.results_table import PAIRINGS, make_table
from fedala.report.runs import find_runs

app = typer.Typer()

_TABLE = "Tables for a paper"


@app.command(
    epilog=keep_lines("""Examples:
  fedala report runs/mine                   # writes runs/mine/report.html, also during the run
  fedala report runs/one runs/two --out both.html
  fedala report runs --out all.html         # every run folder in runs
  fedala report runs/mine --plots figures   # .png and .pdf for a paper
  fedala report runs/one runs/two --latex   # a table: a row for each method, a column for each run
  fedala report runs/sweep --winners --baseline fedavg       # tuned methods, a row for each
  fedala report runs/mine --latex --csv --baseline fedavg --out tables""")
)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="run folders, or a folder with run folders in it", metavar="DIR"),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"the page [dim]\[default: report.html in the only folder][/dim]; "
            "for tables, a folder",
            metavar="PATH",
        ),
    ] = None,
    plots_: Annotated[
        Path | None,
        typer.Option(
            "--plots", help="also draw it for print, as .png and .pdf in this folder", metavar="DIR"
        ),
    ] = None,
    latex: Annotated[
        bool,
        typer.Option(
            "--latex",
            metavar="",
            help="print a LaTeX table instead; with --out DIR, write DIR/table.tex",
            rich_help_panel=_TABLE,
        ),
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", metavar="", help="the same as Markdown: table.md", rich_help_panel=_TABLE
        ),
    ] = False,
    csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            metavar="",
            help="the same as csv, a line for each method and run: table.csv",
            rich_help_panel=_TABLE,
        ),
    ] = False,
    figure: Annotated[
        str | None,
        typer.Option(
            help="which round's accuracy the table shows "
            r"[dim]\[default: validation if every run has it, else best][/dim]",
            metavar="|".join(HEADLINES),
            rich_help_panel=_TABLE,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="test every method against this one, and mark significant differences",
            metavar="METHOD",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    winners: Annotated[
        bool,
        typer.Option(
            "--winners",
            metavar="",
            help="keep only the best point of each method's sweep in the table",
            rich_help_panel=_TABLE,
        ),
    ] = False,
    paired: Annotated[
        str | None,
        typer.Option(
            help="what the test pairs: seeds (t-test) or clients (Wilcoxon) "
            r"[dim]\[default: seeds][/dim]",
            metavar="|".join(PAIRINGS),
            rich_help_panel=_TABLE,
        ),
    ] = None,
) -> None:
    """Write one HTML page of one or several runs, finished or not.

    It shows figures, curves, clients, split, W, cost and set-up.
    """
    _check_choice("figure", figure, HEADLINES)
    _check_choice("paired", paired, PAIRINGS)
    wanted = {"latex": latex, "markdown": markdown, "csv": csv}
    formats = [name for name, is_wanted in wanted.items() if is_wanted]
    if winners and not formats:
        formats = ["markdown"]
    if not formats and (figure or baseline or paired):
        raise UserError(
            "--figure, --baseline and --paired are about a table: add --latex, --markdown or --csv."
        )
    if paired and not baseline:
        raise UserError("--paired is about the test against a method: add --baseline METHOD.")
    if plots_:
        plots.check_folder(plots_)
    if formats:
        _write_table(folders, out, formats, figure, baseline, paired or "seeds", winners=winners)
    else:
        print_line(f"Written: {page.write(folders, out, say=say)}")
    if plots_:
        say_written = say if formats and not out else print_line  # keep a printed table clean
        count = len(plots.write_all(find_runs(folders), plots_))
        say_written(f"Written: {count} plots in {plots_}")


def _check_choice(name: str, value: str | None, choices: Iterable[str]) -> None:
    if value is not None and value not in choices:
        raise UserError(f"--{name} must be one of {', '.join(choices)}, not {value!r}.")


def _write_table(
    folders: Sequence[Path],
    out: Path | None,
    formats: Sequence[str],
    figure: str | None,
    baseline: str | None,
    paired: str,
    *,
    winners: bool,
) -> None:
    """Print the table in every format, or write it into the folder `out`."""
    runs = find_runs(folders)
    for run in runs:
        for sentence in run.unverified:
            say(sentence)
    table = make_table(runs, figure=figure, baseline=baseline, paired=paired, winners=winners)
    if out is None:
        print("\n".join(results_formats.FORMATS[name][1](table) for name in formats), end="")
        return
    for path in results_formats.write(table, formats, out):
        print_line(f"Written: {path}")
