"""The run folder: config, history, per-client results, summary, models, checkpoints. Nothing in it is pickled."""

import csv
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from fedala import files
from fedala.config import Config
from fedala.errors import UserError
from fedala.simulation import Personal, Row

#: Tables to which a run adds line by line; each line has its method and its round.
TABLES = ("history.csv", "clients.csv", "faults.csv")
#: What a run folder holds. `--force` replaces a folder only if there is nothing else in it.
CONTENT = {*TABLES, "resumed.csv", "config.toml", "summary.json", "models", "checkpoint", "report.html", "lock"}


class RunFolder:
    """One run, or one comparison of methods, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def check(cls, path: Path, *, force: bool) -> None:
        """Refuses a folder that exists, and a place where none can be made, before any work is done."""
        try:
            if not os.path.lexists(path):
                parent = next(p for p in path.absolute().parents if p.exists())
                if not parent.is_dir() or not os.access(parent, os.W_OK):
                    raise UserError(f"The output folder {path} cannot be made: {parent} cannot be written to.")
            elif not force:
                raise UserError(f"The output folder {path} exists already: choose another, or --force to replace it.")
            elif path.is_symlink() or not path.is_dir():
                raise UserError(f"{path} is not a folder, so --force does not replace it: choose another.")
            elif foreign := sorted(entry.name for entry in path.iterdir() if _plainly(entry.name) not in CONTENT):
                raise UserError(
                    f"{path} holds {foreign[0]}, which is no part of a run, so --force will not replace it."
                )
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
                for entry in path.iterdir():
                    if entry.name == ".lock":
                        continue
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
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
            shutil.copytree(self.path, path, ignore=shutil.ignore_patterns(".lock"))
        copy = RunFolder(path)
        with copy.held():
            yield copy

    def checkpoints(self, number: int) -> Path:
        """The folder of the checkpoints of one of the run's methods."""
        return self.path / "checkpoint" / str(number)

    def add_history(self, method: str, rows: Iterable[Row]) -> None:
        """Appends evaluations, flushed, so that a fault later loses none of them."""
        for row in rows:
            line = {"method": method, **{key: value for key, value in row.items() if key != "clients"}}
            self._append("history.csv", line)

    def add_clients(self, method: str, row: Row) -> None:
        """Every client's part in one evaluation."""
        for client, (correct, loss, samples) in enumerate(row["clients"]):
            accuracy, mean_loss = (correct / samples, loss / samples) if samples else (float("nan"), float("nan"))
            line = {"method": method, "seed": row["seed"], "round": row["round"], "client": client}
            self._append("clients.csv", {**line, "samples": int(samples), "accuracy": accuracy, "loss": mean_loss})

    def add(self, name: str, method: str, round: int, line: Mapping[str, Any]) -> None:
        """A line of a table about one round of a method."""
        self._append(name, {"method": method, "round": round, **line})

    def add_resumption(self, changes: str) -> None:
        """Notes that the run goes on, and what is different from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._append("resumed.csv", {"time": now, "changed": changes})

    def cut(self, method: str, round: int) -> None:
        """Takes back what the tables say of a method from some evaluation on, and what was not written to its end."""
        for name in TABLES:
            if (self.path / name).is_file():
                columns, lines = self._lines(name)
                kept = [line for line in lines if line["method"] != method or int(line["round"]) < round]
                self._replace(name, _csv(columns, kept, header=True))

    def flush(self) -> None:
        """Waits until the tables are on the disk."""
        for name in TABLES:
            if (self.path / name).is_file():
                with (self.path / name).open("rb") as file:
                    files.flush(file.fileno())

    def _lines(self, name: str) -> tuple[list[str], list[dict[str, str]]]:
        """A table's columns and its lines; of a line whose end is missing, nothing."""
        with (self.path / name).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restkey="", restval=None)
            lines = [line for line in reader if "" not in line and None not in line.values()]
            return list(reader.fieldnames or ()), lines

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path / name
        path.touch()
        with path.open("r+", newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file), [])
            new = [column for column in line if column not in columns]
            if not new:
                file.seek(0, os.SEEK_END)
                file.write(_csv(columns, [line]))
                return
            file.seek(0)
            lines = [*csv.DictReader(file), line]
        # Another method may have more to say about a round: its columns are added, empty for the others.
        self._replace(name, _csv([*columns, *new], lines, header=True))

    def _replace(self, name: str, text: str) -> None:
        files.replace(self.path / name, text.encode())

    def history(self) -> list[dict[str, Any]]:
        """The rows of history.csv, numbers as numbers."""
        return [
            {key: value if key == "method" else _number(value) for key, value in row.items()}
            for row in self._lines("history.csv")[1]
        ]

    def save_model(self, method: str, personal: Personal) -> None:
        path = self._model(method, personal.seed, personal.client)
        path.parent.mkdir(parents=True, exist_ok=True)
        model = {name: value[0].detach().cpu().contiguous() for name, value in personal.model.items()}
        files.replace(path, save(model), durable=False)

    def model(self, method: str, seed: int, client: int | None = None) -> dict[str, Tensor]:
        """A saved model's state, by name: a client's personal one, or the global one."""
        tensors: dict[str, Tensor] = load_file(self._model(method, seed, client))
        return tensors

    def _model(self, method: str, seed: int, client: int | None) -> Path:
        name = "global" if client is None else f"client-{client:05d}"
        return self.path / "models" / method / f"seed-{seed}" / f"{name}.safetensors"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def _plainly(name: str) -> str:
    """The name of a file, also of one that is not yet written to its end."""
    return name.removeprefix(".").removesuffix(".new")


def _csv(columns: list[str], lines: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
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
