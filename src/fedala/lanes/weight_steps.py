"""The steps of ALA's weight learning: each changes W by one batch (equation 5 of the paper).

A batch of texts reads some rows of a table of words, and W changes in these alone. So the blend of
a large table is kept from step to step, and updated where W has changed.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.late_gradients import SparseGradient
from fedala.lanes.layers import Cut
from fedala.lanes.losses import IGNORED_LABEL
from fedala.lanes.optimizers import densify
from fedala.lanes.task import Task
from fedala.lanes.trees import Number, Params, State, align


def begin_learning(
    weights: Params, local: Params, update: Params, tables: Collection[str]
) -> State:
    """Return what a step changes: W, and of each large table its blend and room for a gradient."""
    return {
        "weights": weights,
        "tables": {
            name: {
                "blend": local[name] + update[name] * weights[name],
                "gradient": torch.zeros_like(weights[name]),
            }
            for name in tables
        },
    }


@dataclass(frozen=True)
class WeightStep:
    """A step for any governed layers and any loss.

    `fixed` has the governed parameters of the local model, the paper's update of them, the other
    parameters above the cut, and η. The inputs are the features under the cut.
    """

    cut: Cut

    def __call__(self, task: Task, state: State, fixed: Any, x: Any, y: Any) -> Tensor:
        weights, tables = state["weights"], state["tables"]
        local, update = fixed["local"], fixed["update"]
        blended = {
            name: tables[name]["blend"] if name in tables else local[name] + update[name] * value
            for name, value in weights.items()
        }
        model = {**fixed["ungoverned"], **blended}
        losses, gradients = task.gradients(model, x, y, tuple(blended), cut=self.cut)
        for name, table in tables.items():
            if isinstance(gradient := gradients[name], SparseGradient):
                parts = weights[name], local[name], update[name]
                _descend_rows(gradient, table, *parts, fixed["eta"])
                del gradients[name]
        for name, gradient in densify(gradients).items():
            _descend(weights[name], gradient * update[name], fixed["eta"])
            if name in tables:
                torch.add(local[name], update[name] * weights[name], out=tables[name]["blend"])
        return losses


@dataclass(frozen=True)
class HeadStep:
    """The same step for a plain head, with the gradient of cross-entropy written out.

    Batches are small and every lane has many, so most of the time of a `WeightStep` would be
    autograd's and vmap's.
    """

    def __call__(self, task: Task, state: State, fixed: Any, x: Tensor, y: Tensor) -> Tensor:
        local, update, weights = fixed["local"], fixed["update"], state["weights"]
        weight, bias = (local[name] + update[name] * w for name, w in weights.items())
        logs = torch.baddbmm(bias.unsqueeze(1), x, weight.mT).log_softmax(2)
        counts = (y != IGNORED_LABEL).unsqueeze(2)
        labels = torch.where(counts, y.unsqueeze(2), 0)
        share = counts.to(logs.dtype) / counts.sum(1, keepdim=True)
        losses = -(logs.gather(2, labels) * share).sum((1, 2))
        slopes = logs.exp_().scatter_add_(2, labels, -torch.ones_like(share)) * share
        for name, gradient in zip(weights, (slopes.mT @ x, slopes.sum(1)), strict=True):
            _descend(weights[name], gradient * update[name], fixed["eta"])
        return losses


def _descend(weights: Tensor, slope: Tensor, eta: Number) -> None:
    """Change W by its own gradient, ∂L/∂ŵ ⊙ (g − w), and clip it."""
    if isinstance(eta, Tensor):
        weights.sub_(slope * align(eta, slope)).clamp_(0, 1)
    else:
        weights.sub_(slope, alpha=eta).clamp_(0, 1)


def _descend_rows(
    gradient: SparseGradient,
    table: Params,
    weights: Tensor,
    local: Tensor,
    update: Tensor,
    eta: Number,
) -> None:
    """Change W and the blend in the rows of a large table that have a gradient.

    A row may come more than once: its gradients are added up first, because W is clipped.
    """
    gradient.add_to([table["gradient"]], weights.new_ones(len(weights)))
    rows = gradient.find_rows(weights)
    lane = rows // weights.shape[1]
    at = lane, rows - lane * weights.shape[1]
    change, learned = update[at], weights[at]
    slope = table["gradient"][at] * change
    _descend(learned, slope, eta[lane] if isinstance(eta, Tensor) else eta)
    weights[at] = learned
    table["blend"][at] = local[at] + change * learned
    table["gradient"][at] = torch.zeros_like(slope)  # a number would be copied from the host
