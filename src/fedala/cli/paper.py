"""`fedala paper list | run | report`: the paper's tables and figures as commands."""

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedala.cells import running
from fedala.cells.cell import Cell
from fedala.cells.results import CSV, Results
from fedala.cli.cells import (
    DataDir,
    Device,
    EvalEvery,
    Folders,
    Insert,
    Jobs,
    KeepCheckpoints,
    Minutes,
    Out,
    RelayFlag,
    ReportOut,
    check_before_run,
    end_report,
    run_chosen,
    write_report,
)
from fedala.cli.output import keep_lines
from fedala.errors import UserError
from fedala.options import split_names
from fedala.paper import comparison
from fedala.paper import report as reporting
from fedala.paper.experiments import PAPER, Drawing, choose, drawings, preset, tables
from fedala.paper.experiments import Table as PaperTable
from fedala.report.headline import format_spread
from fedala.report.tables import WRAPPED, show
from fedala.runs.observer import Stopped

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The paper's tables and figures: list, run, report.",
)

_OUT = Path("runs/paper")


@app.command("list")
def list_tables() -> None:
    """Show the tables: their columns, how many cells each has, and the data it needs."""
    for table in tables().values():
        show(_columns_of(table))
        print(f"methods: {', '.join(table.methods)}\n")
    for drawing in drawings().values():
        datasets = ", ".join(dict.fromkeys(setting.dataset for setting in drawing.settings))
        print(
            f"{drawing.name}: {drawing.title} ({datasets}; without --data-dir, the embedded digits)"
        )
    defaults = preset()
    print(
        f"\nAll with {defaults['rounds']} rounds, {defaults['seeds']} seeds, "
        f"batches of {defaults['batch_size']} in fixed order. "
        "A cell that several tables show is run once."
    )


def _columns_of(table: PaperTable) -> Table:
    """Build a table with a row for each column of one of the paper's tables."""
    headings = ("column", "", "data", "model", "partition", "clients", "settings")
    shown = Table(
        *headings,
        title=f"{table.name}: {table.title}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    shown.add_column("cells", justify="right")
    for column in table.columns:
        setting = column.setting
        join = "" if setting.join_ratio == 1 else f", ρ = {setting.join_ratio:g}"
        changes = [f"{key}={value}" for key, value in column.set.items()]
        if column.with_ala:
            changes.append("+ala")
        shown.add_row(
            column.name,
            escape(f"{column.group}: {column.title}"),
            setting.dataset,
            setting.model,
            setting.partition,
            f"{setting.clients}{join}",
            " ".join(changes),
            str(sum(table.has(column, method) for method in table.methods)),
        )
    return shown


@app.command(
    epilog=keep_lines("""Examples:
  fedala paper run table2 --columns cifar10-dir --method fedala --data-dir DIR
  fedala paper run table2 --rounds 300 --seeds 1 --minutes 30 --data-dir DIR
  fedala paper run table2 --shuffle --jobs 4 --data-dir DIR

Finished cells are kept. After an interruption, the same command continues.""")
)
def run(
    names: Annotated[
        list[str],
        typer.Argument(metavar="TABLE...", help="tables and figures, as in fedala paper list"),
    ],
    *,
    columns: Annotated[str, typer.Option(help="only these columns, separated by commas")] = "",
    method: Annotated[str, typer.Option(help="only these methods, separated by commas")] = "",
    rounds: Annotated[
        int | None, typer.Option(help="T: number of rounds, instead of the paper's 2000", min=1)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="runs of each cell, instead of the paper's 5", min=1)
    ] = None,
    minutes: Minutes = None,
    data_dir: DataDir = None,
    out: Out = _OUT,
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle", help="reshuffle the batches every epoch; the paper's presets do not"
        ),
    ] = False,
    eval_every: EvalEvery = 1,
    device: Device = "auto",
    keep_checkpoints: KeepCheckpoints = False,
    jobs: Jobs = 1,
    relay: RelayFlag = False,
) -> None:
    """Run cells of the paper's tables with its presets. Each cell has its own folder."""
    began = time.monotonic()
    given_rounds, rounds = rounds, rounds or int(preset()["rounds"])
    seeds = seeds or int(preset()["seeds"])
    check_before_run(device, data_dir, out, relay=relay)
    known_figures = drawings(digits=data_dir is None)
    figures = {name: known_figures[name] for name in known_figures if name in names}
    names = [name for name in names if name not in figures]
    cells = _choose_cells(names, columns, method, shuffle=shuffle, rounds=rounds)
    deadline = None if minutes is None else began + 60 * minutes
    order = running.RunOptions(
        out, rounds, seeds, data_dir, eval_every, device, keep_checkpoints, deadline
    )
    if figures:
        _draw(figures, order, given_rounds)
    if not cells:
        return
    arguments = [*names, f"--columns={columns}", f"--method={method}", *["--shuffle"] * shuffle]
    run_chosen(PAPER, cells, order, arguments, jobs=jobs, relay=relay)
    if not relay:
        print(
            f"Results: {out / CSV}; compare them with the paper's by "
            f"fedala paper report {shlex.quote(str(out))}"
        )


