"""Checkpoints: the state of a simulation between two rounds, so that it can be resumed exactly.

A checkpoint is a small manifest that names files and their digests: one for the servers, one for
every client that has a state, and one for every model that the method keeps. Files are never
changed, and the manifest is written last, in one step, so a manifest that exists is complete. The
last two are kept; if the last one is damaged, the one before is used.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.io import files, tensor_files
from fedala.runs.kept_models import BEST, LAST, KeptFiles, KeptModels, Key
from fedala.simulation import Simulation
from fedala.simulation.client_states import NOTHING, File, Lane

CHECKPOINTS_KEPT = 2
LARGEST = 2**28  # bytes of a manifest: a million clients
#: The only names that a manifest can refer to: no path leads out of its folder.
NAME = re.compile(
    r"(server-\d+|\d+-\d+-\d+|(best|last)-\d+-(\d+|global)-\d+)\.safetensors", re.ASCII
)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a manifest."""

    config: str
    """The digest of the options that may not change when a run is resumed, and of the data."""
    round: int
    done: bool
    """Whether the method is finished, with its last evaluation and its models."""
    device: str
    lanes: int | None
    threads: int
    """Lanes and threads as they were, perhaps chosen by default: the same give the same bits."""
    server: File
    clients: dict[Lane, File]
    kept: dict[Key, KeptFiles] = field(default_factory=dict)
    """The models of best evaluations, and of runs that have stopped."""

    def _is_valid(self) -> bool:
        """Tell whether every value is possible: anybody can write a manifest and its checksum."""
        lanes = 1 if self.lanes is None else self.lanes
        limits = [(self.round, 0, 2**31), (lanes, 1, 2**31), (self.threads, 1, 2**10)]
        numbers = list(chain(*self.clients))
        for (_, run), kept in self.kept.items():
            numbers += [run, kept.round, *(client for client in kept.files if client is not None)]
        limits += [(n, 0, 2**31) for n in numbers]
        kinds = {kind for kind, _ in self.kept}
        return (
            type(self.done) is bool
            and kinds <= {BEST, LAST}
            and all(type(file.digest) is str for file in self.list_files())
            and all(type(n) is int and least <= n < most for n, least, most in limits)
        )

    @property
    def names(self) -> set[str]:
        return {file.name for file in self.list_files()}

    def list_files(self) -> list[File]:
        """Return the files that belong to the checkpoint."""
        kept = [file for one in self.kept.values() for file in one.files.values()]
        every = (self.server, *self.clients.values(), *kept)
        return [file for file in every if file != NOTHING]

    def pack(self) -> bytes:
        values = {"version": files.VERSION, **asdict(self)}
        values["clients"] = [[*lane, *file] for lane, file in self.clients.items()]
        values["kept"] = [
            [kind, run, one.round, client, *file]
            for (kind, run), one in self.kept.items()
            for client, file in one.files.items()
        ]
        return files.pack_checksummed("checkpoint", values)

    @classmethod
    def unpack(cls, path: Path) -> "Checkpoint":
        try:
            values = files.read_checksummed(path, "checkpoint", LARGEST)
        except FileNotFoundError as error:
            raise files.DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
        with files.refuse_damage(path):
            version = values.pop("version")
            if version != files.VERSION:
                raise ValueError(
                    f"it is of version {version}, and this program reads version {files.VERSION}"
                )
            values["server"] = File(*values["server"])
            values["clients"] = {
                (run, client): File(*file) for run, client, *file in values["clients"]
            }
            values["kept"] = _read_kept(values.get("kept", []))
            found = cls(**values)
            if not found._is_valid():
                raise ValueError("it has values that no run writes")
            if strange := [name for name in found.names if not NAME.fullmatch(name)]:
                raise ValueError(f"it refers to {strange[0]!r}")
            return found


