"""Checkpoints: everything a simulation is between two rounds, so that it goes on as if it had never stopped.

A checkpoint is a small manifest that names files and their digests: one for the servers and one for every client that
has a state. Files are never changed, so a manifest that is there is whole: it is written last, in one step. The last two
are kept; if the last one is damaged, the one before serves.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from fedala import files
from fedala.clients import NOTHING, File, Lane
from fedala.errors import UserError
from fedala.inputs import read
from fedala.simulation import Simulation

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
        return type(self.done) is bool and all(type(n) is int and least <= n < most for n, least, most in limits)

    @property
    def names(self) -> set[str]:
        return {file.name for file in (self.server, *self.clients.values()) if file != NOTHING}

    def pack(self) -> bytes:
        clients = [[*lane, *file] for lane, file in self.clients.items()]
        text = json.dumps({"version": files.VERSION, **asdict(self), "clients": clients})
        return json.dumps({"checksum": _digest(text), "checkpoint": text}, indent=1).encode()

    @classmethod
    def unpack(cls, path: Path) -> "Checkpoint":
        try:
            envelope = json.loads(read(path, LARGEST))
            text = envelope["checkpoint"]
            if _digest(text) != envelope["checksum"]:
                raise ValueError("its checksum is wrong")
            values = json.loads(text)
            version = values.pop("version")
            if version != files.VERSION:
                raise ValueError(f"it is of version {version}, and this program reads version {files.VERSION}")
            values["server"] = File(*values["server"])
            values["clients"] = {(run, client): File(*file) for run, client, *file in values["clients"]}
            found = cls(**values)
            if not found._sound():
                raise ValueError("it says what no run has said")
            if strange := [name for name in found.names if not NAME.fullmatch(name)]:
                raise ValueError(f"it refers to {strange[0]!r}")
            return found
        except OSError as error:
            raise files.Damaged(f"{path} cannot be read: {error.strerror}.") from None
        except UserError as error:
            raise files.Damaged(str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise files.Damaged(f"{path} is damaged, or no checkpoint of this program: {error}.") from None


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
        self._ended, self._took = time.monotonic(), size / 2**27  # a guess for the first, at 128 MiB a second

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
        digest = files.save(self.folder / server, simulation.state())
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
        files.replace(self._manifest(checkpoint), checkpoint.pack())

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

    def newest(self) -> Checkpoint | None:
        """The last checkpoint that is whole, or None where there has never been one. Damaged ones are set aside."""
        damage = ""
        for path in self._manifests():
            try:
                found = Checkpoint.unpack(path)
                if found.config != self.config:
                    raise files.Damaged(f"{path} belongs to a run with another configuration.")
                # Of those before the one that serves, it is enough that they say which files are theirs.
                for file in (found.server, *found.clients.values()) if not self._kept else ():
                    if file != NOTHING:
                        files.read(self.folder / file.name, file.digest)
            except files.Damaged as error:
                damage = str(error)
                if not self._kept:
                    self.say(f"{damage} Looking for an earlier checkpoint.")
                path.rename(path.with_suffix(".damaged"))
                continue
            self._kept.append(found)
        if self._kept:
            self._sweep()
            return self._kept[0]
        if damage:
            raise files.Damaged(f"No checkpoint in {self.folder} is whole, so nothing can be resumed. {damage}")
        return None

    def restore(self, checkpoint: Checkpoint, simulation: Simulation, *, anew: bool = False) -> None:
        """Brings the simulation to where it was; with `anew`, not to the lanes and threads that it had."""
        path = self.folder / checkpoint.server.name
        state, _ = files.load(path, checkpoint.server.digest)
        try:
            simulation.restore(checkpoint.round, state)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise files.Damaged(f"{path} does not fit this run: it is a checkpoint of something else.") from None
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
