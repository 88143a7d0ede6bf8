"""A program that compiles the kernels for a GPU that need not be there.

`python compilation.py 89` does so for compute capability 8.9. It rehearses steps as a training on a
GPU does, and then takes them, but launches nothing. It prints a JSON object:

- `shared`: for each kernel, the most bytes of shared memory of one block,
- `late`: the kernels that were not compiled before they would have been launched,
- `twice`: the kernels of which one version was compiled more than once,
- `together`: the most kernels that were compiled at the same time.
"""

import json
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver, jit

from fedala.cuda.ala_kernel import Head, learn_weights
from fedala.cuda.backend import CudaBackend
from fedala.cuda.graphs import CapturedSteps
from fedala.lanes.cohort import Cohort
from fedala.lanes.task import Task
from fedala.models import cnn, fasttext, resnet18


class Gpu:
    """What Triton asks of the GPU that it compiles for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Backend(CudaBackend):
    """That of a GPU, for tensors on the CPU."""

    def __init__(self) -> None:
        self.device, self.memory, self._captured = torch.device("cpu"), 2**36, {}


class Step:
    """A step that was captured."""

    def replay(self) -> None:
        pass


class Compilation:
    """What has been compiled."""

    def __init__(self) -> None:
        self.shared: Counter[str] = Counter()
        self.late: set[str] = set()
        self.twice: set[str] = set()
        self._versions: set[tuple[str, str]] = set()
        #: Kernels that are being compiled now, and the most that have been at a time.
        self.running = self.together = 0
        self._lock = threading.Lock()
        self.is_rehearsed = False
        self._compile = compiler.compile

    def __call__(self, source, *args, **options):
        with self._lock:
            self.running += 1
            self.together = max(self.together, self.running)
            version = source.hash(), str(options)
            if version in self._versions:
                self.twice.add(source.fn.__qualname__)
            self._versions.add(version)
        compiled = self._compile(source, *args, **options)
        name = source.fn.__qualname__
        self.shared[name] = max(self.shared[name], compiled.metadata.shared)
        with self._lock:
            self.running -= 1
        if self.is_rehearsed:
            self.late.add(name)
        return compiled


def train(model: nn.Module, shape: tuple[int, ...], lanes: int, **options) -> None:
    """Train `lanes` clients for an epoch, one batch more each."""
    size = options.setdefault("batch_size", 10)
    ends = np.cumsum([0, *(size * (lanes - lane) for lane in range(lanes))])
    parts = [np.arange(*bounds) for bounds in pairwise(ends)]
    kind = torch.int32 if len(shape) == 1 else torch.float32  # texts, or images
    x = torch.zeros(ends[-1], *shape, dtype=kind)
    y = torch.zeros(ends[-1], dtype=torch.int64)
    task = Task(model, x, y, parts, [part[:0] for part in parts], **{"lr": 0.1, **options})
    task.backend = Backend()
    start = {name: value.expand(lanes, *value.shape) for name, value in model.state_dict().items()}
    Cohort(task, range(lanes), [0] * lanes, round=1).fit(start)


def main(capability: int) -> None:
    driver.set_active(Gpu(capability))
    compiler.compile = compilation = Compilation()
    CUDABackend.make_cubin = lambda *args: b""
    CUDABackend.make_ptx = lambda self, source, metadata, *args: metadata.update(name="k") or ""
    torch.cuda.device = torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.set_device = lambda _: None
    torch.cuda.current_device, torch.cuda.graph_pool_handle = lambda: 0, lambda: None
    torch.cuda.get_device_capability = lambda _: divmod(capability, 10)
    # Nothing is launched.
    jit.JITFunction.__getitem__ = lambda jitted, grid: partial(jitted.warmup, grid=grid)

    def capture(self: CapturedSteps, step, lanes) -> Step:
        if step not in self._compiled:
            self._compiled.add(step)
            self.compile(step, lanes)
        compilation.is_rehearsed = True
        self._take_step(step, lanes)
        compilation.is_rehearsed = False
        return Step()

    CapturedSteps._capture = capture
    train(cnn((1, 28, 28), 10), (1, 28, 28), 20)
    train(cnn((3, 32, 32), 100), (3, 32, 32), 5, batch_size=64)
    train(resnet18((3, 64, 64), 200), (3, 64, 64), 2)
    train(fasttext(3000, 4, 32), (200,), 20)
    head = Head(torch.zeros(20, 100, 512), torch.zeros(20, 100))
    order, counts = torch.zeros(20, 30, dtype=torch.int64), torch.zeros(20, dtype=torch.int64)
    learn_weights(
        torch.zeros(90, 512), order, order, counts, counts, counts, head, head, head,
        batch_size=10, eta=1.0, threshold=0.01, most=100, window=10,
    )  # fmt: skip
    found = {"shared": dict(compilation.shared), "late": sorted(compilation.late)}
    found["twice"] = sorted(compilation.twice)
    print(json.dumps({**found, "together": compilation.together}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
