"""Kernels are compiled on all cores, before they are launched.

Triton compiles a kernel at its first launch, and a training begins with some thirty of them. One
after the other, they take longer than many rounds. So a step is first rehearsed on tensors without
memory (PyTorch's meta device), with which no kernel is launched. Those that would have been are
compiled then, each in a thread.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from fedala.io.child_processes import count_cores
from fedala.lanes.trees import tree_map

#: Where tensors may begin: a kernel is compiled for aligned addresses, as memory has them.
ALIGNMENT = 256


Version = tuple[Any, ...]
#: What the work that is being rehearsed needs compiled, each version of a kernel once.
_rehearsed: ContextVar[dict[Version, Callable[[], object]]] = ContextVar("rehearsed")


class Kernel:
    """A kernel that is launched as `kernel[grid](…)`. With meta tensors, it is only noted."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if any(isinstance(value, Tensor) and value.is_meta for value in args):
                compile = partial(self.jitted.warmup, *args, grid=grid, **options)
                return _rehearsed.get().setdefault(self._name_version(args, options), compile)
            return self.jitted[grid](*args, **options)

        return launch

    def _name_version(self, args: tuple[Any, ...], options: dict[str, Any]) -> Version:
        """Return what Triton compiles a kernel for, apart from the GPU."""
        given = zip(self.jitted.params, args, strict=False)
        return self, *(_describe(*pair) for pair in given), *sorted(options.items())


def _describe(param: Any, value: Any) -> Any:
    """Return what the code of a kernel depends on, of the value of a parameter."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if param.is_constexpr or not isinstance(value, int):
        return value
    fits = -(2**31) <= value < 2**31
    return fits if param.do_not_specialize else (fits, value == 1, value % 16 == 0)


def drop_memory(tree: Any) -> Any:
    """Return tensors that lie as those of a tree do, on the meta device.

    They have addresses of their own, which tell parameters from each other.
    """
    end = ALIGNMENT

    def drop(value: Any) -> Any:
        nonlocal end
        if not isinstance(value, Tensor):
            return value
        sides = zip(value.shape, value.stride(), strict=True)
        size = (1 + sum((side - 1) * step for side, step in sides)) * value.element_size()
        start, end = end, end + -(-size // ALIGNMENT) * ALIGNMENT
        space = torch.empty(end, dtype=value.dtype, device="meta")
        return space.as_strided(value.shape, value.stride(), start // value.element_size())

    return tree_map(drop, tree)


def compile_kernels(rehearsals: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that some pieces of work on meta tensors would launch.

    They are compiled for the current GPU, which each thread has to be told. This only saves time:
    work that the meta device cannot do is left out, and so is a kernel that does not compile. Its
    launch will say why.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # it is from 3.6 on that threads can compile
        return
    versions: dict[Version, Callable[[], object]] = {}
    token = _rehearsed.set(versions)
    for rehearse in rehearsals:
        with suppress(Exception):
            rehearse()
    _rehearsed.reset(token)

    def compile_version(compile: Callable[[], object]) -> None:
        with suppress(Exception):
            compile()

    current = (torch.cuda.current_device(),)
    with ThreadPoolExecutor(
        count_cores(), initializer=torch.cuda.set_device, initargs=current
    ) as pool:
        pool.map(compile_version, versions.values())
