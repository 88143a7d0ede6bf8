"""A dataset in memory, whatever file it came from."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.data.catalogue import LENGTH
from fedala.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their labels. Its constructor checks them, so a `Dataset` is always sound.

    `x` holds uint8 images N×C×H×W (normalised later, batch by batch), int32 texts N×200, or
    float32 samples of any other shape.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor  # int64 N, labels 0..classes-1
    classes: int
    class_names: tuple[str, ...] = ()
    vocabulary: int | None = None  # texts: rows of the embedding; index 0 = unknown = padding
    note: str = ""  # shown to users, for example "partial: …"

    def __post_init__(self) -> None:
        self._check_form()
        self._check_values()
        self._check_labels()

    def _check_form(self) -> None:
        x, y, name = self.x, self.y, self.name
        if len(x) != len(y):
            raise UserError(
                f"{name} has {len(x)} samples but {len(y)} labels; "
                "it needs one label for every sample."
            )
        if len(y) == 0:
            raise UserError(f"{name} is empty; it needs samples of at least two classes.")
        is_image = x.dtype == torch.uint8 and x.ndim == 4
        is_other = x.dtype == torch.float32 and x.ndim > 1
        has_labels = y.dtype == torch.int64 and y.ndim == 1
        if not (is_image or self._is_text or is_other) or not has_labels:
            raise UserError(
                f"{name} must hold uint8 images N×C×H×W, int32 texts N×{LENGTH} or float32 N×…, "
                f"and int64 labels; it holds {x.dtype} of shape {tuple(x.shape)} "
                f"and {y.dtype} of shape {tuple(y.shape)}."
            )
        if x[0].numel() == 0:
            raise UserError(
                f"{name} has samples of shape {tuple(x.shape[1:])}, which hold nothing."
            )

    @property
    def _is_text(self) -> bool:
        return self.x.dtype == torch.int32 and self.x.ndim == 2

    def _check_values(self) -> None:
        x, name = self.x, self.name
        # Piece by piece, because the test takes more memory than the values.
        rows = max(1, 2**20 // x[0].numel())
        parts = (x[first : first + rows] for first in range(0, len(x), rows))
        if x.dtype == torch.float32 and not all(bool(torch.isfinite(part).all()) for part in parts):
            raise UserError(
                f"{name} holds NaN or infinite values (beyond float32); "
                "every value must be a finite number."
            )
        if self._is_text and not 0 <= int(x.min()) <= int(x.max()) < (self.vocabulary or 0):
            raise UserError(
                f"{name} holds token ids outside its vocabulary, which is {self.vocabulary}."
            )

    def _check_labels(self) -> None:
        name, low, high = self.name, int(self.y.min()), int(self.y.max())
        if low < 0 or high >= self.classes:
            raise UserError(
                f"{name} holds the labels {low} to {high}; "
                f"the labels of {self.classes} classes are 0 to {self.classes - 1}."
            )
        if low == high:
            raise UserError(
                f"{name} holds a single class; learning needs samples of at least two classes."
            )


class RawData(NamedTuple):
    """The content of a file: texts are not yet tokens, and the number of classes may be open."""

    where: str
    x: "torch.Tensor | list[str]"
    y: "np.ndarray[Any, np.dtype[np.int64]]"
    class_names: tuple[str, ...] = ()


def encode_labels(
    labels: list[str],
) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]":
    """Return text labels as 0..classes-1, and the names of the classes.

    Names are ordered by number if all are numbers, otherwise by the alphabet.
    """
    names = sorted(set(labels))
    with suppress(ValueError):  # some name is not a number
        names = sorted(names, key=int)
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[label] for label in labels], dtype=np.int64), tuple(names)
