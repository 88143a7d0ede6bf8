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
from fedala.data.tabular import list_names
from fedala.data.text import fit_ids
from fedala.errors import UserError, printable

Array = np.ndarray[Any, Any]
Shares = dict[int | None, Array]
"""The samples of each client, by its number; None: those on which the global model is tested."""


class Samples(NamedTuple):
    """Samples that a model can be run on."""

    x: Tensor
    """The model's input."""
    y: Tensor
    """The targets."""
    clients: Array | None = None
    """Whose sample it is, by name, if a table says so."""


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
    data: Any,
    preprocessing: Preprocessing,
    label_column: str | None = None,
    clients_by: Sequence[str] = (),
) -> Samples:
    """Return the model's input, and the targets, for data with labels.

    That is a path, a pair (inputs, targets), a DataFrame with labels, a `Dataset` of this package
    or of torch, or a `DataLoader`. The column of a table that names the clients has one of the
    names `clients_by`, if it is to be read.
    """
    names: Sequence[str] = ()
    columns = Columns(preprocessing.feature_names, True, label_column, tuple(clients_by))
    clients = None
    if is_file(data) and is_table(Path(data)):
        x, y, clients = _read_table(Path(data), preprocessing, columns)
    elif is_frame(data):
        x, y, clients = _read_frame(data, preprocessing, columns)
    elif isinstance(data, str | Path):
        x, y, names = _read_samples(data, preprocessing, label_column)
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
    targets = convert_targets(y, names, preprocessing, is_dataset=is_dataset)
    return Samples(x, targets, clients)


def _read_samples(
    data: str | Path, preprocessing: Preprocessing, label_column: str | None
) -> tuple[Tensor, Array, Sequence[str]]:
    """Read samples and targets from a file, a folder, or a dataset that has a name."""
    path, resize = Path(data).expanduser(), preprocessing.resize
    if label_column is not None:
        raise UserError(f"label_column is for tables, .csv and .parquet, and {path} is not one.")
    if path.is_dir() or path.is_file():
        is_folder = path.is_dir()
        raw = read_image_folder(path, resize, is_further=True) if is_folder else read_npz(path)
        assert isinstance(raw.x, Tensor)
        return preprocessing.prepare(raw.x), raw.y, raw.class_names
    named = load(str(data), resize=resize)
    return _prepare_dataset(named, preprocessing), named.y.numpy(), named.class_names


def _read_table(
    path: Path, preprocessing: Preprocessing, columns: Columns
) -> tuple[Tensor, Array, Array | None]:
    """Read samples, targets and the names of clients from a .csv or .parquet file."""
    found = read_inputs(path, columns, preprocessing.resize)
    assert found.labels is not None
    return preprocessing.prepare(found.x), found.labels, found.clients


def _read_frame(
    frame: Any, preprocessing: Preprocessing, columns: Columns
) -> tuple[Tensor, Array, Array | None]:
    """Read a frame as a csv file of the same content."""
    names = [str(name) for name in frame.columns]
    roles = columns.find_roles(names, "The data")
    known = {role: np.array(read_words(frame, roles[role], "The data")) for role in roles}
    others = [place for place, name in enumerate(names) if name not in roles.values()]
    return preprocessing.prepare(frame.iloc[:, others]), known["label"], known.get("client")


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


# --- clients --------------------------------------------------------------------------------------


def divide_by_client(
    names: Array, clients: Sequence[int | str | None]
) -> tuple[Shares, tuple[str, ...]]:
    """Return the samples of each client of a run, and sentences about them.

    `names` say whose sample it is. Without any client of the run, there are no shares.
    """
    number = {str(client): position for position, client in enumerate(clients)}
    shares: Shares = {}
    strangers = []
    for name in np.unique(names).tolist():
        known = number.get(printable(name, 100))
        if known is None:
            strangers.append(name)
        else:
            shares[known] = np.flatnonzero(names == name)
    others = f"Not among the clients of the run: {list_names(strangers)}."
    if not shares:
        return {}, (f"{others} Every model is tested on all samples.",)
    notes = ["Each client's model is tested on that client's samples, the global one on all."]
    if missing := [client for client, k in number.items() if k not in shares]:
        notes.append(f"The data has no samples of {list_names(missing)}.")
    if strangers:
        notes.append(others)
    return {**shares, None: np.arange(len(names))}, tuple(notes)


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
