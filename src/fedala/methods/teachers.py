"""Losses that compare what enters the last layer under a model and under teachers, fixed models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedala.lanes import Gradients, Params, State, Task
from fedala.lanes.layers import Cut


@dataclass(frozen=True)
class TeacherGradients:
    """The gradients of `combine(loss, features, **features under each teacher, **numbers)`.

    They are for `Cohort.fit`: `fixed["teachers"]` has the teachers by name, `fixed["numbers"]` the
    numbers. `combine` is a function of one lane, and features are [sample, …].
    """

    cut: Cut
    combine: Callable[..., Tensor]

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
        return task.gradients(model, x, y, None, objective, teachers, of_lanes)
