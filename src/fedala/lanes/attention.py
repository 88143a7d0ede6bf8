"""Keep torch's attention on its plain path.

In evaluation mode, torch's Transformer layers take a fused path that knows neither lanes nor, with
a padding mask, anything but nested tensors. The plain path computes the same for any mask.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Switch:
    """Torch's switch for the fused path. Several threads may need it off at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def turn_off(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.mha.set_fastpath_enabled(self._before)


_switch = _Switch()


def has_attention(model: nn.Module) -> bool:
    """Tell whether a model has attention of torch's own."""
    return any(isinstance(module, _ATTENTION) for module in model.modules())


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Keep a model with attention of torch's own on the plain path."""
    if not has_attention(model):
        yield
        return
    _switch.turn_off()
    try:
        yield
    finally:
        _switch.give_back()
