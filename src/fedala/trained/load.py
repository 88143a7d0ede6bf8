"""`fedala.load`: from a run folder to its trained models."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedala.data import Dataset, Federation
from fedala.data import load as load_dataset
from fedala.data.federation import NATURAL
from fedala.data.preprocessing import PREPROCESSING, Preprocessing
from fedala.errors import UserError, printable
from fedala.lanes.heads import extend_model, find_extended_layer
from fedala.lanes.losses import LossFunction
from fedala.lanes.normalization import parse_normalization
from fedala.methods import catalogue, make
from fedala.options import name_option
from fedala.runs.config import Config
from fedala.runs.model_trial import MakeModel
from fedala.runs.own_code import fit_model, import_given, load_model_function
from fedala.runs.results import RunResult, locate_folder
from fedala.runs.sweep import label_of, list_points
from fedala.trained.federation import TrainedFederation
from fedala.trained.modules import ModelBuilder, Shapes
from fedala.trained.saved_run import SavedRun, find_run

Data = str | Path | Dataset | Federation


def load(
    folder: Path | str | RunResult,
    method: str | None = None,
    seed: int | None = None,
    best: bool = False,
    *,
    dataset: Data | None = None,
    model: str | MakeModel | None = None,
    loss: LossFunction | None = None,
    imports: str | Sequence[str] | None = None,
) -> TrainedFederation:
    """Load the trained models of a run folder: `load("runs/mine").predict(images, client=7)`.

    The result of `fedala.run` stands for its folder. If the folder has several methods, name one;
    without a `seed`, it is the first. With `best`, the models are those of the run's best
    evaluation, and not of its last. Give `model` (a function, or its name such as `net.py:make`)
    and `loss` again if they were your own, `imports` (files or modules) if a method of your own
    adds parameters to the model, and `dataset` if an older version of this program made the folder.
    """
    folder = locate_folder(folder)
    run = find_run(folder, method, seed, best=best)
    import_given({"imports": imports})
    config = run.config
    if loss is not None and config.loss != "own":
        raise UserError(f"{folder} was made with a loss that has a name: leave out loss.")
    preprocessing, names = run.read_preprocessing(), run.read_client_names()
    if preprocessing is None:
        data = _load_dataset(config, dataset, folder)
        preprocessing = _describe(config, data)
        names = data.client_names if config.partition == NATURAL else ()
    elif dataset is not None:
        raise UserError(f"{folder} says itself what its models are fed: leave out dataset.")
    if isinstance(model, str):
        shapes = Shapes.of(config.dataset, preprocessing)
        model = fit_model(load_model_function(model), shapes)
    builder = replace(
        ModelBuilder.of(config, preprocessing, model, str(folder)), extend=_make_extension(run)
    )
    return TrainedFederation(run, preprocessing, builder, names, loss)


def _make_extension(run: SavedRun) -> Callable[[nn.Module, Collection[str]], nn.Module]:
    """Return what adds the method's own parameters to a model.

    The names of the saved tensors show which layer was extended, if any: a global model may have
    only what the user's own model has.
    """
    config = run.config
    [method] = [
        method
        for method in config.methods
        if run.method in (label_of(method, point) for point in list_points(config, method))
    ]

    def extend(model: nn.Module, names: Collection[str]) -> nn.Module:
        last = find_extended_layer(model, names)
        if last is None:
            return model
        if method.partition("+")[0] not in catalogue():
            raise UserError(_explain_unknown(run, method))
        own = make(method)
        return extend_model(model, own.head, own.title, last) if own.head else model

    return extend


def _explain_unknown(run: SavedRun, method: str) -> str:
    """Say that a method adds parameters to the model, and what to import."""
    named = run.config.imports
    code = printable(named, 200) if named else "FILE"
    return (
        f"{run.folder.path} has models with parameters that the method {printable(method, 100)} "
        "has added. It is a method of your own, and its code is executed only if you name it: "
        f"{name_option('imports', code)}."
    )


def _load_dataset(config: Config, dataset: Data | None, folder: Path) -> Dataset:
    """Return the data that an older run was made with."""
    if dataset is None:
        raise UserError(
            f"{folder} has no {PREPROCESSING}, which says what its models are fed; older versions "
            "did not write it. Give the data of the run, as dataset=…."
        )
    if isinstance(dataset, Federation):
        return dataset.dataset
    if isinstance(dataset, Dataset):
        return dataset
    data_dir = Path(config.data_dir) if config.data_dir else None
    return load_dataset(str(dataset), data_dir, config.resize)


def _describe(config: Config, data: Dataset) -> Preprocessing:
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    normalization = parse_normalization(config.normalize)
    return Preprocessing.of(data, normalization, dtype, resize=config.resize)
