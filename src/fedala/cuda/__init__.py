"""The fast path of lanes on a GPU. Models and methods do not know it, and results are the same."""

import functools
import importlib.util

import torch

#: The oldest GPUs (Ampere) whose tensor cores can multiply as the kernels do: tf32x3, tf32, bf16.
LEAST_CAPABILITY = (8, 0)


def has_kernels(device: torch.device | None = None) -> bool:
    """Tell whether the kernels can run on a CUDA device, by default the current one.

    They need Triton, which comes with torch for CUDA on Linux, from torch 2.7, and a GPU that is
    new enough. Without them, torch's own functions do the work.
    """
    index = None if device is None else device.index
    return _has_kernels(torch.cuda.current_device() if index is None else index)


@functools.cache
def _has_kernels(index: int) -> bool:
    return _has_triton() and torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


def _has_triton() -> bool:
    """Tell whether there is a Triton with tuples, which hold a kernel's sums: 3.3 or newer."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton.language

    return hasattr(triton.language, "tuple")
