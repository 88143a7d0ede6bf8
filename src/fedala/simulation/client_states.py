"""What every client keeps between rounds, wherever there is room for it.

If everybody takes part in every round, the same cohorts come again and again, and their states
stay stacked on the device. If few of many take part, the states of absent clients move out of the
way: to the host's memory and, beyond a budget, to files. A client has a state once it has taken
part.

A file is never changed: a new state gets a new one. So a checkpoint is a list of files, and writing
one costs what has changed since the last. What a round has replaced is kept until the round is
over, so that it can be undone.
"""

import glob
import os
import platform
import shutil
import tempfile
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fedala.io import files, tensor_files
from fedala.io.untrusted import free_memory
from fedala.lanes.trees import State, count_bytes, count_lanes, join, matches, take, tree_map

Lane = tuple[int, int]
"""A run's position among the seeds, and a client."""


class File(NamedTuple):
    """A state's file in the folder, and its digest."""

    name: str
    digest: str


NOTHING = File("", "")
"""The file of a state that holds nothing: it does not exist."""


@dataclass
class StateLocation:
    """Where a client's state is: in a lane of a stack in memory, in a file, or both."""

    stack: State | None = None
    lane: int = 0
    file: File | None = None


class States(Mapping[Lane, State]):
    """The states of clients, by run and client, on this machine or elsewhere."""

    @abstractmethod
    def settle(self) -> None:
        """End a round: what it has replaced is not needed any more."""

    @abstractmethod
    def undo(self) -> None:
        """Give every client the state that it had before the round."""

    @abstractmethod
    def write(self) -> dict[Lane, File]:
        """Write the states that have no file yet; return the files of all."""

    @abstractmethod
    def hold(self, names: Collection[str]) -> None:
        """Keep the files that checkpoints refer to, and drop those that nobody needs any more."""

    @abstractmethod
    def adopt(self, found: Mapping[Lane, File], serial: int = 0) -> None:
        """Take over states from their files, as `write` returned them.

        New files get numbers from `serial` on, or higher ones.
        """


