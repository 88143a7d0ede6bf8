"""Clients whose training ended with numbers that are not finite: who they are, what they keep."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, State, broadcast_lanes
from fedala.lanes.samples import to_device
from fedala.lanes.trees import are_finite, leaves, tree_map


def find_finite_lanes(cohort: Cohort, upload: Message, state: State) -> Tensor:
    """Tell for each lane whether its training succeeded.

    Its upload and state must be finite, and so must its loss, if it has any samples.
    """
    # What a client uploads is often what it keeps, too: each tensor is read once.
    tensors = {id(leaf): leaf for _, leaf in leaves((upload, state))}.values()
    checked = [tensor for tensor in tensors if tensor.is_floating_point()]
    loss = cohort.metrics.get("train_loss")
    if loss is not None:
        has_samples = to_device(cohort.task.device, cohort.sizes()) > 0
        checked.append(torch.where(has_samples, loss, 0))
    if not checked:
        return torch.ones(len(cohort), dtype=torch.bool)
    return are_finite(checked)


def state_after_divergence(policy: str, before: State, make_new: Callable[[], State]) -> State:
    """Return what a diverged client keeps: its state from before the round, or a new one (reset).

    If the policy is "stop", the run has ended before anybody asks.
    """
    return {**before, **make_new()} if policy == "reset" else before


def choose_states(is_finite: Tensor, new: State, instead: State) -> State:
    """Return the new state of each lane, or the one instead of it if its training failed."""
    chosen: State = tree_map(
        lambda a, b: torch.where(broadcast_lanes(is_finite, a), a, b), new, instead
    )
    return chosen


def check_step(losses: Tensor, state: State) -> None:
    """Raise a FloatingPointError after a training step whose loss or result is not finite."""
    if not all(leaf.isfinite().all() for _, leaf in leaves((losses, state))):
        raise FloatingPointError