def _choose_cells(
    names: list[str], columns: str, method: str, *, shuffle: bool, rounds: int
) -> dict[Cell, float | None]:
    """Return the chosen cells, each with the accuracy that the paper prints for it."""
    cells: dict[Cell, float | None] = {}
    for table, column, row in choose(names, split_names(columns), split_names(method)):
        printed = table.printed(column, row)
        cell = column.cell(row, shuffle=shuffle, rounds=rounds)
        cells.setdefault(cell, printed.accuracy if printed else None)
    return cells


def _draw(chosen: Mapping[str, Drawing], order: running.RunOptions, rounds: int | None) -> None:
    """Draw the paper's figures, as far as there is time and data."""
    from fedala.paper import figures  # needs matplotlib

    shelf = running.DataCache(order.data_dir)
    options = {"device": order.device, **({"rounds": rounds} if rounds else {})}
    folder = order.out / "figures"
    for name, drawing in chosen.items():
        if order.seconds_left <= 0:
            print(f"Left out, because the time is up: {name}.")
            continue
        print(f"{name}: {drawing.title} …", file=sys.stderr)
        try:
            for path in figures.draw(
                drawing, shelf, folder, lambda: order.seconds_left <= 0, **options
            ):
                print(f"Written: {path}")
        except Stopped as stopped:
            print(f"Out of time: {name} is not drawn; it got to {stopped}.")
        except UserError as error:
            print(f"Skipped: {name}: {error}")
        else:
            datasets = dict.fromkeys(setting.dataset for setting in drawing.settings)
            for dataset in datasets:
                if dataset in shelf.missing:
                    print(f"Left out of {name}: {shelf.missing[dataset]}")


@app.command(
    epilog=keep_lines("""Examples:
  fedala paper report runs/paper
  fedala paper report results --insert docs/reproduction.md""")
)
def report(folders: Folders = None, *, out: ReportOut = None, insert: Insert = None) -> None:
    """Compare our numbers with the paper's: Markdown, LaTeX, csv and one HTML page."""
    places = folders or [_OUT]
    pictures = [path for place in places for path in sorted((place / "figures").glob("*.png"))]

    def write(results: Results, folder: Path) -> list[Path]:
        return reporting.write(results, folder, pictures)

    results, written = write_report(PAPER, places, out, insert, write, reporting.make_markdown)
    show(_comparison(results))
    print(comparison.describe(results))
    end_report(results, written)


def _comparison(results: Results) -> Table:
    """Build the table of our numbers and the paper's."""
    shown = Table("table", "column", "method", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("paper", "ours", "difference", "last round"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("not as in the paper", min_width=WRAPPED)
    colours = {"agrees": "green", "near": "yellow", "differs": "red"}
    for row in comparison.list_comparisons(results):
        colour = colours[row["agreement"]]
        paper, ours = (format_spread(row[key], row[f"{key}_std"]) for key in ("paper", "ours"))
        shown.add_row(
            row["table"],
            row["column"],
            row["method"],
            paper,
            f"[{colour}]{ours}[/]",
            f"[{colour}]{row['difference']:+.2f}[/]",
            f"{row['final']:.2f}",
            escape(row["departures"]),
        )
    return shown
