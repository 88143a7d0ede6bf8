"""The models that a run saves: a safetensors file for each client and for the global model.

`models/METHOD` has those of the last evaluation, `models/best/METHOD` those of the best one.
"""

import os
import re
import warnings
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from fedala.io import files
from fedala.lanes.trees import Params
from fedala.records import PersonalModel
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.verified_files import RunRecord

BEST_FOLDER = "best"
_MODEL_FILE = re.compile(
    r"models/(?P<best>best/)?(?P<method>[^/]+)/seed-(?P<seed>\d+)"
    r"/(?:global|client-(?P<client>\d+))\.safetensors",
    re.ASCII,
)
Clients = set[int | None]
"""Whose models are saved; None: the global one."""


def pack_model(model: Params) -> bytes:
    """Return the content of a model's file. The model is one lane."""
    tensors = {name: value[0].detach().cpu().contiguous() for name, value in model.items()}
    data: bytes = save(tensors)
    return data


class SavedModels:
    """The saved models of one run folder."""

    def __init__(self, record: RunRecord) -> None:
        self.path, self._record = record.path, record
        self._initial: dict[Path, Path] = {}  # by folder: the file of the initial model

    def save(self, method: str, personal: PersonalModel, *, best: bool = False) -> None:
        """Save a model. Clients that never took part share one file, if the disk has hard links."""
        path = self._file(method, personal.seed, personal.client, best)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = self._record.method(method).models
        if personal.is_initial and (twin := self._initial.get(path.parent)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
                os.link(twin, path)
                digests[self._name(path)] = digests[self._name(twin)]
                return
        data = pack_model(personal.model)
        files.write_file(path, data, durable=False)
        digests[self._name(path)] = files.sha256(data)
        if personal.is_initial:
            self._initial[path.parent] = path

    def link(
        self, method: str, seed: int, client: int | None, file: Path, digest: str, *, best: bool
    ) -> None:
        """Save a model whose file exists already: a hard link if the disk has them, or a copy."""
        path = self._file(method, seed, client, best)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.link_or_copy(file, path)
        self._record.method(method).models[self._name(path)] = digest

    def has_best(self, method: str, seed: int) -> bool:
        """Tell whether the models of a run's best evaluation have been saved."""
        record = self._record.find_method(method)
        folder = self._name(self._file(method, seed, None, best=True).parent)
        names = record.models if record else ()
        return any(name.startswith(f"{folder}/") for name in names)

    def load(
        self, method: str, seed: int, client: int | None = None, *, best: bool = False
    ) -> dict[str, Tensor]:
        """Return a saved model's tensors by name: a client's, or the global model's without one.

        With `best`, it is that of the run's best evaluation, and not of the last.
        """
        path = self._file(method, seed, client, best)
        data = files.read_verified(path, self._digest(method, path))
        with files.refuse_damage(path):
            tensors: dict[str, Tensor] = load(data)
        return tensors

    def list_saved(self, *, best: bool = False) -> dict[tuple[str, int], Clients]:
        """Return whose models are saved, by method and seed: those that the record names.

        A folder without a record has those that are on the disk.
        """
        digests = self._record.digests
        if digests is None:
            names = [self._name(path) for path in (self.path / "models").rglob("*.safetensors")]
        else:
            names = [name for method in digests.methods.values() for name in method.models]
        found: dict[tuple[str, int], Clients] = {}
        for match in filter(None, map(_MODEL_FILE.fullmatch, names)):
            if bool(match["best"]) == best:
                client = None if match["client"] is None else int(match["client"])
                found.setdefault((match["method"], int(match["seed"])), set()).add(client)
        return found

    def find_damaged(self, method: str, seeds: Container[int]) -> Path | None:
        """Return a saved model of the method that is gone or not what the run wrote, if any."""
        record = self._record.find_method(method)
        for name, digest in record.models.items() if record else ():
            if seed_of_model(name) not in seeds:
                continue
            try:
                files.read_verified(self.path / name, digest)
            except files.DamagedFile:
                return self.path / name
        return None

    def _digest(self, method: str, path: Path) -> str | None:
        record = self._record.find_method(method)
        digest = record.models.get(self._name(path)) if record else None
        if digest is None and path.exists():
            warnings.warn(
                f"{path} cannot be verified: {DIGESTS} does not have its digest.", stacklevel=4
            )
        return digest

    def _file(self, method: str, seed: int, client: int | None, best: bool) -> Path:
        name = "global" if client is None else f"client-{client:05d}"
        folder = self.path / "models" / BEST_FOLDER if best else self.path / "models"
        return folder / method / f"seed-{seed}" / f"{name}.safetensors"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()


def seed_of_model(name: str) -> int:
    """Return the seed of a saved model by its path in the run folder; −1 if it is not one."""
    match = _MODEL_FILE.fullmatch(name)
    return int(match["seed"]) if match else -1
