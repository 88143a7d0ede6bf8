"""The learning of ALA's weights W, as in FedALA (Zhang et al., AAAI 2023), for a cohort of lanes.

Before a client trains, ALA blends the received model g with the client's own old model w, element
by element, on the upper p layers (equation 4). It learns the weights W on the client's own data
(equation 5):

    ŵ = w + (g − w) ⊙ W                        W in [0, 1], starts at ones, is never reset
    W ← clip₀₁( W − η · ∂L/∂ŵ ⊙ (g − w) )      after every mini-batch

`fedala.lanes.weight_steps` has the steps, `fedala.lanes.local_aggregation` says which lanes learn,
and makes the blend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedala.lanes.cohort import Cohort
from fedala.lanes.features import FeatureBatches
from fedala.lanes.layers import Cut, Layered
from fedala.lanes.losses import CrossEntropy
from fedala.lanes.samples import Samples, iterate_steps, to_device
from fedala.lanes.training import Step, make_runner
from fedala.lanes.trees import Params, take
from fedala.lanes.weight_steps import HeadStep, WeightStep, begin_learning
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

    A `Learner` changes `weights` in place. Only the lanes that are `learning` count.
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

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.update.values())).dtype

    @cached_property
    def is_plain_head(self) -> bool:
        """Tell whether ALA governs just the last linear layer under cross-entropy, as in the paper.

        The gradient then has a formula, if the features are rows of numbers.
        """
        task, governed = self.cohort.task, tuple(self.update)
        name = governed[0].removesuffix(".weight")
        if self.ungoverned or not self.cut.cuts or self.cut.p != 1:
            return False
        if governed != (f"{name}.weight", f"{name}.bias"):
            return False
        has_labels = (
            isinstance(task.y, Tensor) and task.y.dtype == torch.int64 and task.y.dim() == 1
        )
        return has_labels and _ends_linearly(task.model, name) and task.loss == CrossEntropy()


def _ends_linearly(model: nn.Module, name: str) -> bool:
    """Tell whether the upper layer computes x·Wᵀ + b and nothing else."""
    last = model.get_submodule(name)
    if isinstance(model, Layered) and model.stages()[-1] is not last:
        return False
    forward = last._forward_pre_hooks, last._forward_hooks
    backward = last._backward_pre_hooks, last._backward_hooks
    is_changed = any(forward) or any(backward) or "forward" in vars(last)
    return type(last) is nn.Linear and not is_changed


Learner = Callable[[Problem], Curves]


@torch.no_grad()
def learn_in_batches(problem: Problem) -> Curves:
    """Learn W for any model and any loss.

    The host reads losses only if they decide whether another epoch follows.
    """
    cohort, samples, settings = problem.cohort, problem.samples, problem.settings
    backend = cohort.task.backend
    read_flags = backend.read_later(torch.stack([problem.learning, problem.trained]))
    if backend.captures_steps and cohort.round > 1 and not settings.freeze:
        # The device takes the first epoch of all lanes while the host finds out which ones learn.
        # In round 1, none does: clients have what they receive.
        active = [lane for lane, length in enumerate(samples.lengths) if length]
    else:
        active = [lane for lane, learns in enumerate(read_flags()[0]) if learns]
        if len(active) < len(cohort):
            rows = [r if lane in active else r[:0] for lane, r in enumerate(samples.rows)]
            samples = Samples(rows, cohort.task.device)
    table, positions = cohort.features(problem.cut, problem.start, samples)
    progress = _Progress(problem, read_flags)
    while active:
        group = _LaneGroup(problem, active, samples, table, positions)
        remaining = active
        while remaining == active:  # when a lane is done, the others form a new group
            remaining = progress.add_epoch(group, group.run_epoch())
        group.save_weights()
        active = remaining
    return progress.make_curves()


class _LaneGroup:
    """Lanes that learn side by side, with their part of the problem's tensors."""

    def __init__(
        self, problem: Problem, lanes: list[int], samples: Samples, table: Any, positions: Tensor
    ) -> None:
        """`table` and `positions` are what `Cohort.features` returns."""
        self.problem, self.lanes = problem, lanes
        task = problem.cohort.task
        self.part: slice | list[int] = lanes
        if task.backend.captures_steps and lanes == [*range(len(lanes))]:
            self.part = slice(len(lanes))  # a GPU would wait for a list
        self.lengths = [samples.lengths[lane] for lane in lanes]
        self._step: Step = WeightStep(problem.cut)
        if problem.is_plain_head and table.dim() == 2 and table.dtype == problem.dtype:
            self._step = HeadStep()
        positions, rows = positions[self.part], samples.matrix[self.part]
        constants = {
            "local": problem.local,
            "update": problem.update,
            "ungoverned": problem.ungoverned,
            "eta": problem.settings.eta,
        }
        fixed = take(constants, self.part)
        weights = take({name: problem.weights[name] for name in problem.update}, self.part)
        tables = [name for name in task.embeddings if name in weights]
        self._runner = make_runner(
            task,
            (self._step,),
            task.batch_size,
            (),
            begin_learning(weights, fixed["local"], fixed["update"], tables),
            fixed,
            len(lanes),
            read_batch=FeatureBatches(task, table, positions, rows),
        )
        counts = [-(-length // task.batch_size) for length in self.lengths]
        self._batch_counts = to_device(task.device, counts)

    def run_epoch(self) -> Tensor:
        """Take a step for every batch, and return each lane's mean loss."""
        size, runner = self.problem.cohort.task.batch_size, self._runner
        for lanes, columns in iterate_steps(self.lengths, size, drop_last=False):
            runner.step(self._step, lanes, columns)
        means = runner.total / self._batch_counts
        runner.total.zero_()
        return means

    def save_weights(self) -> None:
        """Write the learned W into the problem's."""
        for name, value in self._runner.state["weights"].items():
            self.problem.weights[name][self.part] = value


class _Progress:
    """How many epochs the lanes have learned for, and which ones learn for another."""

    def __init__(self, problem: Problem, read_flags: Callable[[], Any]) -> None:
        """`read_flags` waits for `learning` and `trained` of every lane."""
        self.problem, self._read_flags = problem, read_flags
        self._curves: list[Tensor] = []
        self._epochs = [0] * len(problem.cohort)
        self._losses: list[list[float]] = [[] for _ in problem.cohort.clients]

    def add_epoch(self, group: _LaneGroup, means: Tensor) -> list[int]:
        """Note an epoch's mean losses, and return the lanes that learn for another epoch."""
        curve = means.new_full((len(self._epochs),), float("nan"))
        curve[group.part] = means
        self._curves.append(curve)
        for lane in group.lanes:
            self._epochs[lane] += 1
        learning, has_trained = self._read_flags()
        active = [lane for lane in group.lanes if learning[lane]]
        settings = self.problem.settings
        if settings.min_epochs == 1 and all(has_trained[lane] for lane in active):
            return []
        for lane, loss in zip(group.lanes, means.tolist(), strict=True):
            self._losses[lane].append(loss)
        return [
            lane
            for lane in active
            if _needs_another_epoch(self._losses[lane], has_trained[lane], settings)
        ]

    def make_curves(self) -> Curves:
        """Return how weight learning went. It stays on the device."""
        learning = self.problem.learning
        epochs = torch.where(learning, to_device(learning.device, self._epochs), 0)
        losses = torch.empty(len(learning), 0, device=learning.device)
        if self._curves:
            curves = torch.stack(self._curves, 1)
            losses = torch.where(learning.unsqueeze(1), curves, float("nan"))
        return Curves(losses, epochs, are_losses_finite(losses, epochs))


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
