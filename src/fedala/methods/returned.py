"""Refuse what a method's functions return if it is not what they should, in a sentence.

The first mistakes of a new method show here, at the function that made them. Later they would be
errors of torch or of a checkpoint, in some rounds or with some numbers of lanes only.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedala.errors import MethodError
from fedala.lanes import Cohort, Message, Params, State
from fedala.lanes.parameters import list_few
from fedala.lanes.trees import leaves, take
from fedala.methods.base import Method
from fedala.methods.wrapper import Wrapper

_shapes: WeakKeyDictionary[nn.Module, dict[str, tuple[torch.dtype, torch.Size]]] = (
    WeakKeyDictionary()
)


def check_tensors(
    method: Method,
    function: str,
    found: Any,
    part: str = "",
    *,
    lanes: int | None = None,
    wanted: str = "a dict of tensors",
) -> State:
    """Refuse what a function returns, or a part of it, if it is not a dict of tensors by name.

    With `lanes`, each of them must have so many.
    """
    if not isinstance(found, dict):
        raise MethodError(
            f"{method.title}: {function} must return {wanted}, and it returns {_describe(found)}."
        )
    for path, value in _list_entries(found, part):
        if isinstance(value, Tensor):
            if lanes is None or (value.dim() and len(value) == lanes):
                continue
            wanted = f"Its first dimension must be the lane, and its length {lanes}"
        elif isinstance(value, dict) and not value:
            continue
        else:
            wanted = "It must be a tensor, or a dict of tensors by name"
        where = f" under {path!r}" if path else ""
        raise MethodError(
            f"{method.title}: {function} returns {_describe(value)}{where}. {wanted}."
        )
    return found


def check_like(
    method: Method,
    function: str,
    found: State,
    part: str,
    owner: str,
    template: State,
    *,
    may_lack: bool = False,
    may_add: bool = True,
) -> None:
    """Refuse what has a tensor that is not like that of a template, whose `owner` is named."""
    own, expected = (dict(_list_entries(tree, part)) if tree else {} for tree in (found, template))
    for path in {**expected, **own}:
        one, other = own.get(path), expected.get(path)
        is_excused = (may_lack and one is None) or (may_add and other is None)
        if not is_excused and not _are_alike(one, other):
            has, should = ("nothing" if v is None else _describe(v) for v in (one, other))
            raise MethodError(
                f"{method.title}: {function} returns {has} under {path!r}, where {owner} has "
                f"{should}. Names, types and shapes must be the same."
            )


def _are_alike(one: Any, other: Any) -> bool:
    """Tell whether two tensors have one type and shape, or two other things would be called so."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and one.shape == other.shape)
    return one is not None and other is not None and _describe(one) == _describe(other)


def check_aggregated(method: Method, before: State, after: Any) -> State:
    """Refuse a server's new state that is not made as the old one: a checkpoint may have either."""
    wanted = 'the server\'s new state, a dict such as {"global": uploads.average().model}'
    state = check_tensors(method, "aggregate", after, wanted=wanted)
    if missing := [name for name in before if name not in state]:
        raise MethodError(
            f"{method.title}: the state that aggregate returns lacks {list_few(missing)}, which "
            "the server's state has before: return the whole new state."
        )
    # With a hyperparameter that has changed since a checkpoint, fewer parameters may be shared.
    check_like(method, "aggregate", state, "", "the server's state", before, may_lack=True)
    return state


def find_widths(method: Method, function: str, message: Any) -> set[int]:
    """Return the numbers of lanes of a message's tensors; refuse what is not a message of such."""
    if not isinstance(message, Message):
        raise MethodError(
            f"{method.title}: {function} must return a Message, and it returns "
            f"{_describe(message)}."
        )
    for part, found in message._asdict().items():
        wanted = f"a Message whose {part} is a dict of tensors"
        check_tensors(method, function, found, part, wanted=wanted)
    return {len(leaf) if leaf.dim() else 0 for _, leaf in leaves(message)}


def check_message(method: Method, message: Any, clients: int, function: str = "send") -> Message:
    """Refuse a message that is neither one lane for all clients nor one for each."""
    widths = find_widths(method, function, message)
    if len(widths) > 1 or not widths <= {1, clients}:
        raise MethodError(
            f"{method.title} sends tensors of {sorted(widths)} lanes to {clients} clients. "
            "All tensors of a message must have one lane for all clients, or one for each."
        )
    sent: Message = message
    return sent


