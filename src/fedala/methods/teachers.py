"""Losses that compare what enters the last layer under a model and under teachers, fixed models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import Gradients, Params, State, Task
from fedala.lanes.layers import Cut

#: The widths a of the kernel Σ_a exp(−d²/2a).
WIDTHS = (10, 15, 20, 50)


@dataclass(frozen=True)
class TeacherGradients:
    """The gradients of `combine(loss, features, **features under each teacher, **numbers)`.

    They are for `Cohort.fit`: `fixed["teachers"]` has the teachers by name, `fixed["numbers"]` the
    numbers. `combine` is a function of one lane, and features are [sample, …].
    """

    cut: Cut
    combine: Callable[..., Tensor]
    names: tuple[str, ...] | None = None
    """The parameters that learn; None: all of the task's."""

    def __call__(
        self, task: Task, model: Params, fixed: State, x: Any, y: Any
    ) -> tuple[Tensor, Gradients]:
        numbers = fixed["numbers"].items()
        of_lanes = {name: n.to(task.dtype) for name, n in numbers if isinstance(n, Tensor)}
        of_all = {name: n for name, n in numbers if not isinstance(n, Tensor)}

        def objective(w: Params, x: Any, y: Any, teachers: State, of_lanes: State) -> Tensor:
            features = self.cut.lower(w, x)
            others = {n: self.cut.lower(one, x).to(task.dtype) for n, one in teachers.items()}
            loss = task.loss(task.loss.select(self.cut.upper(w, features)), y)
            return self.combine(loss, features.to(task.dtype), **others, **of_lanes, **of_all)

        # Teachers run as w does, on the batch's statistics: equal models have equal features.
        # Their running statistics are copies, so that they stay as they are.
        teachers = {
            name: {n: v if n in task.trainable else v.clone() for n, v in one.items()}
            for name, one in fixed["teachers"].items()
        }
        return task.gradients(model, x, y, self.names, objective, teachers, of_lanes)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two sets of features, [sample, …].

    It is biased: the mean over all pairs.
    """

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        squares = (a.flatten(1).unsqueeze(1) - b.flatten(1)).square().sum(-1)
        kernels = torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS])
        return kernels.sum(0).mean()

    return similarity(a, a) + similarity(b, b) - 2 * similarity(a, b)
