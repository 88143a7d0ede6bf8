"""The models that a run saves: a safetensors file for each client and for the global model."""

import os
import warnings
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from fedala.io import files
from fedala.records import PersonalModel
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.verified_files import RunRecord


class SavedModels:
    """The saved models of one run folder."""

    def __init__(self, record: RunRecord) -> None:
        self.path, self._record = record.path, record
        self._initial: dict[Path, Path] = {}  # by folder: the file of the initial model

    def save(self, method: str, personal: PersonalModel) -> None:
        """Save a model. Clients that never took part share one file, if the disk has hard links."""
        path = self._file(method, personal.seed, personal.client)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = self._record.method(method).models
        if personal.is_initial and (twin := self._initial.get(path.parent)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
                os.link(twin, path)
                digests[self._name(path)] = digests[self._name(twin)]
                return
        model = {
            name: value[0].detach().cpu().contiguous() for name, value in personal.model.items()
        }
        data = save(model)
        files.write_file(path, data, durable=False)
        digests[self._name(path)] = files.sha256(data)
        if personal.is_initial:
            self._initial[path.parent] = path

    def load(self, method: str, seed: int, client: int | None = None) -> dict[str, Tensor]:
        """Return a saved model's tensors by name: a client's, or the global model's without one."""
        path = self._file(method, seed, client)
        data = files.read_verified(path, self._digest(method, path))
        with files.refuse_damage(path):
            tensors: dict[str, Tensor] = load(data)
        return tensors

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

    def _file(self, method: str, seed: int, client: int | None) -> Path:
        name = "global" if client is None else f"client-{client:05d}"
        return self.path / "models" / method / f"seed-{seed}" / f"{name}.safetensors"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()


def seed_of_model(name: str) -> int:
    """Return the seed of a saved model by its path in the run folder; −1 if it is not one."""
    folders = name.split("/")
    seed = folders[2].removeprefix("seed-") if len(folders) == 4 else ""
    return int(seed) if seed.isdecimal() else -1
