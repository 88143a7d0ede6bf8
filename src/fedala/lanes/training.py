"""Steps of local training, and what takes them.

A step is a function (task, state, fixed, x, y) of the lanes that have a batch. It changes `state`
in place and returns the lanes' losses. It may depend on nothing else that changes from round to
round, because a GPU captures it once and replays it: a learning rate, a schedule or an anchor is a
tensor in `fixed`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.row_gradients import Gradients, RowGradient
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, broadcast_lanes, is_shared, take, tree_map

Step = Callable[[Task, Any, Any, Any, Any], Tensor]
OnStep = Callable[[Tensor, Any], None]
"""Called with the losses and the state after each step."""


def descend(params: Params, gradients: Gradients, lr: Tensor) -> None:
    """Take one step of gradient descent, in place. `lr` is [lane]."""
    whole = {name: value for name, value in gradients.items() if isinstance(value, Tensor)}
    targets = [params[name].detach() for name in whole]
    # A model may learn nothing but row gradients: a kernel wants at least one tensor.
    if targets and is_shared(lr) and all(map(_can_fuse, targets, whole.values())):
        _descend_fused(targets, list(whole.values()), lr[0])
    else:
        for target, gradient in zip(targets, whole.values(), strict=True):
            target.addcmul_(gradient, broadcast_lanes(lr, gradient).to(target.dtype), value=-1)
    for name, value in gradients.items():
        if isinstance(value, RowGradient):
            value.add_to(params[name].detach(), -lr)


def _can_fuse(target: Tensor, gradient: Tensor) -> bool:
    """Tell whether one GPU kernel can step this parameter together with others."""
    return (
        target.is_cuda
        and target.dtype == gradient.dtype == torch.float32
        and target.stride() == gradient.stride()
    )


def _descend_fused(targets: list[Tensor], gradients: list[Tensor], lr: Tensor) -> None:
    """Take the step for all parameters in one kernel."""
    torch._fused_sgd_(
        targets,
        gradients,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=lr.float(),
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def densify(gradients: Gradients) -> Params:
    """Return gradients as whole tensors, for arithmetic that needs them so."""
    return {
        name: value.densify() if isinstance(value, RowGradient) else value
        for name, value in gradients.items()
    }


def pull(params: Params, gradients: Gradients, anchor: Params, mu: float) -> None:
    """Add the gradient of a proximal term, μ/2·‖w − anchor‖², in place."""
    for name, value in densify(gradients).items():
        gradients[name] = value.add_(params[name] - anchor[name], alpha=mu)


@dataclass(frozen=True)
class SGD:
    """The step of plain SGD on the named parameters, at the rates `fixed["lr"]`, [lane].

    With μ > 0, a proximal term of strength μ pulls towards `fixed["anchor"]`.
    """

    names: tuple[str, ...]
    mu: float = 0.0

    def __call__(self, task: Task, state: Params, fixed: Any, x: Any, y: Any) -> Tensor:
        losses, gradients = task.gradients(state, x, y, self.names)
        if self.mu:
            pull(state, gradients, fixed["anchor"], self.mu)
        descend(state, gradients, fixed["lr"])
        return losses


class EagerRunner:
    """Takes the steps of one training, one after the other, as plain PyTorch."""

    def __init__(
        self, task: Task, state: Any, fixed: Any, lanes: int, on_step: OnStep | None = None
    ) -> None:
        self.task, self.fixed, self.on_step = task, fixed, on_step
        self.state = tree_map(task.lay_out, state)
        self.total = torch.zeros(lanes, device=task.device, dtype=task.dtype)
        self.order = torch.empty(0)

    def begin_epoch(self, order: Tensor) -> None:
        """Set the samples of an epoch: [lane, sample], padded."""
        self.order = order

    def step(self, step: Step, lanes: slice, columns: slice) -> None:
        """Take one step with the samples in these columns of the epoch's order."""
        rows = self.order[lanes, columns]
        x, y = self.task.training_batch(rows)
        losses = step(self.task, take(self.state, lanes), take(self.fixed, lanes), x, y)
        self.total[lanes] += losses
        if self.on_step:
            self.on_step(losses, self.state)

    def finish(self) -> tuple[Any, Tensor]:
        """Return the state after the last step, and each lane's summed losses."""
        return self.state, self.total


def make_runner(
    task: Task,
    steps: Sequence[Step],
    batch_size: int,
    frozen: Collection[str],
    state: Any,
    fixed: Any,
    lanes: int,
    on_step: OnStep | None = None,
) -> EagerRunner:
    """Return what takes the steps of a training: captured steps if the device has them."""
    if on_step is None:
        captured: EagerRunner | None = task.backend.capture_steps(
            task, steps, batch_size, frozen, state, fixed, lanes
        )
        if captured:
            return captured
    return EagerRunner(task, state, fixed, lanes, on_step)
