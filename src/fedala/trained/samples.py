"""New data for a trained model: inputs as the model takes them, targets as the run had them.

Whatever the data calls a class, a feature or a word, it gets the number that it had in the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fedala.data import Dataset, load
from fedala.data.arrays import read_npz
from fedala.data.collect import collect_samples
from fedala.data.frames import is_frame, read_words
from fedala.data.images import read_image_folder
from fedala.data.inputs import Columns, is_file, is_table, read_inputs
from fedala.data.matching import match_classes, name_numbers, order_features
from fedala.data.preprocessing import Preprocessing
from fedala.data.text import fit_ids
from fedala.errors import UserError

Array = np.ndarray[Any, Any]


class Samples(NamedTuple):
    """Samples that a model can be run on."""

    x: Tensor
    """The model's input."""
    y: Tensor
    """The targets."""


class NamedInputs(NamedTuple):
    """Inputs without targets."""

    x: Tensor
    names: tuple[str, ...] = ()
    """Of each sample, if it is a file."""


@contextmanager
def _refuse_too_much() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise UserError("The data does not fit into the memory of this machine.") from None


@_refuse_too_much()
def prepare_inputs(data: Any, preprocessing: Preprocessing) -> NamedInputs:
    """Return the model's input for data with or without labels: a path, arrays, texts, a table."""
    names: tuple[str, ...] = ()
    if isinstance(data, Dataset):
        x = _prepare_dataset(data, preprocessing)
    elif is_file(data, allows_text=preprocessing.kind == "texts"):
        columns = Columns(preprocessing.feature_names)
        found = read_inputs(Path(data), columns, preprocessing.resize)
        x, names = preprocessing.prepare(found.x), found.names
    else:
        x = preprocessing.prepare(data)
    _refuse_empty(x)
    return NamedInputs(x, names)


@_refuse_too_much()
def prepare_samples(
    data: Any, preprocessing: Preprocessing, label_column: str | None = None
) -> Samples:
    """Return the model's input, and the targets, for data with labels.

    That is a path, a pair (inputs, targets), a DataFrame with labels, a `Dataset` of this package
    or of torch, or a `DataLoader`.
    """
    names: Sequence[str] = ()
    if isinstance(data, str | Path):
        x, y, names = _read_samples(data, preprocessing, label_column)
    elif is_frame(data):
        x, y = _read_frame(data, preprocessing, label_column)
    elif isinstance(data, Dataset):
        x, y, names = _prepare_dataset(data, preprocessing), data.y.numpy(), data.class_names
    elif isinstance(data, TorchDataset | DataLoader):
        inputs, targets = collect_samples(data, np.arange)
        x, y = preprocessing.prepare(inputs), _to_array(targets)
    elif isinstance(data, tuple | list) and len(data) == 2:
        x, y = preprocessing.prepare(data[0]), _to_array(data[1])
    else:
        raise UserError(
            "The data must be a path, a pair (inputs, targets), a DataFrame, a Dataset or a "
            f"DataLoader, not {type(data).__name__}."
        )
    _refuse_empty(x)
    if y.ndim == 0 or len(y) != len(x):
        count = len(y) if y.ndim else 1
        raise UserError(f"There are {len(x)} samples and {count} targets: each needs one.")
    is_dataset = isinstance(data, Dataset)
    return Samples(x, convert_targets(y, names, preprocessing, is_dataset=is_dataset))


