"""`fedala flower state list | clear`: what clients have stored on this machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedala.cli.output import keep_lines, print_line
from fedala.errors import UserError, byte_size
from fedala.report import tables

app = typer.Typer(no_args_is_help=True, help="What clients on Flower have stored on this machine.")

StateDir = Annotated[
    Path | None,
    typer.Option(
        help=r"the node's state-dir [dim]\[default: that of nodes without one][/dim]",
        metavar="DIR",
    ),
]
Experiment = Annotated[
    str | None, typer.Option(help="the experiment, if there are several", metavar="NAME")
]
Client = Annotated[
    str | None,
    typer.Option(
        help="the client, if there are several: its partition-id, or the name in the list",
        metavar="CLIENT",
    ),
]

_RECENT = 3600  # seconds since the last change within which a run may still need a state


@app.command(
    "list",
    epilog=keep_lines("""Examples:
  fedala flower state list
  fedala flower state list --state-dir /var/lib/fedala/state"""),
)
def list_(state_dir: StateDir = None) -> None:
    """List the states of clients: experiment, client, round, size, last change."""
    from fedala.flower.stored_states import find_root, list_states

    states = list_states(state_dir)
    if not states:
        print_line(f"No client has stored anything in {find_root(state_dir)}.")
        return
    tables.show(tables.stored_states(map(_describe, states)))
    print(f"{_count(states)}.")
    if any(state.belongs_to_run for state in states):
        print(
            "No later run uses a state that belongs to one run: delete those of finished runs with "
            "fedala flower state clear --runs."
        )


@app.command(
    epilog=keep_lines("""Examples:
  fedala flower state clear --runs --older-than 1     # of runs without a named experiment
  fedala flower state clear --experiment ward --client 3 --dry-run
  fedala flower state clear --all --yes""")
)
def clear(
    *,
    state_dir: StateDir = None,
    experiment: Annotated[
        str | None, typer.Option(help="only those of this experiment", metavar="NAME")
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(help="only those of this client: number or name", metavar="CLIENT"),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(help="only those that have not changed for so many days", metavar="DAYS"),
    ] = None,
    runs: Annotated[
        bool,
        typer.Option(
            "--runs", metavar="", help="only those that belong to one run; it must be over"
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", metavar="", help="all states of all clients")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="only show what would be deleted")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="do not ask")] = False,
) -> None:
    """Delete states of clients. A client without its state starts over."""
    from fedala.flower.stored_states import delete_states, list_states, select_states

    chosen = (experiment, client, older_than, runs or None)
    if everything == any(value is not None for value in chosen):
        raise UserError(
            "Say which states to delete: --experiment, --client, --older-than and --runs choose "
            "some, --all takes all of them."
        )
    if older_than is not None and not 0 <= older_than < 1e6:  # NaN is neither
        raise UserError(f"--older-than takes a number of days from 0 on, not {older_than:g}.")
    states = select_states(
        list_states(state_dir),
        experiment=experiment,
        client=client,
        older_than=older_than,
        runs=runs,
    )
    if not states:
        print("There is no such state.")
        return
    tables.show(tables.stored_states(map(_describe, states)))
    total = _count(states)
    if dry_run:
        print(f"{total}, would be deleted.")
        return
    if max(state.changed for state in states) > time.time() - _RECENT:
        print("Some have changed within the last hour: make sure that their runs are over.")
    if not yes:
        typer.confirm(f"Delete {total}?", abort=True)
    delete_states(states)
    print_line(f"Deleted: {total}.")


def _describe(state: Any) -> tuple[str, ...]:
    """Return the row of a state in the table."""
    return (
        state.experiment,
        state.client,
        "–" if state.round is None else str(state.round),
        byte_size(state.size),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(state.changed)),
        "belongs to one run" if state.belongs_to_run else "",
    )


def _count(states: Sequence[Any]) -> str:
    """Say how many states there are, and how large they are together."""
    noun = "state" if len(states) == 1 else "states"
    return f"{len(states):,} {noun}, {byte_size(sum(state.size for state in states))}"
