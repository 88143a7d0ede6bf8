"""Recurrent layers under `vmap`: torch's fused `lstm`, `gru` and `rnn` know no lanes.

`UnrolledRecurrence` replaces them, under `vmap` only, by the same sums step by step. A single lane
runs torch's own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Cell = Callable[[Tensor, Tensor, "_Hidden"], "_Hidden"]
"""(what the input adds, what the hidden state adds, the hidden state) to the next hidden state."""
_Hidden = tuple[Tensor, ...]


def unroll_recurrence(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which the recurrent layers of a model, if any, run under `vmap`."""
    return UnrolledRecurrence() if is_recurrent(model) else nullcontext()


def is_recurrent(model: nn.Module) -> bool:
    """Tell whether a model has recurrent layers of torch's own."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


class UnrolledRecurrence(TorchFunctionMode):
    """A mode in which recurrent layers run step by step under `vmap`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cell = _CELLS.get(func)
        if cell is not None and not kwargs and _has_lanes(args) and not isinstance(args[3], Tensor):
            return _run_layers(cell, func is torch.lstm, *args)
        return func(*args, **(kwargs or {}))


def _has_lanes(args: Sequence[Any]) -> bool:
    tensors = [args[0], *(args[2] if isinstance(args[2], list | tuple) else ())]
    return all(isinstance(t, Tensor) for t in tensors) and any(
        torch._C._functorch.is_batchedtensor(t) for t in tensors
    )


def _run_layers(
    cell: Cell,
    is_lstm: bool,
    x: Tensor,
    start: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute what torch's function of these arguments computes."""
    x = x.transpose(0, 1) if batch_first else x
    starts: tuple[Tensor, ...] = tuple(start) if is_lstm else (start,)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    ends: list[_Hidden] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            hidden = tuple(h[number] for h in starts)
            output, hidden = _run_direction(cell, x, hidden, own, has_biases, direction == 1)
            outputs.append(output)
            ends.append(hidden)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.stack(part) for part in zip(*ends, strict=True)))


def _run_direction(
    cell: Cell,
    x: Tensor,
    hidden: _Hidden,
    weights: Sequence[Tensor],
    has_biases: bool,
    is_reversed: bool,
) -> tuple[Tensor, _Hidden]:
    """Run one layer in one direction over x [time, sample, …]."""
    input_bias, hidden_bias = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    inputs = F.linear(x, weights[0], input_bias).unbind(0)
    outputs = []
    for step in reversed(inputs) if is_reversed else inputs:
        hidden = cell(step, F.linear(hidden[0], weights[1], hidden_bias), hidden)
        if projection is not None:
            hidden = (F.linear(hidden[0], projection), *hidden[1:])
        outputs.append(hidden[0])
    return torch.stack(outputs[::-1] if is_reversed else outputs), hidden


def _lstm_cell(step: Tensor, recurrent: Tensor, hidden: _Hidden) -> _Hidden:
    gate_in, forget, new, out = (step + recurrent).chunk(4, -1)
    memory = forget.sigmoid() * hidden[1] + gate_in.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru_cell(step: Tensor, recurrent: Tensor, hidden: _Hidden) -> _Hidden:
    (reset, update, new), (old_reset, old_update, old) = step.chunk(3, -1), recurrent.chunk(3, -1)
    candidate = (new + (reset + old_reset).sigmoid() * old).tanh()
    return (candidate + (update + old_update).sigmoid() * (hidden[0] - candidate),)


def _tanh_cell(step: Tensor, recurrent: Tensor, hidden: _Hidden) -> _Hidden:
    return ((step + recurrent).tanh(),)


def _relu_cell(step: Tensor, recurrent: Tensor, hidden: _Hidden) -> _Hidden:
    return ((step + recurrent).relu(),)


_CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
}
