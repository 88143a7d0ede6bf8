"""How lanes run on a GPU."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedala.cuda import has_kernels
from fedala.cuda.ala_learner import learn_head, takes_kernel
from fedala.cuda.graphs import CapturedRunner, CapturedSteps
from fedala.cuda.late import find_place, run_on_streams
from fedala.lanes.backend import Backend
from fedala.lanes.late_gradients import LateGradient
from fedala.lanes.layers import Layered
from fedala.lanes.optimizers import Numbers, UpdateRule
from fedala.lanes.task import Task
from fedala.lanes.training import ReadBatch
from fedala.lanes.trees import Params, State, is_shared, leaves
from fedala.lanes.weight_learning import Learner, Problem

#: Bytes of activations for each number of a sample: the widest layers of image models are some
#: hundred times their input.
ACTIVATION_BYTES = 400
#: A model with more convolutions than this takes too long to compile a kernel for each size.
FEW_CONVOLUTIONS = 4


class CudaBackend(Backend):
    """Captured steps, the lanes' own kernels, and chunks as large as the GPU's memory allows."""

    predraws = True
    has_updates = True
    captures_steps = True
    #: The kernels that are in use now.
    _kernels: Any = None

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.memory = torch.cuda.get_device_properties(device).total_memory
        self._captured: dict[Any, CapturedSteps] = {}

    def chunk_size(self, sample_numbers: int) -> int:
        activations = ACTIVATION_BYTES * max(1, sample_numbers)
        return max(16, min(16384, self.memory // 8 // activations))

    def choose_lanes(self, task: Task) -> int | None:
        return None

    def feature_memory(self) -> int:
        return int(self.memory // 8)

    def has_room_for_floats(self, numbers: int) -> bool:
        return bool(numbers * 4 < self.memory // 10)

    @contextmanager
    def use_arithmetic(self, model: nn.Module, precision: str) -> Iterator[None]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before, outer = (matmul.allow_tf32, cudnn.allow_tf32), self._kernels
        matmul.allow_tf32 = cudnn.allow_tf32 = precision in ("tf32", "bf16")
        products = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
        try:
            # Triton launches kernels on the current device, and steps are captured there: whatever
            # runs a model, on whichever of several GPUs, comes through here.
            with torch.cuda.device(self.device):
                if precision in products and has_kernels():
                    from fedala.cuda.kernels import LaneKernels

                    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
                    special = convolutions <= FEW_CONVOLUTIONS
                    is_own = isinstance(model, Layered)
                    with LaneKernels(
                        products[precision], special=special, is_own=is_own
                    ) as self._kernels:
                        yield
                else:
                    yield
        finally:
            self._kernels = outer
            matmul.allow_tf32, cudnn.allow_tf32 = before

    @contextmanager
    def keep_late(
        self, params: Params, names: Sequence[str]
    ) -> Iterator[dict[str, list[LateGradient]]]:
        if self._kernels is None or not self._kernels.is_own:
            yield {}
        else:
            known = {find_place(params[name]): name for name in names}
            with self._kernels.keep_late(known) as late:
                yield late.found

    def run_together(self, works: Sequence[Callable[[], None]]) -> None:
        run_on_streams(works)

    def capture_steps(
        self,
        task: Task,
        steps: Sequence[Any],
        batch_size: int,
        frozen: Collection[str],
        state: Any,
        fixed: Any,
        lanes: int,
        read_batch: ReadBatch | None = None,
    ) -> CapturedRunner:
        kinds = tuple((name, *value.shape[1:]) for name, value in leaves(state))
        constants = tuple((name, *_describe_constant(value)) for name, value in leaves(fixed))
        key = (frozenset(steps), batch_size, frozenset(frozen), kinds, constants)
        known = self._captured.get(key)
        if known is None or known.lanes < lanes:
            known = CapturedSteps(task, batch_size, lanes, state, fixed)
            self._captured[key] = known
        return CapturedRunner(known, state, fixed, lanes, read_batch)

    def read_later(self, values: Tensor) -> Callable[[], Any]:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        is_there = torch.cuda.Event()
        is_there.record()

        def wait() -> Any:
            is_there.synchronize()
            return copy.tolist()

        return wait

    def update_lanes(
        self,
        rule: UpdateRule,
        params: Params,
        gradients: Params,
        slots: State,
        numbers: Numbers,
    ) -> bool:
        from fedala.cuda import updates

        return updates.update_lanes(rule, params, gradients, slots, numbers)

    def find_weight_learner(self, problem: Problem) -> Learner | None:
        return learn_head if takes_kernel(problem) else None

    def free_caches(self) -> None:
        self._captured.clear()


def _describe_constant(value: Any) -> tuple[Any, ...]:
    """Return what a captured step depends on: the shape of a tensor, or a number itself."""
    if isinstance(value, torch.Tensor):
        return (is_shared(value), *value.shape[1:])
    return (value,)
