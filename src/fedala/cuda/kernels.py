"""Fast kernels under unchanged modules.

Under `vmap`, torch has its own rule for a layer with other weights in every lane: convolutions
become grouped ones, which are slow, and the results of matrix products come out transposed.
`LaneKernels` catches these functions, under `vmap` or not, and calls a kernel for the whole stack
of lanes. A function that no kernel covers runs as usual.

`precision` says how the tensor cores multiply float32 numbers: `tf32x3` (three products, as exact
as float32), `tf32` or `bf16`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedala.cuda import convolution, entropy, linear, pooling
from fedala.lanes.stacked import call_stacked


class LaneKernels(TorchFunctionMode):
    """A mode that runs layers on their kernels, if they have one."""

    def __init__(self, precision: str = "tf32x3", *, special: bool = True) -> None:
        """Compile convolutions for each size if `special`: the fastest if there are few sizes."""
        super().__init__()
        self.precision, self.special = precision, special
        self.kernels: dict[Any, Callable[..., Any]] = {
            torch.conv2d: convolution.match_call,
            F.linear: linear.match_call,
            F.max_pool2d: pooling.match_call,
            F.cross_entropy: entropy.match_call,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kernels:
            call = self.kernels[func](self, *args, **(kwargs or {}))
            if call is not None:
                return call_stacked(*call)
        return func(*args, **(kwargs or {}))
