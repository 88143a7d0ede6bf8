"""Rehearse the methods of a run with two samples, before it starts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from fedala.data import Federation
from fedala.lanes.heads import extend_task
from fedala.lanes.losses import Loss
from fedala.lanes.parameters import list_few, model_state
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, count_bytes
from fedala.methods import Method, ServerRound
from fedala.methods.with_ala import InitializedByALA
from fedala.methods.wrapper import Wrapper
from fedala.runs.holdout import rehearse_newcomers
from fedala.runs.members import Member
from fedala.runs.own_code import check_personal_models
from fedala.simulation.client_round import init_client_state


class Rehearsal(NamedTuple):
    """What a method's rehearsal has found."""

    state_bytes: int
    """What a client keeps between rounds."""
    governed: tuple[str, ...]
    """The parameters that ALA blends."""
    sizes: Mapping[str, int]
    """How many numbers each parameter has."""


def rehearse(
    members: Sequence[Member], model: nn.Module, federation: Federation, loss: Loss
) -> dict[str, Rehearsal]:
    """Make server and client once, with two samples, so that a method can refuse model or loss.

    Returns what was found, by label.
    """
    data, rows = federation.dataset, [np.arange(2)]
    initial = model_state(model)
    found = {}
    for member in members:
        method, config = member.method, member.config
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
        task, begin = extend_task(task, lambda seed: dict(initial), method.head, method.title)
        start = begin(0)
        shared = method.shared_part(task, start)
        method.init_server(task, shared, ServerRound(0, 0, 1, [0], [2]))
        if federation.held_out:
            rehearse_newcomers(method, task, start)
        state = init_client_state(method, task, start)
        check_personal_models(method, state)
        sizes = {name: value.numel() for name, value in task.model.named_parameters()}
        found[member.label] = Rehearsal(
            count_bytes(state), _list_governed(method, task, shared), sizes
        )
    return found


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
