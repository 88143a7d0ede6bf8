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
    """Of each sample, as text; None if they were not read."""
    clients: Array | None = None
    """Whose sample it is, by name; None if they were not read."""


class Columns(NamedTuple):
    """What is read from a table: features by their names, or texts, and what else is wanted.

    A feature `colour=red` is 1 for the word red in the column colour, and 0 for others.
    """

    features: tuple[str, ...] = ()
    has_label: bool = False
    label: str | None = None
    """Its column; None: one with a usual name."""
    clients: tuple[str, ...] = ()
    """What the column that names the clients may be called; it need not be there."""

    def find_roles(self, names: Sequence[str], where: str) -> dict[str, str]:
        """Return the columns of the label and of the client, if they are wanted."""
        features = find_columns(self.features, names, where)
        free = [name for name in names if name not in features]
        roles: dict[str, str] = {}
        if self.has_label:
            label = find(LABELS if self.label is None else (self.label,), free)
            if label is None:
                wanted = self.label or f"label column ({', '.join(LABELS)}); name it"
                raise UserError(f"{where} has no {wanted}: its columns are {_list(names)}.")
            roles["label"] = label
        client = find(self.clients, [name for name in free if name not in roles.values()])
        return {**roles, "client": client} if client else roles

    def find_inputs(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns of the features, or of the texts."""
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
    roles, wanted = columns.find_roles(names, str(path)), columns.find_inputs(names, str(path))
    chosen = [*wanted, *roles.values()]
    places = [names.index(name) for name in chosen]
    lines, values = [], []
    for line, row in rows:
        if len(row) <= max(places):
            raise UserError(
                f"{path}, line {line} has {len(row)} columns, "
                f"but the first line names {len(names)}."
            )
        lines.append(line)
        values.append([row[place] for place in places])
    table = {name: [row[place] for row in values] for place, name in enumerate(chosen)}
    known = {
        role: _read_role(role, table.pop(roles[role]), f"{path}, line", lines) for role in roles
    }
    texts = None if columns.features else table[wanted[0]]
    x = _encode(table, columns.features, str(path), "line", lines) if texts is None else texts
    return Inputs(x, (), known.get("label"), known.get("client"))


def _read_parquet(path: Path, columns: Columns, resize: int | None) -> Inputs:
    def choose(names: Sequence[str]) -> list[str]:
        roles = columns.find_roles(names, str(path))
        inputs = columns.find_inputs(names, str(path)) if columns.features else []
        return [*inputs, *roles.values()]

    x, table = read_parquet_columns(path, choose, resize, has_input=not columns.features)
    rows = range(len(next(iter(table.values()), [])))
    roles = columns.find_roles(list(table), str(path))
    known = {role: _read_role(role, table.pop(roles[role]), f"{path}, row", rows) for role in roles}
    if x is None:
        x = torch.from_numpy(_encode(table, columns.features, str(path), "row", rows))
    return Inputs(x, (), known.get("label"), known.get("client"))


def _read_role(role: str, values: Sequence[Any], where: str, places: Sequence[int]) -> Array:
    """Return labels, or the names of clients, as text."""
    words = ["" if value is None or value != value else str(value).strip() for value in values]
    for place, word in zip(places, words, strict=True):
        if not word:
            raise UserError(f"{where} {place}: the {role} is empty; every sample needs one.")
    return np.array(words)


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
