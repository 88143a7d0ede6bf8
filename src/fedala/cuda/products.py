"""What several kernels compute: the matrix product in each precision, and ReLU."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def passes_relu(x):
    """Tell what ReLU lets through: positive numbers, and NaN, as in torch."""
    return (x > 0) | (x != x)
