"""What a run trains on: a dataset, and who holds which of its samples for training, validation and test."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.dataset import Dataset, first_line
from fedala.data.partition import Indices, check_seed, partitioner
from fedala.errors import UserError
from fedala.io.untrusted import read_json
from fedala.lanes.randomness import draw

_FORMAT, _VERSION = "fedala-partition", 1
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Federation:
    """Per client: indices into the dataset, in the client's own fixed order."""

    dataset: Dataset
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    validation: tuple[Indices, ...]

    def counts(self, *parts: str) -> Indices:
        """Clients × classes: how many samples of each class a client holds, in all or in some of its `PARTS`."""
        labels, classes = self.dataset.y.numpy(), self.dataset.classes
        held = (getattr(self, part) for part in parts or PARTS)
        rows = [np.concatenate(own) for own in zip(*held, strict=True)]
        return np.stack([np.bincount(labels[row], minlength=classes) for row in rows])

    def digest(self) -> str:
        """Tells one federation from another: the samples, their labels, and who has which."""
        found = hashlib.sha256()
        for part in (self.train, self.test, self.validation):
            for row in part:
                found.update(
                    np.int64(len(row)).tobytes() + np.ascontiguousarray(row, np.int64).tobytes()
                )
        for tensor in (self.dataset.x, self.dataset.y):
            found.update(
                repr(tensor.shape).encode() + np.ascontiguousarray(tensor.numpy()).data.cast("B")
            )
        return found.hexdigest()


def federate(
    dataset: Dataset,
    partition: str = "dir:0.1",
    clients: int | None = 20,
    seed: int = 1,
    validation: float = 0.0,
) -> Federation:
    """Divide `dataset` by `dir:β`, `pathological:c`, `iid` or a partition file, each share 75/25 into train and test.

    `validation` is the share of the training samples to hold out. With `clients=None` a file says how many there are.
    """
    if not 0 <= validation < 1:
        raise UserError(
            f"The validation share must be at least 0 and less than 1, not {validation}."
        )
    check_seed(seed)
    if partition.endswith(".json"):
        held = _read(Path(partition), dataset, clients, seed)
    else:
        shares = partitioner(partition)(
            dataset.y.numpy(), clients=20 if clients is None else clients, seed=seed
        )
        held = [_split(share, seed, client) for client, share in enumerate(shares)]
    if not any(
        len(parts["validation"]) for parts in held
    ):  # those that a file holds stay as they are
        held = [_hold_out(parts, validation) for parts in held]
    return Federation(dataset, **{part: tuple(parts[part] for parts in held) for part in PARTS})


def _split(share: Indices, seed: int, client: int) -> dict[str, Indices]:
    """75/25 at random; the order after the draw is the client's order from now on."""
    shuffled = share[draw(seed, "split", client=client).permutation(len(share))]
    cut = int(0.75 * len(share))
    return {"train": shuffled[:cut], "validation": shuffled[:0], "test": shuffled[cut:]}


def _hold_out(parts: dict[str, Indices], validation: float) -> dict[str, Indices]:
    """The end of the training part becomes the validation part."""
    train = parts["train"]
    cut = len(train) - int(validation * len(train))
    return {**parts, "train": train[:cut], "validation": train[cut:]}


def write_partition(federation: Federation, path: Path | str) -> None:
    """Write who holds what, for `federate(partition="….json")` to read; the file appears whole or not at all."""
    path, dataset = Path(path), federation.dataset
    if path.suffix != ".json":
        raise UserError(
            f"A partition file must be called ….json, not {path}, or it will not be known as one."
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
    return hashlib.sha256(dataset.y.numpy().astype("<i8").tobytes()).hexdigest()


def _read(path: Path, dataset: Dataset, clients: int | None, seed: int) -> list[dict[str, Indices]]:
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
            f"{path} is of version {content.get('version')!r}; this program reads version {_VERSION}."
        )
    samples = len(dataset.y)
    if content.get("samples") != samples or content.get("labels", _checksum(dataset)) != _checksum(
        dataset
    ):
        raise UserError(
            f"{path} was made for {content.get('dataset')} with {content.get('samples')} samples, whose labels are not "
            f"those of {dataset.name} with {samples}; a partition fits one dataset only."
        )
    rows = content.get("clients")
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} names no clients; its list clients needs at least one.")
    if clients is not None and clients != len(rows):
        raise UserError(
            f"{path} holds {len(rows)} clients, but {clients} were asked for; leave the number out."
        )
    held = [
        _client(row, f"{path}, client {client}", samples, seed, client)
        for client, row in enumerate(rows)
    ]
    indices, times = np.unique(
        np.concatenate([part for parts in held for part in parts.values()]), return_counts=True
    )
    if (times > 1).any():
        raise UserError(
            f"{path} gives the sample {indices[times > 1][0]} away twice; clients and parts must not overlap."
        )
    return held


def _client(row: Any, where: str, samples: int, seed: int, client: int) -> dict[str, Indices]:
    if isinstance(row, list):
        return _split(_indices(row, where, samples), seed, client)
    if not isinstance(row, dict) or not {"train", "test"} <= set(row) <= set(PARTS):
        raise UserError(
            f"{where} must be a list of samples, or have train, test and perhaps validation."
        )
    return {part: _indices(row.get(part, []), f"{where}, {part}", samples) for part in PARTS}


def _indices(values: Any, where: str, samples: int) -> Indices:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < samples for value in values
    ):
        raise UserError(
            f"{where} must list whole numbers from 0 to {samples - 1}, the samples of the dataset."
        )
    return np.array(values, dtype=np.int64)
