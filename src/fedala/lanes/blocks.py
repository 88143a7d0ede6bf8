"""Layers with what follows them, as one function each: a device may have one kernel for it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ReLU of a linear layer."""
    if has_torch_function_variadic(x, weight):
        result: Tensor = handle_torch_function(linear_relu, (x, weight), x, weight, bias)
        return result
    return F.linear(x, weight, bias).relu()


def conv_pool_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any
) -> Tensor:
    """Return ReLU of max-pooling by two of a convolution.

    ReLU keeps order, so pooling first gives the same and leaves a quarter of the work.
    """
    if has_torch_function_variadic(x, weight):
        arguments = x, weight, bias, stride, padding
        result: Tensor = handle_torch_function(conv_pool_relu, (x, weight), *arguments)
        return result
    return F.max_pool2d(F.conv2d(x, weight, bias, stride, padding), 2).relu()


def run_linear_relu(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ReLU of a layer's output."""
    return linear_relu(x, layer.weight, layer.bias)


def run_conv_pool_relu(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return ReLU of a layer's output, pooled by two."""
    return conv_pool_relu(x, layer.weight, layer.bias, layer.stride, layer.padding)
