"""Csv files: texts with labels, and tables of numbers."""

import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fedala.data.columns import USUAL, Roles, Wanted, assign_roles, describe_clients, parse_parts
from fedala.data.dataset import RawData
from fedala.data.known_columns import encode_columns, make_readers
from fedala.data.tabular import ColumnReader, describe_classes, encode_targets
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_memory, open_file
from fedala.options import name_option

#: Bytes that a value of a table takes while it is read, for each byte of the file.
_TABLE_COST = 8
_LONGEST_HEADER = 2**20


def read_csv(path: Path, wanted: Wanted = USUAL) -> RawData:
    """Read a csv file whose first line names its columns.

    One is the label. A column `text` holds texts; without it, all other columns are features.
    Columns may also say whose sample it is, and whether it is for training or testing.
    """
    rows = read_rows(path)
    _, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    roles = assign_roles(names, wanted, str(path))
    if roles.label is None:
        advice = "" if wanted.is_further else f"; {name_option('label_column')} names another"
        raise UserError(
            f"{path} has no label column: its first line must name one (label, class, target or y"
            f"{advice}), and it names "
            f"{', '.join(name.lower() for name in names)[:200] or 'nothing'}."
        )
    columns = _Columns(names, roles, path, wanted)
    for line, row in rows:
        columns.add(line, row)
    return columns.finish()


class _Columns:
    """The columns of a file, as far as they have been read."""

    def __init__(self, names: list[str], roles: Roles, path: Path, wanted: Wanted) -> None:
        self.names, self.roles, self.path, self.wanted = names, roles, path, wanted
        self.texts: list[str] = []
        columns = {"label": roles.label, "client": roles.clients, "split": roles.split}
        self.places = {role: names.index(column) for role, column in columns.items() if column}
        self.values: dict[str, list[str]] = {role: [] for role in self.places}
        self.known: dict[str, str] = {}  # one object for each word
        self.features: list[tuple[int, ColumnReader]] = []
        if not roles.input:
            if not wanted.features:
                self._check_header()
            check_memory(_TABLE_COST * path.stat().st_size, str(path))
            for reader in make_readers(roles.features, str(path), features=wanted.features):
                self.features.append((names.index(reader.name), reader))

    def _check_header(self) -> None:
        for place, name in enumerate(self.names):
            if not name:
                raise UserError(
                    f"{self.path}: column {place + 1} has no name in the first line; name it, or "
                    "leave it out (pandas writes its index so, unless told index=False)."
                )
            if self.names.index(name) < place:
                raise UserError(
                    f"{self.path} names the column {name} twice; every name must be different."
                )

    def add(self, line: int, row: list[str]) -> None:
        """Add a line."""
        roles, names = self.roles, self.names
        text = names.index(roles.input) if roles.input else len(names) - 1
        least = max([text, *self.places.values()])
        if len(row) <= least or (not roles.input and len(row) != len(names)):
            raise UserError(
                f"{self.path}, line {line} has {len(row)} columns, "
                f"but the first line names {len(names)}."
            )
        for role, place in self.places.items():
            value = row[place].strip()
            if not value:
                noun = "text" if roles.input else "sample"
                raise UserError(
                    f"{self.path}, line {line}: the {role} is empty; every {noun} needs one."
                )
            self.values[role].append(self.known.setdefault(value, value))
        if roles.input:
            self.texts.append(row[text])
        for place, reader in self.features:
            reader.add(row[place], line)

    def finish(self) -> RawData:
        """Return the content of the whole file."""
        path, roles, values = self.path, self.roles, self.values
        notes: tuple[str, ...] = ()
        clients, split = values.get("client"), None
        if roles.clients and clients is not None:
            notes = (describe_clients(roles.clients, clients),)
        if "split" in values:
            split = parse_parts(values["split"], f"{path}: the column {roles.split}")
        feature_names: tuple[str, ...] = ()
        if roles.input:
            x: torch.Tensor | list[str] = self.texts
            notes += roles.describe_unread()
        else:
            readers = [reader for _, reader in self.features]
            table, feature_names, about = encode_columns(readers, str(path), self.wanted.features)
            x = torch.from_numpy(table)
            notes += about
        y, class_names = encode_targets(
            values["label"],
            f"{path}: the column {roles.label}",
            is_regression=self.wanted.is_regression,
            are_of_texts=roles.input is not None,
        )
        return RawData(
            str(path),
            x,
            y,
            class_names,
            clients=clients,
            split=split,
            feature_names=feature_names,
            notes=notes + describe_classes(str(roles.label), class_names),
        )


def read_ag_news_csv(paths: list[Path]) -> RawData:
    """Read the published files of AG News: class 1..4, title, description, without a header."""
    labels, texts = [], []
    for path in paths:
        for line, row in read_rows(path, has_header=False):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise UserError(
                    f"{path}, line {line}: "
                    "a line of AG News is a class from 1 to 4, a title and a text."
                )
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
    return RawData(str(paths[0].parent), texts, np.array(labels, dtype=np.int64))


def read_rows(path: Path, *, has_header: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of every row that is not blank.

    They are separated by commas, or by semicolons or tabs if the header is.
    """
    try:
        with (
            open_file(path) as data,
            io.TextIOWrapper(data, newline="", encoding="utf-8-sig") as file,
        ):
            check_memory(os.fstat(data.fileno()).st_size, str(path))
            separator = ","
            if has_header:
                separator = _find_separator(file.readline(_LONGEST_HEADER))
                file.seek(0)
            reader = csv.reader(file, strict=True, delimiter=separator)
            yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError:
        raise UserError(
            f"{path}, line {_find_undecodable(path)} is not in UTF-8: save the file as UTF-8."
        ) from None
    except (OSError, csv.Error) as error:
        raise UserError(f"{path} is not a readable .csv file ({first_line(error)}).") from None


def _find_separator(header: str) -> str:
    """Return what separates the names of columns most often, outside quotation marks."""
    plain = re.sub(r'"[^"]*"', "", header)
    return max(",", ";", "\t", key=plain.count)


def _find_undecodable(path: Path) -> int:
    """Return the number of the first line that is not UTF-8."""
    with open_file(path) as lines:
        return next(place for place, line in enumerate(lines, 1) if not _is_utf8(line))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
