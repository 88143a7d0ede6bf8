"""Samples that come later: their classes and columns get the numbers that they have in a run."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, stack

from fedala.data.tabular import refuse_word
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
    sample with a word that the run does not have is refused.
    """
    if not wanted or not names or tuple(names) == tuple(wanted) or x.ndim != 2:
        return x
    place = {name: i for i, name in enumerate(names)}
    words = {name.partition("=")[0] for name in names if "=" in name}
    _refuse_new_words(x, names, wanted)
    columns = []
    for name in wanted:
        if name not in place and not ("=" in name and name.partition("=")[0] in words):
            raise UserError(
                f"The data has no column {printable(name, 100)!r}; "
                f"the features of this model are {printable(', '.join(wanted), 500)}."
            )
        columns.append(x[:, place[name]] if name in place else x.new_zeros(len(x)))
    return stack(columns, 1)


def _refuse_new_words(x: Tensor, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a sample that has a word of a column which the run has without this word."""
    known: dict[str, list[str]] = {}
    for name in wanted:
        column, sign, word = name.partition("=")
        if sign:
            known.setdefault(column, []).append(word)
    for place, name in enumerate(names):
        column, _, word = name.partition("=")
        rows = x[:, place].nonzero()
        if column in known and name not in wanted and len(rows):
            refuse_word(f"The data, sample {int(rows[0])}", word, column, known[column])
