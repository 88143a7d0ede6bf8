"""What travels between the server and the clients."""

from typing import NamedTuple, Self

from fedala.lanes.task import Task
from fedala.lanes.trees import Params, State, leaves


class _Message(NamedTuple):
    model: Params
    """Parameters and buffers by name; empty if no model travels."""
    extra: State
    """Anything else: control variates, prototypes, statistics, numbers."""


class Message(_Message):
    """A model, or the shared part of one, and further tensors. Every tensor is [lane, …]."""

    __slots__ = ()

    def __new__(cls, model: Params | None = None, extra: State | None = None) -> Self:
        """Make a message. What is not given is a dict of its own, which a method may fill."""
        own_model = {} if model is None else model
        return super().__new__(cls, own_model, {} if extra is None else extra)

    def __repr__(self) -> str:
        """Say how much travels, and not every number of it."""
        tensors = len(list(leaves(self)))
        return f"<Message of {tensors} tensors, {count_numbers_per_lane(self):,} numbers a lane>"


def count_numbers_per_lane(message: Message) -> int:
    """Return how many numbers one client sends or gets with a message."""
    return sum(leaf[:1].numel() for _, leaf in leaves(message))


def drop_transient(task: Task, model: Params) -> Params:
    """Return a model without the buffers that `state_dict` leaves out: they do not travel."""
    return {name: value for name, value in model.items() if name not in task.transient}


def add_transient(task: Task, message: Message, shared: Params) -> Message:
    """Give a message the initial values of the buffers that do not travel.

    `shared` is the part of the initial model that the method shares, as one lane.
    """
    names = task.transient & shared.keys()
    if not message.model or not names:
        return message
    name, some = next(iter(message.model.items()))
    sizes = some.shape[: 1 + some.dim() - shared[name].dim()]  # lanes, and models of a stack
    model = dict(message.model)
    for name in names:
        inner = shared[name].shape[1:]
        model[name] = shared[name].view(*[1] * len(sizes), *inner).expand(*sizes, *inner)
    return message._replace(model=model)