class ClientStates(States):
    """The states of clients in this process."""

    def __init__(
        self,
        device: torch.device,
        *,
        everybody: bool,
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """With `everybody`, states stay on the device.

        Otherwise `budget` bounds the bytes of host memory that they take, and the rest is in files:
        those of `folder`, which outlive the process, or temporary ones.
        """
        self.device, self.everybody = device, everybody
        self.budget = free_memory() // 2 if budget is None else budget
        self.bytes = 0
        self._locations: dict[Lane, StateLocation] = {}
        self._resident: OrderedDict[Lane, int] = OrderedDict()  # bytes in host memory, by age
        self._before: dict[Lane, StateLocation | None] = {}  # what this round has replaced
        self._folder, self._is_lasting = folder, folder is not None
        self._checkpointed: set[str] = set()  # files that checkpoints refer to
        self._adopted: set[File] = set()  # files that another process has written
        self._serial = 0
        self._lock = threading.RLock()  # cohorts in threads load states while others save theirs

    def gather(self, lanes: Sequence[Lane], init: Callable[[Lane], State]) -> State:
        """Return the states of a cohort's lanes, stacked on the device.

        `init` makes the state of a client that has none.
        """
        with self._lock:
            stack = self._find_stack(lanes) if self.everybody else None
            if stack is not None:
                return stack
            own = [self._load(lane, init) if lane in self else init(lane) for lane in lanes]
        stacked: State = join([tree_map(lambda t: t.to(self.device), state) for state in own])
        return stacked

    def _load(self, lane: Lane, init: Callable[[Lane], State]) -> State:
        """Return a client's state. One from another process must be the state of such a client."""
        state, file = self[lane], self._locations[lane].file
        if file in self._adopted and not matches(state, init(lane)):
            raise files.DamagedFile(
                f"{self.folder / file.name} does not fit this run: it is the state of another one."
            )
        return state

    def _find_stack(self, lanes: Sequence[Lane]) -> State | None:
        """Return the stack that holds these lanes, in this order and no others, if there is one."""
        locations = [self._locations.get(lane) for lane in lanes]
        stack = locations[0].stack if locations[0] else None
        if stack is None or count_lanes(stack) not in (0, len(lanes)):
            return None
        for position, location in enumerate(locations):
            if not location or location.stack is not stack or location.lane != position:
                return None
        return stack

    def scatter(self, lanes: Sequence[Lane], state: State) -> None:
        """Keep the states of a cohort's lanes."""
        with self._lock:
            if self.everybody:
                for position, lane in enumerate(lanes):
                    self._replace(lane, StateLocation(state, position))
                return
            host = tree_map(lambda t: t.cpu(), state)
            for position, lane in enumerate(lanes):
                # A copy: a view would keep the whole cohort's memory alive.
                own = tree_map(torch.clone, take(host, slice(position, position + 1)))
                self._replace(lane, StateLocation(own))
                self._resident[lane] = count_bytes(own)
                self.bytes += self._resident[lane]
                while self.bytes > self.budget and len(self._resident) > 1:
                    self._spill(next(iter(self._resident)))

    def settle(self) -> None:
        before, self._before = self._before, {}
        for location in before.values():
            if location and location.file:
                self._drop(location.file)

    def undo(self) -> None:
        for lane, location in self._before.items():
            replaced = self._locations.pop(lane)
            self.bytes -= self._resident.pop(lane, 0)
            if replaced.file:
                self._drop(replaced.file)
            if location:
                self._locations[lane] = location
                if location.stack is not None and not self.everybody:
                    self._resident[lane] = count_bytes(location.stack)
                    self.bytes += self._resident[lane]
        self._before = {}

    def _replace(self, lane: Lane, location: StateLocation) -> None:
        before = self._locations.pop(lane, None)
        self.bytes -= self._resident.pop(lane, 0)
        if lane not in self._before:
            self._before[lane] = before
        elif before and before.file:
            self._drop(before.file)
        self._locations[lane] = location

    # --- files ---------------------------------------------------------------------------------

    def write(self) -> dict[Lane, File]:
        found: dict[Lane, File] = {}
        on_host: dict[int, State] = {}
        for lane, location in self._locations.items():
            if location.file is None:
                stack = location.stack or {}
                if id(stack) not in on_host:
                    on_host[id(stack)] = tree_map(lambda t: t.cpu(), stack)
                own = slice(location.lane, location.lane + 1)
                location.file = self._save(lane, take(on_host[id(stack)], own))
            found[lane] = location.file
        return found

    def hold(self, names: Collection[str]) -> None:
        released, self._checkpointed = self._checkpointed - set(names), set(names)
        live = {location.file.name for location in self._locations.values() if location.file}
        for name in released - live:
            self._drop(File(name, ""))

    def adopt(self, found: Mapping[Lane, File], serial: int = 0) -> None:
        self._adopted = set(found.values()) - {NOTHING}
        self._locations = {
            lane: StateLocation({} if file == NOTHING else None, file=file)
            for lane, file in found.items()
        }
        self._serial = max(serial, next_serial(found))

    @property
    def folder(self) -> Path:
        """Return the folder of the files; it is made when it is first used."""
        if self._folder is None:
            self._folder = _make_temporary_folder()
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _save(self, lane: Lane, state: State) -> File:
        if count_lanes(state) == 0:
            return NOTHING
        name = f"{lane[0]}-{lane[1]}-{self._serial}.safetensors"
        self._serial += 1
        return File(name, tensor_files.save(self.folder / name, state, durable=self._is_lasting))

    def _spill(self, lane: Lane) -> None:
        """Move a state from memory to its file."""
        location = self._locations[lane]
        if location.file is None:
            location.file = self._save(lane, self[lane])
        location.stack = None
        self.bytes -= self._resident.pop(lane)

    def _drop(self, file: File) -> None:
        if file != NOTHING and file.name not in self._checkpointed:
            (self.folder / file.name).unlink(missing_ok=True)

    # --- as a mapping --------------------------------------------------------------------------

    def __getitem__(self, lane: Lane) -> State:
        location = self._locations[lane]
        if location.stack is not None and not self.everybody:
            return dict(location.stack)  # a stack of its own
        if location.stack is not None:
            return dict(take(location.stack, slice(location.lane, location.lane + 1)))
        if location.file is None:
            raise KeyError(lane)
        return tensor_files.load(self.folder / location.file.name, location.file.digest)[0]

    def __contains__(self, lane: object) -> bool:
        return lane in self._locations

    def __iter__(self) -> Iterator[Lane]:
        yield from self._locations

    def __len__(self) -> int:
        return len(self._locations)


def next_serial(found: Mapping[Lane, File]) -> int:
    """Return a number that is higher than those of all these files."""
    names = [file.name for file in found.values() if file != NOTHING]
    return 1 + max((int(name.split(".")[0].split("-")[2]) for name in names), default=0)


def _make_temporary_folder() -> Path:
    """Make a folder for states, and remove those that killed processes of this machine left."""
    prefix = f"fedala-clients-{platform.node()}-"
    for path in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if os.name == "posix" and pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
