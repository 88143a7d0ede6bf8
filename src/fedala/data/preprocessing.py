"""What a model is fed: everything that turns raw inputs into its input, saved beside it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedala.data.columns import find_columns, find_text
from fedala.data.dataset import Dataset
from fedala.data.frames import is_frame, make_table, read_words
from fedala.data.images import fit_images
from fedala.data.tabular import list_names
from fedala.data.text import encode_texts
from fedala.errors import UserError, first_line, printable
from fedala.io.untrusted import parse_json
from fedala.lanes.normalization import Normalization, normalize_bytes, normalize_floats
from fedala.version import __version__

#: The name of the file in a run folder.
PREPROCESSING = "preprocessing.json"
LARGEST = 2**28  # characters of the file
_FORMAT, _VERSION = "fedala-preprocessing", 1
_KINDS = {"uint8": ("images",), "int32": ("texts",), "float32": ("images", "features")}
_TARGETS = ("classes", "labels", "numbers")
_PRECISIONS = ("float32", "float64")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Preprocessing:
    """How samples become the input of a model, and what its outputs are called.

    `prepare` gives what a `Task` with the same dataset and normalisation gives, to the bit.
    """

    kind: str
    """`images`, `texts` or `features` (float samples of any other shape)."""
    shape: tuple[int, ...]
    """Of a sample: C×H×W of images, the length of texts in tokens, …"""
    dtype: str
    """Of the samples as a dataset holds them: uint8, int32 or float32."""
    targets: str
    """What the outputs are: `classes`, `labels` or `numbers`, as `Dataset.kind`."""
    classes: int
    """The number of outputs."""
    normalization: Normalization | None = None
    """None: bytes as (x/255 − 0.5)/0.5, and floats as they are."""
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    vocabulary: int | None = None
    tokens: tuple[str, ...] = ()
    """The words of ids 1, 2, …; 0 is for unknown words and padding."""
    resize: int | None = None
    """The side in pixels to which images of bytes are resized, if that was asked for."""
    precision: str = "float32"
    """The number format of the model's input."""

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        normalization: Normalization | None,
        model_input: torch.dtype | None = None,
        *,
        resize: int | None = None,
    ) -> "Preprocessing":
        """Describe how the samples of a dataset are fed to a model.

        `model_input` is the number format that the model takes: float32 by default.
        """
        x = dataset.x
        kind = "images" if x.ndim == 4 else "features"
        return cls(
            "texts" if x.dtype == torch.int32 else kind,
            tuple(x.shape[1:]),
            _name(x.dtype),
            dataset.kind,
            dataset.classes,
            normalization,
            dataset.class_names,
            dataset.feature_names,
            dataset.vocabulary,
            dataset.tokens,
            resize if x.dtype == torch.uint8 else None,
            "float32" if model_input is None else _name(model_input),
        )

    def prepare(self, raw: Any) -> Tensor:
        """Return the model's input for raw samples, one row for each: `encode`, and scale.

        Images are arrays N×C×H×W, N×H×W×C or N×H×W, texts a list of strings or of rows of token
        ids, or a table (DataFrame) with a column of texts, and features an array N×…, or a table
        with the columns `feature_names`.
        """
        x = self.encode(raw)
        if self.kind == "texts":
            return x.long()
        dtype: torch.dtype = getattr(torch, self.precision)
        normalization = self.normalization or Normalization()
        mean, std = normalization.figures(torch.device("cpu"), dtype, len(self.shape))
        if self.dtype == "uint8":
            return normalize_bytes(x, dtype, mean, std)
        return x.to(dtype) if self.normalization is None else normalize_floats(x, dtype, mean, std)

    def encode(self, raw: Any) -> Tensor:
        """Return raw samples as an exported program takes them: as numbers that are not scaled.

        Images are uint8 N×C×H×W, texts int32 token ids, and features float32, with the words of a
        table as zeros and ones. `raw` is what `prepare` takes.
        """
        is_series = hasattr(raw, "to_frame") and self.kind != "texts"
        if isinstance(raw, Mapping) or is_series:
            raise UserError(
                f"The samples were given as a {type(raw).__name__}: give a DataFrame with a row "
                "for each, for a single one as in pd.DataFrame([sample])."
            )
        if self.kind == "texts":
            return self._encode_texts(raw)
        return self._encode_images(raw) if self.dtype == "uint8" else self._encode_floats(raw)

    def _encode_texts(self, raw: Any) -> Tensor:
        if isinstance(raw, str):
            raise UserError("A single text was given: put it into a list, as in [text].")
        if is_frame(raw):
            names = [str(name) for name in raw.columns]
            raw = read_words(raw, find_text(names, "The table"), "The table")
        rows = list(raw)
        if not all(isinstance(row, str) for row in rows):
            return self._check_ids(_to_array(rows))
        if rows and not self.tokens:
            raise UserError(
                "The vocabulary of this model was not saved with it, so texts must be given as "
                f"rows of {self.shape[0]} token ids."
            )
        return encode_texts(rows, self.tokens, self.shape[0])[0]

    def _check_ids(self, ids: Array) -> Tensor:
        if ids.dtype.kind not in "iu":
            raise UserError("This model takes texts: give a list of strings, each a text.")
        self._check_shape(ids.shape[1:], "texts, as strings or as rows of token ids")
        most = (self.vocabulary or 1) - 1
        if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() <= most):
            raise UserError(f"Texts must be strings, or token ids: whole numbers from 0 to {most}.")
        return torch.from_numpy(ids.astype(np.int32))

    def _encode_images(self, raw: Any) -> Tensor:
        """Return images of bytes as uint8 N×C×H×W."""
        is_ragged = isinstance(raw, list | tuple) and len({np.shape(one) for one in raw}) > 1
        if is_ragged and self.resize:
            return torch.cat([self._encode_images([image]) for image in raw])
        if is_ragged:
            raise UserError(f"The images differ in size: all must be {self._format_shape()}.")
        images = _to_array(raw)
        is_whole = images.dtype.kind in "iu"
        if not is_whole or (images.size and not 0 <= images.min() <= images.max() <= 255):
            raise UserError(
                f"This model was trained on images of bytes, and the input is {images.dtype}: "
                "give whole numbers from 0 to 255."
            )
        images = self._put_channels_first(images.astype(np.uint8, copy=False))
        if images.shape[1:] == self.shape:
            return torch.from_numpy(np.ascontiguousarray(images))
        return fit_images(images, self.shape)

    def _put_channels_first(self, images: Array) -> Array:
        """Return images as N×C×H×W, of another size only if they are to be resized."""
        channels = self.shape[0]
        candidates = [images] if images.ndim == 4 else []
        if images.ndim == 4:
            candidates.append(images.transpose(0, 3, 1, 2))
        elif images.ndim == 3 and channels == 1:
            candidates.append(images[:, None])
        for found in candidates:
            if found.shape[1:] == self.shape:
                return found
        for found in candidates if self.resize else []:
            if found.shape[1] == channels and min(found.shape[2:]) > 0:
                return found
        raise UserError(
            f"The images must be N×{self._format_shape()}, or N×H×W×C with as many channels"
            f"{' and any size' if self.resize else ''}; the input is {_format(images.shape)}."
        )

    def _encode_floats(self, raw: Any) -> Tensor:
        names = self.feature_names
        if hasattr(raw, "columns"):
            names = names or tuple(map(str, raw.columns))
            raw = self._choose_columns(raw)
        numbers = _to_array(raw)
        if numbers.dtype.kind not in "biuf":
            raise UserError(
                f"The input must be numbers, samples of shape {self._format_shape()}, and it holds "
                f"{'texts' if numbers.dtype.kind == 'U' else numbers.dtype}."
            )
        if numbers.shape == self.shape:
            raise UserError(
                f"A single sample of shape {self._format_shape()} was given: add a first dimension "
                "for the samples, as in x[None]."
            )
        self._check_shape(numbers.shape[1:], "samples")
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = numbers.astype(np.float32)
        if not np.isfinite(numbers).all():
            columns = _count_not_finite(numbers, names)
            raise UserError(
                f"The input holds NaN or infinite values (beyond float32){columns}; every value "
                "must be a finite number."
            )
        return torch.from_numpy(numbers)

    def _choose_columns(self, table: Any) -> Any:
        """Return the columns of a table that are features, in the order of the model's."""
        if not self.feature_names:
            return table.to_numpy()
        present = [str(name) for name in table.columns]
        used = find_columns(self.feature_names, present, "The table")
        chosen = table.iloc[:, [present.index(name) for name in used]]
        return make_table(chosen, "The table").encode("The table", self.feature_names)[0]

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if tuple(shape) != self.shape:
            raise UserError(
                f"This model takes {what} of shape {self._format_shape()}, "
                f"and the input has {_format(shape) or 'single numbers'}."
            )

    def _format_shape(self) -> str:
        return _format(self.shape)

    def metadata(self, about: Mapping[str, Any]) -> dict[str, str]:
        """Return what a file with a model says of it; `about` says whose it is."""
        return {
            "fedala": __version__,
            **{name: "" if value is None else str(value) for name, value in about.items()},
            "class_names": json.dumps(list(self.class_names), ensure_ascii=False),
            "preprocessing": self.to_json(),
        }

    # --- as a file -----------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return everything as JSON, for `from_json`."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        # Half a character cannot be written.
        return text.encode(errors="replace").decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Preprocessing":
        """Read what `to_json` wrote, from a file that anybody may have written."""
        if len(text) > LARGEST:
            raise UserError(f"{PREPROCESSING} is larger than {LARGEST:,} characters.")
        values = parse_json(text.encode(errors="replace"), PREPROCESSING)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise UserError(f'{PREPROCESSING} does not say "format": "{_FORMAT}".')
        if values.get("version") != _VERSION:
            raise UserError(
                f"{PREPROCESSING} is of version {printable(repr(values.get('version')), 50)}; "
                f"this program reads version {_VERSION}."
            )
        try:
            return _read(cls, values)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{PREPROCESSING} is damaged: {first_line(error)}.") from None


