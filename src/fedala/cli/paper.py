"""`fedala paper list | run | report`: the paper's tables and figures as commands."""

import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedala.cli.output import keep_lines, say
from fedala.errors import UserError
from fedala.paper import comparison, processes, running
from fedala.paper import report as reporting
from fedala.paper.experiments import Cell, Drawing, choose, drawings, preset, tables
from fedala.paper.experiments import Table as PaperTable
from fedala.paper.progress import CellProgress
from fedala.paper.reading import read_results
from fedala.paper.results import CSV, Results
from fedala.report.headline import format_spread
from fedala.report.tables import WRAPPED, show
from fedala.runs.devices import NAMES, choose_device, share_devices
from fedala.runs.observer import Stopped, catch_stop_signals

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The paper's tables and figures: list, run, report.",
)

Out = Annotated[Path, typer.Option(help="the results folder", metavar="DIR")]
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
    minutes: Annotated[
        float | None, typer.Option(help="stop after this time, between two rounds", min=0.01)
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="folder with copies of the datasets; without it, the hub", metavar="DIR"),
    ] = None,
    out: Out = _OUT,
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle", help="reshuffle the batches every epoch; the paper's presets do not"
        ),
    ] = False,
    eval_every: Annotated[
        int, typer.Option(help="evaluate every N rounds, and after the last", min=1, metavar="N")
    ] = 1,
    device: Annotated[str, typer.Option(help=NAMES)] = "auto",
    keep_checkpoints: Annotated[
        bool,
        typer.Option(
            "--keep-checkpoints",
            help="also keep those of finished cells (large), to add rounds later",
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            help="processes that run cells in parallel, on several GPUs if there are several",
            min=1,
        ),
    ] = 1,
    relay: Annotated[bool, typer.Option("--relay", hidden=True)] = False,
) -> None:
    """Run cells of the paper's tables with its presets. Each cell has its own folder."""
    began = time.monotonic()
    given_rounds, rounds = rounds, rounds or int(preset()["rounds"])
    seeds = seeds or int(preset()["seeds"])
    choose_device(device)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"The data directory {data_dir} is not a folder.")
    if out.exists() and not relay:
        _note(read_results(out).unverified)  # unreadable results are refused now, not at the end
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
    if relay:
        # Run folders record the command: record the one that a user can type.
        sys.argv[:] = [word for word in sys.argv if word != "--relay"]
        parent = processes.Relay()
        running.run_cells(cells, replace(order, stop_signals=parent.stop_signals), parent)
        return
    arguments = [*names, f"--columns={columns}", f"--method={method}", *["--shuffle"] * shuffle]
    _run_cells(cells, order, jobs, arguments)


def _choose_cells(
    names: list[str], columns: str, method: str, *, shuffle: bool, rounds: int
) -> dict[Cell, float | None]:
    """Return the chosen cells, each with the accuracy that the paper prints for it."""
    cells: dict[Cell, float | None] = {}
    for table, column, row in choose(names, _split(columns), _split(method)):
        printed = table.printed(column, row)
        cell = column.cell(row, shuffle=shuffle, rounds=rounds)
        cells.setdefault(cell, printed.accuracy if printed else None)
    return cells


def _run_cells(
    cells: Mapping[Cell, float | None], order: running.RunOptions, jobs: int, arguments: list[str]
) -> None:
    """Run the cells with a live table, in this process or in `jobs` others; write the results."""
    out = order.out
    accuracies = {str(cell): accuracy for cell, accuracy in cells.items()}
    board = CellProgress(Console(stderr=True), accuracies, order.rounds, order.deadline)
    try:
        with board, catch_stop_signals() as signals:
            if jobs == 1:
                running.run_cells(cells, replace(order, stop_signals=signals), board)
            else:
                words = [*arguments, *_order_arguments(order)]
                devices = share_devices(order.device, jobs)
                processes.run_processes(words, devices, board, signals)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; {_advice(out)}") from None
    finally:
        if out.is_dir():
            read_results(out).write(out / CSV)
    if signals:
        print(f"Stopped; {_advice(out)}.", file=sys.stderr)
        raise typer.Exit(128 + signals[0])
    for sentence in board.summary():
        print(sentence)
    states = {state.status for state in board.cells.values()}
    if "failed" in states:
        raise typer.Exit(1)
    if states == {"skipped"}:
        raise UserError("Nothing was run.")
    print(
        f"Results: {out / CSV}; compare them with the paper's by "
        f"fedala paper report {shlex.quote(str(out))}"
    )


def _order_arguments(order: running.RunOptions) -> list[str]:
    """Return the command-line arguments that give another process the same order.

    Its device is its own.
    """
    arguments = [
        f"--rounds={order.rounds}",
        f"--seeds={order.seeds}",
        f"--out={order.out}",
        f"--eval-every={order.eval_every}",
    ]
    if order.keep_checkpoints:
        arguments.append("--keep-checkpoints")
    if order.data_dir:
        arguments.append(f"--data-dir={order.data_dir}")
    if order.deadline is not None:
        arguments.append(f"--minutes={max(0.01, order.seconds_left / 60)}")
    return arguments


def _advice(out: Path) -> str:
    return f"the results so far are in {out}, and the same command continues"


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


def _note(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        say(f"Note: {sentence}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command(
    epilog=keep_lines("""Examples:
  fedala paper report runs/paper
  fedala paper report results --insert docs/reproduction.md""")
)
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]", help="the results folder, or a folder with csv files of results"
        ),
    ] = _OUT,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"where to write [dim]\[default: report in the results folder][/dim]",
            metavar="DIR",
        ),
    ] = None,
    insert: Annotated[
        Path | None,
        typer.Option(
            help="also put the Markdown tables between the marks of this file", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Compare our numbers with the paper's: Markdown, LaTeX, csv and one HTML page."""
    results = read_results(folder)
    if out and out.resolve() == folder.resolve():
        raise UserError(
            f"The report cannot be written into {out} itself: "
            "its tables would be read as results. Name another folder."
        )
    if insert:
        reporting.split_at_marks(insert)  # refuse a file without marks before anything is written
    written = reporting.write(
        results, out or folder / "report", sorted((folder / "figures").glob("*.png"))
    )
    if insert:
        reporting.insert(results, insert)
    show(_comparison(results))
    print(comparison.describe(results))
    _note([*results.contradictions, *results.unverified])
    for path in [*written, *([insert] if insert else [])]:
        print(f"Written: {path}")


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
