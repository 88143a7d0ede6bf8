"""The command line: all commands, and how an error in any of them ends."""

import contextlib
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    print(
        "Error: the command line needs typer and rich: pip install 'fedala[cli]'.", file=sys.stderr
    )
    raise SystemExit(2) from None

from fedala.cli import (
    bench,
    convert,
    flower,
    layers,
    leaderboard,
    lists,
    new,
    onboard,
    paper,
    partition,
    report,
    run,
    trained,
)
from fedala.cli.memory import keep_freed_memory
from fedala.cli.output import keep_lines, say
from fedala.errors import CacheWarning, PluginWarning, RunError, UserError, printable
from fedala.io.user_code import trace_own_code
from fedala.options import use_flags
from fedala.runs.provenance import versions

#: The errors of a full disk, and of a user's share of one.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Commands(TyperGroup):
    """The commands, with one sentence and an exit code for every kind of error."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            try:
                return super().main(*args, **options)
            finally:
                sys.stdout.flush()  # only here, a full disk may come to light
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                say(f"Error: The name of a file is too long: {printable(str(error.filename), 60)}.")
                raise SystemExit(2) from None
            if error.errno not in _NO_ROOM:
                raise
            place = f" to {printable(str(error.filename), 200)}" if error.filename else ""
            say(f"Error: Nothing more can be written{place}: {error.strerror}.")
            _drop_output()
            raise SystemExit(1) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings(), use_flags():
                warnings.showwarning = _make_warner(warnings.showwarning)
                return super().invoke(ctx)
        except UserError as error:
            say(f"Error: {error}")
            raise typer.Exit(2) from None
        except RunError as error:
            say(f"Error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            say(f"Interrupted{interrupt}.")
            raise typer.Exit(130) from None
        except Exception as error:
            if not (trace := trace_own_code(error)):
                raise
            print(
                f"{trace}Error: code of your own failed, in the last of its lines above.",
                file=sys.stderr,
            )
            raise typer.Exit(1) from None


def _drop_output() -> None:
    """Let what stdout still holds go nowhere: its last flush would fail once more, aloud."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _make_warner(show: Callable[..., None]) -> Callable[..., None]:
    """Return a function that shows warnings: those of this program as a sentence."""

    def show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, PluginWarning | CacheWarning):
            say(f"Warning: {message}")
        else:
            show(message, category, *where)

    return show_warning


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personalised federated learning with Adaptive Local Aggregation (FedALA).",
    epilog=keep_lines("""Examples:
  fedala run                                # FedALA and FedAvg on embedded data
  fedala run --method fedala,ditto+ala --seeds 5    # one table, mean ± std
  fedala partition --partition pathological:2 --plot split.png
  fedala methods                            # what --method and --set take
  fedala new method FedMine                 # a method of your own to start from"""),
)
for commands in (run, trained, onboard, partition, layers, report, lists, bench):
    app.add_typer(commands.app)
app.add_typer(convert.app, name="convert")
app.add_typer(new.app, name="new")
app.add_typer(paper.app, name="paper")
app.add_typer(leaderboard.app, name="leaderboard")
app.add_typer(flower.app, name="flower")


def _show_versions(is_requested: bool) -> None:
    if is_requested:
        found = versions()
        print(f"fedala {found['fedala']} (torch {found['torch']}, Python {found['python']})")
        raise typer.Exit


@app.callback()
def fedala(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_show_versions,
            is_eager=True,
            help="Show the versions and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console without ρ shows a question mark
    # A usage error repeats its argument: control characters must not reach the terminal.
    sys.argv[1:] = [re.sub(r"[\x00-\x1f\x7f-\x9f]", "�", word) for word in sys.argv[1:]]
    app(prog_name="fedala")


if __name__ == "__main__":
    main()
