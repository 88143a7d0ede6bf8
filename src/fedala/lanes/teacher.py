"""Features that stay near those of a teacher, a model that does not learn (FedPHP, FedCP)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.late_gradients import Gradients
from fedala.lanes.layers import Cut
from fedala.lanes.optimizers import Number
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, State

#: The widths a of the kernel Σ_a exp(−d²/2a).
WIDTHS = (10, 15, 20, 50)


@dataclass(frozen=True)
class NearTeacher:
    """The gradients of (1 − λ)·loss + λ·MMD(features under w, under the teacher).

    The loss keeps its whole weight, 1, if `keeps_loss`. `names` are the parameters that learn; all
    of the task's by default.
    """

    cut: Cut
    keeps_loss: bool = False
    names: tuple[str, ...] | None = None

    def __call__(
        self, task: Task, model: Params, fixed: State, x: Any, y: Any
    ) -> tuple[Tensor, Gradients]:
        def objective(w: Params, x: Any, y: Any, teacher: Params, lam: Number) -> Tensor:
            features, others = self.cut.lower(w, x), self.cut.lower(teacher, x)
            loss = task.loss(task.loss.select(self.cut.upper(w, features)), y)
            distance = mmd(features.to(task.dtype), others.to(task.dtype))
            weighted = loss if self.keeps_loss else (1 - lam) * loss
            return weighted + lam * distance

        # The teacher runs as w does, on the batch's statistics: equal models have equal features.
        # Its running statistics are copies, so that they stay as they are.
        teacher = {
            name: value if name in task.trainable else value.clone()
            for name, value in fixed["teacher"].items()
        }
        lam = fixed["lam"]
        if isinstance(lam, Tensor):
            return task.gradients(model, x, y, self.names, objective, teacher, lam.to(task.dtype))
        return task.gradients(model, x, y, self.names, partial(objective, lam=lam), teacher)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two sets of features, [sample, …].

    It is biased: the mean over all pairs.
    """

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        squares = (a.flatten(1).unsqueeze(1) - b.flatten(1)).square().sum(-1)
        kernels = torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS])
        return kernels.sum(0).mean()

    return similarity(a, a) + similarity(b, b) - 2 * similarity(a, b)
