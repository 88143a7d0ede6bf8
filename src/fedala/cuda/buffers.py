"""How tensors of lanes lie in memory, for the kernels."""

from torch import Tensor


def has_many_channels(c: int) -> bool:
    """Tell whether a convolution's kernels can take the channels last, 16 or 32 at a time.

    The first layer of an image model has one or three.
    """
    return c % 16 == 0


def to_last(x: Tensor) -> Tensor:
    """View [lane, b, c, h, w] as [lane, b, h, w, c]."""
    return x.permute(0, 1, 3, 4, 2)


def to_first(x: Tensor) -> Tensor:
    """View [lane, b, h, w, c] as [lane, b, c, h, w]."""
    return x.permute(0, 1, 4, 2, 3)


def make_buffer(like: Tensor, lanes: int) -> Tensor:
    """Return an empty tensor like a parameter [lane, …], laid out as the kernels take it."""
    if _stands_last(like):
        return to_first(like.new_empty(lanes, *to_last(like).shape[1:]))
    return make_plain_buffer(like, lanes)


def make_plain_buffer(like: Tensor, lanes: int) -> Tensor:
    """Return an empty tensor like a parameter [lane, …], in the usual order of memory."""
    return like.new_empty(lanes, *like.shape[1:])


def is_laid_out(param: Tensor) -> bool:
    """Tell whether a parameter lies in memory as the kernels take it."""
    return (to_last(param) if _stands_last(param) else param).is_contiguous()


def _stands_last(param: Tensor) -> bool:
    return param.dim() == 5 and has_many_channels(param.shape[2])
