"""Record what a run has written, so that damage to its folder is noticed.

`digests.json` holds the digest of each file that a run writes as a whole, of each method's rows in
each table, and of each saved model. Tables grow line by line and the record is written at
checkpoints, so it covers the first rows of a table; the rest is newer than the record. A crash
between two writes must not look like damage. That is why a file has the digests of its last two
versions, and why the record is shortened before a table is.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedala.io import files
from fedala.io.files import sha256
from fedala.io.untrusted import read_file
from fedala.runs.config import MOST_SEEDS
from fedala.runs.config_values import flatten_settings

NAME = "digests.json"
LARGEST = 2**28  # bytes: a million saved models


class RowHash:
    """Hash rows of a table one by one. Empty cells do not count: another method may add columns."""

    def __init__(self) -> None:
        self.count, self._hash = 0, hashlib.sha256()

    def add(self, row: Mapping[str, str]) -> None:
        cells = sorted((name, text) for name, text in row.items() if text)
        self._hash.update(json.dumps(cells).encode() + b"\n")
        self.count += 1

    @property
    def value(self) -> tuple[int, str]:
        return self.count, self._hash.hexdigest()


@dataclass
class BatchRecord:
    """How far one batch of seeds of a method had got when the record was written."""

    finished: bool = False
    checkpoint: int | None = None
    """The round of its newest checkpoint; None if there has never been one."""


@dataclass
class MethodRecord:
    """How far one method of a run had got when the record was written."""

    finished: bool = False
    """Whether all its batches of seeds are finished."""
    checkpoint: int | None = None
    """The round of the newest checkpoint of its first batch; None if there has never been one."""
    rows: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By table: how many of its rows the record covers, and their digest."""
    models: dict[str, str] = field(default_factory=dict)
    """By path in the run folder: the digest of each saved model."""
    batches: list[BatchRecord] = field(default_factory=list)
    """Every batch of seeds, if there are several."""

    def batch(self, number: int) -> BatchRecord:
        """Return the record of a batch of seeds; a new batch is not finished."""
        if self.batches:
            return self.batches[number] if number < len(self.batches) else BatchRecord()
        return BatchRecord(self.finished, self.checkpoint) if number == 0 else BatchRecord()


@dataclass
class Digests:
    """The content of `digests.json`."""

    written: dict[str, list[str]] = field(default_factory=dict)
    """By file: the digests of its last two versions. The file on disk is one of them."""
    methods: dict[str, MethodRecord] = field(default_factory=dict)
    identity: str = ""
    """The digest of what the run is: its options and its data."""
    versions: dict[str, str] = field(default_factory=dict)
    probe: list[float] = field(default_factory=list)
    """What the initial model computes from the first samples."""
    origin: dict[str, Any] = field(default_factory=dict)
    """`method`, `set` and `seeds` of the run as it began, if some were added: its identity.

    If its data have moved, also their first place, `dataset` and `partition`.
    """
    batches: list[int] = field(default_factory=list)
    """How many seeds each batch has, if there are several."""

    def pack(self) -> bytes:
        return files.pack_checksummed("digests", _without_empty_additions(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Digests | None":
        """Return the record of a run folder, or None. Raise `Damaged` if no run wrote it."""
        path = folder / NAME
        try:
            values = files.read_checksummed(path, "digests", LARGEST)
        except FileNotFoundError:
            return None
        with files.refuse_damage(path):
            methods = {str(name): _method(value) for name, value in values["methods"].items()}
            written = {
                str(name): [str(one) for one in both] for name, both in values["written"].items()
            }
            versions = {str(name): str(version) for name, version in values["versions"].items()}
            probe = [float(value) for value in values["probe"]]
            origin = _origin(values.get("origin", {}))
            batches = [_size(size) for size in values.get("batches", [])]
            identity = str(values["identity"])
            return cls(written, methods, identity, versions, probe, origin, batches)

    def add_version(self, path: Path, data: bytes) -> bool:
        """Record a file's next version along with the present one; tell whether the record changed.

        The present version may be older than the last one recorded: the process that recorded that
        may have been killed.
        """
        present = read_file(path, LARGEST) if path.is_file() else None
        kept = [sha256(present)] if present is not None and self.expects(path.name, present) else []
        before, new = self.written.get(path.name), sha256(data)
        self.written[path.name] = kept if kept == [new] else [*kept, new]
        return self.written[path.name] != before

    def expects(self, name: str, data: bytes) -> bool:
        """Tell whether a file's content is what the run wrote."""
        return sha256(data) in self.written.get(name, ())

    def check_rows(self, path: Path, rows: Iterable[Mapping[str, str]]) -> int:
        """Compare a table's rows with the record; return how many are newer than the record."""
        hashes: dict[str, RowHash] = {}
        newer = 0
        for row in rows:
            method = row["method"]
            record = self.methods.get(method, MethodRecord())
            expected, value = record.rows.get(path.name, (0, RowHash().value[1]))
            seen = hashes.setdefault(method, RowHash())
            if seen.count < expected:
                seen.add(row)
                if seen.count == expected and seen.value[1] != value:
                    raise files.DamagedFile(
                        f"{path} is damaged: its rows of {method} are not those that the run wrote."
                    )
            elif record.finished:
                raise files.DamagedFile(
                    f"{path} is damaged: it has more rows of {method} than the run wrote."
                )
            else:
                newer += 1
        for method, record in self.methods.items():
            expected, _ = record.rows.get(path.name, (0, ""))
            found = hashes[method].count if method in hashes else 0
            if found < expected:
                raise files.DamagedFile(
                    f"{path} is damaged: it has {found} of the {expected} rows of {method} "
                    "that the run wrote."
                )
        return newer


def _without_empty_additions(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a run to which nothing was added does not have."""
    for method in values["methods"].values():
        if not method["batches"]:
            del method["batches"]
    return {
        name: value for name, value in values.items() if value or name not in ("origin", "batches")
    }


def _origin(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values:
        return {}
    return {
        "method": str(values["method"]),
        "set": flatten_settings(values["set"]),
        "seeds": _size(values["seeds"]),
        **{name: str(values[name]) for name in ("dataset", "partition") if name in values},
    }


def _size(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_SEEDS:
        raise ValueError("a number of seeds is not of its kind")
    return value


def _batch(values: Mapping[str, Any]) -> BatchRecord:
    finished, checkpoint = values["finished"], values["checkpoint"]
    if type(finished) is not bool or not (checkpoint is None or type(checkpoint) is int):
        raise ValueError("a method's state is not of its kind")
    return BatchRecord(finished, checkpoint)


def _method(values: Mapping[str, Any]) -> MethodRecord:
    own = _batch(values)
    batches = [_batch(value) for value in values.get("batches", [])]
    rows = {str(name): (int(count), str(value)) for name, (count, value) in values["rows"].items()}
    models = {str(name): str(value) for name, value in values["models"].items()}
    return MethodRecord(own.finished, own.checkpoint, rows, models, batches)
