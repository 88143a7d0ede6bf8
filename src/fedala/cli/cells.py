"""What `fedala paper` and `fedala leaderboard` share: options, and running cells in view."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedala.cells import processes, running
from fedala.cells.cell import Cell
from fedala.cells.collection import Collection
from fedala.cells.progress import CellProgress
from fedala.cells.reading import read_results
from fedala.cells.report_files import insert as put_between_marks
from fedala.cells.report_files import split_at_marks
from fedala.cells.results import CSV, Results
from fedala.cli.output import print_line, say
from fedala.errors import UserError
from fedala.leaderboard.board import BOARD
from fedala.paper.experiments import PAPER
from fedala.runs.devices import NAMES, choose_device, share_devices
from fedala.runs.observer import catch_stop_signals

Out = Annotated[Path, typer.Option(help="the results folder", metavar="DIR")]
Minutes = Annotated[
    float | None, typer.Option(help="stop after this time, between two rounds", min=0.01)
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="folder with copies of the datasets; without it, the hub", metavar="DIR"),
]
EvalEvery = Annotated[
    int, typer.Option(help="evaluate every N rounds, and after the last", min=1, metavar="N")
]
Device = Annotated[str, typer.Option(help=NAMES)]
KeepCheckpoints = Annotated[
    bool,
    typer.Option(
        "--keep-checkpoints",
        help="also keep those of finished cells (large), to add rounds later",
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        help="processes that run cells in parallel, on several GPUs if there are several",
        min=1,
    ),
]
RelayFlag = Annotated[bool, typer.Option("--relay", hidden=True)]
Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DIR...]",
        help="results folders of either command, or folders with csv files of results",
    ),
]
ReportOut = Annotated[
    Path | None,
    typer.Option(
        help=r"where to write [dim]\[default: in report, in the first folder][/dim]", metavar="DIR"
    ),
]
Insert = Annotated[
    Path | None,
    typer.Option(
        help="also put the Markdown tables between the marks of this file", metavar="FILE"
    ),
]


def read_folders(*folders: Path, shown: Collection | None = None) -> Results:
    """Read what either command has written; with `shown`, leave out what is not part of it."""
    return read_results(folders, (PAPER, BOARD), shown)


def check_before_run(device: str, data_dir: Path | None, out: Path, *, relay: bool) -> None:
    """Refuse what cannot be used, before work starts: device, data, and results so far."""
    choose_device(device)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"The data directory {data_dir} is not a folder.")
    if out.exists() and not relay:
        note(read_folders(out).unverified)


def run_chosen(
    collection: Collection,
    cells: Mapping[Cell, float | None],
    order: running.RunOptions,
    arguments: list[str],
    *,
    jobs: int,
    relay: bool,
    source: str = "paper",
) -> None:
    """Run the cells, each with its printed accuracy, in view; write the results.

    With several `jobs`, other processes run them: the same command with these `arguments`. Such a
    process is a `relay`, and reports to this one.
    """
    if relay:
        # Run folders record the command: record the one that a user can type.
        sys.argv[:] = [word for word in sys.argv if word != "--relay"]
        parent = processes.Relay()
        running.run_cells(cells, replace(order, stop_signals=parent.stop_signals), parent)
        return
    out = order.out
    accuracies = {str(cell): accuracy for cell, accuracy in cells.items()}
    rounds = {str(cell): order.rounds_of(cell) for cell in cells}
    progress = CellProgress(Console(stderr=True), accuracies, rounds, order.deadline, source)
    try:
        with progress, catch_stop_signals() as signals:
            if jobs == 1:
                running.run_cells(cells, replace(order, stop_signals=signals), progress)
            else:
                words = [collection.command, "run", *arguments, *_list_arguments(order)]
                devices = share_devices(order.device, jobs)
                processes.run_processes(words, devices, progress, signals)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; {_advice(out)}") from None
    finally:
        if out.is_dir():
            read_folders(out).write(out / CSV)
    if signals:
        print(f"Stopped; {_advice(out)}.", file=sys.stderr)
        raise typer.Exit(128 + signals[0])
    for sentence in progress.summary():
        print(sentence)
    states = {state.status for state in progress.cells.values()}
    if "failed" in states:
        raise typer.Exit(1)
    if states == {"skipped"}:
        raise UserError("Nothing was run.")


def _list_arguments(order: running.RunOptions) -> list[str]:
    """Return the command-line arguments that give another process the same order.

    Its device is its own.
    """
    arguments = [f"--out={order.out}", f"--eval-every={order.eval_every}"]
    named = {
        "rounds": order.rounds,
        "seeds": order.seeds,
        "data-dir": order.data_dir,
        "import": order.imports,
    }
    arguments += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if order.keep_checkpoints:
        arguments.append("--keep-checkpoints")
    if order.deadline is not None:
        arguments.append(f"--minutes={max(0.01, order.seconds_left / 60)}")
    return arguments


def _advice(out: Path) -> str:
    return f"the results so far are in {out}, and the same command continues"


def note(sentences: Iterable[str]) -> None:
    """Print what a user should know about the files that were read."""
    for sentence in sentences:
        say(f"Note: {sentence}")


def write_report(
    collection: Collection,
    folders: Sequence[Path],
    out: Path | None,
    insert: Path | None,
    write: Callable[[Results, Path], list[Path]],
    make_markdown: Callable[[Results], str],
) -> tuple[Results, list[Path]]:
    """Write the report of a collection, also into a page; return the results and the paths."""
    results = read_folders(*folders, shown=collection)
    note(results.left_out)
    if out and out.resolve() in [folder.resolve() for folder in folders]:
        raise UserError(
            f"The report cannot be written into {out} itself: "
            "its tables would be read as results. Name another folder."
        )
    if insert:
        # Refuses a file without marks before anything is written.
        split_at_marks(insert, collection.command)
    written = write(results, out or folders[0] / "report" / collection.command)
    if insert:
        put_between_marks(make_markdown(results), insert, collection.command)
        written.append(insert)
    return results, written


def end_report(
    results: Results, written: Iterable[Path], print_path: Callable[[str], None] = print_line
) -> None:
    """Print what a user should know about the results, and which files were written."""
    note([*results.contradictions, *results.unverified])
    for path in written:
        print_path(f"Written: {path}")
