"""The run folder: config, tables, summary, models, checkpoints. Nothing in it is pickled."""

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from fedala.data.preprocessing import PREPROCESSING, Preprocessing
from fedala.errors import RunError, UserError, printable
from fedala.io import files
from fedala.io.untrusted import parse_json
from fedala.options import name_option
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import BatchRecord, Digests, MethodRecord
from fedala.runs.models import SavedModels, seed_of_model
from fedala.runs.run_files import JOBS, LOGGER_FOLDER, check_no_links, list_run_files
from fedala.runs.tables import Tables
from fedala.runs.verified_files import CLIENTS, RunRecord


class RunFolder:
    """One run, or one comparison of methods, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = RunRecord(path)
        self.tables = Tables(self._record)
        self.models = SavedModels(self._record)

    # --- make, open, lock, copy -----------------------------------------------------------------

    @staticmethod
    def check_output(path: Path, *, force: bool) -> None:
        """Refuse an output folder that cannot be made or exists; `force` allows that of a run."""
        try:
            if not os.path.lexists(path):
                parent = nearest_existing_parent(path)
                if not parent.is_dir() or not os.access(parent, os.W_OK):
                    raise UserError(
                        f"The output folder {path} cannot be made: {parent} cannot be written to."
                    )
            elif not force:
                raise UserError(
                    f"The output folder {path} exists already: "
                    f"choose another, or {name_option('force', True)} to replace it."
                )
            elif path.is_symlink() or not path.is_dir():
                raise UserError(
                    f"{path} is not a folder, so {name_option('force', True)} does not replace it: "
                    "choose another."
                )
            else:
                list_run_files(path)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be used: {error.strerror}.") from None

    @classmethod
    @contextmanager
    def create(
        cls, path: Path, config: Config, *, force: bool, about: Digests | None = None
    ) -> Iterator["RunFolder"]:
        """Make a run folder, and lock it while it is in use. `about` says what the run is."""
        cls.check_output(path, force=force)
        try:
            make_folders(path)
        except OSError as error:
            raise UserError(f"The output folder {path} cannot be made: {error.strerror}.") from None
        folder = cls(path)
        with folder.lock():
            try:
                folder._check_jobs_are_free()
                folder._clear(about or Digests())
                folder.write_config(config)
            except OSError as error:
                raise UserError(
                    f"The output folder {path} cannot be made: {error.strerror}."
                ) from None
            yield folder

    def _check_jobs_are_free(self) -> None:
        """Refuse a folder in which processes of a killed run are still working."""
        for job in (self.path / JOBS).glob("*"):
            with RunFolder(job).lock():
                pass

    def _clear(self, about: Digests) -> None:
        """Remove the files of an earlier run, and start a new record.

        If the process is killed in between, the folder is still recognised as a run's.
        """
        entries, folders = list_run_files(self.path)
        if entries:
            # Files of the earlier run are recorded until they are gone.
            about.written = dict(self._record.digests_to_extend().written)
            self._record.start(about)
            self._record.write()
        # A summary without a history would look damaged, and so would a history without a config.
        order = {"summary.json": 0, "config.toml": 2}
        for entry in sorted(entries, key=lambda entry: order.get(entry.name, 1)):
            if entry not in (self.path / ".lock", self.path / DIGESTS):
                entry.unlink(missing_ok=True)  # writing the record removed its half-written twin
        for folder in folders:
            folder.rmdir()  # fails if something has been added since
        about.written = {}
        self._record.start(about)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of an earlier run."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: there is no config.toml in it.")
        check_no_links(path)
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from working in the folder. The lock ends with the process."""
        busy = f"{self.path} is in use: another process is working in it."
        try:
            with files.lock(self.path / ".lock", busy):
                yield
        except PermissionError:
            raise UserError(f"The run folder {self.path} cannot be written to.") from None

    @contextmanager
    def copy_to(self, path: Path) -> Iterator["RunFolder"]:
        """Copy the folder, which the caller has locked, and lock the copy."""
        self.check_output(path, force=False)
        try:
            make_folders(path.parent)
            ignored = shutil.ignore_patterns(".lock", "log-id", LOGGER_FOLDER)
            shutil.copytree(self.path, path, symlinks=True, ignore=ignored)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be copied to {path}: {error.strerror or error}."
            ) from None
        copy = RunFolder(path)
        with copy.lock():
            yield copy

    # --- the record -----------------------------------------------------------------------------

    @property
    def record(self) -> Digests | None:
        """The digests of what the run has written; None if there are none to verify with."""
        return self._record.digests

    def find_method_record(self, method: str) -> MethodRecord | None:
        """Return the record of a method, if there is one."""
        return self._record.find_method(method)

    def record_progress(
        self,
        methods: Iterable[str],
        *,
        batch: int = 0,
        checkpoint: int | None = None,
        is_finished: bool = False,
    ) -> None:
        """Record the newest checkpoint of a batch of methods that run side by side.

        The digests of their present rows and models become part of the record.
        """
        for method in methods:
            entry = self._record.method(method)
            entry.rows = self.tables.row_digests(method)
            entry.finished = is_finished
            if entry.batches:
                entry.batches[batch] = BatchRecord(is_finished, checkpoint)
                entry.finished = all(one.finished for one in entry.batches)
            if batch == 0:
                entry.checkpoint = checkpoint
        self._record.write()

    def drop_rows_from(
        self,
        first_rounds: Mapping[tuple[str, int], int],
        about: Digests,
        batches: Mapping[str, list[BatchRecord]] | None = None,
    ) -> None:
        """Drop unfinished rows, by method and seed from a given round on, and record the rest.

        `about` says what the run is from now on, and `batches` how far each method has got if it
        has several batches of seeds.
        """
        texts = self.tables.without_rows_from(first_rounds)
        digests = self._record.digests_to_extend()
        for name in ("identity", "versions", "probe", "origin", "batches"):
            setattr(digests, name, getattr(about, name))
        # A process that was killed may have recorded a method that it was about to add.
        known = {*self.tables.methods, *(name for name, _ in first_rounds)}
        digests.methods = {name: one for name, one in digests.methods.items() if name in known}
        for method in known:
            seeds = {seed for name, seed in first_rounds if name == method}
            entry = self._record.method(method)
            entry.rows = self.tables.row_digests(method)
            entry.finished = not seeds
            entry.batches = (batches or {}).get(method, [])
            models = entry.models.items()
            entry.models = {name: one for name, one in models if seed_of_model(name) not in seeds}
        self._record.write()  # before the tables get shorter: a crash in between is not damage
        self.tables.replace(texts)

    def take_over(
        self, job: "RunFolder", methods: Collection[str], rank: Callable[[str, int], Any]
    ) -> None:
        """Replace the rows and records of some methods by those of the folder of a job.

        The files that the records name must be here already. `rank` sorts the rows.
        """
        self.tables.replace(self.tables.with_rows_of(job.tables, methods, rank))
        # A crash before this is not damage: rows may be newer than the record.
        digests = self._record.digests_to_extend()
        for method in methods:
            digests.methods.pop(method, None)
            if record := job.find_method_record(method):
                digests.methods[method] = record
        self._record.write()

    def has_begun(self) -> bool:
        """Tell whether a round has been evaluated, even if its row is gone."""
        entries = self.record.methods.values() if self.record else ()
        return os.path.lexists(self.path / "history.csv") or any(
            "history.csv" in entry.rows for entry in entries
        )

    # --- reading --------------------------------------------------------------------------------

    def config(self) -> Config:
        return self._record.read_config()

    def stated_config(self) -> Config:
        """Return the config without the former defaults that an older run did not record."""
        return self._record.read_stated_config()

    def read_verified(self, name: str) -> bytes:
        """Return the content of a file that the run writes as a whole, if it is what it wrote."""
        return self._record.read_verified(name)

    def has(self, name: str) -> bool:
        """Tell whether a whole file is there, and verify it."""
        return self._record.has(name)

    def history(self) -> dict[str, list[HistoryRow]]:
        """Return the rows of history.csv by method, verified."""
        return self.tables.history()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table, verified, with numbers as numbers and empty cells as None."""
        return self.tables.rows(name)

    def model(
        self, method: str, seed: int, client: int | None = None, *, best: bool = False
    ) -> dict[str, Tensor]:
        """Return a saved model's tensors by name: a client's, or the global model's without one.

        With `best`, it is that of the run's best evaluation, and not of the last.
        """
        return self.models.load(method, seed, client, best=best)

    def preprocessing(self) -> Preprocessing | None:
        """Return what the models of the run are fed; None if an older version wrote the folder."""
        if not self.has(PREPROCESSING):
            return None
        data = self.read_verified(PREPROCESSING)
        with files.refuse_damage(self.path / PREPROCESSING):
            return Preprocessing.from_json(data.decode())

    def client_names(self) -> tuple[str, ...]:
        """Return the names of the clients; none if the data do not name them."""
        if not self.has(CLIENTS):
            return ()
        path = self.path / CLIENTS
        names = parse_json(self.read_verified(CLIENTS), str(path))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise files.DamagedFile(f"{path} is damaged: it is not a list of names.")
        return tuple(printable(name, 100) for name in names)

    def list_unverified(self) -> list[str]:
        """Say, in sentences, what could not be verified of the files that have been read."""
        if self.record is None:
            return [f"{self.path} has no {DIGESTS}, so nothing in it can be verified."]
        missing = [
            f"{self.path / name} is missing; a run was about to write it, or has."
            for name in self._record.missing
        ]
        return missing + self.tables.list_unrecorded()

    # --- writing --------------------------------------------------------------------------------

    def write_config(self, config: Config) -> None:
        self._record.replace("config.toml", config.text())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json. JSON has no NaN and no infinity: they become null."""
        text = json.dumps(_finite(summary), indent=2, ensure_ascii=False, allow_nan=False)
        self._record.replace("summary.json", text + "\n")

    def write_preprocessing(self, preprocessing: Preprocessing) -> None:
        """Write what the saved models are fed."""
        self._record.replace(PREPROCESSING, preprocessing.to_json())

    def write_client_names(self, names: Sequence[str]) -> None:
        """Write the names of the clients, in the order of their numbers."""
        self._record.replace(CLIENTS, json.dumps(list(names), ensure_ascii=False) + "\n")

    def checkpoint_folder(self, number: int, added_seed: int | None = None) -> Path:
        """Return the folder of the checkpoints of one of the run's methods.

        A batch of added seeds has its own: `added_seed` is its first one.
        """
        name = str(number) if added_seed is None else f"{number}-{added_seed}"
        return self.path / "checkpoint" / name

    def size(self) -> int:
        """Return the bytes of the folder's models and checkpoints."""
        paths = chain((self.path / "models").rglob("*"), (self.path / "checkpoint").rglob("*"))
        return sum(path.lstat().st_size for path in paths if path.is_file())


def _finite(value: Any) -> Any:
    """Return a tree of JSON values with null for each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folders(path: Path) -> None:
    """Make a folder and those above it in a loop: `Path.mkdir` would call itself for each."""
    for folder in reversed((path, *path.parents)):
        folder.mkdir(exist_ok=True)


def nearest_existing_parent(path: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())
