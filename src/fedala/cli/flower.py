"""`fedala flower new | demo | export`: the methods on Flower, and clients' models."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedala.cli import flower_state
from fedala.cli.config_options import config_options, given_options
from fedala.cli.flower_state import Client, Experiment, StateDir
from fedala.cli.output import keep_lines, print_line
from fedala.errors import UserError
from fedala.report import tables
from fedala.report.progress_bars import ProgressBars
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.outputs import check_output
from fedala.runs.own_code import configure
from fedala.runs.plan import plan

app = typer.Typer(
    no_args_is_help=True, help="The same methods on Flower: real clients, on their own machines."
)
app.add_typer(flower_state.app, name="state")


@app.command(
    epilog=keep_lines("""Examples:
  fedala flower new my-app --dataset mnist --data-dir data --clients 10
  fedala flower new my-app --import my/fedsim.py --method fedsim    # the file goes into the app
  flwr run my-app                           # simulated by Flower, with fedala[flower-simulation]
  flwr run my-app our-superlink             # on the nodes of a SuperLink: docs/deployment.md""")
)
@config_options()
def new(
    *,
    folder: Annotated[Path, typer.Argument(help="the folder to write", metavar="DIR")],
    **values: Any,
) -> None:
    """Write a folder for flwr run: an app for one method, with all options in pyproject.toml."""
    from fedala.flower.experiment import (
        SIMULATION_OPTIONS,
        check_evaluation,
        give_figures,
    )
    from fedala.flower.new import check_app_folder, choose_deployment, write_app

    check_app_folder(folder)
    given = given_options(values)
    for name in SIMULATION_OPTIONS:
        if name in given:
            raise UserError(
                f"--{name.replace('_', '-')} has no meaning if every client has its own machine: "
                "leave it out."
            )
    check_evaluation(given)
    _check_model(given)
    config = configure({"method": "fedala", **given})
    _check_single_method(config)
    resolved = give_figures(plan(config)).config
    write_app(folder, resolved, choose_deployment(folder, resolved))
    print_line(f"Written: {folder / 'pyproject.toml'}, {folder / 'app.py'}")
    nodes = shlex.quote(f"num-supernodes={resolved.clients} client-resources-num-cpus=1")
    print_line(
        "To run it in Flower's simulation engine: flwr run "
        f"{shlex.quote(str(folder))} local --stream --federation-config {nodes}"
    )
    if resolved.dataset != "digits":
        print("Each node reads the data that its own node config names: see docs/deployment.md.")


@app.command(
    epilog=keep_lines("""Examples:
  fedala flower demo
  fedala flower demo --method ditto+ala --clients 4 --rounds 5 --out runs/demo""")
)
@config_options(
    "method",
    "imports",
    "set",
    "dataset",
    "data_dir",
    "model",
    "partition",
    "clients",
    "rounds",
    "batch_size",
    "lr",
    "seed",
)
def demo(
    *,
    out: Annotated[
        Path | None, typer.Option(help="keep the server's run folder here", metavar="DIR")
    ] = None,
    **values: Any,
) -> None:
    """Run a federation on this machine: a SuperLink and SuperNodes, with TLS and authentication."""
    from fedala.flower.demo import run_demo
    from fedala.flower.experiment import give_figures

    defaults = {"method": "fedala", "clients": 2, "rounds": 3, "partition": "dir:0.5"}
    given = given_options(values)
    _check_model(given)
    checked = give_figures(plan(configure({**defaults, **given})))
    _check_single_method(checked.config)
    if out:
        RunFolder.check_output(out, force=False)
    with ProgressBars(Console(stderr=True), checked) as watch:
        summary = run_demo(checked, out, row=watch.row, say=watch.say)
    tables.show(tables.results(summary["methods"]))
    folder = f" Run folder: {out}" if out else ""
    print_line(f"SuperLink and SuperNodes have stopped.{folder}")


@app.command(
    epilog=keep_lines("""Examples:
  fedala flower export --out model.safetensors
  fedala flower export --state-dir /srv/state --client 3 --out 3.safetensors
  fedala flower export --experiment ward --out 3.safetensors --force""")
)
def export(
    *,
    out: Annotated[Path, typer.Option(help="a .safetensors file", metavar="FILE")],
    state_dir: StateDir = None,
    experiment: Experiment = None,
    client: Client = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="overwrite a file that exists")
    ] = False,
) -> None:
    """Write a client's personal model, as its last training left it, on the client's machine."""
    from fedala.flower.stored_states import export_personal, find_state

    check_output(out, [".safetensors"], [state_dir], force=force)
    state = find_state(experiment, client, state_dir=state_dir)
    path = export_personal(state, out)
    round = "" if state.round is None else f", after round {state.round}"
    print_line(f"Written: {path} ({state.title}{round})")


def _check_model(given: dict[str, Any]) -> None:
    from fedala.flower.experiment import check_code

    check_code({"model": given.get("model")})  # imports become parts of the app


def _check_single_method(config: Config) -> None:
    if len(config.methods) > 1:
        raise UserError(f"A federation runs one method at a time, not {config.method}.")
