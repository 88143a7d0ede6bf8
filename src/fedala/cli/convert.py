"""`fedala convert`: datasets of other libraries as files that `fedala run` reads."""

from pathlib import Path
from typing import Annotated

import typer

from fedala.cli.output import keep_lines, print_line
from fedala.data.pfllib import convert_pfllib
from fedala.lanes.parameters import list_few

app = typer.Typer(no_args_is_help=True, help="Convert datasets of other libraries for --dataset.")


@app.callback()
def convert() -> None:
    """Keep the name of the library a command of its own."""


@app.command(
    epilog=keep_lines("""Examples:
  fedala convert pfllib PFLlib/dataset/MNIST --out mnist.npz
  fedala run --dataset mnist.npz""")
)
def pfllib(
    folder: Annotated[
        Path, typer.Argument(help="a folder with train/0.npz, test/0.npz, …", metavar="FOLDER")
    ],
    out: Annotated[Path, typer.Option(help="write the dataset to this .npz file", metavar="FILE")],
) -> None:
    """Convert a dataset that PFLlib has generated, with its clients and its split."""
    found = convert_pfllib(folder, out)
    shape = "×".join(map(str, found.shape))
    print_line(
        f"{folder}: {found.clients} clients with {found.train:,} training and {found.test:,} test "
        f"samples of shape {shape}"
    )
    if found.empty:
        print_line(
            f"Left out, as they have no samples: clients {list_few([*map(str, found.empty)])}"
        )
    print_line(f"Written: {out}")
