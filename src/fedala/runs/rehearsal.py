"""Rehearse the methods of a run with two samples, before it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fedala.data import Federation
from fedala.errors import MethodError
from fedala.lanes import UpdateRule
from fedala.lanes.heads import Start, extend_task
from fedala.lanes.losses import Loss
from fedala.lanes.parameters import list_few, model_state
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, count_bytes
from fedala.methods import Method, ServerRound
from fedala.methods.returned import check_tensors
from fedala.methods.with_ala import InitializedByALA
from fedala.methods.wrapper import Wrapper, is_own
from fedala.runs.holdout import rehearse_newcomers
from fedala.runs.members import Member
from fedala.runs.own_code import check_personal_models
from fedala.simulation import Simulation
from fedala.simulation.client_round import init_client_state
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.server_round import init_server_state


class Rehearsal(NamedTuple):
    """What a method's rehearsal has found."""

    state_bytes: int
    """What a client keeps between rounds."""
    governed: tuple[str, ...]
    """The parameters that ALA blends."""
    sizes: Mapping[str, int]
    """How many numbers each parameter has."""


def rehearse(
    members: Sequence[Member],
    model: nn.Module,
    federation: Federation,
    loss: Loss,
    *,
    is_rehearsed: bool = False,
) -> dict[str, Rehearsal]:
    """Make server and client once, with two samples, so that a method can refuse model or loss.

    A user's own method also does two rounds, unless another process of the run has done that
    (`is_rehearsed`). Points of a sweep that take the same steps do them once. Returns what was
    found, by label.
    """
    found, kinds = {}, list[Any]()
    for member in members:
        method = member.method
        task, begin = _make_task(member, model, federation, loss, clients=1)
        start = begin(0)
        shared = check_tensors(method, "shared_part", method.shared_part(task, start), lanes=1)
        # A user's method may refuse few clients, so its server begins with those of the run.
        population = len(federation.known.train) if is_own(method) else 1
        begin_server = ServerRound(0, 0, 1, list(range(population)), [2] * population)
        init_server_state(method, task, shared, begin_server)
        if federation.held_out:
            rehearse_newcomers(method, task, start, max(2, population))
        state = init_client_state(method, task, start)
        check_personal_models(method, state)
        kind = _list_choices(method), UpdateRule.of([member.config.recipe().optimizer])
        if is_own(method) and not is_rehearsed and kind not in kinds:
            kinds.append(kind)
            # If only some take part, one more: two of them are side by side, and one is absent.
            clients = 2 if member.config.join_ratio == 1 else 3
            _rehearse_rounds(member, *_make_task(member, model, federation, loss, clients))
        sizes = {name: value.numel() for name, value in task.model.named_parameters()}
        found[member.label] = Rehearsal(
            count_bytes(state), _list_governed(method, task, shared), sizes
        )
    return found


def _make_task(
    member: Member, model: nn.Module, federation: Federation, loss: Loss, clients: int
) -> tuple[Task, Start]:
    """Return a task of clients that have the same two samples, and what makes its first models."""
    config, data, rows = member.config, federation.dataset, [np.arange(2)] * clients
    task = Task(
        model,
        data.x[:2],
        data.y[:2],
        rows,
        rows,
        loss=loss,
        optimizer=config.recipe().optimizer,
        keeps_optimizer=config.keep_optimizer,
    )
    initial = {
        name: value.to(task.dtype) if value.is_floating_point() else value
        for name, value in model_state(model).items()
    }
    return extend_task(task, lambda seed: dict(initial), member.method.head, member.method.title)


def _list_choices(value: Any) -> Any:
    """Return what a method's steps depend on: of a number with decimals, only if it is zero."""
    if is_dataclass(value):
        values = {one.name: _list_choices(getattr(value, one.name)) for one in fields(value)}
        return type(value), values
    return bool(value) if isinstance(value, float) else value


def _rehearse_rounds(member: Member, task: Task, start: Start) -> None:
    """Let two clients of a user's method do a round one by one, and another side by side.

    One by one comes first: what they share side by side cannot be written to, which torch would
    say in its own words.

    What any of its functions returns or changes is refused here as in the run. If anything else
    fails, the samples or clients may be too few for it, also if it says so in a `UserError` of its
    own: the run will show it.
    """
    clients = len(task.parts["train"])
    # What only saves time need not be tried.
    task.uses_vmap = task.uses_channels_last = False
    options: dict[str, Any] = {"rounds": 2, "join_ratio": 2 / clients}
    options["evaluate"] = member.config.evaluated_models
    try:
        simulation = Simulation(member.method, task, start, lanes=1, **options)
        simulation.step(1, train=True)
        assert isinstance(simulation.transport, LocalTransport)
        simulation.transport.lanes = clients
        simulation.step(2, train=True)
    except MethodError:
        raise
    except Exception:  # whatever the user's method may raise
        return


def _list_governed(method: Method, task: Task, shared: Params) -> tuple[str, ...]:
    """Return the parameters that ALA blends in a method; none without ALA."""
    while isinstance(method, Wrapper) and not isinstance(method, InitializedByALA):
        method = method.base
    if isinstance(method, InitializedByALA):
        return method.list_governed(task, shared)
    return ()


def describe_blended(rehearsals: Mapping[str, Rehearsal]) -> tuple[str, ...]:
    """Say which parameters ALA blends, once for all methods in which they are the same."""
    labels: dict[str, list[str]] = {}
    for label, (_, governed, sizes) in rehearsals.items():
        if governed:
            count = sum(sizes[name] for name in governed)
            what = f"{list_few(governed)}: {count:,} of {sum(sizes.values()):,} parameters"
            labels.setdefault(what, []).append(label)
    if len(labels) == 1:
        return tuple(f"ALA blends {what}." for what in labels)
    return tuple(f"ALA blends {what} ({list_few(own)})." for what, own in labels.items())
