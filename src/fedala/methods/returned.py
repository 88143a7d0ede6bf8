"""Refuse what a method's functions return if it is not what they should, in a sentence.

The first mistakes of a new method show here, at the function that made them. Later they would be
errors of torch, in some rounds or with some numbers of lanes only.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State
from fedala.lanes.parameters import list_few
from fedala.lanes.trees import leaves, matches, take
from fedala.methods.base import Method
from fedala.methods.wrapper import Wrapper


def check_init_client(method: Method, state: Any, lanes: int) -> State:
    """Refuse a first state of clients that is not a dict of tensors with so many lanes."""
    if not isinstance(state, dict):
        raise UserError(
            f"{method.title}: init_client must return a state, a dict, and it returns "
            f"{_describe(state)}."
        )
    _check_lanes(method, "init_client", state, lanes)
    return state


def check_initialized(method: Method, found: Any) -> tuple[Params, State]:
    """Refuse what `initialize` returns if it is not a model and a state."""
    wanted = "initialize must return a model and the client's state, two dicts"
    pair: tuple[Params, State] = _check_pair(method, found, (dict, dict), wanted)
    return pair


def check_trained(method: Method, found: Any) -> tuple[Message, State]:
    """Refuse what `train` returns if it is not a message and a state."""
    wanted = (
        "train must return a Message and the client's new state, a dict, as in "
        "`return Message(trained), state`"
    )
    pair: tuple[Message, State] = _check_pair(method, found, (Message, dict), wanted)
    return pair


def check_client_state(method: Method, before: State, after: State, lanes: int) -> None:
    """Refuse a state after training that is not made as those of clients that have not trained.

    Both work in the same cohort, and a client whose training diverges keeps the state that it had.
    """
    if isinstance(method, Wrapper) and "base" in before:
        check_client_state(method.base, before["base"], after["base"], lanes)
    _check_lanes(method, "train", after, lanes)
    wanted = "Return a state with the same tensors from both."
    if before.keys() != after.keys():
        raise UserError(
            f"{method.title}: the state that train returns has {_list_keys(after)}, and that of "
            f"init_client has {_list_keys(before)}. {wanted}"
        )
    if not _are_alike(before, after):
        where = next(path for path in before if not _are_alike(before[path], after[path]))
        raise UserError(
            f"{method.title}: under {where!r}, the state that train returns has tensors of other "
            f"names, types or shapes than that of init_client. {wanted}"
        )


def check_aggregated(method: Method, before: State, after: Any) -> State:
    """Refuse a server's new state that lacks something that the old one has."""
    if not isinstance(after, dict):
        raise UserError(
            f"{method.title}: aggregate must return the server's new state, a dict such as "
            f'{{"global": uploads.average().model}}, and it returns {_describe(after)}.'
        )
    if missing := [name for name in before if name not in after]:
        raise UserError(
            f"{method.title}: the state that aggregate returns lacks {list_few(missing)}, which "
            "the server's state has before: return the whole new state."
        )
    return after


def check_message(method: Method, message: Any, clients: int) -> None:
    """Refuse a message that is neither one lane for all clients nor one for each."""
    if not isinstance(message, Message):
        raise UserError(
            f"{method.title}: send must return a Message, and it returns {_describe(message)}."
        )
    widths = _find_widths(message)
    if len(widths) > 1 or not widths <= {1, clients}:
        raise UserError(
            f"{method.title} sends tensors of {sorted(widths)} lanes to {clients} clients. "
            "All tensors of a message must have one lane for all clients, or one for each."
        )


def check_upload(method: Method, cohort: Cohort, initialized: Params, upload: Message) -> None:
    """Refuse tensors without a lane for each client, and extra tensors that were not announced."""
    widths = _find_widths(upload)
    if widths - {len(cohort)}:
        raise UserError(
            f"{method.title} uploads tensors of {sorted(widths)} lanes for {len(cohort)} clients. "
            "All tensors of an upload must have one lane for each client."
        )
    template = method.extra_template(cohort.task, take(initialized, slice(0, 1)))
    extra = take(upload.extra, slice(0, 1))
    if not _are_alike(extra, template):
        raise UserError(
            f"The extra tensors that {method.title} uploads are not those of its extra_template."
        )


def _check_lanes(method: Method, function: str, state: State, lanes: int) -> None:
    """Refuse a state that holds something else than tensors with so many lanes."""
    for path, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            raise UserError(
                f"{method.title}: the state that {function} returns has {_describe(leaf)} under "
                f"{path!r}. A state is a dict of tensors, [lane, …]."
            )
        if leaf.shape[:1] != (lanes,):
            raise UserError(
                f"{method.title}: the state that {function} returns has a tensor of shape "
                f"{tuple(leaf.shape)} under {path!r}. The first dimension of every tensor must be "
                f"the lane, one for each client: here, {lanes}."
            )


def _check_pair(method: Method, found: Any, kinds: tuple[type, type], wanted: str) -> Any:
    """Refuse what is no tuple of these; a `Message` is a tuple, too, but only one thing."""
    is_pair = isinstance(found, tuple) and not isinstance(found, Message) and len(found) == 2
    if not is_pair or not all(map(isinstance, found, kinds)):
        raise UserError(f"{method.title}: {wanted}, and it returns {_describe(found)}.")
    return found


def _are_alike(one: Any, other: Any) -> bool:
    return matches(one, other) and matches(other, one)


def _find_widths(message: Message) -> set[int]:
    return {len(leaf) if leaf.dim() else 0 for _, leaf in leaves(message)}


def _describe(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, Message):
        return " and ".join(map(_describe, value)) or "an empty tuple"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _list_keys(state: Collection[str]) -> str:
    return list_few(list(state)) if state else "nothing"
