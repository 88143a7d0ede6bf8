"""Columns of a table as a run had them: each holds numbers, or some words."""

from array import array
from collections.abc import Sequence

import numpy as np

from fedala.data.tabular import (
    Array,
    ColumnReader,
    Feature,
    encode_features,
    is_missing,
    name_word,
    refuse_missing,
    refuse_word,
)
from fedala.io.untrusted import check_memory


class KnownColumn(ColumnReader):
    """Collect the values of a column as a run had it: words, or numbers if there are no words."""

    may_be_dropped = False

    def __init__(self, name: str, where: str, row: str, known: Sequence[str]) -> None:
        super().__init__(name, where, row)
        self.known = known
        self.codes = array("q")

    def add(self, text: str, place: int) -> None:
        text = text.strip()
        if not self.known:
            super().add(text, place)
            return
        if text not in self.words and (code := self._find_code(text)) is not None:
            self.words[text] = code
        if text in self.words:
            self.codes.append(self.words[text])
        elif is_missing(text):
            self.note_missing(place)
        else:
            word = text.removesuffix(".0")
            refuse_word(f"{self.where}, {self.row} {place}", word, self.name, self.known)

    def add_numbers(self, values: Array) -> None:
        if not self.known:
            super().add_numbers(values)
            return
        for place, value in enumerate(values.tolist()):
            self.add(str(value), place)

    def finish(self) -> Feature:
        if self.known:
            return Feature(self.name, np.array(self.codes), tuple(self.known))
        if self.first_word:
            self.refuse_number()
        return super().finish()

    def _find_code(self, text: str) -> int | None:
        """Return the position of a word. A number may have been read as 3.0."""
        features = [name_word(self.name, word) for word in self.known]
        for word in (text, text.removesuffix(".0")):
            if name_word(self.name, word) in features:
                return features.index(name_word(self.name, word))
        return None


def make_readers(
    names: Sequence[str], where: str, row: str = "line", features: Sequence[str] = ()
) -> list[ColumnReader]:
    """Return a reader for each column; `features` are those that a run has made of them."""
    if not features:
        return [ColumnReader(name, where, row) for name in names]
    words: dict[str, list[str]] = {name: [] for name in names}
    for feature in features:
        column, _, word = feature.partition("=")
        if feature not in words:
            words[column].append(word)
    return [KnownColumn(name, where, row, words[name]) for name in names]


def encode_columns(
    readers: Sequence[ColumnReader], where: str, features: Sequence[str] = ()
) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
    """Return columns as `encode_features` does, or as the features that a run has made of them."""
    refuse_missing(readers)
    columns = {reader.name: reader.finish() for reader in readers}
    if not features:
        return encode_features([*columns.values()], where)
    rows = len(next(iter(columns.values())).values)
    check_memory(4 * rows * len(features), where)
    x = np.empty((rows, len(features)), np.float32)
    for place, name in enumerate(features):
        column, _, word = name.partition("=")
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused later
            if name in columns:
                x[:, place] = columns[name].values
            else:
                x[:, place] = columns[column].values == columns[column].words.index(word)
    return x, tuple(features), ()
