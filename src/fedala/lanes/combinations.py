"""Models that are sums of others, with shares that learn: Σ_j p_j·θ_j.

Large tables of words are never added up. A batch reads a few rows of them, and the rows of a sum
are the sum of the rows.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.late_gradients import Gradients
from fedala.lanes.layers import Layered
from fedala.lanes.optimizers import densify
from fedala.lanes.row_gradients import Read, RowGradients
from fedala.lanes.task import Task
from fedala.lanes.trees import Params


class Combination(ABC):
    """In every lane, a model that is the sum of others."""

    @abstractmethod
    def compose(self, name: str) -> Tensor:
        """Return a parameter of the sum, [lane, …]."""

    @abstractmethod
    def find_slopes(self, name: str, gradient: Tensor) -> Tensor:
        """Return the shares' slopes, [lane, share], at the gradient of a parameter of the sum."""

    @abstractmethod
    def read(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        """Return what `read` gives of a table of the sum, and its derivatives, [share, lane, …]."""

    def gradients(
        self, task: Task, params: Params, x: Any, y: Any
    ) -> tuple[Tensor, Gradients, Tensor]:
        """Return each lane's loss, the gradients of the sum, and the shares' slopes.

        What does not learn is that of `params`, whose other tensors have the shapes of the sum's.
        """
        # Of another model, it is not known whether it reads its tables in another way, too.
        rows = RowGradients(task.embeddings if isinstance(task.model, Layered) else (), self.read)
        summed = [name for name in task.trainable if name not in rows.found]
        model = params | {name: self.compose(name) for name in summed}
        losses, gradients = task.gradients(model, x, y, rows=rows)
        whole = densify({name: gradients[name] for name in summed})
        slopes = [self.find_slopes(name, gradient) for name, gradient in whole.items()]
        return losses, gradients | whole, torch.stack(slopes + rows.list_slopes()).sum(0)
