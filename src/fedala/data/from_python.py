"""Data that a program holds already, as a `Dataset`: arrays, tensors, datasets, frames, clients."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedala.data.arrays import Array, choose_layout
from fedala.data.columns import USUAL, Wanted
from fedala.data.dataset import Dataset, RawData, encode_labels
from fedala.data.frames import Frame, Table, is_frame, join_tables, make_table
from fedala.data.load import build_dataset
from fedala.data.tabular import describe_classes, encode_targets
from fedala.errors import UserError, first_line
from fedala.options import split_names

_PART_NAMES = {"train": 0, "validation": 1, "val": 1, "test": 2}
_WANTED = (
    "data are a pair (x, y) of arrays or tensors, a torch Dataset of such pairs, a pandas "
    "DataFrame, a list with one of these for each client, a dict of clients, or a dict with the "
    "parts train and test"
)

_ONE_TENSOR = (
    "a run needs one array or tensor for each sample's x (ALA in a loop of your own takes dicts "
    "and tuples of them)"
)


class _Part(NamedTuple):
    """Samples of one client, of one part, or of everybody."""

    x: "Array | list[str] | Table"
    y: Array
    """The labels of a frame are texts, as objects."""
    clients: tuple[str, ...] | None = None
    split: Array | None = None
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    vocabulary: int | None = None
    notes: tuple[str, ...] = ()
    label: str = ""
    """The column of a frame."""


def make_dataset(
    data: Any,
    *,
    clients: Sequence[Any] | None = None,
    name: str = "own",
    label_column: str | None = None,
    clients_by: str | None = None,
    drop_columns: str | Sequence[str] | None = None,
    is_regression: bool = False,
) -> Dataset:
    """Make a dataset of what a program has.

    `data` is one of these:

    - `(x, y)`: arrays, tensors or lists with a row for each sample. `clients` may say whose sample
      each one is; `(x, y, clients)` says the same.
    - a `torch.utils.data.Dataset` with a length, whose samples are such pairs;
    - a pandas `DataFrame`, which is read as a csv file of the same content: `label_column`,
      `clients_by`, `drop_columns` and `is_regression` are those of `load`;
    - a list with one of the above for each client, or a dict with their names;
    - a dict with the parts `train` and `test`, and maybe `validation`, each one of the above; or a
      dict or list of clients, each with such parts.

    Bytes in 3 or 4 dimensions are images, channels first or last. Rows of other whole numbers are
    tokens: make whole numbers that are features floats. A list of texts becomes tokens, too. Labels
    may be whole numbers from 0 or names; floats are numbers to predict.
    """
    columns = Wanted(clients_by, label_column, split_names(drop_columns), is_regression)
    if clients is not None:
        if not isinstance(data, tuple) or len(data) != 2:
            raise UserError(
                "clients with a name for each sample goes with a pair (x, y) only: other data say "
                "themselves whose sample is whose."
            )
        data = (*data, clients)
    part = _read(data, name, columns)
    if columns.has_names and part.y.dtype.kind != "O":
        raise UserError(
            "label_column, clients_by and drop_columns are for a pandas DataFrame with its labels."
        )
    dataset = build_dataset(name, _to_raw(part, name, columns))
    return replace(dataset, vocabulary=part.vocabulary) if part.vocabulary else dataset


def make_raw(data: Any, name: str, columns: Wanted = USUAL) -> RawData:
    """Read what `make_dataset` takes; its words and classes are not yet numbers."""
    return _to_raw(_read(data, name, columns), name, columns)


def _to_raw(part: _Part, name: str, columns: Wanted) -> RawData:
    notes, feature_names, is_regression = part.notes, part.feature_names, columns.is_regression
    if isinstance(part.x, Table):
        features, feature_names, about = part.x.encode(name, columns.features)
        x: Tensor | list[str] = torch.from_numpy(features)
        notes += about
    else:
        x = part.x if isinstance(part.x, list) else torch.from_numpy(_make_writeable(part.x))
    y, class_names = _make_writeable(part.y), part.class_names
    if y.dtype.kind == "O":
        where = f"{name}: the column {part.label}"
        y, class_names = encode_targets(
            y.tolist(), where, is_regression=is_regression, are_of_texts=isinstance(x, list)
        )
        notes += describe_classes(part.label, class_names)
    elif y.dtype.kind == "U":
        y, class_names = encode_labels(y.tolist())
    elif is_regression and y.dtype.kind in "iu" and not class_names:
        y = y.astype(np.float32)
    return RawData(name, x, y, class_names, part.clients, part.split, feature_names, notes=notes)


def _make_writeable(array: Array) -> Array:
    """Return an array that torch accepts: it warns about memory that must not change."""
    return array if array.flags.writeable else array.copy()


def _read(data: Any, where: str, columns: Wanted) -> _Part:
    """Read data of any kind."""
    if isinstance(data, Dataset):
        return _read_own_dataset(data)
    if is_frame(data):
        frame = Frame(data, where, columns)
        owners, split = frame.clients(), frame.split()
        label = str(frame.roles.label)
        x, y = frame.inputs(), frame.labels()
        return _Part(x, y, owners, split, notes=frame.notes(), label=label)
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _read_pair(data, where)
    if isinstance(data, Mapping):
        is_parts = "train" in data and set(data) <= set(_PART_NAMES)
        return (_read_parts if is_parts else _read_clients)(data, where, columns)
    if isinstance(data, list) and any(map(_is_array, data)):
        raise UserError(
            f"{where} is a list of arrays; a list has an entry (x, y) for each client, and x and y "
            "together are a tuple (x, y)."
        )
    if isinstance(data, list):
        return _read_clients(dict(enumerate(data)), where, columns)
    if isinstance(data, TorchDataset):
        return _read_torch_dataset(data, where)
    if isinstance(data, DataLoader):
        raise UserError(f"{where} is a DataLoader; give its dataset: loader.dataset.")
    raise UserError(f"{where} is of the type {type(data).__name__}; {_WANTED}.")


def _read_own_dataset(data: Dataset) -> _Part:
    class_names = data.class_names
    if data.kind == "classes" and not class_names:
        class_names = tuple(map(str, range(data.classes)))
    owners = None
    if data.clients is not None:
        owners = tuple(data.client_names[client] for client in data.clients.tolist())
    return _Part(
        data.x.numpy(),
        data.y.numpy(),
        owners,
        None if data.split is None else data.split.numpy(),
        data.feature_names,
        class_names,
        data.vocabulary,
    )


def _read_pair(data: Sequence[Any], where: str) -> _Part:
    x, y = _convert_samples(data[0], where), _convert_targets(data[1], where)
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} samples in x but {len(y)} in y.")
    owners = _name_clients(data[2], len(y), where) if len(data) == 3 else None
    return _Part(x, y, owners)


def _read_torch_dataset(data: "TorchDataset[Any]", where: str) -> _Part:
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise UserError(f"{where} is a Dataset without a length; use one that has __len__.")
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return _read_pair(data.tensors, where)
    xs, ys = [], []
    for i in range(len(data)):
        sample = data[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise UserError(
                f"{where} has samples of the type {type(sample).__name__}; "
                f"a sample must be a pair (x, y), and {_ONE_TENSOR}."
            )
        if isinstance(sample[0], tuple | list) and any(map(_is_tensor, sample[0])):
            raise UserError(f"{where}: x of a sample is several tensors; {_ONE_TENSOR}.")
        xs.append(sample[0] if isinstance(sample[0], str) else _to_array(sample[0], where, "x"))
        ys.append(sample[1] if isinstance(sample[1], str) else _to_array(sample[1], where, "y"))
    return _read_pair((xs, ys), where)


def _read_parts(data: Mapping[str, Any], where: str, columns: Wanted) -> _Part:
    parts = []
    for name, content in data.items():
        part = _read(content, f"{where}, {name}", columns)
        if part.split is not None:
            raise UserError(f"{where}, {name} has parts inside; say once which samples are which.")
        split = np.full(len(part.y), _PART_NAMES[name], np.uint8)
        parts.append(part._replace(split=split))
    if len({part.clients is None for part in parts}) > 1:
        raise UserError(f"{where}: all of its parts must name their clients, or none.")
    return _concatenate(parts, where)


def _read_clients(data: Mapping[Any, Any], where: str, columns: Wanted) -> _Part:
    names = _name_clients(list(data), len(data), where)
    if len(set(names)) < len(names):
        raise UserError(f"{where} has two clients of the same name.")
    parts = []
    for name, content in zip(names, data.values(), strict=True):
        part = _read(content, f"{where}, client {name}", columns)
        if part.clients is not None:
            raise UserError(f"{where}, client {name} has clients inside; say once who has what.")
        if not len(part.y):
            raise UserError(f"{where}, client {name} has no samples; leave it out.")
        parts.append(part._replace(clients=(name,) * len(part.y)))
    if len({part.split is None for part in parts}) > 1:
        raise UserError(f"{where}: all clients must have the parts train and test, or none.")
    return _concatenate(parts, where)


def _concatenate(parts: Sequence[_Part], where: str) -> _Part:
    """Put samples together that agree in their type and shape."""
    if not parts:
        raise UserError(f"{where} is empty; {_WANTED}.")
    for what, kinds in (
        ("samples", {_describe(part.x) for part in parts}),
        ("targets", {_describe(part.y) for part in parts}),
        ("columns", {", ".join(_list_columns(part)) for part in parts}),
        ("classes", {", ".join(part.class_names) for part in parts}),
        ("vocabularies", {str(part.vocabulary) for part in parts}),
    ):
        if len(kinds) > 1:
            one, other = sorted(kinds)[:2]
            raise UserError(
                f"{where}: its {what} differ between clients or parts ({one[:100]} and "
                f"{other[:100]}); they must agree."
            )
    tables = [part.x for part in parts if isinstance(part.x, Table)]
    x: Array | list[str] | Table
    if tables:
        x = join_tables(tables)
    elif isinstance(parts[0].x, list):
        x = [text for part in parts if isinstance(part.x, list) for text in part.x]
    else:
        x = np.concatenate([np.asarray(part.x) for part in parts])
    owners = [name for part in parts for name in part.clients or ()]
    splits = [part.split for part in parts if part.split is not None]
    return _Part(
        x,
        np.concatenate([part.y for part in parts]),
        tuple(owners) if owners else None,
        np.concatenate(splits) if splits else None,
        parts[0].feature_names,
        parts[0].class_names,
        parts[0].vocabulary,
        label=parts[0].label,
    )


def _list_columns(part: _Part) -> Sequence[str]:
    return list(part.x.columns) if isinstance(part.x, Table) else part.feature_names


def _describe(values: "Array | list[str] | Table") -> str:
    """Say of which kind the rows of an array are."""
    if isinstance(values, Table):
        return "table"
    if isinstance(values, list) or values.dtype.kind == "U":
        return "text"
    return f"{values.dtype} of shape {values.shape[1:]}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor) and value.ndim > 0


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor | int | float | str)


def _to_array(values: Any, where: str, what: str) -> Array:
    """Return an array of numbers or texts; refuse everything else."""
    if isinstance(values, Mapping):
        raise UserError(f"{where}: {what} is a dict; {_ONE_TENSOR}.")
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized:
            raise UserError(f"{where}: {what} is a sparse or quantised tensor; make it dense.")
        values = values.detach().cpu()
        is_odd = values.is_floating_point() and values.dtype not in (torch.float32, torch.float64)
        array: Array = (values.float() if is_odd else values).numpy()
    else:
        try:
            array = np.asarray(values)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            _refuse_ragged(values, where, what)
            raise UserError(
                f"{where}: {what} is not an array with rows of one shape ({first_line(error)})."
            ) from None
    if array.dtype.kind == "O":
        # An array of text may be one of objects, as in pandas.
        if array.size and all(isinstance(value, str) for value in array.flat):
            return array.astype(str)
        raise UserError(
            f"{where}: {what} holds Python objects, such as rows of different lengths or missing "
            "values; it must hold numbers or texts only."
        )
    if array.dtype.kind not in "biufU":
        raise UserError(f"{where}: {what} is {array.dtype}; it must hold numbers or texts.")
    return array


def _refuse_ragged(values: Any, where: str, what: str) -> None:
    """Refuse rows of different lengths, such as tokens of texts."""
    if not isinstance(values, Sequence) or not all(hasattr(row, "__len__") for row in values):
        return
    lengths = {len(row) for row in values}
    if len(lengths) > 1:
        raise UserError(
            f"{where}: the rows of {what} have {min(lengths)} to {max(lengths)} values, "
            "and must have one shape; if they are tokens, pad them with 0 to one length."
        )


def _convert_samples(values: Any, where: str) -> "Array | list[str] | Table":
    """Return samples as `Dataset` holds them, a list of texts, or a table."""
    if is_frame(values):
        return make_table(values, where)
    x = _to_array(values, where, "x")
    if x.ndim == 0:
        raise UserError(f"{where}: x is one number; it must have a row for each sample.")
    if x.dtype.kind == "U":
        if x.ndim != 1:
            raise UserError(f"{where}: x is a table of texts; it must be one text for each sample.")
        return list(map(str, x.tolist()))
    if x.dtype.kind == "b":
        x = x.astype(np.float32)
    is_pixels = x.dtype.kind in "iu" and x.ndim in (3, 4) and x.size
    if is_pixels and 0 <= x.min() <= x.max() <= 255:
        x = x.astype(np.uint8)
    layout = choose_layout(x.shape, x.dtype, where)
    with np.errstate(over="ignore", invalid="ignore"):  # `Dataset` refuses what is not finite
        return np.ascontiguousarray(layout.arrange(x), dtype=layout.dtype)


def _convert_targets(values: Any, where: str) -> Array:
    """Return labels as int64 or as texts, other targets as numbers."""
    y = _to_array(values, where, "y")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind != "f":
        y = y[:, 0]
    if y.ndim not in (1, 2) or (y.ndim == 2 and y.dtype.kind == "U"):
        raise UserError(
            f"{where}: y has the shape {y.shape}; it must have one label for each sample, or a row "
            "of numbers."
        )
    if y.dtype.kind == "u" and y.size and int(y.max()) >= 2**63:
        raise UserError(f"{where}: y holds {y.max()}; labels have at most 63 bits.")
    with np.errstate(over="ignore", invalid="ignore"):
        kinds = {"f": np.float32, "U": y.dtype}
        return np.ascontiguousarray(y, dtype=kinds.get(y.dtype.kind, np.int64))


def _name_clients(values: Any, count: int, where: str) -> tuple[str, ...]:
    """Return the name of each client, or of each sample's client, as text."""
    if hasattr(values, "tolist"):  # tensors, arrays and series
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        length = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise UserError(
            f"{where}: clients must have a name or number for each of the {count} samples, "
            f"not {length}."
        )
    names = []
    for value in values:
        with suppress(AttributeError):  # a scalar of NumPy
            value = value.item()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise UserError(
                f"{where}: the name of a client must be text or a whole number, not {value!r}."
            )
        names.append(str(value))
    return tuple(names)
