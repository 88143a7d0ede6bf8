"""The run folder: config, history, per-client results, summary, models, checkpoints. Nothing in it is pickled."""

import csv
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from fedala.data.federation import PARTS, Federation
from fedala.errors import RunError, UserError, printable, spreadsheet_safe
from fedala.io import files
from fedala.io.untrusted import check_memory, read_file, require_file
from fedala.records import PersonalModel, Row
from fedala.runs.config import Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests, MethodRecord, RowHash

T = TypeVar("T")

#: Tables to which a run adds line by line; each line has its method and its round.
TABLES = ("history.csv", "clients.csv", "weights.csv", "faults.csv")
#: Files that a run writes as a whole. `digests.json` knows their content, and a run folder is one that it vouches for.
WHOLE = ("config.toml", "split.csv", "resumed.csv", "summary.json")
#: What a run folder holds. `--force` replaces a folder only if there is nothing else in it.
CONTENT = {*TABLES, "report.html", "lock", "log-id", *WHOLE, DIGESTS}
#: And what its sub-folders hold.
INSIDE = re.compile(
    r"models/[^/]+/seed-\d+/(global|client-\d+)\.safetensors"
    r"|checkpoint/\d+/(\d+\.(json|damaged)|(server-\d+|\d+-\d+-\d+)\.safetensors)"
    r"|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+",
    re.ASCII,
)

#: A logger's own folder. It may hold links, it is never read here, and never deleted.
FOREIGN = "wandb"

LARGEST = 2**28  # bytes of a file that is read as a whole

#: Columns of its tables that are not numbers.
_TEXT = {"method", "parameter", "name", "time", "changed", "policy"}


