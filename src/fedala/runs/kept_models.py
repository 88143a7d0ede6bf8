"""Models that a method keeps until it ends: each run's best, and the last of runs that stop early.

They stay on the device, as the cohorts tested them, until a checkpoint is written or the method
ends. Their files are named after their round and never changed, so that a checkpoint can refer to
them like to the states of clients.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedala.io import files
from fedala.runs.models import pack_model
from fedala.simulation.client_states import File
from fedala.simulation.evaluated_models import RunModels

BEST, LAST = "best", "last"
Key = tuple[str, int]
"""The kind of models, and the run."""


@dataclass(frozen=True)
class KeptFiles:
    """The files of a run's models of one round."""

    round: int
    files: dict[int | None, File]
    """By client; None: the global model."""


class KeptModels:
    """The models that one method keeps."""

    def __init__(self, folder: Path | None = None, *, writes_at_once: bool = False) -> None:
        """Files go to `folder`; without one, everything stays in memory.

        With `writes_at_once`, models go to their files as soon as they are kept.
        """
        self._folder, self._writes_at_once = folder, writes_at_once and folder is not None
        self._models: dict[Key, tuple[int, RunModels]] = {}
        self._files: dict[Key, KeptFiles] = {}
        self._checkpointed: set[str] = set()  # files that checkpoints refer to

    def keep(self, kind: str, run: int, round: int, models: RunModels) -> None:
        """Keep the models of a run's evaluation, in place of earlier ones."""
        replaced = self._files.pop((kind, run), None)
        self._models[kind, run] = round, models
        if self._writes_at_once:
            self.write()
        if replaced:
            self._remove({file.name for file in replaced.files.values()})

    def write(self) -> dict[Key, KeptFiles]:
        """Write the models that have no files yet; return the files of all."""
        for (kind, run), (round, models) in self._models.items():
            self._files[kind, run] = self._write(kind, run, round, models)
        self._models.clear()
        return dict(self._files)

    def hold(self, names: Collection[str]) -> None:
        """Keep the files that checkpoints refer to, and remove those that nobody needs any more."""
        released, self._checkpointed = self._checkpointed - set(names), set(names)
        live = {file.name for kept in self._files.values() for file in kept.files.values()}
        self._remove(released - live)

    def adopt(self, found: Mapping[Key, KeptFiles], kinds: Collection[str]) -> None:
        """Take over the files of some kinds from a checkpoint."""
        self._files = {key: kept for key, kept in found.items() if key[0] in kinds}
        self._checkpointed = {file.name for kept in found.values() for file in kept.files.values()}

    def has(self, kind: str, run: int) -> bool:
        """Tell whether a run has such models."""
        return (kind, run) in self._models or (kind, run) in self._files

    def list_models(self) -> Iterator[tuple[str, RunModels]]:
        """Yield the models that are in memory, and their kind."""
        for (kind, _), (_, models) in self._models.items():
            yield kind, models

    def list_files(self) -> Iterator[tuple[str, int, int | None, Path, str]]:
        """Yield kind, run, client, path and digest of each model that is in a file."""
        for (kind, run), kept in self._files.items():
            for client, file in kept.files.items():
                yield kind, run, client, self.folder / file.name, file.digest

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "files were asked for, and there is no folder"
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _write(self, kind: str, run: int, round: int, models: RunModels) -> KeptFiles:
        written: dict[int | None, File] = {}
        initial: File | None = None
        for personal in models:
            if personal.is_initial and initial:  # clients that never took part share one file
                written[personal.client] = initial
                continue
            client = "global" if personal.client is None else personal.client
            data = pack_model(personal.model)
            file = File(f"{kind}-{run}-{client}-{round}.safetensors", files.sha256(data))
            files.write_file(self.folder / file.name, data)
            written[personal.client] = file
            if personal.is_initial:
                initial = file
        return KeptFiles(round, written)

    def _remove(self, names: Collection[str]) -> None:
        for name in set(names) - self._checkpointed:
            (self.folder / name).unlink(missing_ok=True)
