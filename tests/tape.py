"""What stands for a CUDA graph without a GPU: operations on fixed addresses, done once more."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedala.cuda import graphs
from fedala.cuda.backend import CudaBackend
from fedala.lanes.backend import Backend
from fedala.lanes.trees import tree_map


class Tape(TorchDispatchMode):
    """Records every operation that torch does, with the very tensors that it reads and writes.

    `replay` does them again, without the Python code that called for them: a number that was read
    or computed by the host stays what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        assert func is not torch.ops.aten.lift_fresh.default, "a number is copied from the host"
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(one.alias_info is not None for one in schema.returns)
        if schema.is_mutable or not is_view:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class TapedGpu(Backend):
    """A CPU that captures steps as a GPU does, and replays them from tapes.

    `log` lists the replays, and when the host waited for something that it had begun to read.
    """

    captures_steps = True
    capture_steps = CudaBackend.capture_steps

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._captured: dict[Any, graphs.CapturedSteps] = {}
        self.log: list[str] = []

    def read_later(self, values: torch.Tensor) -> Any:
        numbers = values.numpy().tolist()

        def wait() -> Any:
            self.log.append("wait")
            return numbers

        return wait


def use_tapes(monkeypatch: Any) -> None:
    """Let captured steps make tapes instead of graphs."""
    replay = graphs.CapturedSteps.replay

    def replay_and_log(self: Any, step: Any, lanes: slice) -> None:
        self.task.backend.log.append("replay")
        replay(self, step, lanes)

    def capture(self: Any, step: Any, lanes: slice) -> Tape:
        changing = self.state, self.column, self.total
        before = tree_map(torch.clone, changing)

        def restore() -> None:
            tree_map(lambda buffer, value: buffer.copy_(value), changing, before)

        self._take_step(step, lanes)  # once without a tape, as a GPU does
        restore()
        with Tape() as tape:
            self._take_step(step, lanes)
        restore()
        return tape

    monkeypatch.setattr(graphs.CapturedSteps, "_capture", capture)
    monkeypatch.setattr(graphs.CapturedSteps, "replay", replay_and_log)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "has_kernels", lambda device: False)
