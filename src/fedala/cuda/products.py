"""What several kernels compute: the matrix product in each precision, and ReLU."""

import triton
import triton.language as tl


@triton.jit
def _round_to_tf32(x):
    """Round to the eleven significant bits of TF32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _multiply_exactly(a, b):
    """Multiply with the error of float32, as three products of TF32.

    Triton's own `tf32x3` also replaces NaN in every step of a sum, so that infinity times a number
    stays infinite. Here it becomes NaN, in a third fewer instructions.
    """
    a_high, b_high = _round_to_tf32(a), _round_to_tf32(b)
    low = tl.dot(a - a_high, b_high, input_precision="tf32")
    low = tl.dot(a_high, b - b_high, low, input_precision="tf32")
    return tl.dot(a_high, b_high, low, input_precision="tf32")


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif PRECISION == "tf32x3":
        return acc + _multiply_exactly(a, b)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def passes_relu(x):
    """Tell what ReLU lets through: positive numbers, and NaN, as in torch."""
    return (x > 0) | (x != x)
