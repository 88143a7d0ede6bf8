"""Which column, or array, says what: the label, the input, whose sample it is, and its part."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedala.data.dataset import PARTS
from fedala.data.tabular import list_names
from fedala.errors import UserError, printable
from fedala.options import name_option, suggest

#: The usual names, in the order in which they are looked for.
CLIENTS = (
    "client", "clients", "client_id", "user", "users", "user_id", "subject", "subjects",
    "subject_id",
)  # fmt: skip
SPLITS = ("split", "part")
LABELS = ("label", "class", "target", "y")
TEXTS = ("text", "sentence", "content")
#: How files and columns call the parts, by their position in `PARTS`.
PART_WORDS = {
    "train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2,
    "testing": 2,
}  # fmt: skip

Array = np.ndarray[Any, Any]


class Wanted(NamedTuple):
    """The columns that the user names; None: those with the usual names."""

    clients: str | None = None
    label: str | None = None
    drop: tuple[str, ...] = ()
    """Columns that are not read."""
    is_regression: bool = False
    """Whether labels that are whole numbers are numbers to predict, and not classes."""
    features: tuple[str, ...] = ()
    """Those of a run that the table is further data for: no other columns are features."""
    is_further: bool = False
    """Whether the data are for a run that is over, so that no option says what they hold."""

    @property
    def has_names(self) -> bool:
        return any((self.clients, self.label, self.drop))


USUAL = Wanted()


class MissingColumn(UserError):
    """A column, or array, that was asked for by its name is not there."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class Roles(NamedTuple):
    """Which column says what; None if there is no such column."""

    label: str | None
    input: str | None
    """The image or the text. Without it, `features` are the input."""
    clients: str | None
    split: str | None
    features: tuple[str, ...]
    """All other columns."""

    def used(self) -> list[str]:
        """Return the columns that are read."""
        columns = (self.label, self.input, self.clients, self.split)
        features = () if self.input else self.features
        return list(dict.fromkeys([*filter(None, columns), *features]))

    def describe_unread(self) -> tuple[str, ...]:
        """Say aloud which columns beside the texts are not read: one may be the text that is meant.

        Those that `--drop-columns` names are not among them.
        """
        unread = [name for name in self.features if name != self.input and name]
        if not self.input or not unread:
            return ()
        return (
            f"The column {printable(self.input, 100)} holds the texts. Not read: "
            f"{list_names(unread)}. If one of these is the text to classify, call it text.",
        )


def find(wanted: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first of the names that is wanted; case matters only if both cases are there."""
    folded = {name.strip().lower(): name for name in reversed(names)}
    for name in wanted:
        if name in names or name.lower() in folded:
            return name if name in names else folded[name.lower()]
    return None


def assign_roles(
    names: Sequence[str],
    wanted: Wanted,
    where: str,
    inputs: Sequence[str] = ("text",),
    labels: Sequence[str] = LABELS,
) -> Roles:
    """Tell which column of a table says what."""
    names = drop_columns(names, wanted, where)
    features = find_columns(wanted.features, names, where)
    free = [name for name in names if name not in features]
    label = _find_named(wanted.label, labels, free, where, "label_column")
    free = [name for name in free if name != label]
    if label and wanted.clients and find([wanted.clients], [label]) and wanted.clients not in free:
        raise UserError(f"{where}: the column {label} cannot be both the label and the clients.")
    clients = _find_named(wanted.clients, CLIENTS, free, where, "clients_by")
    free = [name for name in free if name != clients]
    split = find(SPLITS, free)
    free = [name for name in free if name != split]
    if features:
        return Roles(label, None, clients, split, tuple(features))
    return Roles(label, find(inputs, free), clients, split, tuple(free))


def find_text(names: Sequence[str], where: str) -> str:
    """Return the column of the texts."""
    text = find(TEXTS, names)
    if text is None:
        listed = printable(", ".join(names), 200) or "none"
        raise UserError(f"{where} has no column text: its columns are {listed}.")
    return text


def find_columns(features: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Return the columns that a run has made its features of: `colour=red` is of colour."""
    columns = dict.fromkeys(_column_of(feature, names) for feature in features)
    missing = [name for name in columns if name not in names]
    if missing:
        column = printable(missing[0].partition("=")[0], 100)
        raise UserError(
            f"{where} has no column {column}: its columns are "
            f"{printable(', '.join(names), 200) or 'none'}."
        )
    return list(columns)


def _column_of(feature: str, names: Sequence[str]) -> str:
    column = feature.partition("=")[0]
    return feature if feature in names or column not in names else column


def drop_columns(names: Sequence[str], wanted: Wanted, where: str) -> list[str]:
    """Return the names of the columns that are read. Further data may lack the others."""
    drop = [name for name in wanted.drop if not wanted.is_further or find([name], names)]
    dropped = [_find_named(name, (), names, where, "drop_columns") for name in drop]
    for option, kept in (("label_column", wanted.label), ("clients_by", wanted.clients)):
        if kept is not None and find([kept], names) in dropped:
            both = f"{name_option('drop_columns')} and in {name_option(option)}"
            raise UserError(f"{where}: the column {kept} is in {both}.")
    return [name for name in names if name not in dropped]


def _find_named(
    wanted: str | None,
    usual: Sequence[str],
    names: Sequence[str],
    where: str,
    option: str,
) -> str | None:
    if wanted is None:
        return find(usual, names)
    found = find([wanted], names)
    if found is None:
        rest = suggest(wanted, [printable(name, 100) for name in names[:30]])
        named = f"which {name_option(option)} names{rest}"
        raise MissingColumn(f"{where} has no column {wanted}, {named}.", option)
    return found


def parse_parts(words: Sequence[str], where: str) -> Array:
    """Return the part of each sample, as a position in `PARTS`, from the words of a column."""
    numbers = {word: PART_WORDS.get(word.strip().lower()) for word in set(words)}
    for row, word in enumerate(words):
        if numbers[word] is None:
            raise UserError(
                f"{where} holds {printable(word, 100)!r} for sample {row}; such a column says "
                f"which samples are for what, in the words {', '.join(PARTS)}. If it says "
                "something else, give it another name."
            )
    return np.array([numbers[word] for word in words], dtype=np.uint8)


def describe_clients(column: str, clients: Iterable[str], what: str = "column") -> str:
    """Say aloud which column names the clients."""
    count = len(set(clients))
    noun = "client" if count == 1 else "clients"
    return f"The {what} {printable(column, 100)} names {count:,} {noun}."
