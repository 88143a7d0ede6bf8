"""The processes of a run, and what they say to each other: objects, and trees of tensors.

Objects are small, and travel by gloo between hosts' memories. Tensors travel by NCCL if every rank
has a GPU of its own, else by gloo. The processes have the same program and the same user, so
objects are pickled: nothing of this is read from a file or from another program.
"""

import io
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedala.errors import RunError, first_line
from fedala.lanes.trees import leaves, tree_map

log = getLogger(__name__)

#: Where each tensor of a packed tree begins: a multiple of so many bytes.
ALIGNMENT = 16
#: A rank that dies closes its connections, which is noticed at once. This is for nothing else.
TIMEOUT = timedelta(days=2)
#: A key of torchrun's store.
STARTED = "fedala started"
#: The bytes of an object that travel at once, with its length; the rest comes after them.
SLOT, HEADER = 2**14, 8


class RankLost(RunError):
    """A process of the run is gone."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor's shape and type, without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> "Blank":
        return cls(tuple(value.shape), value.dtype)

    def make(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    @property
    def bytes(self) -> int:
        """The bytes that it takes in a packed tree."""
        size = int(torch.Size(self.shape).numel()) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def with_lanes(self, lanes: int) -> "Blank":
        return Blank((lanes, *self.shape[1:]), self.dtype)


def describe_tree(tree: Any) -> Any:
    """Return a tree of blanks."""
    return tree_map(Blank.of, tree)


def count_packed(template: Any) -> int:
    """Return the bytes that a tree takes when it is packed."""
    blanks: Iterator[tuple[str, Any]] = leaves(template)
    return sum(blank.bytes for _, blank in blanks)


def pack(tree: Any, device: torch.device) -> Tensor:
    """Return all tensors of a tree as one row of bytes."""
    rows = []
    for _, leaf in leaves(tree):
        row = _view_bytes(leaf.to(device))
        rows.append(row)
        if missing := -row.numel() % ALIGNMENT:
            rows.append(row.new_zeros(missing))
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device=device)


def _view_bytes(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    if flat.stride(0) != 1:  # a single number may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def unpack(row: Tensor, template: Any, device: torch.device) -> Any:
    """Return the tree that `pack` was given; `template` is its tree of blanks."""
    row = row.to(device)
    start = 0

    def read(blank: Blank) -> Tensor:
        nonlocal start
        size = int(torch.Size(blank.shape).numel()) * blank.dtype.itemsize
        value = row[start : start + size].view(blank.dtype).view(blank.shape)
        start += blank.bytes
        return value

    return tree_map(read, template)


def _empty_row(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _make_row(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _write_slot(data: bytes) -> Tensor:
    """Return the length of an object and its first bytes, in a row of fixed size."""
    first = data[: SLOT - HEADER]
    return _make_row(len(data).to_bytes(HEADER, "little") + first.ljust(SLOT - HEADER, b"\0"))


def _read_slot(row: Tensor) -> tuple[int, bytes]:
    """Return the length of an object, and as many of its bytes as there are."""
    data = row.numpy().tobytes()
    size = int.from_bytes(data[:HEADER], "little")
    return size, data[HEADER : HEADER + size]


class _Pickler(pickle.Pickler):
    """Writes a tensor as its bytes: torch's own way takes five times as long."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _read_tensor, (_view_bytes(value.cpu()).numpy().tobytes(), Blank.of(value))
        return NotImplemented


def _read_tensor(data: bytes, blank: Blank) -> Tensor:
    if not data:
        return blank.make("cpu")
    return _make_row(data).view(blank.dtype).view(blank.shape)


