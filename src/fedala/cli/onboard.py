"""`fedala onboard`: a client that was not there joins a finished run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines, print_line
from fedala.report import tables
from fedala.runs.devices import NAMES
from fedala.runs.onboard import onboard as onboard_clients

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala onboard runs/mine --method fedala --data new.npz
  fedala onboard runs/mine --method fedala --data new.npz --epochs 0,1,5,20
  fedala onboard runs/one-method --data clinics.npz --out models    # several""")
)
@config_options("imports")
def onboard(
    *,
    run: Annotated[Path, typer.Argument(help="the run folder", metavar="DIR")],
    data: Annotated[
        str,
        typer.Option(
            help="the samples of the new client, or of several: anything that --dataset reads",
            metavar="PATH",
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(help="one of the run's methods, if it has several", metavar="NAME"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help=r"one of the run's seeds [dim]\[default: the first][/dim]"),
    ] = None,
    epochs: Annotated[
        str | None,
        typer.Option(
            help="local epochs after which the client is tested, separated by commas "
            r"[dim]\[default: the run's holdout_epochs][/dim]",
            metavar="LIST",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            help=r"the (first) new client's number [dim]\[default: the next after the run's][/dim]"
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="a .safetensors file for the personal model, or a folder for one file per client",
            metavar="PATH",
        ),
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="overwrite models that exist")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="the function that makes the run's model, if it is your own; it is executed",
            metavar="FILE:FUNCTION",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=NAMES, metavar="NAME")] = "auto",
    **values: Any,
) -> None:
    """Onboard a client that was not there: it receives, initialises, trains, and is tested."""
    found = onboard_clients(
        run,
        data,
        method=method,
        seed=seed,
        epochs=epochs,
        number=number,
        out=out,
        force=force,
        device=device,
        model=model,
        imports=given_options(values).get("imports"),
    )
    tables.console().print(tables.onboarding(found))
    print_line(found.describe())
    for note in found.notes:
        print_line(note)
    for client in found.clients:
        print_line(f"Personal model: {client.file}")
