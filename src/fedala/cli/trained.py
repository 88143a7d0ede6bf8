"""`fedala predict`, `fedala evaluate`, `fedala export`: what comes after a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedala.cli.config_options import config_options, given_options
from fedala.cli.output import keep_lines, print_line
from fedala.errors import UserError
from fedala.io.files import write_output
from fedala.report import tables
from fedala.runs.outputs import check_output
from fedala.trained.export import choose_format
from fedala.trained.federation import TrainedFederation
from fedala.trained.load import load
from fedala.trained.prediction_table import PredictionTable
from fedala.trained.samples import prepare_inputs
from fedala.trained.saved_run import find_run

app = typer.Typer()

_SHOWN = 10  # predictions on the screen

Run = Annotated[Path, typer.Argument(help="a run folder with saved models", metavar="RUN")]
Client = Annotated[
    str | None, typer.Option(help="the client whose model it is: name or number", metavar="CLIENT")
]
Global = Annotated[
    bool, typer.Option("--global", metavar="", help="the global model instead of a client's")
]
Weights = Annotated[
    Path | None,
    typer.Option(help="the model of a new client, a file of fedala onboard", metavar="FILE"),
]
Method = Annotated[
    str | None, typer.Option(help="the method, if the run has several", metavar="NAME")
]
Seed = Annotated[int | None, typer.Option(help="the seed; without it, the first", metavar="N")]
Best = Annotated[
    bool,
    typer.Option(
        "--best", metavar="", help="the models of the best evaluation instead of the last"
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="the function that makes the run's model, if it is your own; it is executed",
        metavar="FILE:FUNCTION",
    ),
]
RunData = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="the data of the run, only if an older version made the folder",
        metavar="NAME",
    ),
]


@app.command(
    epilog=keep_lines("""Examples:
  fedala predict runs/mine --method fedala --client 7 --data new.npz
  fedala predict runs/one-method --client 7 --data photos/ --out answers.csv
  fedala predict runs/mine --method fedala --global --data new.csv --best""")
)
@config_options("imports")
def predict(
    *,
    run: Run,
    data: Annotated[
        Path,
        typer.Option(
            help="samples, with or without labels: a .npz, .csv or .parquet file, or a folder of "
            "images or .txt files",
            metavar="PATH",
        ),
    ],
    client: Client = None,
    weights: Weights = None,
    is_global: Global = False,
    method: Method = None,
    seed: Seed = None,
    best: Best = False,
    model: Model = None,
    dataset: RunData = None,
    probabilities: Annotated[
        bool,
        typer.Option("--probabilities", metavar="", help="also write those of all classes"),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="write all predictions to this .csv file", metavar="FILE")
    ] = None,
    **values: Any,
) -> None:
    """Predict the labels of new samples with a client's personal model."""
    if out:
        check_output(out, [".csv"], [data, weights])
    trained = _load(run, method, seed, best, model, dataset, weights, values)
    who = trained.choose_model(client, is_global=is_global)
    inputs = prepare_inputs(data, trained.preprocessing)
    names = inputs.names or tuple(map(str, range(len(inputs.x))))
    table = PredictionTable(trained.answer(inputs, who), names, probabilities)
    if out:
        write_output(out, table.csv().encode())
    tables.console().print(tables.predictions(table.columns, table.first_rows(_SHOWN)))
    if len(names) > _SHOWN:
        print(f"… and {len(names) - _SHOWN:,} more samples.")
    if counts := table.count():
        print_line(", ".join(f"{name}: {count:,}" for name, count in counts.items()))
    if out:
        print_line(f"Written: {out}")


@app.command(
    epilog=keep_lines("""Examples:
  fedala evaluate runs/mine --method fedala --data new.npz    # all models
  fedala evaluate runs/mine --method fedala --data new.npz --client 7
  fedala evaluate runs/mine --method fedala --data new.npz --out scores.csv""")
)
@config_options("imports")
def evaluate(
    *,
    run: Run,
    data: Annotated[
        str,
        typer.Option(
            help="samples with labels: a .npz, .csv or .parquet file, or an image folder",
            metavar="PATH",
        ),
    ],
    client: Client = None,
    weights: Weights = None,
    label_column: Annotated[
        str | None,
        typer.Option(
            help="the column of the labels; without it, the run's, or label, class, target or y",
            metavar="NAME",
        ),
    ] = None,
    method: Method = None,
    seed: Seed = None,
    best: Best = False,
    model: Model = None,
    dataset: RunData = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="write the figures to this .csv file, a row for each model", metavar="FILE"
        ),
    ] = None,
    **values: Any,
) -> None:
    """Test the models of a run on new data, with the metrics of the run."""
    if out:
        check_output(out, [".csv"], [data, weights])
    trained = _load(run, method, seed, best, model, dataset, weights, values)
    scores = trained.evaluate(data, client, label_column=label_column)
    if out:
        write_output(out, scores.csv().encode())
    tables.console().print(tables.model_scores(scores))
    if len(scores.personal) > 1:
        figures = [one.score for one in scores.personal]
        worst, top = min(figures), max(figures)
        show = scores.metric.format
        print(
            f"Personal models: {scores.metric.title} "
            f"{show(sum(figures) / len(figures))}{scores.metric.unit} on average, "
            f"from {show(worst)} to {show(top)}."
        )
    for sentence in scores.list_sentences():
        print_line(sentence)
    if out:
        print_line(f"Written: {out}")


@app.command(
    epilog=keep_lines("""Examples:
  fedala export runs/mine --method fedala --client 7 --out model.safetensors    # weights
  fedala export runs/mine --method fedala --client 7 --out model.pt2  # for torch.export.load
  fedala export runs/mine --method fedala --global --out model.onnx   # for any ONNX runtime""")
)
@config_options("imports")
def export(
    *,
    run: Run,
    out: Annotated[
        Path,
        typer.Option(help="a .safetensors, .pt2 or .onnx file", metavar="FILE"),
    ],
    client: Client = None,
    weights: Weights = None,
    is_global: Global = False,
    method: Method = None,
    seed: Seed = None,
    best: Best = False,
    model: Model = None,
    dataset: RunData = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="overwrite a file that exists")
    ] = False,
    **values: Any,
) -> None:
    """Write a model for use without this package. Programs take raw samples."""
    choose_format(out, [weights], force=force)
    trained = _load(run, method, seed, best, model, dataset, weights, values)
    path = trained.export(out, client, is_global=is_global)
    print_line(f"Written: {path}")


def _load(
    run: Path,
    method: str | None,
    seed: int | None,
    best: bool,
    model: str | None,
    dataset: str | None,
    weights: Path | None,
    values: Mapping[str, Any],
) -> TrainedFederation:
    config = find_run(run, method, seed, best=best).config
    for name, given in (("model", model), ("loss", None)):
        if getattr(config, name) == "own" and given is None:
            raise UserError(
                f"{run} was made in Python with its own {name}: "
                f"load it there with fedala.load(…, {name}=…)."
            )
    imports = given_options(values).get("imports")
    trained = load(run, method, seed, best, model=model, dataset=dataset, imports=imports)
    return trained if weights is None else trained.with_weights(weights)
