"""The run folder: config, history, per-client results, summary, models, checkpoints. Nothing in it is pickled."""

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedala import files
from fedala.config import Config
from fedala.data.federation import PARTS, Federation
from fedala.errors import UserError
from fedala.inputs import check_room, regular
from fedala.simulation import Personal, Row

#: Tables to which a run adds line by line; each line has its method and its round.
TABLES = ("history.csv", "clients.csv", "weights.csv", "faults.csv")
#: What a run folder holds. `--force` replaces a folder only if there is nothing else in it.
CONTENT = {*TABLES, "split.csv", "resumed.csv", "config.toml", "summary.json", "report.html", "lock", "log-id"}
#: And what its sub-folders hold.
INSIDE = re.compile(
    r"models/[^/]+/seed-\d+/(global|client-\d+)\.safetensors"
    r"|checkpoint/\d+/(\d+\.(json|damaged)|(server-\d+|\d+-\d+-\d+)\.safetensors)"
    r"|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+"
    r"|wandb/.+",
    re.ASCII,
)

#: Columns of its tables that are not numbers.
_TEXT = {"method", "parameter", "name", "time", "changed"}


class RunFolder:
    """One run, or one comparison of methods, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def check(cls, path: Path, *, force: bool) -> None:
        """Refuses a folder that exists, and a place where none can be made, before any work is done."""
        try:
            if not os.path.lexists(path):
                parent = standing(path)
                if not parent.is_dir() or not os.access(parent, os.W_OK):
                    raise UserError(f"The output folder {path} cannot be made: {parent} cannot be written to.")
            elif not force:
                raise UserError(f"The output folder {path} exists already: choose another, or --force to replace it.")
            elif path.is_symlink() or not path.is_dir():
                raise UserError(f"{path} is not a folder, so --force does not replace it: choose another.")
            else:
                _own(path)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be used: {error.strerror}.") from None

    @classmethod
    @contextmanager
    def create(cls, path: Path, config: Config, *, force: bool) -> Iterator["RunFolder"]:
        """A new run folder, which is this process's own for as long as it is used."""
        cls.check(path, force=force)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be made: {error.strerror}.") from None
        folder = cls(path)
        with folder.held():
            try:
                own, folders = _own(path)
                for entry in own:
                    if entry.name != ".lock":
                        entry.unlink()
                for entry in folders:  # which fails where something else has come since
                    entry.rmdir()
                folder.write_config(config)
            except OSError as error:
                raise UserError(f"The output folder {path} cannot be made: {error.strerror}.") from None
            yield folder

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else may work in the folder meanwhile. A process that has died holds nothing."""
        try:
            with files.lock(self.path / ".lock", f"{self.path} is in use: another process is working in it."):
                yield
        except PermissionError:
            raise UserError(f"The run folder {self.path} cannot be written to.") from None

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """A folder that a run has left."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is no run folder: there is no config.toml in it.")
        things, folders = _walk(path)
        for entry in (*things, *(folder for folder in folders if _is_own(folder.relative_to(path)))):
            if entry.relative_to(path).parts[0] == "wandb":
                continue  # another program's, which has links in it and which is not read here
            if entry.is_symlink() or not entry.is_file():
                raise UserError(f"{entry} is a link, or no file at all: such a run folder is not used.")
        return cls(path)

    def config(self) -> Config:
        return Config.of(Config.read(self.path / "config.toml"))

    def write_config(self, config: Config) -> None:
        self._replace("config.toml", config.text())

    @contextmanager
    def copied(self, path: Path) -> Iterator["RunFolder"]:
        """A copy of the folder somewhere else, held like this one."""
        self.check(path, force=False)
        with self.held():
            shutil.copytree(self.path, path, symlinks=True, ignore=shutil.ignore_patterns(".lock", "log-id", "wandb"))
        copy = RunFolder(path)
        with copy.held():
            yield copy

    def checkpoints(self, number: int) -> Path:
        """The folder of the checkpoints of one of the run's methods."""
        return self.path / "checkpoint" / str(number)

    def add_history(self, method: str, rows: Iterable[Row]) -> None:
        """Appends evaluations, flushed, so that a fault later loses none of them."""
        for row in rows:
            line = {"method": method, **{key: value for key, value in row.items() if key not in ("clients", "weights")}}
            self._append("history.csv", [line])

    def add_clients(self, method: str, row: Row) -> None:
        """Every client's part in one evaluation."""
        lines = []
        for client, (correct, loss, samples) in enumerate(row["clients"]):
            accuracy, mean_loss = (correct / samples, loss / samples) if samples else (float("nan"), float("nan"))
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
            {"client": client, "class": label, "name": names[label]}
            | {part: count[client, label] for part, count in counts.items()}
            for client, label in np.argwhere(federation.counts()).tolist()
        ]
        self._replace("split.csv", csv_text(columns, lines, header=True))

    def add(self, name: str, method: str, round: int, line: Mapping[str, Any]) -> None:
        """A line of a table about one round of a method."""
        self._append(name, [{"method": method, "round": round, **line}])

    def add_resumption(self, changes: str) -> None:
        """Notes that the run goes on, and what is different from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._append("resumed.csv", [{"time": now, "changed": changes}])

    def cut(self, method: str, round: int) -> None:
        """Takes back what the tables say of a method from some evaluation on, and what was not written to its end."""
        for name in TABLES:
            if (self.path / name).is_file():
                columns, lines = self._lines(name)
                kept = [line for line in lines if line["method"] != method or int(line["round"]) < round]
                self._replace(name, csv_text(columns, kept, header=True))

    def flush(self) -> None:
        """Waits until the tables are on the disk."""
        for name in TABLES:
            if (self.path / name).is_file():
                with (self.path / name).open("rb") as file:
                    files.flush(file.fileno())

    def _lines(self, name: str) -> tuple[list[str], list[dict[str, str]]]:
        """A table's columns and its lines, without the last one if its end is missing: it was being written."""
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
            return list(reader.fieldnames or ()), lines

    @contextmanager
    def _table(self, name: str, mode: str = "r") -> Iterator[IO[str]]:
        """A table, opened. What is found not to be one is a damaged file."""
        path = self.path / name
        try:
            check_room(path.stat().st_size, str(path))
            with path.open(mode, newline="", encoding="utf-8") as file:
                yield file
        except (ValueError, KeyError, csv.Error) as error:
            raise files.Damaged(f"{path} is damaged, or not the table of a run: {error}.") from None

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        (self.path / name).touch()
        with self._table(name, "r+") as file:
            columns = next(csv.reader(file), [])
            new = [column for column in lines[0] if column not in columns]
            if not new:
                file.seek(0, os.SEEK_END)
                file.write(csv_text(columns, lines))
                return
            file.seek(0)
            lines = [*csv.DictReader(file), *lines]
        # Another method may have more to say about a round: its columns are added, empty for the others.
        self._replace(name, csv_text([*columns, *new], lines, header=True))

    def _replace(self, name: str, text: str) -> None:
        files.replace(self.path / name, text.encode())

    def history(self) -> list[dict[str, Any]]:
        """The rows of history.csv, numbers as numbers."""
        return self.rows("history.csv")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of the folder's tables, numbers as numbers."""
        rows = self._lines(name)[1]
        try:
            read: list[dict[str, Any]] = [
                {key: value if key in _TEXT else _number(value) for key, value in row.items()} for row in rows
            ]
            for accuracy in (row["accuracy"] for row in read if row.get("accuracy") is not None):
                if accuracy < 0 or accuracy > 1:
                    raise ValueError(f"an accuracy of {accuracy} is not from 0 to 1")
        except ValueError as error:
            raise files.Damaged(f"{self.path / name} is damaged: {error}.") from None
        return read

    def save_model(self, method: str, personal: Personal) -> None:
        path = self._model(method, personal.seed, personal.client)
        path.parent.mkdir(parents=True, exist_ok=True)
        model = {name: value[0].detach().cpu().contiguous() for name, value in personal.model.items()}
        files.replace(path, save(model), durable=False)

    def model(self, method: str, seed: int, client: int | None = None) -> dict[str, Tensor]:
        """A saved model's state, by name: a client's personal one, or the global one."""
        path = self._model(method, seed, client)
        try:
            tensors: dict[str, Tensor] = load_file(regular(path))
        except (OSError, SafetensorError) as error:
            raise files.Damaged(f"{path} is not a readable model: {error}.") from None
        return tensors

    def _model(self, method: str, seed: int, client: int | None) -> Path:
        name = "global" if client is None else f"client-{client:05d}"
        return self.path / "models" / method / f"seed-{seed}" / f"{name}.safetensors"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def standing(path: Path) -> Path:
    """The nearest folder above a path that is there already."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Everything in a folder but folders; and these, the deepest first. Links are not followed."""
    things, folders = [], []
    for place, below, names in os.walk(path, topdown=False, onerror=_fail):
        links = [name for name in below if Path(place, name).is_symlink()]
        things += [Path(place, name) for name in (*names, *links)]
        folders += [Path(place, name) for name in below if name not in links]
    return things, folders


def _fail(error: OSError) -> None:
    raise error


def _own(path: Path) -> tuple[list[Path], list[Path]]:
    """What a run has put into its folder; anything else in it is refused."""
    things, folders = _walk(path)
    for entry in sorted((*things, *folders)):
        place = entry.relative_to(path)
        if not (
            place.parts[0] in ("models", "checkpoint", "tensorboard", "wandb") if entry in folders else _is_own(place)
        ):
            raise UserError(f"{path} holds {place}, which is no part of a run, so --force will not replace it.")
    return things, folders


def _is_own(place: Path) -> bool:
    """Whether a run puts a file there, be it one that is not yet written to its end."""
    whole = place.parent / place.name.removeprefix(".").removesuffix(".new")
    return str(whole) in CONTENT or INSIDE.fullmatch(whole.as_posix()) is not None


def csv_text(columns: Sequence[str], lines: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    """Lines of a table; with `header`, the whole of it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _number(text: str) -> float | int | None:
    if not text:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)
