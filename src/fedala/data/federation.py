"""A dataset divided among clients, each with its training, validation and test samples."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.dataset import PARTS, Dataset
from fedala.data.natural import (
    describe_given,
    describe_untested,
    explain_default,
    list_natural_clients,
)
from fedala.data.partition import Indices, check_seed, needs_classes, partitioner
from fedala.errors import UserError, first_line, printable
from fedala.io.files import write_output
from fedala.io.untrusted import read_json
from fedala.lanes.randomness import draw
from fedala.options import name_option

_FORMAT, _VERSION = "fedala-partition", 1
NATURAL = "natural"


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """For each client, indices into the dataset, in the client's own fixed order.

    Its constructor checks that all parts have as many clients, and that their indices are samples
    of the dataset. `check` also refuses overlaps, and clients without training samples.
    """

    dataset: Dataset
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    validation: tuple[Indices, ...]
    client_names: tuple[str, ...] = ()
    """By client, if the data or the partition file name them."""
    notes: tuple[str, ...] = ()
    """Sentences: what was found in the data, and how they were divided."""
    held_out: int = field(default=0, kw_only=True)
    """How many clients take no part in training: the last ones."""
    original: tuple[int, ...] = field(default=(), kw_only=True)
    """By client: its number before some were held out; empty if it is the same."""

    def __post_init__(self) -> None:
        for part in PARTS:
            rows = getattr(self, part)
            if not (isinstance(rows, tuple) and all(map(_is_index_array, rows))):
                object.__setattr__(self, part, _convert_indices(rows, part))
        lengths = {part: len(getattr(self, part)) for part in PARTS}
        if len(set(lengths.values())) > 1 or not self.train:
            told = ", ".join(f"{part} {length}" for part, length in lengths.items())
            raise UserError(
                "A Federation needs one array of indices for each client in each of its parts, and "
                f"at least one client; it has {told}. An array may be empty."
            )
        samples = len(self.dataset.y)
        for part in PARTS:
            # All clients at once: there may be very many.
            indices = np.concatenate(getattr(self, part))
            if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
                raise UserError(
                    f"The {part} part of a Federation must hold indices from 0 to {samples - 1}, "
                    f"the samples of {self.dataset.name}; it has {indices.min()} to "
                    f"{indices.max()}."
                )

    def check(self) -> None:
        """Refuse a sample in two places, and clients without training samples."""
        everything = np.concatenate([row for part in PARTS for row in getattr(self, part)])
        times = np.bincount(everything, minlength=len(self.dataset.y))
        if times.max() > 1:
            sample = int(times.argmax())
            places = [
                f"{part} part of client {client}"
                for part in PARTS
                for client, rows in enumerate(getattr(self, part))
                for _ in range(int((rows == sample).sum()))
            ]
            raise UserError(
                f"The sample {sample} is in the {places[0]} and again in the {places[1]}: "
                "clients and parts must not overlap, or a model is tested on what it has seen."
            )
        empty = next((client for client, rows in enumerate(self.train) if len(rows) == 0), None)
        if empty is not None:
            raise UserError(
                f"Client {empty} of the Federation has no training samples; leave it out, or give "
                "it some."
            )

    def __repr__(self) -> str:
        return f"<Federation {self.describe()}, {len(self.train):,} clients>"

    def describe(self) -> str:
        """Return its data in one line, with the number of samples that clients have."""
        return self.dataset.describe(int(self.sizes().sum()))

    @property
    def known(self) -> "Federation":
        """The federation without the clients that are held out."""
        if not self.held_out:
            return self
        names = ("client_names", *PARTS)
        kept: dict[str, Any] = {name: getattr(self, name)[: -self.held_out] for name in names}
        return Federation(self.dataset, **kept, notes=self.notes)

    def counts(self, *parts: str) -> Indices:
        """Count the samples of each class that a client holds, in all `PARTS` or in some of them.

        Returns an array of clients × classes, or × labels. If the targets are numbers, there is one
        column for all samples.
        """
        data, targets = self.dataset, self.dataset.y.numpy()
        by_part = (getattr(self, part) for part in parts or PARTS)
        rows = [np.concatenate(own) for own in zip(*by_part, strict=True)]
        if data.kind == "numbers":
            return np.array([[len(row)] for row in rows])
        if data.kind == "labels":
            return np.stack([targets[row].sum(0, dtype=np.int64) for row in rows])
        return np.stack([np.bincount(targets[row], minlength=data.classes) for row in rows])

    def sizes(self) -> Indices:
        """Count the samples that each client holds."""
        parts = zip(self.train, self.validation, self.test, strict=True)
        return np.array([sum(map(len, own)) for own in parts])

    @property
    def count_names(self) -> tuple[str, ...]:
        """The names of the columns of `counts`."""
        if self.dataset.kind == "numbers":
            return ("all samples",)
        return self.dataset.class_names or tuple(map(str, range(self.dataset.classes)))

    def digest(self) -> str:
        """Return a digest of the samples, their labels, and which client has which."""
        digest = hashlib.sha256()
        for part in (self.train, self.test, self.validation):
            for row in part:
                digest.update(
                    np.int64(len(row)).tobytes() + np.ascontiguousarray(row, np.int64).tobytes()
                )
        for tensor in (self.dataset.x, self.dataset.y):
            digest.update(repr(tensor.shape).encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data.cast("B"))
        return digest.hexdigest()


def _is_index_array(rows: Any) -> bool:
    return isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype == np.int64


def _convert_indices(rows: Any, part: str) -> tuple[Indices, ...]:
    """Return the indices of each client as int64, if that loses nothing."""
    if not isinstance(rows, tuple | list):
        raise UserError(
            f"The {part} part of a Federation must be a tuple with one array of indices for each "
            f"client, not {type(rows).__name__}."
        )
    converted = []
    for client, own in enumerate(rows):
        try:
            values = np.asarray(own)
        except (ValueError, TypeError, RuntimeError):
            values = np.empty((0, 0))
        if values.shape == (0,):
            values = values.astype(np.int64)  # an empty list has no type of its own
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise UserError(
                f"The {part} part of client {client} must be a list of indices, whole numbers, "
                f"not {values.dtype} of shape {values.shape}."
            )
        converted.append(values.astype(np.int64))
    return tuple(converted)


def federate(
    dataset: Dataset,
    partition: str | None = None,
    clients: int | None = None,
    seed: int = 1,
    validation: float = 0.0,
    split: str = "given",
) -> Federation:
    """Divide `dataset` by `natural`, `dir:β`, `iid` and the like, or a partition file (.json).

    `natural` gives each client of the data its own samples; without a `partition`, that is the way
    for data that name their clients, and `dir:0.1` for all others. If the data have parts for
    training and testing, a client's share is split as they say, unless `split` is `pooled`.
    Otherwise, it is split 75/25 at random. `validation` is the share of the training samples to
    hold out. With `clients=None`, there are 20, or as many as the data or the file have; of natural
    clients, fewer can be drawn. `notes` of the result say what was decided.
    """
    if not 0 <= validation < 1:
        raise UserError(
            f"The validation share must be at least 0 and less than 1, not {validation}."
        )
    check_seed(seed)
    asked, partition = partition, partition or default_partition(dataset)
    given = dataset.split.numpy() if dataset.split is not None and split == "given" else None
    names: tuple[str, ...] = ()
    notes = [*dataset.notes]
    if partition.endswith(".json"):
        splits, names = _read_partition(Path(partition), dataset, clients, seed, given)
    elif partition == NATURAL:
        natural = list_natural_clients(dataset, clients, seed, given)
        names = tuple(dataset.client_names[number] for number in natural.numbers)
        notes += natural.notes
        owners = zip(natural.numbers, natural.shares, strict=True)
        splits = [split_share(share, seed, number, given) for number, share in owners]
    else:
        with explain_default(dataset, asked):
            shares = _divide(dataset, partition, clients, seed)
        if dataset.clients is not None:
            notes.append(f"{partition} divides the samples in another way, not by their clients.")
        splits = [split_share(share, seed, client, given) for client, share in enumerate(shares)]
    if given is not None and not partition.endswith(".json"):
        notes.append(describe_given(splits))
        _check_training(splits, partition)
    if not any(len(own["validation"]) for own in splits):
        splits = [_hold_out(own, validation) for own in splits]
    elif validation:
        source = partition if partition.endswith(".json") else dataset.name
        ignored = name_option("validation", validation)
        notes.append(f"{source} has validation samples, so {ignored} is ignored.")
    parts: dict[str, Any] = {part: tuple(own[part] for own in splits) for part in PARTS}
    if given is not None or partition == NATURAL:
        notes += describe_untested(parts["test"], names)
    return Federation(dataset, **parts, client_names=names, notes=tuple(notes))


def _check_training(splits: list[dict[str, Indices]], partition: str) -> None:
    for client, own in enumerate(splits):
        if not len(own["train"]):
            raise UserError(
                f"With the partition {partition}, client {client} gets no sample that the data put "
                f"into the training part: use fewer clients, or {name_option('split', 'pooled')}."
            )


def default_partition(dataset: Dataset) -> str:
    """Return how a dataset is divided if nobody says so."""
    return "dir:0.1" if dataset.clients is None else NATURAL


def _divide(dataset: Dataset, partition: str, clients: int | None, seed: int) -> list[Indices]:
    """Return the samples of each client."""
    divide = partitioner(partition)
    if dataset.kind != "classes" and needs_classes(partition):
        raise UserError(
            f"The partition {partition} divides samples by their class, and {dataset.name} has "
            f"{dataset.targets}: use iid, quantity:0.5, a partition file, or a Federation of your "
            "own."
        )
    labels = dataset.y.numpy() if dataset.kind == "classes" else np.zeros(len(dataset.y))
    return divide(labels, clients=20 if clients is None else clients, seed=seed)


def split_share(
    share: Indices, seed: int, client: int, given: Indices | None = None
) -> dict[str, Indices]:
    """Split a share as `given`, or 75/25; the order of the draw is the client's order from now on.

    `given` is the part of every sample of the dataset.
    """
    shuffled = share[draw(seed, "split", client=client).permutation(len(share))]
    if given is not None:
        return {part: shuffled[given[shuffled] == i] for i, part in enumerate(PARTS)}
    cut = int(0.75 * len(share))
    return {"train": shuffled[:cut], "validation": shuffled[:0], "test": shuffled[cut:]}


def _hold_out(parts: dict[str, Indices], validation: float) -> dict[str, Indices]:
    """Move the end of the training part to the validation part."""
    train = parts["train"]
    cut = len(train) - int(validation * len(train))
    return {**parts, "train": train[:cut], "validation": train[cut:]}


def write_partition(federation: Federation, path: Path | str) -> None:
    """Write a partition file for `federate(partition="….json")`; it is complete or absent."""
    path, dataset = Path(path), federation.dataset
    if path.suffix != ".json":
        raise UserError(
            f"A partition file must be called ….json, not {path}: {name_option('partition')} "
            "knows it by that."
        )
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "dataset": dataset.name,
        "samples": len(dataset.y),
        "labels": _checksum(dataset),
        "clients": [
            {part: getattr(federation, part)[client].tolist() for part in PARTS}
            for client in range(len(federation.train))
        ],
    }
    if federation.client_names:
        content["names"] = list(federation.client_names)
    write_output(path, json.dumps(content).encode())


def _checksum(dataset: Dataset) -> str:
    kind = "<i8" if dataset.kind == "classes" else "<f4"
    return hashlib.sha256(dataset.y.numpy().astype(kind).tobytes()).hexdigest()


def _read_partition(
    path: Path, dataset: Dataset, clients: int | None, seed: int, given: Indices | None
) -> tuple[list[dict[str, Indices]], tuple[str, ...]]:
    """Read a partition file, and check that it fits the dataset and divides it without overlap.

    Lists of samples are split as `given`. Returns each client's parts, and names if there are any.
    """
    rows, names = _read_clients(path, dataset)
    if clients is not None and clients != len(rows):
        raise UserError(
            f"{path} holds {len(rows)} clients, but {clients} were asked for; leave the number out."
        )
    splits = [
        _read_client(row, f"{path}, client {client}", len(dataset.y), (seed, client, given))
        for client, row in enumerate(rows)
    ]
    all_parts = [part for split in splits for part in split.values()]
    indices, times = np.unique(np.concatenate(all_parts), return_counts=True)
    if (times > 1).any():
        raise UserError(
            f"{path} lists the sample {indices[times > 1][0]} twice; "
            "clients and parts must not overlap."
        )
    return splits, names


def _read_clients(path: Path, dataset: Dataset) -> tuple[list[Any], tuple[str, ...]]:
    """Read a partition file, check that it was made for this dataset, and return its clients.

    Also returns their names, which a file need not have.
    """
    try:
        content = read_json(path, 2**24 + 100 * len(dataset.y))
    except FileNotFoundError:
        raise UserError(f"There is no partition file {path}.") from None
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} is not a readable partition file ({first_line(error)}).") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError(f'{path} is not a partition file: it does not say "format": "{_FORMAT}".')
    if content.get("version") != _VERSION:
        raise UserError(
            f"{path} is of version {content.get('version')!r}; "
            f"this program reads version {_VERSION}."
        )
    samples, checksum = len(dataset.y), _checksum(dataset)
    if content.get("samples") != samples or content.get("labels", checksum) != checksum:
        raise UserError(
            f"{path} was made for {content.get('dataset')} with {content.get('samples')} samples, "
            f"whose labels differ from those of {dataset.name} with {samples}; "
            "a partition fits one dataset only."
        )
    rows = content.get("clients")
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} names no clients; its list clients needs at least one.")
    names = content.get("names", [])
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) not in (0, len(rows)):
        raise UserError(f"{path}: names must list a name for each of its {len(rows)} clients.")
    return rows, tuple(printable(name, 100) for name in names)


def _read_client(row: Any, where: str, samples: int, how: tuple[Any, ...]) -> dict[str, Indices]:
    if isinstance(row, list):
        return split_share(_read_indices(row, where, samples), *how)
    if not isinstance(row, dict) or not {"train", "test"} <= set(row) <= set(PARTS):
        raise UserError(
            f"{where} must be a list of samples, or have train, test and optionally validation."
        )
    return {part: _read_indices(row.get(part, []), f"{where}, {part}", samples) for part in PARTS}


def _read_indices(values: Any, where: str, samples: int) -> Indices:
    is_list = isinstance(values, list)
    if not is_list or not all(type(value) is int and 0 <= value < samples for value in values):
        raise UserError(
            f"{where} must list whole numbers from 0 to {samples - 1}, the samples of the dataset."
        )
    return np.array(values, dtype=np.int64)
