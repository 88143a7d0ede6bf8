"""Losses: what a lane descends on its batches, and what an evaluation sums up.

An evaluation measures the plain loss, without label smoothing and class weights: a sum over samples
divided by their number, which can be compared between runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes.outputs import scores_of
from fedala.lanes.trees import tree_map
from fedala.metrics import ACCURACY, LABEL_ACCURACY, MAE, MSE, OWN_LOSS, Metric

LossFunction = Callable[[Any, Any], Tensor]
"""Of a batch: (output, y) to its mean loss."""

IGNORED_LABEL = -100
"""Torch's cross-entropy leaves out samples with this label."""


class Loss(ABC):
    """A loss and the metric that goes with it.

    Losses are compared and hashed: a GPU captures a step once for each task.
    """

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """What the score of an evaluation is."""

    def prepare(self, y: Any) -> Any:
        """Return all targets in a type that the loss takes."""
        return y

    def select(self, output: Any) -> Any:
        """Return the part of a model's output that the loss takes: its scores."""
        return scores_of(output)

    @abstractmethod
    def __call__(self, output: Any, y: Any) -> Tensor:
        """Return the mean loss of one lane's batch."""

    @abstractmethod
    def score(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return each lane's summed score and summed loss over its first `ends[lane]` samples.

        Outputs and targets are [lane, sample, …]. `real`, [lane, sample], marks these samples.
        """

    def place_on(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring what the loss needs to the device, before a step is captured there."""
        return


@dataclass(frozen=True)
class _Weighted(Loss):
    """A loss on labels, with smoothing ε and a weight for each class."""

    smoothing: float = 0.0
    weights: tuple[float, ...] = ()
    _placed: dict[Any, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def place_on(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.weights:
            self._placed[device, dtype] = torch.tensor(self.weights, device=device, dtype=dtype)

    def _weights_for(self, output: Tensor) -> Tensor | None:
        if not self.weights:
            return None
        # The loss of a bf16 output is float32.
        dtype = torch.promote_types(output.dtype, torch.float32)
        if (output.device, dtype) not in self._placed:
            self.place_on(output.device, dtype)
        return self._placed[output.device, dtype]


@dataclass(frozen=True)
class CrossEntropy(_Weighted):
    """Cross-entropy of class scores [sample, class] and labels [sample].

    The mean is weighted by the classes of the batch, as torch does it.
    """

    metric = ACCURACY

    def prepare(self, y: Any) -> Any:
        is_short = isinstance(y, Tensor) and not y.is_floating_point() and y.dtype != torch.bool
        return y.long() if is_short else y

    def __call__(self, output: Any, y: Any) -> Tensor:
        check_scores(output)
        if not self.smoothing and not self.weights:
            return F.cross_entropy(output, y)
        weights = self._weights_for(output)
        if weights is None or not self.smoothing:
            return F.cross_entropy(output, y, weight=weights, label_smoothing=self.smoothing)
        # Torch's own function has the same terms, and does not run under vmap with both options.
        to_labels = F.cross_entropy(output, y, weight=weights)
        logs = output.to(weights.dtype).log_softmax(1)
        to_all: Tensor = -(logs @ weights).sum() / weights[y].sum()
        return (1 - self.smoothing) * to_labels + self.smoothing / len(weights) * to_all

    def score(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        right = _count_right(output, y, real)
        each = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none")
        return right, torch.where(real, each.view(y.shape), 0).sum(1)


@dataclass(frozen=True)
class MultiLabel(_Weighted):
    """Binary cross-entropy of each label, from logits and zeros or ones [sample, label].

    Smoothing moves targets towards 1/2. A weight counts a label's ones that many times.
    """

    metric = LABEL_ACCURACY

    def __call__(self, output: Any, y: Any) -> Tensor:
        output, y = align(output, y)
        weights = self._weights_for(output)
        if self.smoothing:
            y = y * (1 - self.smoothing) + self.smoothing / 2
        return F.binary_cross_entropy_with_logits(output, y, pos_weight=weights)

    def score(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        output, y = align(output, y)
        right = ((output > 0) == (y > 0.5)).to(output.dtype)
        each = F.binary_cross_entropy_with_logits(output, y, reduction="none")
        return _sum_samples(right, real), _sum_samples(each, real)


_PENALTIES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}


@dataclass(frozen=True)
class Regression(Loss):
    """The squared, absolute or Huber error (δ = 1), mean over samples and outputs."""

    kind: str = "mse"

    @property
    def metric(self) -> Metric:
        return MAE if self.kind == "mae" else MSE

    def __call__(self, output: Any, y: Any) -> Tensor:
        return _PENALTIES[self.kind](*align(output, y))

    def score(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        output, y = align(output, y)
        loss = _sum_samples(_PENALTIES[self.kind](output, y, reduction="none"), real)
        if self.kind == self.metric.name:
            return loss, loss
        return _sum_samples(F.mse_loss(output, y, reduction="none"), real), loss


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A user's function. The score is the accuracy, or without labels the loss itself."""

    function: LossFunction
    metric: Metric = OWN_LOSS

    def select(self, output: Any) -> Any:
        """Return the whole output: the user's function knows what it needs."""
        return output

    def __call__(self, output: Any, y: Any) -> Tensor:
        value: Any = self.function(output, y)
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value.reshape(())
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if value.is_floating_point() and value.dim():
                what += ": use reduction='mean'"
        raise UserError(
            "The loss must return the mean loss of the batch as a tensor of one number, "
            f"not {what}."
        )

    def score(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        right = _count_right(scores_of(output), y, real) if self.metric == ACCURACY else None
        sums = [
            self(*(tree_map(lambda t, i=i, end=end: t[i, :end], tree) for tree in (output, y)))
            * end
            for i, end in enumerate(ends)
        ]
        loss = torch.stack(sums)
        return loss if right is None else right, loss


def as_loss(loss: LossFunction | Loss, y: Any) -> Loss:
    """Return a loss with its metric: a function of the user gets that which fits the targets."""
    if isinstance(loss, Loss):
        return loss
    if loss is F.cross_entropy:
        return CrossEntropy()
    has_labels = isinstance(y, Tensor) and not y.is_floating_point()
    return OwnLoss(loss, ACCURACY if has_labels else OWN_LOSS)


def check_scores(output: Any, dimensions: int | None = None) -> None:
    """Refuse a model whose output is not class scores: a tensor, of so many dimensions."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else None
    if shape is None or (dimensions is not None and len(shape) != dimensions):
        what = f"a {type(output).__name__}"
        if shape is not None:
            what = f"a tensor of {len(shape)} dimensions per lane"
        raise UserError(
            f"The model must return a tensor of scores [sample, class], and it returns {what}."
        )


def check_labels(scores: Tensor, y: Tensor) -> None:
    """Refuse labels that cross-entropy does not take for such scores: [sample, class, …].

    Targets of the scores' own shape are probabilities, not labels.
    """
    if y.is_floating_point() and y.shape[1:] == scores.shape[1:]:
        return
    classes = scores.shape[1]
    expected = f"from 0 to {classes - 1}, as the model gives {classes} scores"
    is_whole = not y.is_floating_point() and y.dtype != torch.bool
    if not is_whole or y.dim() != scores.dim() - 1:
        sides = ", ".join(["sample", *map(str, scores.shape[2:])])
        what = "" if y.dim() == 1 else f" of shape {tuple(y.shape)}"
        raise UserError(
            f"Cross-entropy takes whole numbers [{sides}] as labels, {expected}, and these are "
            f"{y.dtype}{what}: convert them, or give another loss, loss(output, target)."
        )
    labels = y[y != IGNORED_LABEL]
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise UserError(f"Labels must be {expected}, and there is a label {int(wrong[0])}.")


def align(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and targets in one shape and type.

    A single output may have a dimension of its own, or not: N×1 against N must not become N×N.
    """
    if not isinstance(output, Tensor):
        raise UserError(
            f"The model must return a tensor of outputs, and it returns a {type(output).__name__}."
        )
    if output.dim() == y.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    elif y.dim() == output.dim() + 1 and y.shape[-1] == 1:
        output = output.unsqueeze(-1)
    if output.shape != y.shape:
        raise UserError(
            f"The model turns a batch into a tensor of shape {tuple(output.shape)}, "
            f"and its targets are of shape {tuple(y.shape)}: they must be equal."
        )
    dtype = torch.promote_types(output.dtype, y.dtype)
    return output.to(dtype), y.to(dtype)


def _count_right(output: Any, y: Tensor, real: Tensor) -> Tensor:
    check_scores(output, y.dim() + 1)
    right: Tensor = ((output.argmax(-1) == y) & real).sum(1)
    return right


def _sum_samples(each: Tensor, real: Tensor) -> Tensor:
    """Sum the samples that count, each the mean of its outputs: [lane, sample, …] to [lane]."""
    means = each.flatten(2).mean(2) if each.dim() > 2 else each
    return torch.where(real, means, 0).sum(1)
