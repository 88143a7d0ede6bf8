"""Steps of local training, and what takes them.

A step is a function (task, state, fixed, x, y) of the lanes that have a batch. It changes `state`
in place and returns the lanes' losses. It may depend on nothing else that changes from round to
round, because a GPU captures it once and replays it: a learning rate, a schedule or an anchor is a
tensor in `fixed`. A number that stays the same in all rounds may be a float there.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.late_gradients import Gradients
from fedala.lanes.layers import Cut
from fedala.lanes.optimizers import UpdateRule, pull, shift
from fedala.lanes.task import Objective, Task
from fedala.lanes.trees import Params, State, take, tree_map

Step = Callable[[Task, Any, Any, Any, Any], Tensor]
GradientFunction = Callable[[Task, Params, Any, Any, Any], tuple[Tensor, Gradients]]
"""Of (task, model, fixed, x, y) to the lanes' losses and the gradients that a step takes."""
OnStep = Callable[[Tensor, Any], None]
"""Called with the losses and the state after each step."""
ReadBatch = Callable[[slice, slice], tuple[Any, Any]]
"""Of some lanes and some of their samples to the inputs and targets of a step."""


@dataclass(frozen=True)
class FitStep:
    """A step of `Cohort.fit`: gradients of the named parameters, and the optimiser's rule.

    An `objective` replaces the loss, and `gradients` replace its gradients. If `is_shifted`, a
    linear term shifts the gradients by `fixed["linear"]`. If `is_proximal`, a proximal term of
    strength `fixed["mu"]` pulls towards `fixed["anchor"]`. With a `cut`, all below is frozen, and
    x are the features there.
    """

    rule: UpdateRule
    names: tuple[str, ...]
    gradients: GradientFunction | None = None
    objective: Objective | None = None
    is_shifted: bool = False
    is_proximal: bool = False
    cut: Cut | None = None

    def __call__(self, task: Task, state: State, fixed: Any, x: Any, y: Any) -> Tensor:
        model, own = state["model"], fixed["own"]
        if self.gradients:
            losses, gradients = self.gradients(task, model, own, x, y)
        else:
            losses, gradients = task.gradients(
                model, x, y, self.names, self.objective, own, self.cut
            )
        if self.is_shifted:
            shift(gradients, fixed["linear"])
        if self.is_proximal:
            pull(model, gradients, fixed["anchor"], fixed["mu"])
        self.rule.update(task, model, gradients, state["slots"], fixed["optimizer"])
        return losses


class EagerRunner:
    """Takes the steps of one training, one after the other, as plain PyTorch."""

    def __init__(
        self,
        task: Task,
        state: Any,
        fixed: Any,
        lanes: int,
        on_step: OnStep | None = None,
        read_batch: ReadBatch | None = None,
    ) -> None:
        self.task, self.fixed, self.on_step = task, fixed, on_step
        self.read_batch = read_batch
        self.state = tree_map(task.lay_out, state)
        self.total = torch.zeros(lanes, device=task.device, dtype=task.dtype)
        self.order = torch.empty(0)

    def begin_epoch(self, order: Tensor) -> None:
        """Set the samples of an epoch: [lane, sample], padded."""
        self.order = order

    def step(self, step: Step, lanes: slice, columns: slice) -> None:
        """Take one step with the samples in these columns of the epoch's order."""
        if self.read_batch:
            x, y = self.read_batch(lanes, columns)
        else:
            x, y = self.task.training_batch(self.order[lanes, columns])
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
    read_batch: ReadBatch | None = None,
) -> EagerRunner:
    """Return what takes the steps of a training: captured steps if the device has them.

    `read_batch` replaces the training samples in the order of an epoch. Equal steps always come
    with it, or always without.
    """
    if on_step is None and task.backend.captures_steps:
        captured: EagerRunner | None = task.backend.capture_steps(
            task, steps, batch_size, frozen, state, fixed, lanes, read_batch
        )
        if captured:
            return captured
    return EagerRunner(task, state, fixed, lanes, on_step, read_batch)
