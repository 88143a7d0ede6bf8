"""What a dataset is once it is loaded, whatever it came from."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.data.catalogue import LENGTH
from fedala.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their labels. One that exists is sound: whatever makes it has to pass the checks below."""

    name: str
    x: torch.Tensor  # images: uint8 N×C×H×W, normalised later at the batch; texts: int32 N×200; anything else: float32
    y: torch.Tensor  # int64 N, labels 0..classes-1
    classes: int
    class_names: tuple[str, ...] = ()
    vocabulary: int | None = None  # texts: rows of the embedding; index 0 = unknown = padding
    note: str = ""  # shown to users, for example "partial: …"

    def __post_init__(self) -> None:
        x, y, name = self.x, self.y, self.name
        if len(x) != len(y):
            raise UserError(
                f"{name} has {len(x)} samples but {len(y)} labels; it needs one label for every sample."
            )
        if len(y) == 0:
            raise UserError(f"{name} is empty; it needs samples of at least two classes.")
        images, texts = (
            x.dtype == torch.uint8 and x.ndim == 4,
            x.dtype == torch.int32 and x.ndim == 2,
        )
        if (
            not (images or texts or (x.dtype == torch.float32 and x.ndim > 1))
            or y.dtype != torch.int64
            or y.ndim != 1
        ):
            raise UserError(
                f"{name} must hold uint8 images N×C×H×W, int32 texts N×{LENGTH} or float32 N×…, and int64 labels; "
                f"it holds {x.dtype} of shape {tuple(x.shape)} and {y.dtype} of shape {tuple(y.shape)}."
            )
        if x[0].numel() == 0:
            raise UserError(
                f"{name} has samples of shape {tuple(x.shape[1:])}, which hold nothing."
            )
        # Piece by piece: the test takes more memory than what it looks at.
        rows = max(1, 2**20 // x[0].numel())
        parts = (x[first : first + rows] for first in range(0, len(x), rows))
        if x.dtype == torch.float32 and not all(bool(torch.isfinite(part).all()) for part in parts):
            raise UserError(
                f"{name} holds NaN or infinite values (beyond float32); every value must be a finite number."
            )
        if texts and not 0 <= int(x.min()) <= int(x.max()) < (self.vocabulary or 0):
            raise UserError(
                f"{name} holds token ids outside its vocabulary, which is {self.vocabulary}."
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.classes:
            raise UserError(
                f"{name} holds the labels {low} to {high}; "
                f"the labels of {self.classes} classes are 0 to {self.classes - 1}."
            )
        if low == high:
            raise UserError(
                f"{name} holds a single class; there is nothing to learn with fewer than two."
            )


class Raw(NamedTuple):
    """What a file format gives: texts are still texts, and the number of classes may be open."""

    where: str
    x: "torch.Tensor | list[str]"
    y: "np.ndarray[Any, np.dtype[np.int64]]"
    class_names: tuple[str, ...] = ()


def need(module: str, package: str, extra: str, what: str) -> Any:
    """An optional package, imported where it is used; the core has to work without it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{what} needs {package}: pip install 'fedala[{extra}]'.") from None


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough to stand inside a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def encode(labels: list[str]) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]":
    """Labels written as text → 0..classes-1 and their names, in the order of their numbers or of the alphabet."""
    names = sorted(set(labels))
    with suppress(ValueError):  # where one is not a number, the alphabet it is
        names = sorted(names, key=int)
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[label] for label in labels], dtype=np.int64), tuple(names)