class RunFolder:
    """One run, or one comparison of methods, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record: Digests | None = None
        self._hashes: dict[tuple[str, str], RowHash] = {}  # by table and method
        self._missing: list[str] = []  # whole files that should be there
        self._newer: dict[str, int] = {}  # by table: rows that the record does not cover
        self._initial: dict[
            Path, Path
        ] = {}  # the file of the initial model, by the folder of a run's models

    @classmethod
    def check(cls, path: Path, *, force: bool) -> None:
        """Refuses a folder that exists, and a place where none can be made, before any work is done."""
        try:
            if not os.path.lexists(path):
                parent = nearest_existing_parent(path)
                if not parent.is_dir() or not os.access(parent, os.W_OK):
                    raise UserError(
                        f"The output folder {path} cannot be made: {parent} cannot be written to."
                    )
            elif not force:
                raise UserError(
                    f"The output folder {path} exists already: choose another, or --force to replace it."
                )
            elif path.is_symlink() or not path.is_dir():
                raise UserError(
                    f"{path} is not a folder, so --force does not replace it: choose another."
                )
            else:
                _own(path)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be used: {error.strerror}.") from None

    @classmethod
    @contextmanager
    def create(
        cls, path: Path, config: Config, *, force: bool, about: Digests | None = None
    ) -> Iterator["RunFolder"]:
        """Make a run folder, and keep it to this process while it is in use. `about` says what the run is."""
        cls.check(path, force=force)
        try:
            make_folders(path)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be made: {error.strerror}.") from None
        folder = cls(path)
        with folder.held():
            try:
                folder._clear(about or Digests())
                folder.write_config(config)
            except OSError as error:
                raise UserError(
                    f"The output folder {path} cannot be made: {error.strerror}."
                ) from None
            yield folder

    def _clear(self, record: Digests) -> None:
        """Remove what an earlier run has left, and start a new record. A kill on the way leaves a run folder, too."""
        things, folders = _own(self.path)
        if things:
            earlier = self._kept_record()
            self._record = record
            record.written = dict(
                earlier.written
            )  # what is still there is a run's until it is gone
            self._write_record()
        # A summary without a history would look damaged, and so would a history without a config.
        order = {"summary.json": 0, "config.toml": 2}
        for entry in sorted(things, key=lambda entry: order.get(entry.name, 1)):
            if entry.name not in (".lock", DIGESTS):
                entry.unlink(
                    missing_ok=True
                )  # a record that was not written to its end is gone already
        for entry in folders:  # which fails if something else has come since
            entry.rmdir()
        self._record, record.written = record, {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else may work in the folder meanwhile. A process that has died holds nothing."""
        try:
            with files.lock(
                self.path / ".lock", f"{self.path} is in use: another process is working in it."
            ):
                yield
        except PermissionError:
            raise UserError(f"The run folder {self.path} cannot be written to.") from None

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """A folder that a run has left."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is no run folder: there is no config.toml in it.")
        things, folders = _walk(path)
        for entry in (
            *things,
            *(folder for folder in folders if _is_own(folder.relative_to(path))),
        ):
            if entry.is_symlink() or not entry.is_file():
                raise UserError(
                    f"{entry} is a link, or no file at all: such a run folder is not used."
                )
        return cls(path)

    # --- what the run has written, and whether it is still there ---------------------------------------------------

    @property
    def record(self) -> Digests | None:
        """The digests of what the run has written; None if the folder has none, so that nothing can be verified."""
        if self._record is None:
            self._record = Digests.read(self.path)
        return self._record

    def _again_if_stale(self, read: Callable[[], T]) -> T:
        """Call `read`, and once more if another process has written a new record since this one was read."""
        try:
            return read()
        except files.DamagedFile:
            before, self._record = self._record, None
            if self.record == before:
                raise
            return read()

    def verified(self, name: str) -> bytes:
        """Return the content of a file that the run writes as a whole, held against its digest."""
        return self._again_if_stale(lambda: self._verified(name))

    def _verified(self, name: str) -> bytes:
        path = self.path / name
        try:
            data = read_file(path, LARGEST)
        except OSError as error:
            raise files.DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
        if self.record and not self.record.expects(name, data):
            raise files.DamagedFile(f"{path} is damaged: it is not what the run wrote.")
        return data

    def has(self, name: str) -> bool:
        """Tell whether a whole file is there, and hold it against its digest. One that is missing is remembered."""
        if require_file(self.path / name).exists():
            self._verified(name)
            return True
        if self.record and name in self.record.written:
            self._missing.append(name)
        return False

    def has_begun(self) -> bool:
        """Tell whether a round has been evaluated; its row may be gone."""
        entries = self.record.methods.values() if self.record else ()
        return os.path.lexists(self.path / "history.csv") or any(
            "history.csv" in entry.rows for entry in entries
        )

    def seal(self, method: str, *, checkpoint: int | None = None, finished: bool = False) -> None:
        """Record the digests of everything that the tables hold of a method now."""
        entry = self._entry(method)
        entry.rows = self._row_digests(method)
        entry.checkpoint, entry.finished = checkpoint, finished
        self._write_record()

    def _row_digests(self, method: str) -> dict[str, tuple[int, str]]:
        """Return, by table, how many rows of a method it holds, and their digest."""
        return {
            table: rows.value for (table, other), rows in self._hashes.items() if other == method
        }

    def recorded(self, method: str) -> MethodRecord | None:
        """Return what the record says of a method, if anything."""
        return self.record.methods.get(method) if self.record else None

    def _entry(self, method: str) -> MethodRecord:
        return self._kept_record().methods.setdefault(method, MethodRecord())

    def _kept_record(self) -> Digests:
        """Return the record to add to. A folder that has none gets one, which takes its files as they are."""
        if self.record is None:
            there = {name: self.path / name for name in WHOLE if (self.path / name).is_file()}
            self._record = Digests(
                {name: [files.sha256(read_file(path, LARGEST))] for name, path in there.items()}
            )
        assert self._record is not None
        return self._record

    def _write_record(self) -> None:
        files.write_file(self.path / DIGESTS, self._kept_record().pack())

    def shorten(self, rounds: Mapping[str, int], about: Digests) -> None:
        """Drop what the tables say of each unfinished method from some evaluation on; `about` says what the run is."""
        tables = {name: self._lines(name) for name in TABLES if (self.path / name).is_file()}
        self._hashes, texts = {}, {}
        for name, (columns, lines) in tables.items():
            lines = [
                line for line in lines if int(line["round"]) < rounds.get(line["method"], 2**63)
            ]
            for line in lines:
                self._hashes.setdefault((name, line["method"]), RowHash()).add(line)
            texts[name] = csv_text(columns, lines, header=True)
        record = self._kept_record()
        record.identity, record.versions, record.probe = about.identity, about.versions, about.probe
        for method in {*record.methods, *(method for _, method in self._hashes)}:
            entry = self._entry(method)
            entry.rows = self._row_digests(method)
            entry.finished = method not in rounds
            if method in rounds:
                entry.models = {}
        self._write_record()  # before the tables get shorter, so that a crash in between is no damage
        for name, text in texts.items():
            if (self.path / name).read_bytes() != text.encode():
                files.write_file(self.path / name, text.encode())

    # --- config and copies -----------------------------------------------------------------------------------------

    def config(self) -> Config:
        self.verified("config.toml")
        return Config.of(Config.read(self.path / "config.toml"))

    def write_config(self, config: Config) -> None:
        self._replace("config.toml", config.text())

    @contextmanager
    def copied(self, path: Path) -> Iterator["RunFolder"]:
        """Copy the folder, which the caller holds, to another place, and hold the copy."""
        self.check(path, force=False)
        try:
            make_folders(path.parent)
            ignored = shutil.ignore_patterns(".lock", "log-id", FOREIGN)
            shutil.copytree(self.path, path, symlinks=True, ignore=ignored)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be copied to {path}: {error.strerror or error}."
            ) from None
        copy = RunFolder(path)
        with copy.held():
            yield copy

    def checkpoints(self, number: int) -> Path:
        """The folder of the checkpoints of one of the run's methods."""
        return self.path / "checkpoint" / str(number)

    def add_history(self, method: str, rows: Iterable[Row]) -> None:
        """Appends evaluations, flushed, so that a fault later loses none of them."""
        for row in rows:
            line = {
                "method": method,
                **{key: value for key, value in row.items() if key not in ("clients", "weights")},
            }
            self._append("history.csv", [line])

    def add_clients(self, method: str, row: Row) -> None:
        """Every client's part in one evaluation."""
        lines = []
        for client, (correct, loss, samples) in enumerate(row["clients"]):
            accuracy, mean_loss = (
                (correct / samples, loss / samples) if samples else (float("nan"), float("nan"))
            )
            line = {"method": method, "seed": row["seed"], "round": row["round"], "client": client}
            lines.append({**line, "samples": int(samples), "accuracy": accuracy, "loss": mean_loss})
        self._append("clients.csv", lines)

    def add_weights(self, method: str, row: Row) -> None:
        """How the W of every participant is spread, where the row tells: the mean, and the share in each tenth of [0, 1]."""
        place = {"method": method, "seed": row["seed"], "round": row["round"]}
        lines = [
            {**place, "client": client, "parameter": parameter, "mean": round(mean, 6)}
            | {f"bin{k}": round(share, 6) for k, share in enumerate(shares)}
            for client, parameter, (mean, *shares) in row.get("weights", ())
        ]
        if lines:
            self._append("weights.csv", lines)

    def write_split(self, federation: Federation) -> None:
        """Who holds how many samples of which class; a line for each client and class that meet."""
        names = federation.dataset.class_names or range(federation.dataset.classes)
        counts = {part: federation.counts(part) for part in PARTS}
        columns = ["client", "class", "name", *counts]
        lines = [
            {"client": client, "class": label, "name": spreadsheet_safe(names[label])}
            | {part: count[client, label] for part, count in counts.items()}
            for client, label in np.argwhere(federation.counts()).tolist()
        ]
        self._replace("split.csv", csv_text(columns, lines, header=True))

    def add(self, name: str, method: str, round: int, line: Mapping[str, Any]) -> None:
        """A line of a table about one round of a method."""
        self._append(name, [{"method": method, "round": round, **line}])

    def add_resumption(self, changes: str) -> None:
        """Note that the run is resumed, and what is different from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        columns, lines = ["time", "changed"], list[dict[str, str]]()
        if (self.path / "resumed.csv").exists():
            try:
                self.verified("resumed.csv")
                columns, lines = self._lines("resumed.csv")
            except files.DamagedFile:
                lines = [
                    {"time": now, "changed": "resumed.csv was damaged: what it said before is lost"}
                ]
        elif self.record and "resumed.csv" in self.record.written:
            lines = [
                {
                    "time": now,
                    "changed": "resumed.csv was missing: if it said anything before, it is lost",
                }
            ]
        lines.append({"time": now, "changed": printable(changes, 10_000)})
        self._replace("resumed.csv", csv_text(columns, lines, header=True))

    def size(self) -> int:
        """Return how many bytes of models and checkpoints the folder holds."""
        kept = (self.path / "models").rglob("*"), (self.path / "checkpoint").rglob("*")
        return sum(path.lstat().st_size for path in chain(*kept) if path.is_file())

    def flush(self) -> None:
        """Waits until the tables are on the disk."""
        for name in TABLES:
            if (self.path / name).is_file():
                with (self.path / name).open("rb") as file:
                    files.flush(file.fileno())

    def _lines(self, name: str) -> tuple[list[str], list[dict[str, str]]]:
        """A table's columns and its lines, without the last one if its end is missing: it was being written."""
        columns, lines, is_cut = self._parse(name)
        if is_cut and not self._is_growing():
            raise files.DamagedFile(
                f"{self.path / name} is damaged: it ends in the middle of a row."
            )
        return columns, lines

    def _is_growing(self) -> bool:
        """Tell whether a row may just have been written when the run stopped: not once every method is finished."""
        if self.record is None or not (self.path / "config.toml").is_file():
            return True
        finished = {name for name, entry in self.record.methods.items() if entry.finished}
        return not finished.issuperset(self.config().methods)

    def _parse(self, name: str) -> tuple[list[str], list[dict[str, str]], bool]:
        """Return a table's columns, its whole lines, and whether a broken one follows."""
        with self._table(name) as file:
            reader = csv.DictReader(file, restkey="", restval=None)
            lines, broken = [], 0
            for line in reader:
                if broken:
                    raise ValueError(f"line {broken} has not as many columns as the first")
                if "" in line or None in line.values():
                    broken = reader.line_num
                else:
                    lines.append(line)
            for line in lines if name in TABLES else ():
                line["method"], int(line["round"])  # or it is no such table
            return list(reader.fieldnames or ()), lines, bool(broken)

    @contextmanager
    def _table(self, name: str, mode: str = "r") -> Iterator[IO[str]]:
        """A table, opened. What is found not to be one is a damaged file."""
        path = self.path / name
        try:
            check_memory(require_file(path).stat().st_size, str(path))
            with path.open(mode, newline="", encoding="utf-8") as file:
                yield file
        except (ValueError, KeyError, csv.Error) as error:
            raise files.DamagedFile(
                f"{path} is damaged, or not the table of a run: {error}."
            ) from None

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        texts = [{column: _cell(value) for column, value in line.items()} for line in lines]
        (self.path / name).touch()
        with self._table(name, "r+") as file:
            columns = next(csv.reader(file), [])
            new = [column for column in texts[0] if column not in columns]
            if not new:
                file.seek(0, os.SEEK_END)
                file.write(csv_text(columns, texts))
            else:
                file.seek(0)
                whole = [*csv.DictReader(file), *texts]
        if new:  # another method may have more to say about a round: its columns are added, empty for the others
            files.write_file(
                self.path / name, csv_text([*columns, *new], whole, header=True).encode()
            )
        for text in texts:
            self._hashes.setdefault((name, text["method"]), RowHash()).add(text)

    def _replace(self, name: str, text: str) -> None:
        """Write one of the whole files. Its digest is recorded first, beside that of the version it replaces."""
        data = text.encode()
        if self._kept_record().note(self.path / name, data):
            self._write_record()
        files.write_file(self.path / name, data)

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of history.csv, numbers as numbers."""
        return self.rows("history.csv")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of one of the folder's tables, held against their digests, numbers as numbers."""
        return self._again_if_stale(lambda: self._rows(name))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        record = self.record  # before the table, which may grow meanwhile
        if name not in TABLES and not self.has(name):
            return []
        lines = self._lines(name)[1] if require_file(self.path / name).exists() else []
        if name in TABLES and record:
            self._newer[name] = record.check_rows(self.path / name, lines)
        try:
            read: list[dict[str, Any]] = [
                {key: value if key in _TEXT else _number(value) for key, value in line.items()}
                for line in lines
            ]
            for accuracy in (row["accuracy"] for row in read if row.get("accuracy") is not None):
                if accuracy < 0 or accuracy > 1:
                    raise ValueError(f"an accuracy of {accuracy} is not from 0 to 1")
        except ValueError as error:
            raise files.DamagedFile(f"{self.path / name} is damaged: {error}.") from None
        return read

    def unverified(self) -> list[str]:
        """Say, in sentences, what no digest vouches for of the tables that have been read."""
        if self.record is None:
            return [f"{self.path} has no {DIGESTS}, so nothing in it can be verified."]
        missing = [
            f"{self.path / name} is missing; a run was about to write it, or has."
            for name in self._missing
        ]
        return missing + [
            f"{newer} of the rows in {self.path / name} came after {DIGESTS} was written, so they are not verified."
            for name, newer in self._newer.items()
            if newer
        ]

    def save_model(self, method: str, personal: PersonalModel) -> None:
        path = self._model(method, personal.seed, personal.client)
        path.parent.mkdir(parents=True, exist_ok=True)
        models = self._entry(method).models
        name = path.relative_to(self.path).as_posix()
        if personal.is_initial and (twin := self._initial.get(path.parent)):
            with suppress(OSError):  # a disk without hard links gets a file for each
                path.unlink(missing_ok=True)
                os.link(twin, path)
                models[name] = models[twin.relative_to(self.path).as_posix()]
                return
        model = {
            name: value[0].detach().cpu().contiguous() for name, value in personal.model.items()
        }
        data = save(model)
        files.write_file(path, data, durable=False)
        models[name] = files.sha256(data)
        if personal.is_initial:
            self._initial[path.parent] = path

    def model(self, method: str, seed: int, client: int | None = None) -> dict[str, Tensor]:
        """Return a saved model's state, by name: a client's personal one, or the global one."""
        path = self._model(method, seed, client)
        data = files.read_verified(path, self._model_digest(method, path))
        with files.refuse_damage(path):
            tensors: dict[str, Tensor] = load(data)
        return tensors

    def _model_digest(self, method: str, path: Path) -> str | None:
        entry = self.recorded(method)
        found = entry.models.get(path.relative_to(self.path).as_posix()) if entry else None
        if found is None and path.exists():
            warnings.warn(
                f"{path} cannot be verified: {DIGESTS} does not have its digest.", stacklevel=3
            )
        return found

    def damaged_model(self, method: str) -> Path | None:
        """Return a saved model of the method that is gone or not what the run wrote, if there is one."""
        entry = self.recorded(method)
        for name, value in entry.models.items() if entry else ():
            try:
                files.read_verified(self.path / name, value)
            except files.DamagedFile:
                return self.path / name
        return None

    def _model(self, method: str, seed: int, client: int | None) -> Path:
        name = "global" if client is None else f"client-{client:05d}"
        return self.path / "models" / method / f"seed-{seed}" / f"{name}.safetensors"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def make_folders(path: Path) -> None:
    """Make a folder and those above it, one after the other: `Path.mkdir` calls itself for each."""
    for folder in reversed((path, *path.parents)):
        folder.mkdir(exist_ok=True)


