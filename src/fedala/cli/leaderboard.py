"""`fedala leaderboard list | run | report`: every method in the same settings."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedala.cells import running
from fedala.cells.results import CSV
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
from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines, say
from fedala.leaderboard import report as reporting
from fedala.leaderboard.board import (
    BOARD,
    choose_cells,
    choose_settings,
    list_published,
    settings,
)
from fedala.leaderboard.table import COLUMNS, Board, make_boards
from fedala.methods import list_methods
from fedala.options import split_names
from fedala.report.tables import WRAPPED, show
from fedala.runs.own_code import import_given

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Every method, with and without ALA, in the same settings: list, run, report.",
)

_OUT = Path("runs/leaderboard")
#: The columns that fit on a terminal; the files of the report have all.
_SHOWN = ("accuracy", "gain", "published", "trained", "worst", "seconds")


@app.command("list")
@config_options("imports")
def list_settings(**values: Any) -> None:
    """Show the settings: data, partition, rounds and seeds, and how many numbers are published.

    Below them are the methods, with your own if you import them.
    """
    import_given(given_options(values))
    headings = ("setting", "", "data", "model", "partition", "clients", "lr")
    shown = Table(*headings, box=None, pad_edge=False)
    for heading in ("rounds", "seeds", "published"):
        shown.add_column(heading, justify="right")
    for name, setting in settings().items():
        shown.add_row(
            name,
            escape(setting.title),
            setting.dataset,
            setting.model,
            setting.partition,
            str(setting.clients),
            f"{setting.lr:g}",
            str(setting.rounds),
            str(setting.seeds),
            str(len(list_published(name))),
        )
    show(shown)
    print(f"methods: {', '.join(list_methods())}")


@app.command(
    epilog=keep_lines("""Examples:
  fedala leaderboard run                      # all methods on the embedded digits
  fedala leaderboard run --settings cifar100-dir --method ditto --data-dir D
  fedala leaderboard run --settings all --minutes 30 --jobs 4 --data-dir D

Finished cells are kept. After an interruption, the same command continues.""")
)
@config_options("imports")
def run(
    *,
    names: Annotated[
        str,
        typer.Option(
            "--settings",
            "--columns",
            help="settings, separated by commas, as in fedala leaderboard list, or all",
        ),
    ] = "digits",
    method: Annotated[
        str,
        typer.Option(help="only these methods, separated by commas; without it, every method"),
    ] = "",
    rounds: Annotated[
        int | None, typer.Option(help="T: number of rounds, instead of the setting's", min=1)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="runs of each cell, instead of the setting's", min=1)
    ] = None,
    minutes: Minutes = None,
    data_dir: DataDir = None,
    out: Out = _OUT,
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle", help="reshuffle the batches every epoch; the published numbers do not"
        ),
    ] = False,
    eval_every: EvalEvery = 1,
    device: Device = "auto",
    keep_checkpoints: KeepCheckpoints = False,
    jobs: Jobs = 1,
    relay: RelayFlag = False,
    **values: Any,
) -> None:
    """Run methods in settings, each in a folder of its own; test models before and after training.

    Without --method, every method is run, with and without ALA.
    """
    began = time.monotonic()
    chosen = choose_settings(split_names(names))
    given = given_options(values)
    import_given(given)
    cells = choose_cells(chosen, split_names(method), shuffle=shuffle, rounds=rounds)
    check_before_run(device, data_dir, out, relay=relay)
    deadline = None if minutes is None else began + 60 * minutes
    order = running.RunOptions(
        out, rounds, seeds, data_dir, eval_every, device, keep_checkpoints, deadline
    )
    order = replace(order, imports=given.get("imports"))
    arguments = [f"--settings={names}", f"--method={method}", *["--shuffle"] * shuffle]
    run_chosen(BOARD, cells, order, arguments, jobs=jobs, relay=relay, source="published")
    if not relay:
        print(
            f"Results: {out / CSV}; compare them by "
            f"fedala leaderboard report {shlex.quote(str(out))}"
        )


@app.command(
    epilog=keep_lines("""Examples:
  fedala leaderboard report runs/leaderboard
  fedala leaderboard report runs/leaderboard --latex > board.tex
  fedala leaderboard report results --insert docs/leaderboard.md""")
)
def report(
    folders: Folders = None,
    *,
    out: ReportOut = None,
    insert: Insert = None,
    latex: Annotated[
        bool, typer.Option("--latex", metavar="", help="print the tables as LaTeX")
    ] = False,
) -> None:
    """Compare the methods: one HTML page whose tables sort, Markdown, LaTeX, and csv."""
    results, written = write_report(
        BOARD, folders or [_OUT], out, insert, reporting.write, reporting.make_markdown
    )
    boards = make_boards(results)
    if latex:
        print(reporting.make_latex(boards), end="")
        end_report(results, written, print_path=say)
        return
    for board in boards:
        if board.has_results:
            show(_make_table(board))
    for sentence in reporting.describe(boards):
        print(sentence)
    end_report(results, written)


def _make_table(board: Board) -> Table:
    """Build the table of a setting for the terminal: the methods that have been run."""
    shown = Table(
        "method",
        title=f"{board.setting.name}: {board.setting.title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = [column for column in COLUMNS if column.name in _SHOWN]
    for column in columns:
        shown.add_column(column.heading.lower(), justify="right", no_wrap=True)
    shown.add_column("how", min_width=WRAPPED)
    for row in board.rows:
        if row.result:
            texts = (column.text(row) or "–" for column in columns)
            shown.add_row(escape(row.title), *texts, escape("; ".join(row.facts[:3])))
    return shown
