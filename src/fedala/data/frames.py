"""Frames of pandas, read as a csv file with the same content. They may come in several pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedala.data.columns import (
    Wanted,
    assign_roles,
    describe_clients,
    find_columns,
    parse_parts,
)
from fedala.data.known_columns import encode_columns, make_readers
from fedala.data.tabular import to_words
from fedala.errors import UserError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Table:
    """Columns that will be features. What their words are is known when all pieces are together."""

    columns: Mapping[str, Array]
    rows: int

    def __len__(self) -> int:
        return self.rows

    def encode(
        self, where: str, known: Sequence[str] = ()
    ) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
        """Return the features as float32 N×D, their names, and sentences about them.

        With `known`, they are these: those of a run that the table is further data for.
        """
        names = find_columns(known, list(self.columns), where) or list(self.columns)
        readers = make_readers(names, where, "row", known)
        for reader in readers:
            values = self.columns[reader.name]
            if values.dtype.kind in "bf":
                reader.add_numbers(values)
                continue
            for place, value in enumerate(values.tolist()):
                reader.add(str(value), place)
        return encode_columns(readers, where, known)


class Frame:
    """The columns of a frame, by what they say."""

    def __init__(self, frame: Any, where: str, wanted: Wanted) -> None:
        self.frame, self.where = frame, where
        self.names = _check_names(frame, where)
        self.roles = assign_roles(self.names, wanted, where)
        if self.roles.label is None:
            advice = "" if wanted.is_further else ": name the one with label_column=…"
            raise UserError(
                f"{where} has no column label, class, target or y{advice}. It has "
                f"{', '.join(self.names)[:200]}."
            )
        if not (self.roles.input or self.roles.features):
            raise UserError(f"{where} has no columns besides the label and the client.")

    def inputs(self) -> "Table | list[str]":
        """Return the features, or the texts."""
        if self.roles.input:
            return self._read_words(self.roles.input)
        return make_table(self.frame, self.where, self.roles.features)

    def labels(self) -> Array:
        """Return the label of each row, as text."""
        return np.array(self._read_words(str(self.roles.label)), dtype=object)

    def clients(self) -> tuple[str, ...] | None:
        name = self.roles.clients
        return tuple(self._read_words(name)) if name else None

    def split(self) -> Array | None:
        name = self.roles.split
        return parse_parts(self._read_words(name), f"{self.where}: {name}") if name else None

    def notes(self) -> tuple[str, ...]:
        owners, name = self.clients(), self.roles.clients
        named = (describe_clients(name, owners),) if name and owners else ()
        return named + self.roles.describe_unread()

    def _read_words(self, name: str) -> list[str]:
        return read_words(self.frame, name, self.where)


def is_frame(data: Any) -> bool:
    """Tell whether this is a frame of pandas, without importing it."""
    kind = type(data)
    return kind.__name__ == "DataFrame" and kind.__module__.split(".")[0] == "pandas"


def read_words(frame: Any, name: str, where: str) -> list[str]:
    """Return a column as text."""
    series = frame.iloc[:, list(map(str, frame.columns)).index(name)]
    values = series.astype(object).where(~series.isna(), None).tolist()
    whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    return to_words(whole, f"{where}, column {name}")


def make_table(frame: Any, where: str, chosen: Sequence[str] | None = None) -> Table:
    """Read columns as float64, truth values or text; a missing value is NaN, or empty."""
    names = _check_names(frame, where)
    columns = {}
    for place, name in enumerate(names):
        if chosen is not None and name not in chosen:
            continue
        series = frame.iloc[:, place]
        kind = getattr(series.dtype, "kind", "O")
        if kind == "b" and not series.isna().any():
            columns[name] = series.to_numpy(bool)
        elif kind in "biuf":
            columns[name] = series.to_numpy(np.float64, na_value=np.nan)
        else:
            columns[name] = series.astype(object).where(~series.isna(), "").to_numpy(object)
    return Table(columns, len(frame))


def join_tables(tables: Sequence[Table]) -> Table:
    """Put pieces together that have the same columns."""
    columns = {
        name: np.concatenate([table.columns[name] for table in tables])
        for name in tables[0].columns
    }
    return Table(columns, sum(map(len, tables)))


def _check_names(frame: Any, where: str) -> list[str]:
    names = [str(column) for column in frame.columns]
    if len(set(names)) < len(names):
        raise UserError(f"{where} has two columns of the same name.")
    return names
