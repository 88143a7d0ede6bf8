"""Steps of local training as CUDA graphs.

A step of batch size ten is a hundred tiny kernels: launched one by one, the GPU waits for Python.
So a step is captured once for each number of lanes, with everything that changes from step to step
on the device (the samples' order and the position in it). It is replayed as long as that many lanes
have a batch. State comes and goes through fixed buffers.

A graph reads fixed addresses. The training samples have them, so a graph gathers its batches from
these itself. Features under a cut are new in every round and may take gigabytes: they
stay where they are, and each batch of them is copied into a buffer before the graph is replayed.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch

from fedala.cuda import has_kernels
from fedala.cuda.buffers import make_buffer, make_plain_buffer
from fedala.lanes.layers import Layered
from fedala.lanes.task import Task
from fedala.lanes.training import EagerRunner, ReadBatch, Step
from fedala.lanes.trees import is_shared, leaves, share, take, tree_map

#: The attributes of captured steps that a step reads or changes.
_TENSORS = ("state", "fixed", "order", "column", "total", "batch", "samples")


class CapturedSteps:
    """The buffers and graphs of one kind of training: its steps, batch size and shapes."""

    def __init__(self, task: Task, size: int, lanes: int, state: Any, fixed: Any) -> None:
        self.task, self.size, self.lanes = task, size, lanes

        # A model that is not ours may call `view` on its weights: they stay as they are.
        make = make_buffer if isinstance(task.model, Layered) else make_plain_buffer
        self._make_buffer = partial(make, lanes=lanes)

        def make_constant(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):  # a number: it is part of the key
                return value
            if not is_shared(value):
                return self._make_buffer(value)
            one: torch.Tensor = share(value.new_empty(1, *value.shape[1:]), lanes)
            return one

        self.state = tree_map(self._make_buffer, state)
        self.fixed = tree_map(make_constant, fixed)
        longest = max((len(rows) for rows in task.parts["train"]), default=0)
        self.order = torch.zeros(lanes, longest, dtype=torch.int64, device=task.device)
        self.column = torch.arange(size, device=task.device)
        self.total = torch.zeros(lanes, device=task.device, dtype=task.dtype)
        #: Inputs and targets, if they are not the training samples: [lane, sample, …].
        self.batch: tuple[Any, Any] | None = None
        is_plain = has_kernels(task.device) and _has_plain_samples(task)
        #: Inputs and targets of all training samples, if a batch is nothing but rows of them.
        self.samples = (task.x, task.y) if is_plain else None
        self.graphs: dict[tuple[int, int, Step], torch.cuda.CUDAGraph] = {}
        self._compiled: set[Step] = set()
        self.pool = torch.cuda.graph_pool_handle()

    def load(self, state: Any, fixed: Any) -> None:
        """Copy what a training starts from into the buffers."""
        for buffers, values in ((self.state, state), (self.fixed, fixed)):
            for (_, buffer), (_, value) in zip(leaves(buffers), leaves(values), strict=True):
                if isinstance(buffer, torch.Tensor):
                    count = 1 if is_shared(buffer) else len(value)
                    buffer[:count].copy_(value[:count])
        self.total.zero_()

    def begin_epoch(self, order: torch.Tensor) -> None:
        """Set the samples of an epoch: [lane, sample], padded."""
        self.order[: order.shape[0], : order.shape[1]].copy_(order)
        torch.arange(self.size, out=self.column)

    def load_batch(self, batch: tuple[Any, Any], lanes: slice) -> None:
        """Copy the next batch of some lanes to where their graph reads it."""
        if self.batch is None:
            self.batch = tree_map(self._make_buffer, batch)
        _copy(batch, take(self.batch, lanes))

    def replay(self, step: Step, lanes: slice) -> None:
        """Take the next step of some lanes."""
        key = lanes.start, lanes.stop, step
        if key not in self.graphs:
            self.graphs[key] = self._capture(step, lanes)
        self.graphs[key].replay()

    def _capture(self, step: Step, lanes: slice) -> torch.cuda.CUDAGraph:
        if step not in self._compiled and has_kernels(self.task.device):
            self._compiled.add(step)
            self.compile(step, lanes)
        changing = self.state, self.column, self.total
        before = tree_map(torch.clone, changing)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # Once without capture: other kernels are compiled, libraries find their workspace.
        with torch.cuda.stream(side):
            self._take_step(step, lanes)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
            self._take_step(step, lanes)
        _copy(before, changing)
        return graph

    def compile(self, step: Step, lanes: slice) -> None:
        """Compile the kernels of a step side by side, with those of fewer lanes.

        Blocks depend on the number of lanes. In every epoch, it falls as clients end.
        """
        from fedala.cuda.compiling import compile_kernels, drop_memory

        rehearsal = copy(self)
        tensors = {name: vars(self)[name] for name in _TENSORS}
        if not self.samples and not self.batch:
            tensors["batch"] = self.task.training_batch(self.order[: lanes.stop, self.column])
        vars(rehearsal).update(drop_memory(tensors))
        counts = [lanes.stop - lanes.start]
        while counts[-1] > 1:
            counts.append(counts[-1] * 3 // 4)
        parts = (slice(lanes.start, lanes.start + count) for count in counts)
        compile_kernels(partial(rehearsal._take_step, step, part) for part in parts)

    def _take_step(self, step: Step, lanes: slice) -> None:
        state, fixed = take(self.state, lanes), take(self.fixed, lanes)
        if self.batch:
            x, y = take(self.batch, lanes)
            self.total[lanes] += step(self.task, state, fixed, x, y)
        elif self.samples:
            from fedala.cuda.batches import end_step, gather_batch

            x, y = gather_batch(*self.samples, self.order[lanes], self.column, self.size)
            losses = step(self.task, state, fixed, x, y)
            end_step(self.total[lanes], losses, self.column, self.size)
        else:
            x, y = self.task.training_batch(self.order[lanes, self.column])
            self.total[lanes] += step(self.task, state, fixed, x, y)
            self.column += self.size


class CapturedRunner(EagerRunner):
    """Takes full batches by replaying captured steps, and shorter ones as plain PyTorch."""

    def __init__(
        self,
        captured: CapturedSteps,
        state: Any,
        fixed: Any,
        lanes: int,
        read_batch: ReadBatch | None = None,
    ) -> None:
        self.captured, self.on_step, self.task = captured, None, captured.task
        self.read_batch = read_batch
        captured.load(state, fixed)
        part = slice(0, lanes)
        self.state, self.fixed = take(captured.state, part), take(captured.fixed, part)
        self.total, self.order = captured.total[part], captured.order

    def begin_epoch(self, order: torch.Tensor) -> None:
        super().begin_epoch(order)
        self.captured.begin_epoch(order)

    def step(self, step: Step, lanes: slice, columns: slice) -> None:
        if columns.stop - columns.start < self.captured.size:
            super().step(step, lanes, columns)
            return
        if self.read_batch:
            self.captured.load_batch(self.read_batch(lanes, columns), lanes)
        self.captured.replay(step, lanes)

    def finish(self) -> tuple[Any, torch.Tensor]:
        clone = partial(torch.clone, memory_format=torch.contiguous_format)
        state, total = tree_map(clone, (self.state, self.total))
        return state, total


def _copy(values: Any, buffers: Any) -> None:
    """Copy a tree of tensors into another one."""
    for (_, buffer), (_, value) in zip(leaves(buffers), leaves(values), strict=True):
        buffer.copy_(value)


def _has_plain_samples(task: Task) -> bool:
    """Tell whether a batch is nothing but rows of two tensors, `x` and `y`."""
    x, y = task.x, task.y
    if task.augmentation or not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    first = task.inputs(torch.zeros(1, dtype=torch.int64, device=task.device))
    is_dense = x.is_contiguous() and y.is_contiguous()
    return is_dense and first.dtype == x.dtype and torch.bool not in (x.dtype, y.dtype)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing another graph's memory, which would break the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
