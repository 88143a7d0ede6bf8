"""`fedala report`: one HTML page of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from fedala.cli.output import keep_lines, print_line, say
from fedala.report import page, plots
from fedala.report.runs import find_runs

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala report runs/mine                   # writes runs/mine/report.html, also during the run
  fedala report runs/one runs/two --out both.html
  fedala report runs --out all.html         # every run folder in runs
  fedala report runs/mine --plots figures   # .png and .pdf for a paper""")
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
            help=r"the page [dim]\[default: report.html in the only folder][/dim]", metavar="FILE"
        ),
    ] = None,
    plots_: Annotated[
        Path | None,
        typer.Option(
            "--plots", help="also draw it for print, as .png and .pdf in this folder", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write one HTML page of one or several runs, finished or not.

    It shows figures, curves, clients, split, W, cost and set-up.
    """
    if plots_:
        plots.check_folder(plots_)
    print_line(f"Written: {page.write(folders, out, say=say)}")
    if plots_:
        print_line(f"Written: {len(plots.write_all(find_runs(folders), plots_))} plots in {plots_}")
