"""Samples that come later: their classes and columns get the numbers that they have in a run."""

import re
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
from torch import Tensor, stack

from fedala.data.tabular import parse_number, refuse_word
from fedala.errors import UserError, printable, spreadsheet_safe


def match_classes(
    y: "np.ndarray[Any, Any]", names: Sequence[str], known: Sequence[str], where: str
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return labels as numbers of `known` classes, by the names of their own if they have any."""
    used = np.unique(y).tolist()
    number = {spreadsheet_safe(printable(label, 100)): k for k, label in enumerate(known)}
    numbers = {label: label for label in used}
    if len(names):
        titles = {label: spreadsheet_safe(printable(str(names[label]), 100)) for label in used}
        numbers = {
            # A label that is a number may have been read as 3.0.
            label: number.get(title, number.get(title.removesuffix(".0"), -1))
            for label, title in titles.items()
        }
    for label, k in numbers.items():
        if not 0 <= k < len(known):
            title = printable(str(names[label]), 100) if len(names) else f"number {label}"
            raise UserError(
                f"{where} holds the class {title}, which the run does not have; its classes are "
                f"{printable(', '.join(known[:20]), 500)}{', …' if len(known) > 20 else ''}."
            )
    table = np.zeros(max(used, default=0) + 1, dtype=np.int64)
    table[list(numbers)] = list(numbers.values())
    return np.asarray(table[y], dtype=np.int64)


def name_numbers(
    y: "np.ndarray[Any, Any]", names: Sequence[str], known: Sequence[str]
) -> "tuple[np.ndarray[Any, Any], Sequence[str]]":
    """Return labels and their names: whole numbers are names if classes are called 3, 5 and 7."""
    are_numbers = all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in known)
    if len(names) or not are_numbers or list(known) == [*map(str, range(len(known)))]:
        return y, names
    found, positions = np.unique(y, return_inverse=True)
    return positions, tuple(map(str, found.tolist()))


def order_features(x: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Return the columns of a table in the order that they have in a run.

    A column `colour=red` is 0 for data that have the column colour, and never the word red. A
    sample with a word that the run does not have is refused. A column of words that happen to be
    numbers may have been read as numbers.
    """
    if not wanted or not names or tuple(names) == tuple(wanted) or x.ndim != 2:
        return x
    values = dict(zip(names, x.T, strict=True))
    with_words = {name.partition("=")[0] for name in names if "=" in name}
    _refuse_new_words(values, wanted)
    columns = []
    for name in wanted:
        column, sign, word = name.partition("=")
        if name in values:
            columns.append(values[name])
        elif sign and column in values:
            columns.append(_is_word(values[column], word).to(x.dtype))
        elif sign and column in with_words:
            columns.append(x.new_zeros(len(x)))
        else:
            raise UserError(
                f"The data has no column {printable(name, 100)!r}; "
                f"the features of this model are {printable(', '.join(wanted), 500)}."
            )
    return stack(columns, 1)


def _is_word(values: Tensor, word: str) -> Tensor:
    """Tell which numbers a word stands for, if it stands for a number."""
    number = parse_number(word)
    return values == (nan if number is None else number)


def _refuse_new_words(values: Mapping[str, Tensor], wanted: Sequence[str]) -> None:
    """Refuse a sample that has a word of a column which the run has without this word."""
    known: dict[str, list[str]] = {}
    for name in wanted:
        column, sign, word = name.partition("=")
        if sign:
            known.setdefault(column, []).append(word)
    for name in values.keys() - set(wanted):
        column, sign, word = name.partition("=")
        if column not in known:
            continue
        is_new = values[name] != 0
        if not sign:
            is_new = ~stack([_is_word(values[name], word) for word in known[column]]).any(0)
        if is_new.any():
            row = int(is_new.nonzero()[0])
            shown = word if sign else f"{float(values[name][row]):g}"
            refuse_word(f"The data, sample {row}", shown, column, known[column])