def _read_samples(
    data: str | Path, preprocessing: Preprocessing, label_column: str | None
) -> tuple[Tensor, Array, Sequence[str]]:
    """Read samples and targets from a file, a folder, or a dataset that has a name."""
    path, resize = Path(data).expanduser(), preprocessing.resize
    if is_table(path):
        columns = Columns(preprocessing.feature_names, True, label_column)
        found = read_inputs(path, columns, resize)
        assert found.labels is not None
        return preprocessing.prepare(found.x), found.labels, ()
    if label_column is not None:
        raise UserError(f"label_column is for tables, .csv and .parquet, and {path} is not one.")
    if path.is_dir() or path.is_file():
        is_folder = path.is_dir()
        raw = read_image_folder(path, resize, is_further=True) if is_folder else read_npz(path)
        assert isinstance(raw.x, Tensor)
        return preprocessing.prepare(raw.x), raw.y, raw.class_names
    named = load(str(data), resize=resize)
    return _prepare_dataset(named, preprocessing), named.y.numpy(), named.class_names


def _read_frame(
    frame: Any, preprocessing: Preprocessing, label_column: str | None
) -> tuple[Tensor, Array]:
    """Read samples and targets from a frame, as from a csv file of the same content."""
    columns = Columns(preprocessing.feature_names, True, label_column)
    names = [str(name) for name in frame.columns]
    label = columns.find_label(names, "The data")
    assert label is not None
    others = frame.iloc[:, [place for place, name in enumerate(names) if name != label]]
    return preprocessing.prepare(others), np.array(read_words(frame, label, "The data"))


def _refuse_empty(x: Tensor) -> None:
    if len(x) == 0:
        raise UserError("The data is empty: there is no sample in it.")


def _to_array(values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return np.asarray(values)


# --- inputs ---------------------------------------------------------------------------------------


def _prepare_dataset(data: Dataset, preprocessing: Preprocessing) -> Tensor:
    if preprocessing.kind == "texts" and data.tokens:
        known, [length] = preprocessing.tokens, preprocessing.shape
        return preprocessing.prepare(fit_ids(data.x, data.tokens, known, length))
    return preprocessing.prepare(
        order_features(data.x, data.feature_names, preprocessing.feature_names)
    )


# --- targets --------------------------------------------------------------------------------------


def convert_targets(
    y: Array, names: Sequence[str], preprocessing: Preprocessing, *, is_dataset: bool = False
) -> Tensor:
    """Return targets as the run had them: int64 labels, or floats in the model's precision.

    `names` are those of the data's own classes; without them, `y` holds the names of the run's
    classes, or their numbers. Those of a `Dataset` are numbers.
    """
    if preprocessing.targets == "classes":
        return _convert_labels(y, names, preprocessing, is_dataset=is_dataset)
    dtype: torch.dtype = getattr(torch, preprocessing.precision)
    if y.dtype.kind == "U":
        y = _parse_numbers(y)
    count, width = preprocessing.classes, y.shape[1] if y.ndim == 2 else 1
    if y.dtype.kind not in "biuf" or y.ndim > 2 or width != count:
        raise UserError(
            f"The targets must be {count} numbers for each sample, not {y.dtype} of shape "
            f"{tuple(y.shape)}."
        )
    targets = torch.from_numpy(y.astype(np.float32)).to(dtype)
    if not bool(torch.isfinite(targets).all()):
        raise UserError("The targets must be finite numbers, and some are not.")
    return targets


def _parse_numbers(texts: Array) -> Array:
    try:
        return texts.astype(np.float64)
    except ValueError as error:
        raise UserError(f"The targets must be numbers ({error}).") from None


def _convert_labels(
    y: Array, names: Sequence[str], preprocessing: Preprocessing, *, is_dataset: bool
) -> Tensor:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 1 and y.dtype.kind in "UO":
        found, y = np.unique(y.astype(str), return_inverse=True)
        names = found.tolist()
    if y.ndim != 1 or y.dtype.kind not in "biu":
        raise UserError(
            f"The targets must be one class for each sample, not {y.dtype} of shape "
            f"{tuple(y.shape)}."
        )
    known = preprocessing.class_names or tuple(map(str, range(preprocessing.classes)))
    if not is_dataset:
        y, names = name_numbers(y, names, known)
    return torch.from_numpy(match_classes(y, names, known, "The data"))
