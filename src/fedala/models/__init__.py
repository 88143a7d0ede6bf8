"""The paper's models and those for features and sequences. Each lists its layers, output first."""

import math
from typing import Protocol

from torch import Tensor, nn

from fedala.errors import UserError
from fedala.models.cnn import cnn
from fedala.models.cnn1d import cnn1d
from fedala.models.fasttext import fasttext
from fedala.models.lstm import lstm, token_lstm
from fedala.models.mlp import mlp
from fedala.models.resnet import resnet18
from fedala.options import suggest

__all__ = [
    "MODELS",
    "build_model",
    "cnn",
    "cnn1d",
    "fasttext",
    "list_fitting_models",
    "lstm",
    "mlp",
    "resnet18",
    "token_lstm",
]

#: What each model reads.
MODELS = {
    "cnn": "images",
    "resnet18": "images",
    "fasttext": "texts",
    "mlp": "numbers",
    "cnn1d": "windows (channels × steps)",
    "lstm": "sequences (steps × channels) or texts",
}


class Samples(Protocol):
    """The properties of a dataset that a model must fit."""

    @property
    def name(self) -> str: ...
    @property
    def x(self) -> Tensor: ...
    @property
    def classes(self) -> int: ...
    @property
    def vocabulary(self) -> int | None: ...


def list_fitting_models(dataset: Samples) -> tuple[str, ...]:
    """Return the models that can read a dataset, the default first.

    Samples of two dimensions are windows, channels × steps, unless they would have more channels
    than steps, or very few steps: then time probably comes first, as `lstm` reads them.
    """
    x = dataset.x
    if dataset.vocabulary is not None:
        return ("fasttext", "lstm")
    if x.ndim == 4:
        return ("cnn", "resnet18", "mlp")
    if x.ndim == 3:
        is_window = max(4, x.shape[1]) <= x.shape[2]
        return ("cnn1d", "lstm", "mlp") if is_window else ("lstm", "cnn1d", "mlp")
    return ("mlp",)


def build_model(name: str, dataset: Samples) -> nn.Module:
    """Build the model `name` with inputs and outputs that fit `dataset`."""
    if name not in MODELS:
        raise UserError(f"There is no model {name!r}{suggest(name, MODELS)}.")
    fitting = list_fitting_models(dataset)
    if name not in fitting:
        raise UserError(
            f"{name} reads {MODELS[name]}, and {dataset.name} has none: use {' or '.join(fitting)}."
        )
    classes, shape = dataset.classes, tuple(dataset.x.shape[1:])
    if dataset.vocabulary is not None:
        build_for_texts = fasttext if name == "fasttext" else token_lstm
        return build_for_texts(dataset.vocabulary, classes)
    if name == "mlp":
        return mlp(math.prod(shape), classes)
    if name == "lstm":
        return lstm(shape[1], classes)
    if name == "cnn1d":
        return cnn1d((shape[0], shape[1]), classes)
    return (cnn if name == "cnn" else resnet18)((shape[0], shape[1], shape[2]), classes)
