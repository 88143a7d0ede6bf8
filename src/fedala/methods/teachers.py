"""Losses that compare what enters the last layer under a model and under teachers, fixed models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import Params, State, Task
from fedala.lanes.features import compute_loss
from fedala.lanes.layers import Cut

#: The widths a of the kernel Σ_a exp(−d²/2a).
WIDTHS = (10, 15, 20, 50)


@dataclass(frozen=True)
class TeacherObjective:
    """`combine(loss, features, **features under each teacher, **numbers)`, of one lane.

    It is for `Cohort.fit`: `fixed["teachers"]` has the teachers by name, `fixed["numbers"]` the
    numbers. Features are [sample, …].
    """

    cut: Cut
    combine: Callable[..., Tensor]

    def __call__(self, task: Task, model: Params, fixed: State, x: Any, y: Any) -> Tensor:
        features, loss = compute_loss(task, self.cut, model, x, y)
        others = {}
        for name, teacher in fixed["teachers"].items():
            # Teachers run as the model does, on the batch's statistics: equal models have equal
            # features. Their running statistics are copies, so that they stay as they are.
            copied = {n: v if n in task.trainable else v.clone() for n, v in teacher.items()}
            others[name] = self.cut.lower(copied, x).to(task.dtype)
        return self.combine(loss, features.to(task.dtype), **others, **fixed["numbers"])


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two sets of features, [sample, …].

    It is biased: the mean over all pairs.
    """

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        squares = (a.flatten(1).unsqueeze(1) - b.flatten(1)).square().sum(-1)
        kernels = torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS])
        return kernels.sum(0).mean()

    return similarity(a, a) + similarity(b, b) - 2 * similarity(a, b)
