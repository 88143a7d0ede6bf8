"""What depends on the kind of device that lanes run on.

`Backend` is the plain one, for a CPU. A GPU has its own in `fedala.cuda.backend`, which is loaded
when a task asks for it: nothing else in this room knows of a GPU.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedala.lanes.late_gradients import LateGradient
from fedala.lanes.trees import leaves
from fedala.lanes.words import MeanEmbedding, skip_padding

#: Operations of a forward pass, of one batch in each lane, that are worth a thread: with fewer, a
#: step takes longer in Python. If fewer than four lanes have so many, one is as good.
THREAD_OPERATIONS = 48_000_000
FEWEST_LANES = 4
#: Parameters and batches of all lanes take at most so many bytes, if we choose how many they are.
LARGEST_STACK = 2**29
#: A small model remembers about so many numbers for each one of its input.
ACTIVATIONS = 8


class Backend:
    """How lanes run on a CPU."""

    #: Whether random draws of the next round are made while the device works on this one.
    predraws = False
    #: Whether there are kernels for the optimisers' steps.
    has_updates = False
    #: Whether steps are captured once and replayed. Then the host runs ahead of the device.
    captures_steps = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def chunk_size(self, sample_numbers: int) -> int:
        """Return how many samples run at once without gradients: what a CPU's caches hold."""
        return 64

    def choose_lanes(self, task: Any) -> int | None:
        """Return how many clients are best one tensor program; None: all of them.

        Steps of a small model are mostly Python, which lanes have once for all. Those of a large
        one are arithmetic, which one client per thread does best. A model that draws random numbers
        is alone: then it draws the same for any number of clients.
        """
        lanes = THREAD_OPERATIONS / max(1, task.count_batch_operations())
        if lanes < FEWEST_LANES or task.draws_random_numbers:
            return 1
        with warnings.catch_warnings():
            # Torch says so of an operation that it runs lane by lane. Lanes gain nothing from it.
            warnings.filterwarnings("error", "There is a performance drop")
            if not task.uses_vmap:
                return 1
        inputs = task.batch_size * sum(leaf[:1].numel() for _, leaf in leaves(task.x))
        numbers = ACTIVATIONS * inputs + sum(p.numel() for p in task.model.parameters())
        most: int = LARGEST_STACK // (numbers * task.dtype.itemsize)
        return max(1, min(most, int(lanes)))

    def feature_memory(self) -> int:
        """Return how many bytes of features under the upper layers are kept by default."""
        return 2**30

    def has_room_for_floats(self, numbers: int) -> bool:
        """Tell whether samples of so many numbers are converted once, and not at each use."""
        return False

    def use_arithmetic(self, model: nn.Module, precision: str) -> AbstractContextManager[Any]:
        """Switch to the arithmetic of a precision while a model runs."""
        has_means = any(isinstance(module, MeanEmbedding) for module in model.modules())
        return skip_padding() if has_means else nullcontext()

    def keep_late(
        self, params: Any, names: Sequence[str]
    ) -> AbstractContextManager[dict[str, list[LateGradient]]]:
        """Collect gradients of the named parameters that are computed when they are used."""
        return nullcontext({})

    def run_together(self, works: Sequence[Callable[[], None]]) -> None:
        """Do independent pieces of work, side by side if the device can."""
        for work in works:
            work()

    def capture_steps(
        self,
        task: Any,
        steps: Sequence[Any],
        batch_size: int,
        frozen: Collection[str],
        state: Any,
        fixed: Any,
        lanes: int,
        read_batch: Any = None,
    ) -> Any:
        """Return a runner that replays captured steps; None if this device captures none."""
        return None

    def read_later(self, values: Tensor) -> Callable[[], Any]:
        """Begin to read a tensor. The function that is returned waits for its numbers."""
        return values.tolist

    def update_lanes(
        self, rule: Any, params: Any, gradients: Any, slots: Any, numbers: Any
    ) -> bool:
        """Take an optimiser's step in a kernel; tell whether this device has one for it."""
        return False

    def find_weight_learner(self, problem: Any) -> Any:
        """Return a fast learner of ALA's weights for a problem; None if there is none."""
        return None

    def free_caches(self) -> None:
        """Give back memory that only saves time."""


def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device."""
    if device.type != "cuda":
        return Backend(device)
    from fedala.cuda.backend import CudaBackend

    return CudaBackend(device)
