"""`fedala paper list | run | report`: the paper's tables and figures as commands."""

import os
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
from rich.table import Table as Shown

from fedala.errors import UserError, printable
from fedala.paper import comparison, processes, running
from fedala.paper import report as reporting
from fedala.paper.experiments import Cell, Drawing, choose, drawings, preset, tables
from fedala.paper.progress import CellProgress
from fedala.paper.reading import read_results
from fedala.paper.results import CSV
from fedala.report.tables import console
from fedala.runs.config import Config
from fedala.runs.execute import Stopped, catch_stop_signals

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The paper's tables and figures: list, run, report.",
)

Out = Annotated[Path, typer.Option(help="the results folder", metavar="DIR")]
_OUT = Path("runs/paper")


@app.command("list")
def list_() -> None:
    """Show the tables: their columns, how many cells each has, and what data it needs."""
    for table in tables().values():
        shown = Shown(
            "column", "", "data", "model", "partition", "clients", "settings", title=f"{table.name}: {table.title}",
            title_justify="left", box=None, pad_edge=False, title_style="bold",
        )  # fmt: skip
        shown.add_column("cells", justify="right")
        for column in table.columns:
            setting = column.setting
            join = "" if setting.join_ratio == 1 else f", ρ = {setting.join_ratio:g}"
            changes = [f"{key}={value}" for key, value in column.set.items()] + [
                "+ala"
            ] * column.with_ala
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
        console().print(shown)
        print(f"methods: {', '.join(table.methods)}\n")
    for drawing in drawings().values():
        needed = ", ".join(dict.fromkeys(setting.dataset for setting in drawing.settings))
        print(
            f"{drawing.name}: {drawing.title} ({needed}; without --data-dir, the embedded digits)"
        )
    asked = preset()
    print(
        f"\nAll with {asked['rounds']} rounds, {asked['seeds']} seeds, batches of {asked['batch_size']} in fixed order. "
        "A cell that several tables show is run once."
    )