def _read_kept(entries: list[list[Any]]) -> dict[Key, KeptFiles]:
    kept: dict[Key, KeptFiles] = {}
    for kind, run, round, client, *file in entries:
        one = kept.setdefault((kind, run), KeptFiles(round, {}))
        one.files[client] = File(*file)
        if one.round != round or one.files[client] == NOTHING:
            raise ValueError(f"its {kind} models are not those of one round")
    return kept


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints of a method that are on the disk."""

    intact: list[Checkpoint] = field(default_factory=list)
    """The newest first."""
    damaged: list[str] = field(default_factory=list)
    """Names of manifests that cannot be used."""

    @property
    def newest(self) -> Checkpoint | None:
        return self.intact[0] if self.intact else None


class Checkpoints:
    """The checkpoints of one method of a run."""

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        every: int | None = None,
        size: int = 0,
        on_message: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Write checkpoints into a folder, or find them there.

        `config` is the digest of what the run is. A checkpoint is due every `every` rounds: never
        if that is 0, seldom by default. `size` is a guess of its bytes.
        """
        self.folder, self.config, self.every, self.on_message = folder, config, every, on_message
        self.bytes = self.written = 0
        self.seconds = 0.0
        self._checkpoints: list[Checkpoint] = []  # the newest first
        self._last_end = time.monotonic()
        self._last_seconds = size / 2**27  # before the first: 128 MiB a second

    @property
    def round(self) -> int | None:
        """The round of the newest checkpoint; None if there is none."""
        return self._checkpoints[0].round if self._checkpoints else None

    def is_due(self, round: int) -> bool:
        """Tell whether to write one now: by default, if that takes less than 1 % of the time.

        Two are at least ten seconds apart.
        """
        if self.every is not None:
            return self.every > 0 and round % self.every == 0
        return time.monotonic() - self._last_end > max(10, 100 * self._last_seconds)

    def write(self, simulation: Simulation, kept: KeptModels | None = None) -> None:
        """Write the state of a simulation, and the models that the method keeps.

        If that fails, the checkpoints before are still good.
        """
        kept = kept or KeptModels()
        if self._checkpoints and self._checkpoints[0].round == simulation.round:
            return
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        clients = simulation.clients.write()
        server = f"server-{simulation.round}.safetensors"
        digest = tensor_files.save(self.folder / server, simulation.state())
        new = Checkpoint(
            config=self.config,
            round=simulation.round,
            done=False,
            device=simulation.task.device.type,
            lanes=simulation.transport.lanes,
            threads=simulation.transport.threads,
            server=File(server, digest),
            clients=clients,
            kept=kept.write(),
        )
        self._write_manifest(new)
        self._drop_manifests_except([new, *self._checkpoints][:CHECKPOINTS_KEPT])
        referenced = self._referenced
        for path in self.folder.glob("server-*.safetensors"):
            if path.name not in referenced:
                path.unlink()
        simulation.clients.hold(referenced)
        kept.hold(referenced)
        self.bytes = sum((self.folder / name).stat().st_size for name in new.names)
        self._last_end = time.monotonic()
        self._last_seconds = self._last_end - began
        self.seconds += self._last_seconds
        self.written += 1

    def finish(self, *, keep: bool) -> None:
        """Mark the method as finished. Without `keep`, remove the files of its last checkpoint."""
        if not self._checkpoints:
            return
        last = replace(self._checkpoints[0], done=True)
        last = last if keep else replace(last, server=NOTHING, clients={}, kept={})
        self._write_manifest(last)
        self._drop_manifests_except([last])
        self._remove_unreferenced()

    def _write_manifest(self, checkpoint: Checkpoint) -> None:
        files.write_file(self._manifest(checkpoint), checkpoint.pack())

    def _drop_manifests_except(self, kept: list[Checkpoint]) -> None:
        """Remove the other manifests. Their files go later, so that no manifest lacks its files."""
        paths = {self._manifest(checkpoint) for checkpoint in kept}
        for path in self._manifests():
            if path not in paths:
                path.unlink()
        self._checkpoints = kept

    @property
    def _referenced(self) -> set[str]:
        """The names of the files that a checkpoint refers to."""
        return set[str]().union(*(checkpoint.names for checkpoint in self._checkpoints))

    def find(self) -> FoundCheckpoints:
        """Look for checkpoints and change nothing. If all of them are damaged, that is an error."""
        found = FoundCheckpoints()
        damage = ""
        for path in self._manifests():
            try:
                checkpoint = Checkpoint.unpack(path)
                self._check_identity(checkpoint, path)
                if found.newest is None:  # of older ones, only the names of their files matter
                    self._check_files(checkpoint)
            except files.DamagedFile as error:
                damage = str(error)
                if found.newest is None:
                    self.on_message(f"{damage} Looking for an earlier checkpoint.")
                found.damaged.append(path.name)
            else:
                found.intact.append(checkpoint)
        if found.newest is None and (damage or any(self.folder.glob("*.damaged"))):
            raise files.DamagedFile(
                f"All checkpoints in {self.folder} are damaged, so nothing can be resumed. "
                f"{damage}".strip()
            )
        return found

    def _check_identity(self, checkpoint: Checkpoint, path: Path) -> None:
        if checkpoint.config != self.config:  # that is a mistake of the user's, not damage
            raise UserError(
                f"{path} belongs to a run with another configuration: "
                "its options or its data are not the ones given now."
            )

    def _check_files(self, checkpoint: Checkpoint) -> None:
        for file in dict.fromkeys(checkpoint.list_files()):
            files.read_verified(self.folder / file.name, file.digest)

    def continue_from(self, found: FoundCheckpoints) -> None:
        """Rename damaged manifests, and write further checkpoints after the intact ones."""
        for name in found.damaged:
            path = self.folder / name
            path.rename(path.with_suffix(".damaged"))
        self._checkpoints = list(found.intact)
        self._remove_unreferenced()

    def discard(self) -> None:
        """Remove the client states that a run without checkpoints has written here."""
        self._remove_unreferenced()
        for folder in (self.folder, self.folder.parent):
            with suppress(OSError):  # not there, or not empty
                folder.rmdir()

    def restore(
        self, checkpoint: Checkpoint, simulation: Simulation, *, restores_lanes: bool = True
    ) -> None:
        """Give a simulation the state of a checkpoint.

        On the same kind of device, it gets the lanes and threads of the checkpoint, too.
        """
        path = self.folder / checkpoint.server.name
        state, _ = tensor_files.load(path, checkpoint.server.digest)
        try:
            simulation.restore(checkpoint.round, state)
            if any(run >= len(simulation.seeds) for _, run in checkpoint.kept):
                raise ValueError("another run's models")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise files.DamagedFile(
                f"{path} does not fit this run: it is a checkpoint of something else."
            ) from None
        simulation.clients.adopt(checkpoint.clients)
        simulation.clients.hold(self._referenced)
        if restores_lanes and simulation.task.device.type == checkpoint.device:
            simulation.transport.set_width(checkpoint.lanes, checkpoint.threads)

    def _manifest(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{checkpoint.round:07d}.json"

    def _manifests(self) -> list[Path]:
        """Return the manifests on the disk, the newest first."""
        return sorted(self.folder.glob("[0-9]*.json"), reverse=True)

    def _remove_unreferenced(self) -> None:
        """Remove what a fault left: files that no manifest refers to, and half-written ones."""
        referenced = self._referenced
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob(".*.new")]:
            if path.name not in referenced:
                path.unlink()
