"""`fedala layers`: what counts as a layer of a model, and which layers ALA would blend."""

from typing import Annotated, Any

import typer

from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines, print_line
from fedala.lanes.layer_table import describe_layers
from fedala.lanes.layers import upper
from fedala.runs.config import Config
from fedala.runs.plan import plan

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala layers --model cnn --dataset digits
  fedala layers --dataset cifar10 --data-dir data --model resnet18 --layers 2
  fedala layers --layers 'fc2,conv1'""")
)
@config_options(
    "dataset", "data_dir", "resize", "clients_by", "label_column", "drop_columns", "loss", "model"
)
def layers(
    *,
    layers: Annotated[
        str,
        typer.Option(
            help="how many layers ALA governs, or patterns of names, separated by commas",
            metavar="NUMBER|PATTERNS",
        ),
    ] = "1",
    **values: Any,
) -> None:
    """List a model's layers, counted from the output, and what ALA would blend of them."""
    division = {"method": "fedavg", "partition": "iid", "clients": "1"}
    planned = plan(Config.from_values({**given_options(values), **division}))
    model = planned.make_skeleton()
    chosen = int(layers) if layers.lstrip("-").isdigit() else layers
    for line in describe_layers(model, upper(model, chosen)).splitlines():
        print_line(line)
