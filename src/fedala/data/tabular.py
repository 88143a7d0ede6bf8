"""Tables of numbers: columns of numbers, and of a few words, as float32 features."""

import math
import re
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedala.data.dataset import encode_labels
from fedala.errors import Caution, UserError, printable
from fedala.io.untrusted import check_memory
from fedala.options import name_option

Array = np.ndarray[Any, Any]

#: The most different words of a column that becomes a feature for each word.
MOST_WORDS = 64
_MISSING = {"", "?", "na", "n/a", "nan", "null"}
_TRUTH = {"true": 1.0, "false": 0.0}
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")
#: The fewest rows in which a column of consecutive numbers looks like their numbering.
_FEW_ROWS = 10
#: The most names in a list.
_SHOWN = 40
#: More classes than this, by whole numbers, may be meant as numbers to predict.
_FEW_CLASSES = 10


class Feature(NamedTuple):
    """A column: numbers, or codes of words."""

    name: str
    values: Array
    words: tuple[str, ...] = ()


class ColumnReader:
    """Collect the values of a column that are given as text. They are numbers, or a few words.

    They count as numbers if at least half of them are. `row` says how messages call a place.
    """

    may_be_dropped = True

    def __init__(self, name: str, where: str, row: str = "line") -> None:
        self.name, self.where, self.row = name, where, row
        self.numbers, self.codes = array("d"), array("h")
        self.words: dict[str, int] = {}
        self.first_word: tuple[int, str] | None = None
        self.count = 0  # of numbers
        self.commas = 0  # numbers with a decimal comma
        self.missing = 0
        self.first_missing: int | None = None
        self.given: Array | None = None

    def add(self, text: str, place: int) -> None:
        """Add the value of a line, or row."""
        text = text.strip()
        if is_missing(text):
            self.note_missing(place)
            return
        number = parse_number(text)
        if number is None:
            self.first_word = self.first_word or (place, text)
            self.commas += bool(_DECIMAL_COMMA.fullmatch(text))
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

    def note_missing(self, place: int, count: int = 1) -> None:
        """Count missing values; `refuse_missing` refuses those of all columns in one sentence."""
        self.missing += count
        self.first_missing = place if self.first_missing is None else self.first_missing

    def add_numbers(self, values: Array) -> None:
        """Take the whole column, which is given as numbers or truth values; NaN: missing."""
        values = values.astype(np.float64, copy=False)
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            self.note_missing(int(missing[0]), len(missing))
        for place in np.flatnonzero(np.isinf(values))[:1].tolist():
            self.add(str(values[place]), place)  # raises
        self.given = values

    def finish(self) -> Feature:
        """Return the column as a feature, or raise `UserError` if it is neither kind."""
        if self.given is not None:
            return Feature(self.name, self.given)
        if self.first_word is None:
            return Feature(self.name, np.array(self.numbers))
        place, text = self.first_word
        if self.commas and self.commas + self.count == len(self.numbers):
            raise UserError(
                f"{self.where}, {self.row} {place}: the column {self.name} holds {text}, a number "
                "with a decimal comma; write numbers with a decimal point."
            )
        if 2 * self.count >= len(self.numbers):
            self.refuse_number()
        if len(self.words) > MOST_WORDS or 2 * len(self.words) > len(self.numbers):
            many = "more than 64" if len(self.words) > MOST_WORDS else str(len(self.words))
            raise UserError(
                f"{self.where}: the column {self.name} holds {many} different words in "
                f"{len(self.numbers)} {self.row}s, such as {printable(text, 100)!r} in {self.row} "
                f"{place}, too many for a feature each. Leave it out with "
                f"{name_option('drop_columns', self.name)}; if it is the text to classify, call it "
                f"text; if it names the clients, use {name_option('clients_by', self.name)}."
            )
        return Feature(self.name, np.array(self.codes), tuple(self.words))

    def refuse_number(self) -> NoReturn:
        """Refuse the first value that is not a number."""
        place, text = self.first_word or (0, "")
        raise UserError(
            f"{self.where}, {self.row} {place}: {printable(text, 100)!r} in the column "
            f"{self.name} is not a number."
        )


def is_missing(text: str) -> bool:
    """Tell whether a value says that there is none."""
    return text.lower() in _MISSING


def to_words(values: list[Any], where: str) -> list[str]:
    """Return names and numbers as text, one object for each."""
    known: dict[Any, str] = {}
    for row, value in enumerate(values):
        is_word = isinstance(value, str | int | float) and value == value and value != ""
        if not is_word:
            raise UserError(f"{where}: row {row} holds {value!r}; it must be a number or a name.")
        if (type(value), value) not in known:
            known[type(value), value] = str(value).strip()
    return [known[type(value), value] for value in values]


