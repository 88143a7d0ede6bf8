"""A dataset in memory, whatever file it came from."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.errors import UserError, printable


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples and their targets. Its constructor checks them, so a `Dataset` is always sound.

    `x` holds uint8 images N×C×H×W (normalised later, batch by batch), int32 tokens N×L (texts and
    other sequences), or float32 samples of any other shape. `y` holds int64 labels N, or float32
    targets: a matrix of zeros and ones N×L for L labels, or numbers N or N×k.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor  # labels 0..classes-1, or float targets
    classes: int  # the number of labels L, or of a sample's targets, if these are floats
    class_names: tuple[str, ...] = ()
    #: Tokens: rows of the embedding; without it, the largest token + 1. 0 is unknown and padding.
    vocabulary: int | None = None
    note: str = ""  # shown to users, for example "partial: …"
    clients: torch.Tensor | None = None  # int64 N: whose sample it is, if the data say so
    client_names: tuple[str, ...] = ()  # by client
    split: torch.Tensor | None = None  # uint8 N: the part (of `PARTS`) that the data put it into
    feature_names: tuple[str, ...] = ()  # of a table's columns
    tokens: tuple[str, ...] = ()  # texts: the words of ids 1, 2, …
    notes: tuple[str, ...] = ()  # sentences: what was found in the files

    def __post_init__(self) -> None:
        is_matrix = self.y.ndim == 2 and not self.y.is_complex()
        if is_matrix or (self.y.is_floating_point() and self.y.dtype != torch.float32):
            object.__setattr__(self, "y", self._convert_targets())
        self._check_form()
        if self._is_text and self.vocabulary is None:
            object.__setattr__(self, "vocabulary", int(self.x.max()) + 1)
        self._check_values()
        self._check_owners()
        if self.y.is_floating_point():
            self._check_targets()
        else:
            self._check_labels()

    def __repr__(self) -> str:
        owners = f", {len(self.client_names):,} clients" if self.clients is not None else ""
        return f"<Dataset {self.describe()}{owners}>"

    def describe(self, samples: int | None = None) -> str:
        """Return it, or so many of its samples: `digits: 1,797 samples of 10 classes, 1×28×28`."""
        count = len(self.y) if samples is None else samples
        shape = "×".join(map(str, self.x.shape[1:]))
        return f"{printable(self.name, 80)}: {count:,} samples of {self.targets}, {shape}"

    @cached_property
    def kind(self) -> str:
        """What the targets are: `classes`, `labels` (zeros and ones), or `numbers`."""
        if not self.y.is_floating_point():
            return "classes"
        return "labels" if self.y.ndim == 2 and self.is_binary else "numbers"

    @cached_property
    def is_binary(self) -> bool:
        """Tell whether the targets are floats, all of them 0 or 1."""
        return self.y.is_floating_point() and bool(((self.y == 0) | (self.y == 1)).all())

    @property
    def targets(self) -> str:
        """The number and kind of the targets, in words."""
        noun = {"classes": "classes", "labels": "labels", "numbers": "float targets"}[self.kind]
        return f"{self.classes} {noun[:-1] if self.classes == 1 else noun}"

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
        has_targets = y.dtype == torch.float32 and y.ndim in (1, 2)
        if not (is_image or self._is_text or is_other) or not (has_labels or has_targets):
            raise UserError(
                f"{name} must hold uint8 images N×C×H×W, int32 tokens N×L or float32 N×…, "
                "and int64 labels N or float32 targets N or N×k; "
                f"it holds {x.dtype} of shape {tuple(x.shape)} "
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

    def _check_owners(self) -> None:
        """Check whose samples they are, and which part they belong to, if the data say so."""
        count = len(self.client_names)
        for what, values, end in (("clients", self.clients, count), ("split", self.split, 3)):
            if values is not None and (
                values.shape != (len(self.y),)
                or not 0 <= int(values.min()) <= int(values.max()) < end
            ):
                raise UserError(
                    f"{self.name}: {what} must hold a whole number from 0 to {end - 1} for each of "
                    f"the {len(self.y)} samples."
                )

    def _convert_targets(self) -> torch.Tensor:
        """Return targets as float32. Whole numbers in a matrix must be zeros and ones."""
        y = self.y
        if not y.is_floating_point() and y.numel() and not bool(((y == 0) | (y == 1)).all()):
            raise UserError(
                f"{self.name} holds a matrix of whole numbers as labels; for several labels of a "
                "sample, these must be zeros and ones, and for numbers to predict, floats."
            )
        return y.to(torch.float32)

    def _check_targets(self) -> None:
        name, outputs = self.name, self.y.shape[1] if self.y.ndim == 2 else 1
        if not bool(torch.isfinite(self.y).all()):
            raise UserError(
                f"{name} holds targets that are NaN or infinite (beyond float32); "
                "every target must be a finite number."
            )
        if outputs != self.classes or outputs == 0:
            raise UserError(
                f"{name} holds targets of shape {tuple(self.y.shape)}, so classes, the number of "
                f"a sample's targets, must be {outputs} and at least 1, not {self.classes}."
            )
        if self.class_names and len(self.class_names) != outputs:
            raise UserError(
                f"{name} holds {outputs} targets and {len(self.class_names)} names of them; "
                "give one name for each, or none."
            )

    def _check_labels(self) -> None:
        name, low, high = self.name, int(self.y.min()), int(self.y.max())
        if low < 0 or high >= self.classes:
            raise UserError(
                f"{name} holds the labels {low} to {high}; "
                f"the labels of {self.classes} classes are 0 to {self.classes - 1}."
            )
        if self.classes < 2:  # of several classes, a newcomer may hold a single one
            raise UserError(
                f"{name} holds a single class; learning needs samples of at least two classes."
            )


#: The parts of a client's samples.
PARTS = ("train", "validation", "test")


class RawData(NamedTuple):
    """The content of a file: texts are not yet tokens, and the number of classes may be open."""

    where: str
    x: "torch.Tensor | list[str]"
    y: "np.ndarray[Any, Any]"
    class_names: tuple[str, ...] = ()
    clients: Sequence[str] | None = None
    """Whose sample it is, by name."""
    split: "np.ndarray[Any, Any] | None" = None
    """uint8: the part, as a position in `PARTS`."""
    feature_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    """The order of the clients, if it is not that of their names."""
    notes: tuple[str, ...] = ()
    """Sentences: what was found, and what was made of it."""


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
