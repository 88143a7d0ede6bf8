"""The paper's models, as plain `nn.Module`s. Each lists its layers, output first."""

from typing import Protocol

from torch import Tensor, nn

from fedala.errors import UserError
from fedala.models.cnn import cnn
from fedala.models.fasttext import fasttext
from fedala.models.resnet import resnet18
from fedala.options import suggest

__all__ = ["MODELS", "build_model", "cnn", "fasttext", "resnet18"]

MODELS = ("cnn", "resnet18", "fasttext")


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


def build_model(name: str, dataset: Samples) -> nn.Module:
    """Build the model `name` with inputs and outputs that fit `dataset`."""
    if name not in MODELS:
        raise UserError(f"There is no model {name!r}{suggest(name, MODELS)}.")
    if name == "fasttext":
        if dataset.vocabulary is None:
            raise UserError(
                f"fasttext reads texts, and {dataset.name} has none: use cnn or resnet18."
            )
        return fasttext(dataset.vocabulary, dataset.classes)
    if dataset.x.ndim != 4:
        raise UserError(
            f"{name} reads images, and {dataset.name} has none: use fasttext for texts."
        )
    channels, height, width = dataset.x.shape[1:]
    return (cnn if name == "cnn" else resnet18)((channels, height, width), dataset.classes)