def _read(cls: type[Preprocessing], values: dict[str, Any]) -> Preprocessing:
    """Build a `Preprocessing` of JSON values. Raises a ValueError or the like if it is not one."""
    dtype = _read_choice(values["dtype"], tuple(_KINDS))
    kind = _read_choice(values["kind"], _KINDS[dtype])
    shape = tuple(_read_count(side) for side in _read_list(values["shape"], 16))
    if len(shape) != {"images": 3, "texts": 1}.get(kind, max(1, len(shape))):
        raise ValueError("its shape does not fit its kind")
    if math.prod(shape) > 2**31:
        raise ValueError("its samples are implausibly large")
    classes = _read_count(values["classes"])
    class_names = _read_names(values["class_names"])
    if class_names and len(class_names) != classes:
        raise ValueError(f"it has {len(class_names)} names for {classes} outputs")
    vocabulary, tokens, resize = values["vocabulary"], values["tokens"], values["resize"]
    is_text = kind == "texts"
    words = tuple(_read_word(token) for token in _read_list(tokens, 2**26))
    rows = 1 if vocabulary is None else _read_count(vocabulary)
    if (vocabulary is not None) != is_text or len(words) >= rows:
        raise ValueError("its vocabulary does not fit its tokens")
    return cls(
        kind,
        shape,
        dtype,
        _read_choice(values["targets"], _TARGETS),
        classes,
        _read_normalization(values["normalization"], shape),
        class_names,
        _read_names(values["feature_names"]),
        vocabulary,
        words,
        None if resize is None else _read_count(resize),
        _read_choice(values["precision"], _PRECISIONS),
    )