def nearest_existing_parent(path: Path) -> Path:
    """The nearest folder above a path that is there already."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Return everything in a run folder but folders; and these, the deepest first. Links are not followed."""
    things: list[Path] = []
    folders: list[Path] = []
    try:
        for place, below, names in os.walk(path, topdown=False, onerror=_fail):
            links = [name for name in below if Path(place, name).is_symlink()]
            things += [Path(place, name) for name in (*names, *links)]
            folders += [Path(place, name) for name in below if name not in links]
    except RecursionError:
        raise UserError(f"{path} has folders in it too deep to be those of a run.") from None
    foreign = path / FOREIGN
    return (
        [entry for entry in things if not entry.is_relative_to(foreign)],
        [entry for entry in folders if not entry.is_relative_to(foreign)],
    )


def _fail(error: OSError) -> None:
    raise error


def _own(path: Path) -> tuple[list[Path], list[Path]]:
    """Return what a run has put into its folder; refuse a folder that holds anything else."""
    things, folders = _walk(path)
    for entry in sorted((*things, *folders)):
        place = entry.relative_to(path)
        if not (
            place.parts[0] in ("models", "checkpoint", "tensorboard")
            if entry in folders
            else _is_own(place)
        ):
            raise UserError(
                f"{path} holds {place}, which is no part of a run, so --force will not replace it."
            )
    folder = RunFolder(path)
    if folder.record is None:
        unfinished = {".lock", f".{DIGESTS}.new"}
        if any(entry.name not in unfinished for entry in path.iterdir()) and not _is_older_run(
            path
        ):
            raise UserError(
                f"{path} is not empty and has no {DIGESTS}, so --force cannot tell that a run wrote it: "
                "remove it yourself, or choose another folder."
            )
    for name in WHOLE:
        if (path / name).exists():
            try:
                folder.verified(name)
            except files.DamagedFile:
                raise UserError(
                    f"{path / name} is not what the run wrote, so --force will not replace it: move it away first."
                ) from None
    return things, folders


def _is_older_run(path: Path) -> bool:
    """Tell whether a folder without digests is that of a run: its config is written as only a run writes it."""
    try:
        text = read_file(path / "config.toml", LARGEST).decode()
        return (path / "split.csv").is_file() and Config.of(
            Config.read(path / "config.toml")
        ).text() == text
    except (OSError, ValueError):
        return False


def _is_own(place: Path) -> bool:
    """Whether a run puts a file there, be it one that is not yet written to its end."""
    whole = place.parent / place.name.removeprefix(".").removesuffix(".new")
    return str(whole) in CONTENT or INSIDE.fullmatch(whole.as_posix()) is not None


def csv_text(
    columns: Sequence[str], lines: Iterable[Mapping[str, Any]], *, header: bool = False
) -> str:
    """Lines of a table; with `header`, the whole of it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cell(value: Any) -> str:
    """Return a value as it stands in a table; a float comes back as the same float."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _number(text: str) -> float | int | None:
    if not text:
        return None
    if not text.lstrip("-").isdecimal():
        return float(text)
    if len(text) > 19:
        raise ValueError(f"{text[:19]}… is a number of more than 64 bits")
    return int(text)
