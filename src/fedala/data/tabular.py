"""Tables of numbers: columns of numbers, and of a few words, as float32 features."""

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedala.data.dataset import encode_labels
from fedala.errors import UserError, printable
from fedala.io.untrusted import check_memory

Array = np.ndarray[Any, Any]

#: The most different words of a column that becomes a feature for each word.
MOST_WORDS = 64
_MISSING = {"", "?", "na", "n/a", "nan", "null"}
_TRUTH = {"true": 1.0, "false": 0.0}


class Feature(NamedTuple):
    """A column: numbers, or codes of words."""

    name: str
    values: Array
    words: tuple[str, ...] = ()


class ColumnReader:
    """Collect the values of a column that are given as text. They are numbers, or a few words.

    They count as numbers if at least half of them are. `row` says how messages call a place.
    """

    def __init__(self, name: str, where: str, row: str = "line") -> None:
        self.name, self.where, self.row = name, where, row
        self.numbers, self.codes = array("d"), array("h")
        self.words: dict[str, int] = {}
        self.first_word: tuple[int, str] | None = None
        self.count = 0  # of numbers

    def add(self, text: str, place: int) -> None:
        """Add the value of a line, or row."""
        text = text.strip()
        if text.lower() in _MISSING:
            raise UserError(
                f"{self.where}, {self.row} {place}: the column {self.name} has no value "
                f"({text!r}); fill it, or leave the {self.row} or the column out."
            )
        number = parse_number(text)
        if number is None:
            self.first_word = self.first_word or (place, text)
        elif not math.isfinite(number):
            raise UserError(
                f"{self.where}, {self.row} {place}: the column {self.name} holds {text}; "
                "every value must be a finite number."
            )
        else:
            self.count += 1
        if text not in self.words and len(self.words) <= MOST_WORDS:
            self.words[text] = len(self.words)
        self.numbers.append(0.0 if number is None else number)
        self.codes.append(self.words.get(text, -1))

    def finish(self) -> Feature:
        """Return the column as a feature, or raise `UserError` if it is neither kind."""
        if self.first_word is None:
            return Feature(self.name, np.array(self.numbers))
        place, text = self.first_word
        if 2 * self.count >= len(self.numbers):
            raise UserError(
                f"{self.where}, {self.row} {place}: {printable(text, 100)!r} in the column "
                f"{self.name} is not a number."
            )
        if len(self.words) > MOST_WORDS or 2 * len(self.words) > len(self.numbers):
            many = "more than 64" if len(self.words) > MOST_WORDS else str(len(self.words))
            raise UserError(
                f"{self.where}: the column {self.name} holds {many} different words in "
                f"{len(self.numbers)} {self.row}s, such as {printable(text, 100)!r} in {self.row} "
                f"{place}, too many for a feature each. Leave it out; if it is the text to "
                "classify, call it text; if it names the clients, use --clients-by."
            )
        return Feature(self.name, np.array(self.codes), tuple(self.words))


def parse_number(text: str) -> float | None:
    """Return a number, or a truth value as 1 or 0; None if the text is neither."""
    try:
        return _TRUTH.get(text.lower()) if "_" in text else float(text)
    except ValueError:
        return _TRUTH.get(text.lower())


def encode_features(
    features: Sequence[Feature], where: str
) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
    """Return the features as float32 N×D, their names, and sentences that say what they are."""
    if not features:
        raise UserError(
            f"{where} has no columns beside the label; it needs at least one column of numbers, or "
            "one called text."
        )
    rows = len(features[0].values)
    width = sum(len(feature.words) or 1 for feature in features)
    check_memory(4 * rows * width, where)
    x = np.empty((rows, width), np.float32)
    names: list[str] = []
    notes = [f"The features are the columns {_list_names([f.name for f in features])}."]
    for feature in features:
        if not feature.words:
            with np.errstate(over="ignore"):  # `Dataset` refuses what float32 cannot hold
                x[:, len(names)] = feature.values
            names.append(feature.name)
            continue
        ordered = sorted(feature.words)
        for word in ordered:
            x[:, len(names)] = feature.values == feature.words.index(word)
            names.append(f"{feature.name}={word}")
        notes.append(
            f"The column {feature.name} holds words, each of which becomes a feature of zeros and "
            f"ones: {_list_names(ordered)}."
        )
    return x, tuple(printable(name, 100) for name in names), tuple(notes)


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name, 50) for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} … ({len(names):,} in all)"


def encode_targets(values: Sequence[str], where: str) -> tuple[Array, tuple[str, ...]]:
    """Return labels and their names; numbers that are not all whole are targets to predict."""
    texts = set(values)
    numbers = {text: parse_number(text) for text in texts}
    if any(number is None for number in numbers.values()):
        return encode_labels(list(values))
    targets = np.array([numbers[text] for text in values], dtype=np.float64)
    if not np.isfinite(targets).all():
        raise UserError(f"{where} holds targets that are not finite numbers; all must be.")
    if (targets != np.floor(targets)).any():
        with np.errstate(over="ignore"):  # `Dataset` refuses what float32 cannot hold
            return targets.astype(np.float32), ()
    return encode_labels([str(int(number)) for number in targets.tolist()])
