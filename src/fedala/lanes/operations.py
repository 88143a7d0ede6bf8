"""Count the floating-point operations of a model: those of its products, two for each factor.

Torch has an exact counter, which takes two seconds to load. Here an estimate is enough: products by
`einsum` and of unusual layers are left out.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def _count_product(out: Tensor, a: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * out.numel() * a.shape[-1]


def _count_sum(out: Tensor, bias: Tensor, *rest: Any, **options: Any) -> int:
    return _count_product(out, *rest)


def _count_convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * out.numel() * weight[:1].numel()


def _count_transposed(out: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * x.numel() * weight[:1].numel()


def _count_pooled(out: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> int:
    return 4 * _count_convolution(out, x, weight)


def _count_recurrence(out: Any, x: Tensor, state: Any, weights: Any, *rest: Any) -> int:
    """Return the operations of all layers over x, [time, sample, …] or [sample, time, …]."""
    gates: int = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * math.prod(x.shape[:2]) * gates


def _count_attention(out: Tensor, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _count_multihead(out: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> int:
    """Return the operations of four projections and of attention, [place, sample, width]."""
    width = query.shape[-1]
    return 2 * (query.numel() + key.numel()) * 2 * width + 4 * query.numel() * len(key)


#: The operations of a function, by its name: of its result and its arguments.
_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("linear", "linear_relu", "matmul", "mm", "bmm"), _count_product),
    **dict.fromkeys(("addmm", "baddbmm"), _count_sum),
    **{f"conv{n}d": _count_convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _count_transposed for n in (1, 2, 3)},
    "conv_pool_relu": _count_pooled,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _count_recurrence),
    "scaled_dot_product_attention": _count_attention,
    "multi_head_attention_forward": _count_multihead,
}


class OperationCounter(TorchFunctionMode):
    """While active, adds up the operations of products in `total`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = _COUNTS.get(getattr(func, "__name__", "").strip("_"))
        if count:
            self.total += count(out, *args, **(kwargs or {}))
        return out