@app.command(
    epilog="""Examples:
  fedala paper run table2 --columns cifar100-dir --method fedavg,fedala --data-dir DATA
  fedala paper run table2 table7 --rounds 300 --seeds 1 --minutes 30 --data-dir DATA
  fedala paper run table2 --shuffle --jobs 4 --data-dir DATA

Finished cells are kept; the same command goes on where it was interrupted."""
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
        int | None, typer.Option(help="how many runs of each cell, instead of the paper's 5", min=1)
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
        int, typer.Option(help="evaluate every so many rounds, and after the last", min=1)
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    keep_checkpoints: Annotated[
        bool,
        typer.Option(
            "--keep-checkpoints",
            help="also of finished cells (large), to give them more rounds later",
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="processes that run cells side by side", min=1)] = 1,
    relay: Annotated[bool, typer.Option("--relay", hidden=True)] = False,
) -> None:
    """Run cells of the paper's tables with the paper's presets. Each has a folder of its own in the results folder."""
    began = time.monotonic()
    asked_rounds, rounds = rounds, rounds or int(preset()["rounds"])
    seeds = seeds or int(preset()["seeds"])
    Config.of({"device": device})
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"The data directory {data_dir} is not a folder.")
    if out.exists():
        _note(
            read_results(out).unverified if not relay else ()
        )  # what could not be read at the end is refused now
    figures = {
        name: drawing
        for name, drawing in drawings(digits=data_dir is None).items()
        if name in names
    }
    names = [name for name in names if name not in figures]
    chosen = choose(names, _split(columns), _split(method))
    cells: dict[Cell, float | None] = {}
    for table, column, row in chosen:
        printed = table.printed(column, row)
        cells.setdefault(
            column.cell(row, shuffle=shuffle, rounds=rounds), printed.accuracy if printed else None
        )
    deadline = None if minutes is None else began + 60 * minutes
    order = running.RunOptions(
        out, rounds, seeds, data_dir, eval_every, device, keep_checkpoints, deadline
    )
    if figures:
        _draw(figures, order, asked_rounds)
    if not cells:
        return
    if relay:
        sys.argv[:] = [
            word for word in sys.argv if word != "--relay"
        ]  # run folders note the command: one can type it
        parent = processes.Relay()
        running.run_cells(cells, replace(order, stop_signals=parent.stop_signals), parent)
        return
    board = CellProgress(
        Console(stderr=True),
        {str(cell): accuracy for cell, accuracy in cells.items()},
        rounds,
        deadline,
    )
    try:
        with board, catch_stop_signals() as asked:
            if jobs == 1:
                running.run_cells(cells, replace(order, stop_signals=asked), board)
            else:
                arguments = [
                    *names, f"--columns={columns}", f"--method={method}", f"--rounds={rounds}", f"--seeds={seeds}",
                    f"--out={out}", f"--eval-every={eval_every}", f"--device={device}", *["--shuffle"] * shuffle,
                    *["--keep-checkpoints"] * keep_checkpoints,
                    *([f"--data-dir={data_dir}"] if data_dir else []),
                    *([f"--minutes={max(0.01, order.seconds_left / 60)}"] if minutes else []),
                ]  # fmt: skip
                threads = str(max(1, (os.cpu_count() or 1) // jobs))
                processes.run_processes(
                    arguments, jobs, board, {"OMP_NUM_THREADS": threads, **os.environ}, asked
                )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"; what was done is in {out}, and the same command goes on"
        ) from None
    finally:
        if out.is_dir():
            read_results(out).write(out / CSV)
    if asked:
        print(f"Stopped; what was done is in {out}, and the same command goes on.", file=sys.stderr)
        raise typer.Exit(128 + asked[0])
    for sentence in board.summary():
        print(sentence)
    states = {state.status for state in board.cells.values()}
    if "failed" in states:
        raise typer.Exit(1)
    if states == {"skipped"}:
        raise UserError("Nothing was run.")
    print(
        f"Results: {out / CSV}; fedala paper report {shlex.quote(str(out))} puts them beside the paper's."
    )


def _draw(chosen: Mapping[str, Drawing], order: running.RunOptions, rounds: int | None) -> None:
    from fedala.paper import figures  # needs matplotlib

    shelf = running.DataCache(order.data_dir)
    options = {"device": order.device, **({"rounds": rounds} if rounds else {})}
    for name, drawing in chosen.items():
        if order.seconds_left <= 0:
            print(f"Left out, for want of time: {name}.")
            continue
        print(f"{name}: {drawing.title} …", file=sys.stderr)
        try:
            for path in figures.draw(
                drawing, shelf, order.out / "figures", lambda: order.seconds_left <= 0, **options
            ):
                print(f"Written: {path}")
        except Stopped as stopped:
            print(f"Out of time: {name} is not drawn; it got to {stopped}.")
        except UserError as error:
            print(f"Skipped: {name}: {error}")
        else:
            for reason in dict.fromkeys(
                shelf.missing[s.dataset] for s in drawing.settings if s.dataset in shelf.missing
            ):
                print(f"Left out of {name}: {reason}")


def _note(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(printable(f"Note: {sentence}", 1000), file=sys.stderr)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command(
    epilog="""Examples:
  fedala paper report runs/paper
  fedala paper report results --insert docs/reproduction.md"""
)
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]", help="the results folder, or any with csv files of results"
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
            help="put the Markdown tables between the marks of this file as well", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Put our numbers beside the paper's: Markdown, LaTeX, csv and one HTML page."""
    results = read_results(folder)
    if out and out.resolve() == folder.resolve():
        raise UserError(
            f"The report cannot go into {out} itself, where its tables would be taken for results."
        )
    if insert:
        reporting.split_at_marks(
            insert
        )  # a file without a place for the tables is refused before anything is written
    written = reporting.write(
        results, out or folder / "report", sorted((folder / "figures").glob("*.png"))
    )
    if insert:
        reporting.insert(results, insert)
    shown = Shown("table", "column", "method", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("paper", "ours", "difference", "last round"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("not as in the paper")
    colours = {"agrees": "green", "near": "yellow", "differs": "red"}
    for row in comparison.list_comparisons(results):
        colour = colours[row["agreement"]]
        paper, ours = (
            comparison.format_spread(row[key], row[f"{key}_std"]) for key in ("paper", "ours")
        )
        texts = [paper, f"[{colour}]{ours}[/]", f"[{colour}]{row['difference']:+.2f}[/]"]
        shown.add_row(
            row["table"],
            row["column"],
            row["method"],
            *texts,
            f"{row['final']:.2f}",
            escape(row["departures"]),
        )
    console().print(shown)
    print(comparison.describe(results))
    _note([*results.contradictions, *results.unverified])
    for path in [*written, *([insert] if insert else [])]:
        print(f"Written: {path}")
