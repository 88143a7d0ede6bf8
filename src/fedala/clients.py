"""What every client keeps between rounds, wherever there is room for it.

Where everybody takes part in every round, the same cohorts come again and again, and their state stays stacked on the
device as it is. Where few of many take part, the state of those who do not is out of the way: in the host's memory
and, beyond a budget, in files. A client's state exists once it has taken part.
"""

import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedala.inputs import free_memory
from fedala.methods import State
from fedala.trees import join, leaves, take, tree_map

Lane = tuple[int, int]
"""A run's position among the seeds, and a client."""


class ClientStates(Mapping[Lane, State]):
    """The states of clients, by lane. `budget` bounds the bytes of host memory that they take."""

    def __init__(self, device: torch.device, *, everybody: bool, budget: int | None = None) -> None:
        self.device, self.everybody = device, everybody
        self.budget = free_memory() // 2 if budget is None else budget
        self._cohorts: dict[tuple[Lane, ...], State] = {}
        self._memory: OrderedDict[Lane, State] = OrderedDict()
        self._files: dict[Lane, Path] = {}
        self._folder: Path | None = None
        self._shape: State = {}
        self.bytes = 0
        self._places: dict[Lane, tuple[tuple[Lane, ...], int]] = {}
        self._lock = threading.RLock()  # cohorts in threads come for their states while others bring theirs back

    def gather(self, lanes: Sequence[Lane], fresh: Callable[[Lane], State]) -> State:
        """The states of a cohort's lanes, stacked on the device; `fresh` makes that of a client that is new."""
        with self._lock:
            known = self._cohorts.get(tuple(lanes))
            if known is not None:
                return known
            own = [self[lane] if lane in self else fresh(lane) for lane in lanes]
        stacked: State = join([tree_map(lambda t: t.to(self.device), state) for state in own])
        return stacked

    def scatter(self, lanes: Sequence[Lane], state: State) -> None:
        """Keeps the states of a cohort's lanes."""
        with self._lock:
            if self.everybody:
                self._cohorts[tuple(lanes)] = state
                self._places |= {lane: (tuple(lanes), i) for i, lane in enumerate(lanes)}
                return
            self._shape = tree_map(lambda t: None, state)
            host = tree_map(lambda t: t.cpu(), state)
            for i, lane in enumerate(lanes):
                # A copy: a view would keep the whole cohort's memory alive when its lanes go different ways.
                self._remember(lane, tree_map(torch.clone, take(host, slice(i, i + 1))))

    def _remember(self, lane: Lane, state: State) -> None:
        self._forget(lane)
        self._memory[lane] = state
        self.bytes += size(state)
        while self.bytes > self.budget and len(self._memory) > 1:
            self._spill(*self._memory.popitem(last=False))

    def _spill(self, lane: Lane, state: State) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedala-clients-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{lane[0]}-{lane[1]}.safetensors"
        save_file({name: value.contiguous() for name, value in leaves(state)}, path)
        self._files[lane] = path
        self.bytes -= size(state)

    def _forget(self, lane: Lane) -> None:
        if lane in self._memory:
            self.bytes -= size(self._memory.pop(lane))
        if lane in self._files:
            self._files.pop(lane).unlink()

    # --- as a mapping ----------------------------------------------------------------------------------------------

    def __getitem__(self, lane: Lane) -> State:
        if lane in self._memory:
            return self._memory[lane]
        if lane in self._files:
            flat = load_file(self._files[lane])
            return _rebuild(self._shape, flat)
        lanes, place = self._places[lane]
        return dict(take(self._cohorts[lanes], slice(place, place + 1)))

    def __contains__(self, lane: object) -> bool:
        return lane in self._memory or lane in self._files or lane in self._places

    def __iter__(self) -> Iterator[Lane]:
        yield from self._memory
        yield from self._files
        yield from self._places

    def __len__(self) -> int:
        return sum(1 for _ in self)


def size(state: State) -> int:
    """The bytes of a state's tensors."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(state))


def _rebuild(shape: State, flat: Mapping[str, torch.Tensor], prefix: str = "") -> State:
    """The tree of the given shape with the leaves that `leaves` named."""
    tree: State = {}
    for key, value in shape.items():
        path = f"{prefix}{key}"
        tree[key] = _rebuild(value, flat, f"{path}/") if isinstance(value, dict) else flat[path]
    return tree
