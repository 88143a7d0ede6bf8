"""The learning of ALA's weights W, as in FedALA (Zhang et al., AAAI 2023), for a cohort of lanes.

Before a client trains, ALA blends the received model g with the client's own old model w, element
by element, on the upper p layers (equation 4). It learns the weights W on the client's own data
(equation 5):

    ŵ = w + (g − w) ⊙ W                        W in [0, 1], starts at ones, is never reset
    W ← clip₀₁( W − η · ∂L/∂ŵ ⊙ (g − w) )      after every mini-batch

`fedala.lanes.local_aggregation` says which lanes learn, and makes the blend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut
from fedala.lanes.parameters import list_few
from fedala.lanes.samples import Samples, iterate_steps, to_device
from fedala.lanes.trees import Number, Params, align, take
from fedala.options import option

#: The initial stage looks at the spread of this many of the last epoch losses.
WINDOW = 10


@dataclass(frozen=True)
class Settings:
    """ALA's hyperparameters, with the paper's defaults."""

    lane_numbers: ClassVar[frozenset[str]] = frozenset({"eta"})

    layers: int | str = option(
        1,
        "p: how many layers ALA governs, counted from the output; 0 switches it off; or patterns "
        "of parameters' names, separated by commas",
        least=0,
    )
    eta: float = option(1.0, "η: learning rate of the aggregation weights W", above=0)
    sample: float = option(
        0.8, "s: share of the client's training samples that W is learned on", above=0, most=1
    )
    threshold: float = option(
        0.01, "the initial stage ends when the last ten epoch losses spread less than this", least=0
    )
    max_epochs: int = option(100, "the most epochs of the initial stage", least=1)
    min_epochs: int = option(1, "the least epochs of weight learning in every round", least=1)
    start_round: int = option(
        1, "the round from which ALA is on; before it, the received model overwrites", least=1
    )
    freeze: bool = option(False, "learn W in the initial stage only, and keep it")


class Curves(NamedTuple):
    """How weight learning went in each lane."""

    losses: Tensor
    """[lane, epoch], NaN after a lane's last epoch."""
    epochs: Tensor
    is_finite: Tensor
    """Whether all of a lane's losses are finite."""


@dataclass(frozen=True)
class Problem:
    """The weight learning of a cohort in one round.

    A `Learner` changes `weights` in place in the lanes that are `learning`.
    """

    cohort: Cohort
    settings: Settings
    learning: Tensor
    """[lane]: whether the lane learns."""
    trained: Tensor
    """[lane]: whether the lane has its initial stage behind it."""
    weights: Params
    local: Params
    """The governed parameters of the local model, w."""
    update: Params
    """The paper's update of the governed parameters, g − w."""
    start: Params
    """A whole model. Its layers that ALA does not govern are part of the forward pass."""
    samples: Samples
    cut: Cut

    @cached_property
    def ungoverned(self) -> Params:
        """Return the parameters and buffers above the cut that ALA does not govern."""
        upper = [name for layer in self.cohort.task.layers[: self.cut.p] for name in layer]
        return {name: self.start[name] for name in upper if name not in self.update}


Learner = Callable[[Problem], Curves]


def learn_in_batches(problem: Problem) -> Curves:
    """Learn W for any model and any loss. The host waits for the losses of every epoch."""
    cohort, samples = problem.cohort, problem.samples
    losses: list[list[float]] = [[] for _ in cohort.clients]
    has_trained = problem.trained.tolist()
    active = [lane for lane, learns in enumerate(problem.learning.tolist()) if learns]
    if len(active) < len(cohort):
        rows = [r if lane in active else r[:0] for lane, r in enumerate(samples.rows)]
        samples = Samples(rows, cohort.task.device)
    table, positions = cohort.features(problem.cut, problem.start, samples)
    while active:
        group = _LaneGroup.gather(problem, active, samples, table, positions)
        remaining = active
        while remaining == active:  # when a lane is done, the others form a new group
            for lane, loss in zip(active, group.run_epoch(), strict=True):
                losses[lane].append(loss)
            remaining = [
                lane
                for lane in active
                if _needs_another_epoch(losses[lane], has_trained[lane], problem.settings)
            ]
        for name in problem.update:
            problem.weights[name][active] = group.weights[name]
        active = remaining
    return _make_curves(losses, problem.trained.device)


