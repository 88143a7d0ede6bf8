"""The arrays of an app's messages, and the parameters and buffers of its model."""

import copy
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedala.errors import UserError, printable

#: The name of the one array in a message without arrays, in Flower's legacy API.
EMPTY_TENSOR_KEY = "_empty"

Names = Callable[[str], str | None] | Mapping[str, str | None]
"""From an array's name to that in the model, or to None if ALA should leave the array alone."""


def decode(record: ArrayRecord) -> dict[str, Tensor]:
    """Read arrays as tensors. Their bytes tell type and shape, which the legacy API does not."""
    if EMPTY_TENSOR_KEY in record:
        raise UserError("The message carries no arrays, but ALA needs the model in it.")
    try:
        return dict(record.to_torch_state_dict())
    except (ValueError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise UserError(f"The arrays of the model cannot be read: {error}.") from error


def match_names(
    model: nn.Module,
    arrays: Mapping[str, Tensor],
    source: str,
    names: Names | None = None,
) -> dict[str, str]:
    """Return the parameter or buffer of each array. `source` says whose they are, for errors.

    - `names` says it, if it is given.
    - By name: those of the model, of its PEFT adapter, or of just one sub-module's state dict.
    - By order, if the arrays have no names: the whole state dict, all parameters, those that learn,
      or the state dict of just one sub-module. Shapes must match.
    """
    known = set(model.state_dict())
    if names is not None:
        return _apply_names(names, arrays, known)
    if known.issuperset(arrays):
        return {key: key for key in arrays}
    adapter = _name_adapter(model)
    if adapter.keys() >= arrays.keys():
        return {key: adapter[key] for key in arrays}
    has_names = list(arrays) != [str(i) for i in range(len(arrays))]
    match = _match_part(model, arrays) if has_names else _match_order(model, arrays)
    if match is None:
        raise _make_error(known, arrays, source, has_names)
    return match


def _apply_names(names: Names, keys: Collection[str], known: Collection[str]) -> dict[str, str]:
    match = {}
    for key in keys:
        name = names.get(key, key) if isinstance(names, Mapping) else names(key)
        if name is None:
            continue
        if name not in known:
            raise UserError(
                f"names turns the array {printable(key, 100)} into {printable(str(name), 100)}, "
                "which the model that setup returns does not have."
            )
        match[key] = name
    if len(set(match.values())) < len(match):
        raise UserError("names turns two arrays into the same parameter of the model.")
    return match


def _name_adapter(model: nn.Module) -> dict[str, str]:
    """Return the names that PEFT gives to an adapter's parameters, with those in the model.

    It drops the adapter's name. Which is which shows in the memory that they share.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return {}
    peft = importlib.import_module("peft")  # the adapter comes from there
    state = model.state_dict()
    places = {value.data_ptr(): name for name, value in state.items()}
    found = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {key: places[value.data_ptr()] for key, value in found.items()}


def _list_parts(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the prefix and the state dict of every sub-module."""
    for path, module in model.named_modules():
        if path:
            yield f"{path}.", module.state_dict()


def _match_part(model: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Match arrays with the only sub-module that has all these names and shapes, and no others."""
    shapes = {key: value.shape for key, value in arrays.items()}
    prefixes = [
        prefix
        for prefix, state in _list_parts(model)
        if {name: value.shape for name, value in state.items()} == shapes
    ]
    return {key: f"{prefixes[0]}{key}" for key in arrays} if len(prefixes) == 1 else None


def _match_order(model: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Match arrays without names with the model's tensors, or with those of one sub-module."""
    state, parameters = model.state_dict(), dict(model.named_parameters())
    learning = {name: value for name, value in parameters.items() if value.requires_grad}
    if len(arrays) == len(state):  # whatever the shapes are: which one is wrong will be said
        return dict(zip(arrays, state, strict=True))
    shapes = [value.shape for value in arrays.values()]
    for whole in (parameters, learning):
        if [value.shape for value in whole.values()] == shapes:
            return dict(zip(arrays, whole, strict=True))
    parts = {  # a set, because a module and its only child have the same tensors
        tuple(prefix + name for name in part)
        for prefix, part in _list_parts(model)
        if [value.shape for value in part.values()] == shapes
    }
    return dict(zip(arrays, parts.pop(), strict=True)) if len(parts) == 1 else None


def _make_error(
    known: Collection[str], arrays: Mapping[str, Any], source: str, has_names: bool
) -> UserError:
    if not has_names:
        return UserError(
            f"It is not clear which parameters the {len(arrays)} arrays without names in {source} "
            f"are: the model that setup returns has {len(known)} tensors. Tell ALA with names=, a "
            "function from an array's number, as text, to the parameter's name."
        )
    unknown = printable(next(key for key in arrays if key not in known), 100)
    return UserError(
        f"The model that setup returns does not have {unknown}, which is in {source}. If it has "
        "another name there, tell ALA with names=, a function from the array's name to that one."
    )


def find_shared(model: nn.Module, names: Collection[str]) -> tuple[str, ...] | None:
    """Name the parameters among these tensors, or return None if that is all parameters.

    A tied weight has several names. It is shared if one of them is.
    """
    state = model.state_dict(keep_vars=True)
    places = {id(state[name]) for name in names}
    parameters = dict(model.named_parameters())
    shared = tuple(name for name, value in parameters.items() if id(value) in places)
    if not shared:
        raise UserError(
            "There is nothing that ALA could blend: the server sends no parameter of the model "
            "that setup returns."
        )
    return None if len(shared) == len(parameters) else shared


def copy_with_arrays(
    model: nn.Module,
    arrays: Mapping[str, Tensor],
    names: Mapping[str, str],
    source: str,
) -> nn.Module:
    """Copy the model with these arrays in it: `names` has the parameter or buffer of each.

    A counter that was averaged is rounded down. Frozen parameters without an array are not copied:
    with an adapter, that is almost the whole model.
    """
    tensors = model.state_dict(keep_vars=True)
    replaced = {id(tensors[name]) for name in names.values()}
    frozen = {
        id(value): value
        for value in model.parameters()
        if not value.requires_grad and id(value) not in replaced
    }
    filled = copy.deepcopy(model, frozen)
    state = filled.state_dict()
    with torch.no_grad():
        for key, name in names.items():
            if state[name].shape != arrays[key].shape:
                raise UserError(
                    f"{name} has the shape {tuple(state[name].shape)} in the model that setup "
                    f"returns, but {tuple(arrays[key].shape)} in {source}."
                )
            state[name].copy_(arrays[key])
    return filled


def make_array(value: Tensor, like: Array) -> Array:
    """Make an array of the type of `like`: averages and half-precision apps keep their type."""
    dtype = torch.from_numpy(like.numpy()).dtype  # arrays of the legacy API do not declare theirs
    return Array(value.detach().cpu().to(dtype).numpy())