def _read_normalization(values: Any, shape: tuple[int, ...]) -> Normalization | None:
    if values is None:
        return None
    is_last = values["is_channels_last"]
    if type(is_last) is not bool:
        raise ValueError("its normalisation is not one")
    sizes = {1, shape[-1 if is_last else 0]}
    means, stds = (_read_numbers(values[name], sizes) for name in ("mean", "std"))
    if not all(std > 0 for std in stds):
        raise ValueError("its normalisation is not one")
    return Normalization(means, stds, is_last)


def _read_numbers(values: Any, sizes: set[int]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in _read_list(values, max(sizes)))
    if len(numbers) not in sizes or not all(map(math.isfinite, numbers)):
        raise ValueError("its normalisation does not fit its shape")
    return numbers


def _read_names(values: Any) -> tuple[str, ...]:
    return tuple(printable(_read_word(name), 100) for name in _read_list(values, 2**24))


def _read_list(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"a list of at most {most} was expected")
    return value


def _read_word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text was expected")
    return value


def _read_count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 2**31:
        raise ValueError("a whole number from 1 on was expected")
    return value


def _read_choice(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices or not isinstance(value, str):
        raise ValueError(f"one of {', '.join(choices)} was expected")
    return value


def _to_array(raw: Any) -> Array:
    if isinstance(raw, Tensor):
        return raw.detach().cpu().numpy()
    try:
        return np.asarray(raw)
    except ValueError:
        raise UserError("The samples of the input differ in shape: all must have one.") from None


def _count_not_finite(numbers: Array, names: Sequence[str]) -> str:
    """Say how many values of which columns are not finite, if there are columns."""
    if numbers.ndim != 2 or len(names) != numbers.shape[1]:
        return ""
    counts = (~np.isfinite(numbers)).sum(0).tolist()
    return ": " + list_names([f"{name} {k:,}" for name, k in zip(names, counts, strict=True) if k])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
