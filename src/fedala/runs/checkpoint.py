"""Checkpoints: everything a simulation is between two rounds, so that it goes on as if it had never stopped.

A checkpoint is a small manifest that names files and their digests: one for the servers and one for every client that
has a state. Files are never changed, so a manifest that is there is whole: it is written last, in one step. The last two
are kept; if the last one is damaged, the one before serves.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

from fedala.errors import UserError
from fedala.io import files, tensor_files
from fedala.simulation.client_states import NOTHING, File, Lane
from fedala.simulation.rounds import Simulation

KEPT = 2
LARGEST = 2**28  # bytes of a manifest: a million clients
#: The only names that a manifest can refer to: no path leads out of its folder.
NAME = re.compile(r"(server-\d+|\d+-\d+-\d+)\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says."""

    config: str
    """The digest of everything that may not change when a run is resumed."""
    round: int
    done: bool
    """Whether the method is finished: its last evaluation, too, and its models."""
    device: str
    lanes: int | None
    threads: int
    """What was chosen, perhaps by itself: the same again gives the same bits."""
    server: File
    clients: dict[Lane, File]

    def _sound(self) -> bool:
        """Whether every value is of its kind: a manifest may come from anywhere, and its checksum along with it."""
        lanes = 1 if self.lanes is None else self.lanes
        limits = [(self.round, 0, 2**31), (lanes, 1, 2**31), (self.threads, 1, 2**10)]
        limits += [(n, 0, 2**31) for n in chain(*self.clients)]
        return type(self.done) is bool and all(
            type(n) is int and least <= n < most for n, least, most in limits
        )

    @property
    def names(self) -> set[str]:
        return {file.name for file in (self.server, *self.clients.values()) if file != NOTHING}

    def pack(self) -> bytes:
        clients = [[*lane, *file] for lane, file in self.clients.items()]
        return files.pack_checksummed(
            "checkpoint", {"version": files.VERSION, **asdict(self), "clients": clients}
        )

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
            found = cls(**values)
            if not found._sound():
                raise ValueError("it says what no run has said")
            if strange := [name for name in found.names if not NAME.fullmatch(name)]:
                raise ValueError(f"it refers to {strange[0]!r}")
            return found


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints of a method that are on the disk."""

    whole: list[Checkpoint] = field(default_factory=list)
    """The newest first."""
    damaged: list[str] = field(default_factory=list)
    """Names of manifests that cannot be used."""

    @property
    def newest(self) -> Checkpoint | None:
        return self.whole[0] if self.whole else None


class Checkpoints:
    """The checkpoints of one method of a run."""

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        every: int | None = None,
        size: int = 0,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`config` is the digest of what the run is; a checkpoint is due `every` so many rounds, never if that is 0.

        `size` is how many bytes one will have, about.
        """
        self.folder, self.config, self.every, self.say = folder, config, every, say
        self.bytes = self.written = 0
        self.seconds = 0.0
        self._kept: list[Checkpoint] = []  # the newest first
        self._ended, self._took = (
            time.monotonic(),
            size / 2**27,
        )  # a guess for the first, at 128 MiB a second

    @property
    def round(self) -> int | None:
        """The round of the newest checkpoint; None if there is none."""
        return self._kept[0].round if self._kept else None

    def due(self, round: int) -> bool:
        """By default, so seldom that checkpoints take less than 1 % of the time, and not within ten seconds."""
        if self.every is not None:
            return self.every > 0 and round % self.every == 0
        return time.monotonic() - self._ended > max(10, 100 * self._took)

    def write(self, simulation: Simulation) -> None:
        """Keeps what the simulation is now. If anything fails, what was kept before is still good."""
        if self._kept and self._kept[0].round == simulation.round:
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
            lanes=simulation.lanes,
            threads=simulation.threads,
            server=File(server, digest),
            clients=clients,
        )
        self._note(new)
        self._keep([new, *self._kept][:KEPT])
        needed = self._needed
        for path in self.folder.glob("server-*.safetensors"):
            if path.name not in needed:
                path.unlink()
        simulation.clients.hold(needed)
        self.bytes = sum((self.folder / name).stat().st_size for name in new.names)
        self._ended = time.monotonic()
        self._took = self._ended - began
        self.seconds += self._took
        self.written += 1

    def finish(self, *, keep: bool) -> None:
        """Notes that the method is done; without `keep`, its files are not needed any more."""
        if not self._kept:
            return
        last = replace(self._kept[0], done=True)
        last = last if keep else replace(last, server=NOTHING, clients={})
        self._note(last)
        self._keep([last])
        self._sweep()

    def _note(self, checkpoint: Checkpoint) -> None:
        files.write_file(self._manifest(checkpoint), checkpoint.pack())

    def _keep(self, kept: list[Checkpoint]) -> None:
        """Forgets the others: their manifests go first, so that none is there whose files are not."""
        paths = {self._manifest(checkpoint) for checkpoint in kept}
        for path in self._manifests():
            if path not in paths:
                path.unlink()
        self._kept = kept

    @property
    def _needed(self) -> set[str]:
        """The files that a checkpoint refers to."""
        return set[str]().union(*(checkpoint.names for checkpoint in self._kept))

    def find(self) -> FoundCheckpoints:
        """Look for checkpoints and change nothing. Damaged ones are named; if there is no other, that is an error."""
        found = FoundCheckpoints()
        damage = ""
        for path in self._manifests():
            try:
                checkpoint = Checkpoint.unpack(path)
                self._check_identity(checkpoint, path)
                if (
                    found.newest is None
                ):  # of the older ones it is enough that they say which files are theirs
                    self._check_files(checkpoint)
            except files.DamagedFile as error:
                damage = str(error)
                if found.newest is None:
                    self.say(f"{damage} Looking for an earlier checkpoint.")
                found.damaged.append(path.name)
            else:
                found.whole.append(checkpoint)
        if found.newest is None and (damage or any(self.folder.glob("*.damaged"))):
            raise files.DamagedFile(
                f"No checkpoint in {self.folder} is whole, so nothing can be resumed. {damage}".strip()
            )
        return found

    def _check_identity(self, checkpoint: Checkpoint, path: Path) -> None:
        if checkpoint.config != self.config:  # that is a mistake of the user's, not damage
            raise UserError(
                f"{path} belongs to a run with another configuration: its options or its data are not the ones given now."
            )

    def _check_files(self, checkpoint: Checkpoint) -> None:
        for file in (checkpoint.server, *checkpoint.clients.values()):
            if file != NOTHING:
                files.read_verified(self.folder / file.name, file.digest)

    def take_up(self, found: FoundCheckpoints) -> None:
        """Set damaged manifests aside, and go on from the others."""
        for name in found.damaged:
            path = self.folder / name
            path.rename(path.with_suffix(".damaged"))
        self._kept = list(found.whole)
        self._sweep()

    def discard(self) -> None:
        """Remove the client states that a run without checkpoints has put here."""
        self._sweep()
        for folder in (self.folder, self.folder.parent):
            with suppress(OSError):  # not there, or not empty
                folder.rmdir()

    def restore(
        self, checkpoint: Checkpoint, simulation: Simulation, *, anew: bool = False
    ) -> None:
        """Brings the simulation to where it was; with `anew`, not to the lanes and threads that it had."""
        path = self.folder / checkpoint.server.name
        state, _ = tensor_files.load(path, checkpoint.server.digest)
        try:
            simulation.restore(checkpoint.round, state)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise files.DamagedFile(
                f"{path} does not fit this run: it is a checkpoint of something else."
            ) from None
        simulation.clients.adopt(checkpoint.clients)
        simulation.clients.hold(self._needed)
        if simulation.task.device.type == checkpoint.device and not anew:
            simulation.lanes, simulation.threads = checkpoint.lanes, checkpoint.threads

    def _manifest(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{checkpoint.round:07d}.json"

    def _manifests(self) -> list[Path]:
        """The newest first."""
        return sorted(self.folder.glob("[0-9]*.json"), reverse=True)

    def _sweep(self) -> None:
        """Removes what a fault has left: files that no manifest refers to, and those that were never finished."""
        needed = self._needed
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob(".*.new")]:
            if path.name not in needed:
                path.unlink()
