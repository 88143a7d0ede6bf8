"""Find out which layer is last: run the model once, and follow its samples through the layers.

The forward pass is watched operation by operation. An operation on values that come from a sample
and from a parameter *uses* the parameter's layer. All operations of one call of a function are one
use: torch may split `linear` into a product and a sum. A layer feeds another if the other uses a
result of it. Layers that feed no other layer are layer 1; those that feed only layer 1 are layer 2,
and so on: a layer's number is one more than the most layers on a way from it to the output. So

- a layer that is used several times (tied weights, a recurrence) counts where it is used last;
- layers side by side (two heads, the branches of a sum) are one layer together;
- a layer that the output does not depend on counts to the lowest.

Nothing of this depends on the weights, nor on the samples' values as long as the model runs the
same operations for all of them: whoever has the model and a sample's shape finds the same order.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedala.errors import first_line
from fedala.lanes.attention import plain_attention
from fedala.lanes.foreign_model import INDEX_TYPES, make_up_state
from fedala.lanes.layer_units import (
    Layers,
    arrange_layers,
    is_order_known,
    layers_of,
    note_layers,
    units_of,
)
from fedala.lanes.layers import call
from fedala.lanes.trees import tree_map


def learn_order(model: nn.Module, x: Any) -> Layers:
    """Run the model on the samples `x`, and return its layers in the order of use, output first.

    The model keeps the order: `layers_of` returns it from now on. Weights, buffers and random
    numbers stay as they are. If the order cannot be found, a warning says so, and layers count in
    the order in which they are registered.
    """
    if not is_order_known(model):
        try:
            order = _find_order(model, x)
        except Exception as error:  # whatever the user's model may raise
            reason = first_line(error)
            warnings.warn(
                f"Which layer of the model is used last could not be found out ({reason}): layers "
                "count in the order in which they are registered, so the last one should be the "
                "head.",
                stacklevel=2,
            )
            return layers_of(model)
        note_layers(model, arrange_layers(model, order))
    return layers_of(model)


def _find_order(model: nn.Module, x: Any) -> list[list[str]]:
    """Return the names of units in the order of use, output first; without those never used."""
    units = list(units_of(model).items())
    parameters = dict(model.named_parameters())
    number_of = {name: i for i, (_, names) in enumerate(units) for name in names}
    first = next(iter(parameters.values()))
    leaf = next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor))
    device = leaf.device if first.is_meta else first.device
    dtype = next((p.dtype for p in parameters.values() if p.is_floating_point()), first.dtype)
    state = make_up_state(model, device, dtype)
    x = tree_map(lambda t: _copy_input(t, device, dtype), x)
    trace = _Trace()
    for name in parameters:
        trace.add_parameter(state[name], number_of[name])
    for value in tree_leaves(x):
        trace.add_sample(value)
    devices = [device] if device.type == "cuda" else []
    with (
        _evaluation_mode(model),
        plain_attention(model),
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        trace,
        _Calls(trace),
    ):
        output = call(model, state, x)
    levels = trace.sort_units(output)
    if not levels:
        raise ValueError("its output does not depend on its parameters")
    return [[units[i][0] for i in level] for level in levels]


def _copy_input(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = dtype if value.is_floating_point() else value.dtype
    return value.detach().to(device, INDEX_TYPES.get(kind, kind), copy=True)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class _Calls(TorchFunctionMode):
    """Makes all operations of one call of a function of torch one use."""

    def __init__(self, trace: "_Trace") -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Kernels for lanes on a GPU must not take over: the model may be elsewhere.
        with self._trace.as_one_use(), torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which units each operation on the samples uses. Units are numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: By memory: the units whose parameters a value is made of. Views share their memory.
        self._units: dict[Any, int] = {}
        #: By memory: the latest uses that a value made from samples depends on.
        self._uses: dict[Any, int] = {}
        #: Of each use: its units, and all uses before it that it depends on. Sets are bits.
        self._units_used: list[int] = []
        self._before: list[int] = []
        #: Whether a function is being called, and the use that it has made; None before that.
        self._is_calling = False
        self._use_of_call: int | None = None
        self._kept: list[Any] = []  # so that no memory is used twice

    def add_parameter(self, value: Tensor, unit: int) -> None:
        self._units[self._memory(value)] = 1 << unit

    def add_sample(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._uses[self._memory(value)] = 0

    @contextmanager
    def as_one_use(self) -> Iterator[None]:
        """Count what happens inside as one use."""
        self._is_calling, self._use_of_call = True, None
        try:
            yield
        finally:
            self._is_calling = False

    def _memory(self, value: Tensor) -> Any:
        self._kept.append(value)
        try:
            return value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a sparse tensor
            return f"tensor {id(value)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [self._memory(v) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        changed = _list_changed(func, args)
        outputs = [self._memory(v) for v in tree_leaves((result, changed)) if isinstance(v, Tensor)]
        units = _unite(self._units.get(key, 0) for key in inputs)
        if not any(key in self._uses for key in inputs):
            if units:
                self._units.update(dict.fromkeys(outputs, units))
            return result
        before = _unite(self._uses.get(key, 0) for key in inputs)
        if units:
            before = self._note_use(units, before)
        for key in outputs:
            if changed or key not in self._units:
                self._units.pop(key, None)
                self._uses[key] = before
        return result

    def _note_use(self, units: int, before: int) -> int:
        """Note that some units are used on a result of the uses `before`; return the use's bit."""
        if not self._is_calling or self._use_of_call is None:
            self._use_of_call = len(self._units_used)
            self._units_used.append(0)
            self._before.append(0)
        use = self._use_of_call
        before |= _unite(self._before[earlier] for earlier in _list(before))
        self._units_used[use] |= units
        self._before[use] |= before & ~(1 << use)
        return 1 << use

    def sort_units(self, output: Any) -> list[list[int]]:
        """Return the units that the output depends on, by their number of layers above."""
        last = _unite(
            self._uses.get(self._memory(value), 0) for value in _find_tensors(output, set())
        )
        needed = last | _unite(self._before[use] for use in _list(last))
        uses: dict[int, int] = {}
        for use in _list(needed):
            for unit in _list(self._units_used[use]):
                uses[unit] = uses.get(unit, 0) | 1 << use
        final = {
            unit: own & ~_unite(self._before[use] for use in _list(own))
            for unit, own in uses.items()
        }
        above = {
            unit: {
                other
                for other, theirs in final.items()
                if other != unit and any(self._before[use] & own for use in _list(theirs))
            }
            for unit, own in final.items()
        }
        return _peel(above)


