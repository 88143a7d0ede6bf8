"""`fedala methods` and `fedala datasets`: the names for `--method`, `--set` and `--dataset`."""

from typing import Any

import typer

from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines
from fedala.data import known_datasets
from fedala.methods import catalogue, list_kinds
from fedala.report import tables
from fedala.runs.own_code import import_given

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala methods
  fedala methods --import my/fedsim.py      # with your own""")
)
@config_options("imports")
def methods(**values: Any) -> None:
    """List the methods and their hyperparameters."""
    import_given(given_options(values))
    tables.show(tables.methods(list_kinds()))
    tables.show(tables.hyperparameters(catalogue().values()))
    print(
        "Set a hyperparameter with --set, such as --set fedala.eta=0.5; "
        "for x+ala, those of ALA are ala.eta and so on."
    )


@app.command()
def datasets() -> None:
    """List the datasets that are known by name."""
    tables.show(tables.datasets(known_datasets()))
    print(
        "For your own data, give --dataset the path of a .npz file, a .csv file or an image folder,"
        " or hub:owner/name."
    )