def dump(value: Any) -> bytes:
    """Return an object as bytes, for `pickle.loads`. Its tensors arrive in host memory."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class RankGroup:
    """All processes of a run, as one of them sees it."""

    def __init__(self) -> None:
        """Join the group that torchrun has started this process for."""
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        #: Ranks on this machine.
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        #: Whether a rank is gone, or this one has left a conversation in its middle.
        self.is_broken = False
        self._channel = torch.device("cpu")  # where tensors are when they travel
        self._tensors: dist.ProcessGroup | None = None
        if torch.cuda.is_available():
            local_rank = int(os.environ.get("LOCAL_RANK", 0))
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        with self._watch():
            # It is the agent's, and outlives ranks that torchrun starts again.
            self._store, *_ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
            # It still has the addresses of those that died.
            store = PrefixStore(f"attempt {count_restarts()}", self._store)
            dist.init_process_group(
                "gloo", timeout=TIMEOUT, store=store, rank=self.rank, world_size=self.size
            )

    def connect_devices(self, device: torch.device) -> None:
        """Let tensors travel from GPU to GPU, if every rank has one of its own."""
        own = None
        if device.type == "cuda" and dist.is_nccl_available():
            own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
        everybody: list[Any] = [None] * self.size
        with self._watch():
            dist.all_gather_object(everybody, own)
            if None not in everybody and len(set(everybody)) == self.size > 1:
                self._tensors = dist.new_group(backend="nccl", timeout=TIMEOUT)
                self._channel = device

    def note_start(self) -> None:
        """Note that the run has a folder, for ranks that torchrun starts after these."""
        self._store.set(STARTED, "yes")

    def was_started(self) -> bool:
        """Tell whether ranks before these have made the run's folder, and died."""
        return count_restarts() > 0 and self._store.check([STARTED])

    def leave(self) -> None:
        """End the conversation."""
        if not self.is_broken:
            dist.destroy_process_group()

    # --- objects -------------------------------------------------------------------------------

    def share(self, value: Any = None) -> Any:
        """Return the object that rank 0 gives, on every rank."""
        packed = dump(value) if self.rank == 0 else b""
        row = _write_slot(packed) if self.rank == 0 else _empty_row(SLOT)
        with self._watch():
            dist.broadcast(row, src=0)
            size, data = _read_slot(row)
            if rest := size - len(data):
                row = _make_row(packed[-rest:]) if self.rank == 0 else _empty_row(rest)
                dist.broadcast(row, src=0)
                data += row.numpy().tobytes()
        return value if self.rank == 0 else pickle.loads(data)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, on rank 0; nothing on others. Rank 0's own is not copied."""
        packed = b"" if self.rank == 0 else dump(value)
        rows = [_empty_row(SLOT) for _ in range(self.size)] if self.rank == 0 else None
        with self._watch():
            dist.gather(_write_slot(packed), rows, dst=0)
            if rows is None:
                if len(packed) > SLOT - HEADER:
                    dist.send(_make_row(packed[SLOT - HEADER :]), dst=0)
                return []
            found = [value]
            for rank, row in enumerate(rows[1:], 1):
                size, data = _read_slot(row)
                if rest := size - len(data):
                    row = _empty_row(rest)
                    dist.recv(row, src=rank)
                    data += row.numpy().tobytes()
                found.append(pickle.loads(data))
        return found

    # --- trees of tensors ----------------------------------------------------------------------

    def share_tree(self, tree: Any, template: Any, device: torch.device) -> Any:
        """Return rank 0's tree, on every rank; the others give None, and get it on `device`."""
        total = count_packed(template)
        if not total or self.size == 1:
            return template if tree is None else tree
        if self.rank == 0:
            row = pack(tree, self._channel)
        else:
            row = torch.empty(total, dtype=torch.uint8, device=self._channel)
        with self._watch():
            dist.broadcast(row, src=0, group=self._tensors)
        return tree if self.rank == 0 else unpack(row, template, device)

    def send_tree(self, tree: Any, rank: int) -> None:
        """Send a tree to a rank, which calls `receive_tree`."""
        row = pack(tree, self._channel)
        if row.numel():
            with self._watch():
                dist.send(row, dst=rank, group=self._tensors)

    def receive_tree(self, template: Any, rank: int, device: torch.device) -> Any:
        """Return the tree that a rank sends."""
        total = count_packed(template)
        row = torch.empty(total, dtype=torch.uint8, device=self._channel)
        if total:
            with self._watch():
                dist.recv(row, src=rank, group=self._tensors)
        return unpack(row, template, device)

    def add_trees(self, tree: Any) -> Any:
        """Return the sum of all ranks' trees, on rank 0: they have the same names and shapes."""
        if self.size == 1:
            return tree
        values = [leaf for _, leaf in leaves(tree)]
        order = sorted(range(len(values)), key=lambda i: str(values[i].dtype))
        sums: dict[int, Tensor] = {}
        for dtype, positions in groupby(order, key=lambda i: values[i].dtype):
            sums |= self._add([*positions], values, dtype)
        added = iter(sums[position] for position in range(len(values)))
        return tree_map(lambda _: next(added), tree)

    def _add(
        self, positions: Sequence[int], values: Sequence[Tensor], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """Add up tensors of one type; rounding of half precision is left to the end."""
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        wide = torch.int32 if dtype == torch.bool else wide
        flat = [values[position].reshape(-1).to(self._channel, wide) for position in positions]
        row = torch.cat(flat)
        with self._watch():
            dist.reduce(row, dst=0, group=self._tensors)
        parts = torch.split(row, [one.numel() for one in flat])
        return {
            position: part.to(values[position].device, dtype).view(values[position].shape)
            for position, part in zip(positions, parts, strict=True)
        }

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Surround work in which ranks wait for each other's tensors.

        If it fails on one of them, the others wait for nothing: that rank leaves the run.
        """
        with self._watch():
            try:
                yield
            except RankLost:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise RankLost(f"Rank {self.rank} cannot continue: {reason}") from error

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Turn a broken connection into a sentence. Whatever goes wrong, nobody listens again."""
        if self.is_broken:
            raise RankLost("The processes of this run do not hear each other any more")
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            # The reason is for the log: gloo tells it at length, and with its own source file.
            log.info("%s", first_line(error))
            raise RankLost("A process of this run has ended, or its connection broke") from None
        except BaseException:
            self.is_broken = True
            raise


def is_started_by_torchrun() -> bool:
    """Tell whether this process is a rank."""
    return dist.is_available() and dist.is_torchelastic_launched()


def count_restarts() -> int:
    """Return how often torchrun has started the ranks again, because one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_started_by_torchrun() else 0