def refuse_missing(columns: Sequence[ColumnReader]) -> None:
    """Refuse columns with missing values, all of them in one sentence."""
    lacking = [column for column in columns if column.missing]
    if not lacking:
        return
    total = sum(column.missing for column in lacking)
    listed = list_names([f"{column.name} {column.missing:,}" for column in lacking])
    first = min(lacking, key=lambda column: (column.first_missing, columns.index(column)))
    values, row = "value" if total == 1 else "values", first.row
    advice = f"Drop the {row}s or fill the values first"
    if first.may_be_dropped:
        advice += f", or leave columns out with {name_option('drop_columns')}"
    raise UserError(
        f"{first.where}: {total:,} missing {values}: {listed}; the first in {row} "
        f"{first.first_missing}, column {first.name}. {advice}."
    )


def refuse_word(where: str, word: str, column: str, known: Sequence[str]) -> NoReturn:
    """Refuse a word of a column that a run has without it."""
    raise UserError(
        f"{where}: the word {printable(word, 100)!r} of the column {column} was not there in "
        f"training; it had {list_names(sorted(known))}."
    )


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
    notes = [f"The features are the columns {list_names([f.name for f in features])}."]
    for feature in features:
        if not feature.words:
            with np.errstate(over="ignore"):  # `Dataset` refuses what float32 cannot hold
                x[:, len(names)] = feature.values
            names.append(printable(feature.name, 100))
            if _is_numbering(feature.values):
                notes.append(
                    f"The column {feature.name} looks like a row number; "
                    f"{name_option('drop_columns', feature.name)} leaves it out."
                )
            continue
        ordered = sorted(feature.words)
        for word in ordered:
            x[:, len(names)] = feature.values == feature.words.index(word)
            names.append(name_word(feature.name, word))
        notes.append(
            f"The column {feature.name} holds words, each of which becomes a feature of zeros and "
            f"ones: {list_names(ordered)}."
        )
    return x, tuple(names), tuple(notes)


def name_word(column: str, word: str) -> str:
    """Return the name of the feature that is 1 for a word of a column."""
    return printable(f"{column}={word}", 100)


def _is_numbering(values: Array) -> bool:
    """Tell whether a column merely numbers the rows."""
    if len(values) < _FEW_ROWS or values.max() - values.min() != len(values) - 1:
        return False
    return bool((np.diff(np.sort(values)) == 1).all())


def list_names(names: Sequence[str]) -> str:
    """Return names as text: so many that a table can be checked by them."""
    shown = ", ".join(printable(name, 50) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def may_be_numbers(class_names: Sequence[str]) -> bool:
    """Tell whether there are many classes, all called by whole numbers."""
    are_whole = all(name.removeprefix("-").isdigit() for name in class_names)
    return len(class_names) > _FEW_CLASSES and are_whole


def describe_classes(column: str, class_names: Sequence[str]) -> tuple[str, ...]:
    """Say that many whole numbers are read as classes, which may not be meant."""
    if not may_be_numbers(class_names):
        return ()
    note = (
        f"The label {printable(column, 100)} holds {len(class_names):,} whole numbers, which are "
        f"read as classes; {name_option('loss', 'mse')}, mae or huber predicts them as numbers, "
        "and cross_entropy says that they are classes."
    )
    return (Caution(note),)


def encode_targets(
    values: Sequence[str], where: str, *, is_regression: bool = False, are_of_texts: bool = False
) -> tuple[Array, tuple[str, ...]]:
    """Return labels and their names; numbers that are not all whole are targets to predict.

    With `is_regression`, whole numbers are, too. Classes of texts are called as they are written:
    `01` and `True` are not 1.
    """
    texts = set(values)
    numbers = {text: parse_number(text) for text in texts}
    words = [text for text in texts if numbers[text] is None]
    if words and all(_DECIMAL_COMMA.fullmatch(word) for word in words):
        raise UserError(
            f"{where} holds {min(words)}, a number with a decimal comma; write numbers with a "
            "decimal point."
        )
    if words and is_regression:
        row = next(row for row, text in enumerate(values) if numbers[text] is None)
        raise UserError(
            f"{where} holds {printable(values[row], 100)!r} for sample {row}, which is not a "
            "number; all targets must be."
        )
    if words:
        return encode_labels(list(values))
    targets = np.array([numbers[text] for text in values], dtype=np.float64)
    if not np.isfinite(targets).all():
        raise UserError(f"{where} holds targets that are not finite numbers; all must be.")
    if is_regression or (targets != np.floor(targets)).any():
        with np.errstate(over="ignore"):  # `Dataset` refuses what float32 cannot hold
            return targets.astype(np.float32), ()
    written = [str(int(number)) for number in targets.tolist()]
    return encode_labels(list(values) if are_of_texts else written)
