"""Sums over each class of what enters the last layer: class means, prototypes, statistics."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.layer_units import find_module
from fedala.lanes.layers import Cut
from fedala.lanes.samples import Samples
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, take
from fedala.metrics import ACCURACY


class ClassFeatures(NamedTuple):
    """Of each lane's training samples, in float64. A class without samples has zeros."""

    sums: Tensor
    """[lane, class, feature]: Σ f(x)."""
    squares: Tensor
    """[lane, class]: Σ ‖f(x)‖²."""
    counts: Tensor
    """[lane, class]: the number of samples."""

    @property
    def means(self) -> Tensor:
        """[lane, class, feature]: each class's mean; zeros if it has no samples."""
        return self.sums / self.counts.clamp(min=1).unsqueeze(-1)


def measure_features(task: Task, title: str) -> tuple[int, int]:
    """Return the number of classes, and of features that enter the last layer.

    `title` names the method that needs both, to refuse a task without classes and a model whose
    last layer does not say them. It runs nothing: a server has no samples.
    """
    if task.loss.metric != ACCURACY:
        raise UserError(
            f"{title} works with the classes of the samples, and this task has none: each sample "
            "needs one label."
        )
    last = task.model.get_submodule(find_module(task.layers[0]))
    if not isinstance(last, nn.Linear):
        raise UserError(
            f"{title} needs a model whose last layer is an nn.Linear from features to classes, and "
            f"this one's is a {type(last).__name__}."
        )
    return last.out_features, last.in_features


@torch.no_grad()
def sum_class_features(
    cohort: Cohort, cut: Cut, params: Params, classes: int, features: int
) -> ClassFeatures:
    """Sum what enters the upper layers, class by class, over each lane's training samples.

    The models run in evaluation mode, many samples at a time. `classes` and `features` are those
    of `measure_features`.
    """
    task, lanes = cohort.task, len(cohort)
    sums = torch.zeros(lanes, classes, features + 2, dtype=torch.float64, device=task.device)
    samples = cohort.load_samples(task.parts["train"][client] for client in cohort.clients)
    with task.use_mode(training=False):
        for active, rows, real in _split_samples(samples, 8 * task.chunk):
            x, y = task.inputs(rows), task.targets(rows)
            found = task.per_lane(cut.lower, take(params, active), x).flatten(2).double()
            # Padding is masked before it is added: 0·∞ is not a number.
            found = torch.where(real.unsqueeze(-1), found, 0)
            ones = torch.ones_like(found[..., :1])
            columns = torch.cat([found, found.square().sum(-1, keepdim=True), ones], -1)
            labels = F.one_hot(y.long(), classes).double() * real.unsqueeze(-1)
            sums[active] += labels.transpose(1, 2) @ columns
    return ClassFeatures(sums[..., :-2], sums[..., -2], sums[..., -1])


def average_class_means(means: Tensor, counts: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return each class's mean over the clients that have it, as one lane, and which have one.

    `means` is [client, class, feature], `counts` [client, class]. A class that no client has keeps
    its mean `before`, [1, class, feature].
    """
    total = counts.sum(0, keepdim=True).unsqueeze(-1)
    mean = (counts.unsqueeze(-1) * means).sum(0, keepdim=True) / total.clamp(min=1)
    return torch.where(total > 0, mean, before), total.squeeze(-1) > 0


def count_classes(cohort: Cohort, classes: int) -> Tensor:
    """Return how many training samples of each class every lane has: [lane, class], float64."""
    task = cohort.task
    samples = cohort.load_samples(task.parts["train"][client] for client in cohort.clients)
    labels = task.targets(samples.matrix).long()
    real = torch.arange(labels.shape[1], device=task.device) < samples.counts[:, None]
    counts = torch.zeros(len(cohort), classes, dtype=torch.float64, device=task.device)
    return counts.scatter_add_(1, labels, real.double())


def _split_samples(samples: Samples, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield parts of all samples: lanes, positions [lane, sample], and which are not padding.

    A part has about `size` positions. Shorter lanes are padded: a model that mixes the samples of
    a batch cannot be cut.
    """
    longest = samples.matrix.shape[1]
    width = max(1, size // max(1, len(samples.lengths)))
    for start in range(0, longest, width):
        columns = torch.arange(start, min(start + width, longest), device=samples.device)
        active = slice(0, sum(length > start for length in samples.lengths))
        real = columns < samples.counts[active, None]
        yield active, samples.matrix[active, start : start + width], real
