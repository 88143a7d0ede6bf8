"""Steps of local training as CUDA graphs.

A step of batch size ten is a hundred tiny kernels: launched one by one, the GPU waits for Python. So a step is
captured once for each number of lanes, with everything that changes from step to step on the device (the samples'
order and the position in it), and replayed for as long as that many lanes have a batch. State comes and goes through
fixed buffers.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fedala.cuda import has_kernels
from fedala.lanes.trees import leaves, take, tree_map

if TYPE_CHECKING:
    from fedala.lanes.cohort import Step, Task


class Captured:
    """The captured steps of one kind of training: its step functions, batch size and shape of state."""

    def __init__(
        self, task: "Task", turns: "Sequence[Step]", size: int, lanes: int, state: Any, fixed: Any
    ) -> None:
        self.task, self.turns, self.size, self.lanes = task, list(turns), size, lanes

        def buffer(value: torch.Tensor) -> torch.Tensor:
            return value.new_empty(lanes, *value.shape[1:])

        def constant(value: torch.Tensor) -> torch.Tensor:
            shared = value.new_empty(1, *value.shape[1:])
            return shared.expand(lanes, *value.shape[1:]) if is_shared(value) else buffer(value)

        self.state, self.fixed = tree_map(buffer, state), tree_map(constant, fixed)
        longest = max((len(rows) for rows in task.parts["train"]), default=0)
        self.table = torch.zeros(lanes, longest, dtype=torch.int64, device=task.device)
        self.column = torch.arange(size, device=task.device)
        self.total = torch.zeros(lanes, device=task.device, dtype=task.dtype)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def load(self, state: Any, fixed: Any, lanes: int) -> tuple[Any, Any, torch.Tensor]:
        """Takes up what a training starts from; returns the buffers in which it will happen, and that of the losses."""
        for buffers, values in ((self.state, state), (self.fixed, fixed)):
            for (_, buffer), (_, value) in zip(leaves(buffers), leaves(values), strict=True):
                count = 1 if is_shared(buffer) else len(value)
                buffer[:count].copy_(value[:count])
        part = slice(0, lanes)
        return take(self.state, part), take(self.fixed, part), self.total[part].zero_()

    def order(self, table: torch.Tensor) -> None:
        """The samples of a new epoch."""
        self.table[: table.shape[0], : table.shape[1]].copy_(table)
        torch.arange(self.size, out=self.column)

    def step(self, lanes: int, turn: int) -> None:
        """The next step of the first `lanes` lanes."""
        self._graph(lanes, turn).replay()

    def _graph(self, lanes: int, turn: int) -> torch.cuda.CUDAGraph:
        turn = self.turns.index(
            self.turns[turn]
        )  # a step that comes several times among the turns is one graph
        key = (lanes, turn)
        if key not in self.graphs:
            kept = tree_map(torch.clone, (self.state, self.column, self.total))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(
                side
            ):  # once without capture: kernels are compiled, libraries find their workspace
                self._step(lanes, turn)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with _undisturbed(), torch.cuda.graph(graph, pool=self.pool):
                self._step(lanes, turn)
            for (_, buffer), (_, value) in zip(
                leaves((self.state, self.column, self.total)), leaves(kept), strict=True
            ):
                buffer.copy_(value)
            self.graphs[key] = graph
        return self.graphs[key]

    def _step(self, lanes: int, turn: int) -> None:
        rows = self.table[:lanes, self.column]
        part, step = slice(0, lanes), self.turns[turn]
        inputs, targets = self.task.inputs(rows), self.task.targets(rows)
        self.total[part] += step(
            self.task, take(self.state, part), take(self.fixed, part), inputs, targets
        )
        self.column += self.size


def is_shared(value: torch.Tensor) -> bool:
    """Whether all lanes have one and the same part of memory, as what the server sends to everybody."""
    return len(value) > 1 and value.stride(0) == 0


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection: if it freed another graph's memory now, the capture would fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def fast(precision: str, *, special: bool) -> Iterator[None]:
    """The GPU's arithmetic for a precision, and the lanes' own kernels, while a run goes on."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in (
        "tf32",
        "bf16",
    )
    products = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
    try:
        if precision in products and has_kernels():
            from fedala.cuda.kernels import LaneKernels

            with LaneKernels(products[precision], special=special):
                yield
        else:
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
