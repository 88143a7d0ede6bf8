"""What every client keeps between rounds, wherever there is room for it.

Where everybody takes part in every round, the same cohorts come again and again, and their state stays stacked on the
device as it is. Where few of many take part, the state of those who do not is out of the way: in the host's memory
and, beyond a budget, in files. A client's state exists once it has taken part.

A file is never changed: a new state gets a new one. So a checkpoint is a list of files, and writing one costs what has
changed since the last. What a round has replaced is kept until the round is settled, so that it can be undone.
"""

import glob
import os
import platform
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fedala.io import files, tensor_files
from fedala.io.untrusted import free_memory
from fedala.lanes.trees import fits, join, leaves, take, tree_map
from fedala.methods import State

Lane = tuple[int, int]
"""A run's position among the seeds, and a client."""


class File(NamedTuple):
    """A state's file in the folder, and its digest."""

    name: str
    digest: str


NOTHING = File("", "")
"""The file of a state that holds nothing: there is none."""


@dataclass
class Kept:
    """Where a client's state is: at some place of a stack in memory, in a file, or both."""

    stack: State | None = None
    place: int = 0
    file: File | None = None


class ClientStates(Mapping[Lane, State]):
    """The states of clients, by lane."""

    def __init__(
        self,
        device: torch.device,
        *,
        everybody: bool,
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """With `everybody`, states stay on the device; otherwise `budget` bounds the bytes of host memory that they take, and
        the rest is in files: those of `folder`, which outlive the process, or temporary ones."""
        self.device, self.everybody = device, everybody
        self.budget = free_memory() // 2 if budget is None else budget
        self.bytes = 0
        self._kept: dict[Lane, Kept] = {}
        self._resident: OrderedDict[Lane, int] = (
            OrderedDict()
        )  # in host memory, by age, with their bytes
        self._before: dict[Lane, Kept | None] = {}  # what this round has replaced
        self._folder, self._lasting = folder, folder is not None
        self._held: set[str] = set()  # files that checkpoints refer to
        self._adopted: set[File] = set()  # files that another process has written
        self._serial = 0
        self._lock = (
            threading.RLock()
        )  # cohorts in threads come for their states while others bring theirs back

    def gather(self, lanes: Sequence[Lane], fresh: Callable[[Lane], State]) -> State:
        """The states of a cohort's lanes, stacked on the device; `fresh` makes that of a client that is new."""
        with self._lock:
            stack = self._stack_of(lanes) if self.everybody else None
            if stack is not None:
                return stack
            own = [self._checked(lane, fresh) if lane in self else fresh(lane) for lane in lanes]
        stacked: State = join([tree_map(lambda t: t.to(self.device), state) for state in own])
        return stacked

    def _checked(self, lane: Lane, fresh: Callable[[Lane], State]) -> State:
        """A client's state; one that was adopted has to be the state of such a client."""
        state, file = self[lane], self._kept[lane].file
        if file in self._adopted and not fits(state, fresh(lane)):
            raise files.DamagedFile(
                f"{self.folder / file.name} does not fit this run: it is the state of something else."
            )
        return state

    def _stack_of(self, lanes: Sequence[Lane]) -> State | None:
        """The stack that holds just these lanes, if there is one."""
        kept = [self._kept.get(lane) for lane in lanes]
        stack = kept[0].stack if kept[0] else None
        whole = stack is not None and _length(stack) == len(lanes)
        return (
            stack
            if whole and all(k and k.stack is stack and k.place == i for i, k in enumerate(kept))
            else None
        )

    def scatter(self, lanes: Sequence[Lane], state: State) -> None:
        """Keeps the states of a cohort's lanes."""
        with self._lock:
            if self.everybody:
                for place, lane in enumerate(lanes):
                    self._keep(lane, Kept(state, place))
                return
            host = tree_map(lambda t: t.cpu(), state)
            for place, lane in enumerate(lanes):
                # A copy: a view would keep the whole cohort's memory alive when its lanes go different ways.
                own = tree_map(torch.clone, take(host, slice(place, place + 1)))
                self._keep(lane, Kept(own))
                self._resident[lane] = size(own)
                self.bytes += self._resident[lane]
                while self.bytes > self.budget and len(self._resident) > 1:
                    self._spill(next(iter(self._resident)))

    def settle(self) -> None:
        """The round is over: what it has replaced is not needed any more."""
        before, self._before = self._before, {}
        for kept in before.values():
            if kept and kept.file:
                self._drop(kept.file)

    def undo(self) -> None:
        """The round begins anew: every client has the state that it had before."""
        for lane, kept in self._before.items():
            replaced = self._kept.pop(lane)
            self.bytes -= self._resident.pop(lane, 0)
            if replaced.file:
                self._drop(replaced.file)
            if kept:
                self._kept[lane] = kept
                if kept.stack is not None and not self.everybody:
                    self._resident[lane] = size(kept.stack)
                    self.bytes += self._resident[lane]
        self._before = {}

    def _keep(self, lane: Lane, kept: Kept) -> None:
        before = self._kept.pop(lane, None)
        self.bytes -= self._resident.pop(lane, 0)
        if lane not in self._before:
            self._before[lane] = before
        elif before and before.file:
            self._drop(before.file)
        self._kept[lane] = kept

    # --- files -----------------------------------------------------------------------------------------------------

    def write(self) -> dict[Lane, File]:
        """Every client's state in a file: those that have none yet are written. Returns what there is."""
        found: dict[Lane, File] = {}
        on_host: dict[int, State] = {}
        for lane, kept in self._kept.items():
            if kept.file is None:
                stack = kept.stack or {}
                if id(stack) not in on_host:
                    on_host[id(stack)] = tree_map(lambda t: t.cpu(), stack)
                kept.file = self._save(
                    lane, take(on_host[id(stack)], slice(kept.place, kept.place + 1))
                )
            found[lane] = kept.file
        return found

    def hold(self, names: Collection[str]) -> None:
        """Keeps these files, to which checkpoints refer, and drops those that nobody needs any more."""
        released, self._held = self._held - set(names), set(names)
        live = {kept.file.name for kept in self._kept.values() if kept.file}
        for name in released - live:
            self._drop(File(name, ""))

    def adopt(self, found: Mapping[Lane, File]) -> None:
        """Takes up states from their files, as `write` returned them."""
        self._adopted = set(found.values()) - {NOTHING}
        self._kept = {
            lane: Kept({} if file == NOTHING else None, file=file) for lane, file in found.items()
        }
        serials = [
            int(file.name.split(".")[0].split("-")[2]) for file in found.values() if file != NOTHING
        ]
        self._serial = max(serials, default=0) + 1

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = _make_temporary()
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _save(self, lane: Lane, state: State) -> File:
        if _length(state) is None:
            return NOTHING
        name = f"{lane[0]}-{lane[1]}-{self._serial}.safetensors"
        self._serial += 1
        return File(name, tensor_files.save(self.folder / name, state, durable=self._lasting))

    def _spill(self, lane: Lane) -> None:
        kept = self._kept[lane]
        if kept.file is None:
            kept.file = self._save(lane, self[lane])
        kept.stack = None
        self.bytes -= self._resident.pop(lane)

    def _drop(self, file: File) -> None:
        if file != NOTHING and file.name not in self._held:
            (self.folder / file.name).unlink(missing_ok=True)

    # --- as a mapping ----------------------------------------------------------------------------------------------

    def __getitem__(self, lane: Lane) -> State:
        kept = self._kept[lane]
        if kept.stack is not None:
            return dict(take(kept.stack, slice(kept.place, kept.place + 1)))
        if kept.file is None:
            raise KeyError(lane)
        return tensor_files.load(self.folder / kept.file.name, kept.file.digest)[0]

    def __contains__(self, lane: object) -> bool:
        return lane in self._kept

    def __iter__(self) -> Iterator[Lane]:
        yield from self._kept

    def __len__(self) -> int:
        return len(self._kept)


def _make_temporary() -> Path:
    """Make a temporary folder for states, and remove those that killed processes of this machine have left."""
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


def size(state: State) -> int:
    """The bytes of a state's tensors."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(state))


def _length(stack: State) -> int | None:
    """The number of lanes; None for a state of nothing, which is as good for any number."""
    return next((len(leaf) for _, leaf in leaves(stack)), None)