def _list_changed(func: Any, args: Sequence[Any]) -> list[Any]:
    """List the arguments that an operation changes in place."""
    declared = zip(func._schema.arguments, args, strict=False)
    return [value for a, value in declared if a.alias_info is not None and a.alias_info.is_write]


def _peel(above: dict[int, set[int]]) -> list[list[int]]:
    """Take away, again and again, the units that have no other one above them.

    If units are above each other, in a circle, those that have no others above them go together.
    """
    levels = []
    while above:
        top = [unit for unit, others in above.items() if not others]
        if not top:
            top = min((_reach(unit, above) for unit in above), key=len)
        levels.append(sorted(top))
        above = {unit: others - set(top) for unit, others in above.items() if unit not in top}
    return levels


def _reach(unit: int, above: dict[int, set[int]]) -> list[int]:
    found, waiting = {unit}, [unit]
    while waiting:
        new = above[waiting.pop()] - found
        found |= new
        waiting += new
    return sorted(found)


def _find_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of an output: in tuples, dicts, or attributes of an object."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, str | bytes | int | float | type(None)):
        seen.add(id(value))
        if isinstance(value, dict):
            parts: Sequence[Any] = list(value.values())
        elif isinstance(value, tuple | list):
            parts = value
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _find_tensors(part, seen)


def _unite(sets: Any) -> int:
    result = 0
    for bits in sets:
        result |= bits
    return result


def _list(bits: int) -> Iterator[int]:
    """Yield the numbers in a set of bits."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