def _make_curves(losses: Sequence[Sequence[float]], device: torch.device) -> Curves:
    epochs = [len(own) for own in losses]
    padded = [[*own, *[float("nan")] * (max(epochs) - len(own))] for own in losses]
    is_finite = [bool(np.isfinite(own).all()) for own in losses]
    return Curves(
        torch.tensor(padded, dtype=torch.float64),
        torch.tensor(epochs, device=device),
        to_device(device, is_finite),
    )


@dataclass(frozen=True)
class _LaneGroup:
    """Lanes that learn side by side, with their part of the problem's tensors."""

    problem: Problem
    lengths: list[int]
    """Samples per lane."""
    table: Any
    """The features under the cut, as `Cohort.features` returns them."""
    positions: Tensor
    """[lane, sample]: rows of the table."""
    rows: Tensor
    """[lane, sample]: rows of the dataset."""
    local: Params
    update: Params
    ungoverned: Params
    weights: Params
    eta: Number

    @classmethod
    def gather(
        cls, problem: Problem, lanes: list[int], samples: Samples, table: Any, positions: Tensor
    ) -> Self:
        return cls(
            problem,
            [samples.lengths[lane] for lane in lanes],
            table,
            positions[lanes],
            samples.matrix[lanes],
            *(
                take(tree, lanes)
                for tree in (
                    problem.local,
                    problem.update,
                    problem.ungoverned,
                    problem.weights,
                    problem.settings.eta,
                )
            ),
        )

    @cached_property
    def _batch_counts(self) -> Tensor:
        task = self.problem.cohort.task
        counts = [-(-length // task.batch_size) for length in self.lengths]
        return torch.tensor(counts, device=task.device)

    def run_epoch(self) -> list[float]:
        """Take a step for every batch, and return each lane's mean loss."""
        task = self.problem.cohort.task
        total = torch.zeros(len(self.lengths), device=task.device, dtype=task.dtype)
        for lanes, columns in iterate_steps(self.lengths, task.batch_size, drop_last=False):
            total[lanes] += self._take_step(lanes, columns)
        means: list[float] = (total / self._batch_counts).tolist()
        return means

    def _take_step(self, lanes: slice, columns: slice) -> Tensor:
        """Change W by one batch (equation 5), and return the lanes' losses."""
        cohort, task = self.problem.cohort, self.problem.cohort.task
        local, update, weights = (take(t, lanes) for t in (self.local, self.update, self.weights))
        blended = {
            name: (local[name] + update[name] * weights[name]).requires_grad_() for name in update
        }
        x = cohort.select_rows(self.table, self.positions[lanes, columns])
        y = task.targets(self.rows[lanes, columns])
        loss = task.losses({**take(self.ungoverned, lanes), **blended}, x, y, self.problem.cut)
        if not loss.requires_grad:
            raise UserError(
                "The loss does not depend on the parameters that ALA governs "
                f"({list_few(list(update))}): choose other layers, and do not detach the loss."
            )
        gradients = torch.autograd.grad(loss.sum(), list(blended.values()), materialize_grads=True)
        for name, gradient in zip(update, gradients, strict=True):
            step = gradient * update[name]
            if isinstance(self.eta, Tensor):
                weights[name].sub_(step * align(self.eta[lanes], step)).clamp_(0, 1)
            else:
                weights[name].sub_(step, alpha=self.eta).clamp_(0, 1)
        return loss.detach()


def _needs_another_epoch(losses: Sequence[float], has_trained: bool, settings: Settings) -> bool:
    """Tell whether a client learns for another epoch.

    Its first ALA lasts until the loss has settled, every later one for one epoch. A loss that is
    not finite spoils the round, so no epoch follows it.
    """
    if not np.isfinite(losses[-1]):
        return False
    enough = has_trained or has_settled(losses, settings) or len(losses) >= settings.max_epochs
    return not enough or len(losses) < settings.min_epochs


def has_settled(losses: Sequence[float], settings: Settings) -> bool:
    """Tell whether the initial stage may end.

    The criterion is the population standard deviation of the last ten of at least eleven losses.
    """
    return len(losses) > WINDOW and float(np.std(losses[-WINDOW:])) < settings.threshold


def are_losses_finite(losses: Tensor, epochs: Tensor) -> Tensor:
    """Tell for each lane whether the losses [lane, epoch] of its first `epochs` are finite."""
    beyond = torch.arange(losses.shape[1], device=losses.device) >= epochs.unsqueeze(1)
    return (losses.isfinite() | beyond).all(1)
