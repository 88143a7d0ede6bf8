"""A dataset divided among clients, each with its training, validation and test samples."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.dataset import PARTS, Dataset
from fedala.data.partition import Indices, check_seed, partitioner
from fedala.errors import UserError, first_line
from fedala.io.untrusted import read_json
from fedala.lanes.randomness import draw

_FORMAT, _VERSION = "fedala-partition", 1
NATURAL = "natural"


@dataclass(frozen=True, eq=False)
class Federation:
    """For each client, indices into the dataset, in the client's own fixed order."""

    dataset: Dataset
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    validation: tuple[Indices, ...]
    held_out: int = field(default=0, kw_only=True)
    """How many clients take no part in training: the last ones."""
    original: tuple[int, ...] = field(default=(), kw_only=True)
    """By client: its number before some were held out; empty if it is the same."""

    @property
    def known(self) -> "Federation":
        """The federation without the clients that are held out."""
        if not self.held_out:
            return self
        parts = {part: getattr(self, part)[: -self.held_out] for part in PARTS}
        return Federation(self.dataset, **parts)

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
            digest.update(
                repr(tensor.shape).encode() + np.ascontiguousarray(tensor.numpy()).data.cast("B")
            )
        return digest.hexdigest()


def federate(
    dataset: Dataset,
    partition: str | None = None,
    clients: int | None = None,
    seed: int = 1,
    validation: float = 0.0,
    split: str = "given",
) -> Federation:
    """Divide `dataset` by `natural`, `dir:β`, `pathological:c`, `iid` or a partition file (.json).

    `natural` gives each client of the data its own samples; without a `partition`, that is the way
    for data that name their clients, and `dir:0.1` for all others. If the data have parts for
    training and testing, a client's share is split as they say, unless `split` is `pooled`.
    Otherwise, it is split 75/25 at random. `validation` is the share of the training samples to
    hold out. With `clients=None`, there are 20, or as many as the data or the file have.
    """
    if not 0 <= validation < 1:
        raise UserError(
            f"The validation share must be at least 0 and less than 1, not {validation}."
        )
    check_seed(seed)
    partition = partition or default_partition(dataset)
    if partition.endswith(".json"):
        splits = _read_partition(Path(partition), dataset, clients, seed)
    else:
        shares = _divide(dataset, partition, clients, seed)
        given = dataset.split.numpy() if dataset.split is not None and split == "given" else None
        splits = [split_share(share, seed, client, given) for client, share in enumerate(shares)]
    has_validation = any(len(own["validation"]) for own in splits)
    if not has_validation:  # validation samples of a file or of the data stay as they are
        splits = [_hold_out(own, validation) for own in splits]
    parts: dict[str, Any] = {part: tuple(own[part] for own in splits) for part in PARTS}
    return Federation(dataset, **parts)


def default_partition(dataset: Dataset) -> str:
    """Return how a dataset is divided if nobody says so."""
    return "dir:0.1" if dataset.clients is None else NATURAL


def _divide(dataset: Dataset, partition: str, clients: int | None, seed: int) -> list[Indices]:
    """Return the samples of each client."""
    if partition == NATURAL:
        return _list_natural_shares(dataset, clients)
    divide = partitioner(partition)
    if dataset.kind != "classes" and partition != "iid":
        raise UserError(
            f"The partition {partition} divides samples by their class, and {dataset.name} has "
            f"{dataset.targets}: use iid, a partition file, or a Federation of your own."
        )
    labels = dataset.y.numpy() if dataset.kind == "classes" else np.zeros(len(dataset.y))
    return divide(labels, clients=20 if clients is None else clients, seed=seed)


def _list_natural_shares(dataset: Dataset, clients: int | None) -> list[Indices]:
    """Return the samples of each client that the data name, in the order of the data."""
    if dataset.clients is None:
        raise UserError(
            f"{dataset.name} does not say whose sample is whose, so it cannot be divided by its "
            "natural clients: name the column with --clients-by, or use dir:0.1, iid and the like."
        )
    count = len(dataset.client_names)
    if clients is not None and clients != count:
        raise UserError(
            f"{dataset.name} has {count} clients, but {clients} were asked for; "
            "leave the number out."
        )
    order = np.argsort(dataset.clients.numpy(), kind="stable")
    sizes = np.bincount(dataset.clients.numpy(), minlength=count)
    return np.split(order, np.cumsum(sizes)[:-1])


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
            f"A partition file must be called ….json, not {path}: --partition knows it by that."
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
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                json.dump(content, file)
                file.close()
                temporary.chmod(0o644)  # temporary files are private, a partition is not
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"The partition cannot be written to {path} ({error.strerror}).") from None


def _checksum(dataset: Dataset) -> str:
    kind = "<i8" if dataset.kind == "classes" else "<f4"
    return hashlib.sha256(dataset.y.numpy().astype(kind).tobytes()).hexdigest()


def _read_partition(
    path: Path, dataset: Dataset, clients: int | None, seed: int
) -> list[dict[str, Indices]]:
    """Read a partition file, and check that it fits the dataset and divides it without overlap."""
    rows = _read_clients(path, dataset)
    if clients is not None and clients != len(rows):
        raise UserError(
            f"{path} holds {len(rows)} clients, but {clients} were asked for; leave the number out."
        )
    splits = [
        _read_client(row, f"{path}, client {client}", len(dataset.y), seed, client)
        for client, row in enumerate(rows)
    ]
    all_parts = [part for split in splits for part in split.values()]
    indices, times = np.unique(np.concatenate(all_parts), return_counts=True)
    if (times > 1).any():
        raise UserError(
            f"{path} lists the sample {indices[times > 1][0]} twice; "
            "clients and parts must not overlap."
        )
    return splits


def _read_clients(path: Path, dataset: Dataset) -> list[Any]:
    """Read a partition file, check that it was made for this dataset, and return its clients."""
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
    return rows


def _read_client(row: Any, where: str, samples: int, seed: int, client: int) -> dict[str, Indices]:
    if isinstance(row, list):
        return split_share(_read_indices(row, where, samples), seed, client)
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
