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
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedala.cuda import convolution, entropy, linear, pooling


class _PerLane(torch.autograd.Function):
    """A stacked function as vmap sees it, for one lane; vmap's rule puts the lanes together."""

    @staticmethod
    def forward(stacked: Callable[..., Tensor], rest: Any, *tensors: Tensor | None) -> Tensor:
        return stacked(*(None if t is None else t.unsqueeze(0) for t in tensors), *rest).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, stacked: Any, rest: Any, *tensors: Tensor | None) -> tuple[Tensor, int]:
        lanes = [
            None if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        return stacked(*lanes, *rest), 0


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
                stacked, tensors, rest = taken
                if any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in tensors):
                    return _PerLane.apply(stacked, rest, *tensors)
                return stacked(*(None if t is None else t.unsqueeze(0) for t in tensors), *rest).squeeze(0)
        return func(*args, **(kwargs or {}))
