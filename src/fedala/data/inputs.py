"""Read samples for a trained model: they may have no labels, and their columns are known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.data.arrays import read_npz_inputs
from fedala.data.columns import LABELS, find, find_columns, find_text
from fedala.data.csv_files import read_rows
from fedala.data.images import read_plain_images
from fedala.data.known_columns import encode_columns, make_readers
from fedala.data.tables import read_parquet_columns
from fedala.errors import UserError, printable
from fedala.io.untrusted import read_file

_TABLES = (".csv", ".parquet")
_SUFFIXES = (".npz", *_TABLES)
_LARGEST_TEXT = 2**24  # bytes of a .txt file

Array = np.ndarray[Any, Any]


class Inputs(NamedTuple):
    """Raw samples."""

    x: "torch.Tensor | Array | list[str]"
    names: tuple[str, ...] = ()
    """Of each sample, if it is a file."""
    labels: Array | None = None
    """Of each sample, as text or numbers; None if they were not read."""


class Columns(NamedTuple):
    """What is read from a table: features by their names, or texts, and the label if it is wanted.

    A feature `colour=red` is 1 for the word red in the column colour, and 0 for others.
    """

    features: tuple[str, ...] = ()
    has_label: bool = False
    label: str | None = None
    """Its column; None: one with a usual name."""

    def find_label(self, names: Sequence[str], where: str) -> str | None:
        if not self.has_label:
            return None
        found = find(LABELS if self.label is None else (self.label,), names)
        if found is None:
            wanted = self.label or f"label column ({', '.join(LABELS)}); name it"
            raise UserError(f"{where} has no {wanted}: its columns are {_list(names)}.")
        return found

    def find_inputs(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns to read, without the label."""
        if not self.features:
            return [find_text(names, where)]
        return find_columns(self.features, names, where)


def _list(names: Sequence[str]) -> str:
    return printable(", ".join(names), 200) or "none"


def is_table(path: Path) -> bool:
    return path.suffix.lower() in _TABLES


def is_file(data: Any, *, allows_text: bool = False) -> bool:
    """Tell whether `data` names a file or folder; with `allows_text`, a string may be a text."""
    if isinstance(data, Path):
        return True
    if not isinstance(data, str):
        return False
    return not allows_text or data.lower().endswith(_SUFFIXES) or _is_folder(data)


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # too long for a path, or a character that none can have
        return False


def read_inputs(path: Path, columns: Columns, resize: int | None = None) -> Inputs:
    """Read the samples of a .npz, .csv or .parquet file, or of a folder of images or .txt files.

    Labels may be there; only those of tables are read, if they are wanted.
    """
    path = path.expanduser()
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            return _read_folder(path, resize)
        if not path.exists():
            raise UserError(f"There is no file or folder {path}.")
        if suffix == ".npz":
            return Inputs(read_npz_inputs(path))
        if suffix == ".csv":
            return _read_csv(path, columns)
        if suffix == ".parquet":
            return _read_parquet(path, columns, resize)
    except MemoryError:
        raise UserError(f"{path} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    raise UserError(
        f"{path} does not hold samples: that is a .npz, .csv or .parquet file, or a folder of "
        "images or of .txt files."
    )


def _read_folder(folder: Path, resize: int | None) -> Inputs:
    texts = sorted(folder.rglob("*.txt"))
    if not texts:
        files, x = read_plain_images(folder, resize)
        return Inputs(x, tuple(str(file.relative_to(folder)) for file in files))
    contents = [read_file(file, _LARGEST_TEXT).decode(errors="replace") for file in texts]
    return Inputs(contents, tuple(str(file.relative_to(folder)) for file in texts))


def _read_csv(path: Path, columns: Columns) -> Inputs:
    rows = read_rows(path)
    _, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    label, wanted = columns.find_label(names, str(path)), columns.find_inputs(names, str(path))
    places = [names.index(name) for name in [*wanted, *([label] if label else [])]]
    lines, values = [], []
    for line, row in rows:
        if len(row) <= max(places):
            raise UserError(
                f"{path}, line {line} has {len(row)} columns, "
                f"but the first line names {len(names)}."
            )
        lines.append(line)
        values.append([row[place] for place in places])
    labels = None
    if label:
        labels = _read_labels([row.pop() for row in values], f"{path}, line", lines)
    if not columns.features:
        return Inputs([text for [text] in values], labels=labels)
    table = {name: [row[place] for row in values] for place, name in enumerate(wanted)}
    return Inputs(_encode(table, columns.features, str(path), "line", lines), labels=labels)


def _read_parquet(path: Path, columns: Columns, resize: int | None) -> Inputs:
    def choose(names: Sequence[str]) -> list[str]:
        label = columns.find_label(names, str(path))
        inputs = columns.find_inputs(names, str(path)) if columns.features else []
        return [*inputs, *([label] if label else [])]

    x, table = read_parquet_columns(path, choose, resize, has_input=not columns.features)
    label = columns.find_label(list(table), str(path))
    labels = None
    if label:
        values = table.pop(label)
        labels = _read_labels(values, f"{path}, row", range(len(values)))
    if x is not None:
        return Inputs(x, labels=labels)
    count = len(next(iter(table.values()), []))
    return Inputs(_encode(table, columns.features, str(path), "row", range(count)), labels=labels)


def _read_labels(values: Sequence[Any], where: str, places: Sequence[int]) -> Array:
    """Return labels as text."""
    labels = ["" if value is None or value != value else str(value).strip() for value in values]
    for place, label in zip(places, labels, strict=True):
        if not label:
            raise UserError(f"{where} {place}: the label is empty; every sample needs one.")
    return np.array(labels)


def _encode(
    table: Mapping[str, Sequence[Any]],
    features: Sequence[str],
    where: str,
    row: str,
    places: Sequence[int],
) -> Array:
    """Return the features of a table as the run had them, N×D."""
    readers = make_readers(list(table), where, row, features)
    for reader in readers:
        for place, value in zip(places, table[reader.name], strict=True):
            reader.add("" if value is None else str(value), place)
    return encode_columns(readers, where, features)[0]
