"""The clients that the data name: who has samples to train with, and who is drawn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from fedala.data.dataset import PARTS, Dataset
from fedala.data.partition import Indices
from fedala.errors import UserError, printable
from fedala.lanes.randomness import draw
from fedala.options import name_option

#: The most clients that a sentence names.
_MOST_CLIENTS = 10


class NaturalClients(NamedTuple):
    """Some of the clients of a dataset, by their numbers there."""

    numbers: tuple[int, ...]
    shares: tuple[Indices, ...]
    notes: tuple[str, ...]
    """Sentences about clients that are not among them."""


def list_natural_clients(
    dataset: Dataset, clients: int | None, seed: int, given: Indices | None
) -> NaturalClients:
    """Return the samples of each client that the data name, in the order of the data.

    A client needs two samples, and one to train with if parts are `given`; others are left out.
    With fewer `clients` than there are, so many are drawn by `seed`.
    """
    if dataset.clients is None:
        raise UserError(
            f"{dataset.name} does not say whose sample is whose, so it cannot be divided by its "
            f"natural clients: name the column with {name_option('clients_by')}, or use dir:0.1, "
            "iid and the like."
        )
    count = len(dataset.client_names)
    order = np.argsort(dataset.clients.numpy(), kind="stable")
    sizes = np.bincount(dataset.clients.numpy(), minlength=count)
    shares = np.split(order, np.cumsum(sizes)[:-1])
    usable = [
        number
        for number, share in enumerate(shares)
        if len(share) > 1 and (given is None or bool((given[share] == 0).any()))
    ]
    notes = []
    if len(usable) < count:
        left = [name for i, name in enumerate(dataset.client_names) if i not in set(usable)]
        notes.append(
            f"{_as_subject(left)} left out, because a client needs at least two samples, one of "
            "them to train with."
        )
    if not usable:
        raise UserError(
            f"{dataset.name}: no client has two samples, one of them to train with; "
            f"is {name_option('clients_by')} right?"
        )
    if clients is not None and clients > len(usable):
        rest = "" if len(usable) == count else f", {len(usable)} of them with samples to train with"
        raise UserError(
            f"{dataset.name} has {count} clients{rest}, but {clients} were asked for; "
            "ask for fewer, or leave the number out."
        )
    if clients is not None and clients < len(usable):
        notes.append(
            f"{clients} of the {len(usable)} clients are drawn, by the seed of the partition."
        )
        drawn = draw(seed, "natural clients").permutation(len(usable))[:clients]
        usable = [usable[place] for place in sorted(drawn.tolist())]
    return NaturalClients(tuple(usable), tuple(shares[number] for number in usable), tuple(notes))


@contextmanager
def explain_default(dataset: Dataset, partition: str | None) -> Iterator[None]:
    """If a dataset cannot be divided in a way that nobody asked for, also say how to name clients.

    `partition` is what the user asked for.
    """
    try:
        yield
    except UserError as error:
        if partition is not None:
            raise
        columns = _list_candidates(dataset)
        advice = "If a column (array, or level of folders) says whose sample it is"
        if columns:
            advice = f"If one of the columns {', '.join(columns)} says whose sample it is"
        raise UserError(
            f"{error} {dataset.name} names no clients, so that it is divided at random. {advice}, "
            f"{name_option('clients_by', columns[0] if len(columns) == 1 else 'NAME')} makes each "
            "of its values a client."
        ) from None


def _list_candidates(dataset: Dataset, most: int = 5) -> list[str]:
    """Return columns of a table with values that repeat: of words, then of whole numbers."""
    names, rows = dataset.feature_names, len(dataset.y)
    if len(names) != dataset.x[0].numel():
        return []
    words = dict.fromkeys(name.partition("=")[0] for name in names if "=" in name)
    numbers = []
    for place, name in enumerate(names):
        values = dataset.x[:, place]
        if "=" not in name and bool((values == values.round()).all()):
            count = len(np.unique(values.numpy()))
            numbers += [name] * (3 <= count <= rows // 2)
    return [*words, *numbers][:most]


def describe_given(splits: Sequence[Mapping[str, Indices]]) -> str:
    """Say how many samples the parts of the data have."""
    counts = {part: sum(len(own[part]) for own in splits) for part in PARTS}
    listed = ", ".join(f"{count:,} {part}" for part, count in counts.items() if count)
    return f"The split of the data is kept: {listed}; {name_option('split', 'pooled')} mixes them."


def describe_untested(tests: Sequence[Indices], names: Sequence[str]) -> list[str]:
    """Say which clients have no test samples, if some have."""
    untested = [
        names[number] if names else str(number)
        for number, rows in enumerate(tests)
        if not len(rows)
    ]
    if not untested:
        return []
    return [f"{_as_subject(untested)} without test samples, so that they do not count in scores."]


def _as_subject(names: Sequence[str]) -> str:
    """Return clients as the subject of a sentence, with its verb."""
    shown = list_clients(names)
    return f"Client {shown} is" if len(names) == 1 else f"{len(names):,} clients ({shown}) are"


def list_clients(names: Sequence[str]) -> str:
    """Return the names of clients, the first ten of many; a name may have commas of its own."""
    shown = [printable(name, 40) for name in names[:_MOST_CLIENTS]]
    separator = "; " if any("," in name for name in shown) else ", "
    return separator.join([*shown, *["…"] * (len(names) > _MOST_CLIENTS)])