def check_initialized(
    method: Method, cohort: Cohort, found: Any, function: str = "initialize"
) -> tuple[Params, State]:
    """Refuse what is not a model and the client's state.

    What `initialize` returns must be a whole model; that of `received_model` may be a part of one.
    """
    wanted = "a model and the client's state, two dicts"
    model, state = _check_pair(method, function, found, (dict, dict), wanted)
    task, lanes = cohort.task, len(cohort)
    check_tensors(method, function, model, "model", lanes=lanes)
    check_tensors(method, function, state, "state", lanes=lanes)
    for name, (own_dtype, shape) in _list_shapes(task.model).items():
        dtype = task.dtype if own_dtype.is_floating_point else own_dtype
        value = model.get(name)
        is_like = isinstance(value, Tensor) and value.dtype == dtype and value.shape[1:] == shape
        if not is_like and (function == "initialize" or name in model):
            template = {name: torch.empty(lanes, *shape, dtype=dtype, device="meta")}
            own = {name: value} if name in model else {}
            check_like(method, function, own, "model", "the model", template)
    return model, state


def _list_shapes(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the type and shape of each parameter and buffer of a model: a cohort asks often."""
    if model not in _shapes:
        named = (*model.named_parameters(), *model.named_buffers())
        _shapes[model] = {name: (value.dtype, value.shape) for name, value in named}
    return _shapes[model]


def check_tested(method: Method, initialized: Params, found: Any) -> Params:
    """Refuse what `model_to_evaluate` returns if it is not a whole model."""
    model: Params = check_tensors(method, "model_to_evaluate", found, wanted="a model, a dict")
    check_like(method, "model_to_evaluate", model, "", "the initialised model", initialized)
    return model


def check_trained(method: Method, found: Any) -> tuple[Message, State]:
    """Refuse what `train` returns if it is not a message and a state."""
    wanted = "a Message and the client's new state, a dict, as in `return Message(trained), state`"
    upload, state = _check_pair(method, "train", found, (Message, dict), wanted)
    return upload, state


def check_client_state(method: Method, before: State, after: State, lanes: int) -> None:
    """Refuse a state after training that is not made as those of clients that have not trained.

    Both work in the same cohort, and a client whose training diverges keeps the state that it had.
    """
    if isinstance(method, Wrapper) and "base" in before:
        check_client_state(method.base, before["base"], after["base"], lanes)
    check_tensors(method, "train", after, "state", lanes=lanes)
    owner = "the state of init_client"
    check_like(method, "train", after, "state", owner, before, may_add=False)


def check_upload(method: Method, cohort: Cohort, initialized: Params, upload: Message) -> None:
    """Refuse tensors without a lane for each client, and extra tensors that were not announced."""
    widths = find_widths(method, "train", upload)
    if widths - {len(cohort)}:
        raise MethodError(
            f"{method.title} uploads tensors of {sorted(widths)} lanes for {len(cohort)} clients. "
            "All tensors of an upload must have one lane for each client."
        )
    first = initialized if len(cohort) == 1 else take(initialized, slice(0, 1))
    announced = method.extra_template(cohort.task, first)
    template = check_tensors(method, "extra_template", announced, lanes=1)
    extra = upload.extra if len(cohort) == 1 else take(upload.extra, slice(0, 1))
    check_like(method, "train", extra, "extra", "extra_template", template, may_add=False)


def _list_entries(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in nested dicts by path, and dicts without names or with other than texts."""
    if isinstance(tree, dict) and tree and all(isinstance(name, str) for name in tree):
        for name, value in tree.items():
            where = f"{path}/{name}" if path else name
            if isinstance(value, dict):
                yield from _list_entries(value, where)
            else:
                yield where, value
    else:
        yield path, tree


def _check_pair(
    method: Method, function: str, found: Any, kinds: tuple[type, type], wanted: str
) -> Any:
    """Refuse what is no tuple of these; a `Message` is a tuple, too, but only one thing."""
    is_pair = isinstance(found, tuple) and not isinstance(found, Message) and len(found) == 2
    if not is_pair or not all(map(isinstance, found, kinds)):
        raise MethodError(
            f"{method.title}: {function} must return {wanted}, and it returns {_describe(found)}."
        )
    return found


def _describe(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, Message):
        return " and ".join(map(_describe, value)) or "an empty tuple"
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        return "a dict with names that are not texts"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
