"""`fedala partition`: divide a dataset among clients, without running anything."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines, print_line
from fedala.data import default_partition, federate, write_partition
from fedala.data.feature_shift import parse_feature_shift
from fedala.report import plots, tables
from fedala.runs.config import Config
from fedala.runs.outputs import check_output
from fedala.runs.plan import load_dataset
from fedala.runs.resumable_options import is_data_path

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala partition --partition dir:0.1 --plot split.png
  fedala partition --dataset mnist --partition pathological:2 --save mine.json
  fedala run --dataset mnist --partition mine.json
  fedala partition --dataset people.csv --clients-by user""")
)
@config_options(
    "dataset",
    "data_dir",
    "clients_by",
    "label_column",
    "drop_columns",
    "loss",
    "resize",
    "partition",
    "split",
    "partition_seed",
    "clients",
    "validation",
    "feature_shift",
)
def partition(
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="draw classes × clients into this .png, .pdf or .svg file", metavar="FILE"
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="write the partition to this .json file, for --partition", metavar="FILE"
        ),
    ] = None,
    **values: Any,
) -> None:
    """Divide a dataset among clients and show which client holds which samples."""
    config = Config.from_values(given_options(values))
    shift = parse_feature_shift(config.feature_shift)
    reads = [config.partition, config.dataset if is_data_path(config.dataset) else None]
    if save:
        check_output(save, [".json"], reads)
    if plot:
        plots.check(plot, reads)
    data = load_dataset(config)
    # Without --clients, the number of clients in a partition file is accepted.
    federation = federate(
        data,
        config.partition,
        config.clients,
        config.partition_seed,
        config.validation,
        config.split,
    )
    if shift is not None:
        shift.check(data.x, data.name, len(federation.train))
    if save:
        write_partition(federation, save)
    counts, sizes = federation.counts(), federation.sizes()
    names = federation.count_names if data.kind == "numbers" else data.class_names
    title = (
        f"{config.dataset}, {config.partition or default_partition(data)}, {len(counts)} clients"
    )
    if config.feature_shift:
        title += f", {config.feature_shift}"
    if plot:
        plots.save(plots.draw_split(counts, names, title), plot)
    tables.show(tables.clients(federation))
    note = f" ({data.note})" if data.note else ""
    print(
        f"{title}{note}: {sizes.sum():,} samples of {data.targets}, "
        f"{sizes.min():,} to {sizes.max():,} per client"
    )
    for sentence in federation.notes:
        print_line(sentence)
    for path in filter(None, (save, plot)):
        print_line(f"Written: {path}")
