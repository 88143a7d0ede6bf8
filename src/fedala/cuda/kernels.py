"""Fast kernels under unchanged modules.

Under `vmap`, torch has its own rule for a layer with other weights in every lane: convolutions
become grouped ones, which are slow, and the results of matrix products come out transposed.
`LaneKernels` catches these functions, under `vmap` or not, and calls a kernel for the whole stack
of lanes. A function that no kernel covers runs as usual.

`precision` says how the tensor cores multiply float32 numbers: `tf32x3` (three products, as exact
as float32), `tf32` or `bf16`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedala.cuda import convolution, entropy, linear, normalization, pooling, words
from fedala.cuda.late import LateGradients
from fedala.lanes.blocks import conv_pool_relu, linear_relu
from fedala.lanes.stacked import call_stacked
from fedala.lanes.words import keep_word_gradient, mean_embedding


class LaneKernels(TorchFunctionMode):
    """A mode that runs layers on their kernels, if they have one."""

    def __init__(
        self, precision: str = "tf32x3", *, special: bool = True, is_own: bool = True
    ) -> None:
        """Compile convolutions for each size if `special`: the fastest if there are few sizes.

        With `is_own`, the model is one of ours, which keeps the promises of `Layered`: channels
        stay last between layers, and gradients may be late.
        """
        super().__init__()
        self.precision, self.special, self.is_own = precision, special, is_own
        self.late: LateGradients | None = None
        self.kernels: dict[Any, Callable[..., Any]] = {
            torch.conv2d: convolution.match_call,
            conv_pool_relu: partial(convolution.match_call, pool=True),
            F.linear: linear.match_call,
            linear_relu: partial(linear.match_call, relu=True),
            F.max_pool2d: pooling.match_call,
            F.cross_entropy: entropy.match_call,
            F.batch_norm: normalization.match_call,
            keep_word_gradient: words.match_call,
            mean_embedding: words.match_mean,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kernels:
            call = self.kernels[func](self, *args, **(kwargs or {}))
            if call is not None:
                result = call_stacked(*call)
                return result if self.is_own else result.contiguous()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def keep_late(self, names: dict[Any, str]) -> Iterator[LateGradients]:
        """Keep the gradients of parameters late, by what `find_place` returns."""
        self.late = LateGradients(names)
        try:
            yield self.late
        finally:
            self.late.join()
            self.late = None
