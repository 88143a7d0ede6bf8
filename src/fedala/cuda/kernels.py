"""Fast kernels under unchanged modules: a mode that catches a layer's function and runs it for all lanes at once.

Under `vmap` a layer with other weights in every lane becomes whatever torch's rule for it says: grouped convolutions,
which are slow, and matrix products whose results come out transposed. `LaneKernels` catches these functions, under
`vmap` or not, and hands them, stacked, to a kernel made for it. A function that a kernel does not cover goes its
usual way.

`precision` is how float32 numbers are multiplied on the tensor cores: `tf32x3` (three products, as exact as float32),
`tf32` or `bf16`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedala.cuda import convolution, entropy, linear, pooling
from fedala.lanes.stacked import call_stacked


class LaneKernels(TorchFunctionMode):
    """While it is active, the layers that have a kernel run on it."""

    def __init__(self, precision: str = "tf32x3", *, special: bool = True) -> None:
        """`special`: compile convolutions for each size that comes, which is the fastest where there are few."""
        super().__init__()
        self.precision, self.special = precision, special
        self.kernels: dict[Any, Callable[..., Any]] = {
            torch.conv2d: convolution.arguments,
            F.linear: linear.arguments,
            F.max_pool2d: pooling.arguments,
            F.cross_entropy: entropy.arguments,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kernels:
            taken = self.kernels[func](self, *args, **(kwargs or {}))
            if taken is not None:
                return call_stacked(*taken)
        return func(*args, **(kwargs or {}))
