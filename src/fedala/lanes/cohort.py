"""A cohort: a group of clients that work side by side as one tensor program, one lane per client.

Clients differ in size. Lanes stand sorted, the longest first, so that the lanes that still have a
batch at some step are neighbours, and a step is a slice. Nothing is padded in training: no result
depends on who else is in the cohort.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedala.lanes.evaluation import PredictionLog, Score, score_lanes
from fedala.lanes.features import Sharing, compute_features, select_rows
from fedala.lanes.layers import Cut
from fedala.lanes.messages import Message
from fedala.lanes.randomness import draw
from fedala.lanes.samples import (
    Samples,
    count_steps,
    iterate_steps,
    order_samples,
    pad_rows,
    to_device,
)
from fedala.lanes.task import Task
from fedala.lanes.training import SGD, OnStep, Step, make_runner
from fedala.lanes.trees import Params

T = TypeVar("T")


@dataclass
class Cohort:
    """Some clients of one round, as lanes. Lane i belongs to the run with the seed `seeds[i]`."""

    task: Task
    clients: Sequence[int]
    seeds: Sequence[int]
    round: int = 1
    rounds: int = 1
    #: What the server sent, per lane, and the number of the message that each lane got.
    received: Message = field(default_factory=Message)
    source: Sequence[int] = ()
    #: What the clients report of the round, by name, [lane].
    metrics: dict[str, Tensor] = field(default_factory=dict)
    #: Called after every step of a training, to find out where it went wrong.
    on_step: OnStep | None = None
    _draws: dict[Any, Callable[["Cohort"], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(a < b for a, b in pairwise(self.sizes())):
            raise ValueError(
                "lanes must be sorted by their number of training samples, the longest first"
            )

    def __len__(self) -> int:
        return len(self.clients)

    def sizes(self, part: str = "train") -> list[int]:
        """Return each lane's number of samples."""
        return [self.task.size(client, part) for client in self.clients]

    def draw(self, lane: int, purpose: str, epoch: int = 0) -> np.random.Generator:
        """Return the generator of one lane and purpose in this round."""
        seed, client = self.seeds[lane], self.clients[lane]
        return draw(seed, purpose, client=client, round=self.round, epoch=epoch)

    def constant(self, value: float) -> Tensor:
        """Return a number for every lane, [lane], as steps take it in `fixed`.

        A number that changes from round to round (a schedule) reaches a step in this way.
        """
        one = torch.full((1,), value, dtype=self.task.dtype, device=self.task.device)
        return one.expand(len(self))

    @property
    def lr(self) -> Tensor:
        """Return this round's learning rate of each lane, [lane]."""
        return self.scale_lr(1.0)

    def scale_lr(self, factor: float) -> Tensor:
        """Return this round's learning rate times `factor`, [lane]."""
        return self.constant(self.task.lr * factor)

    def local_steps(self, *, epochs: int | None = None, batch_size: int | None = None) -> list[int]:
        """Return how many steps each lane takes in a training."""
        epochs = self.task.epochs if epochs is None else epochs
        size = batch_size or self.task.batch_size
        return [count_steps(length, size, epochs) for length in self.sizes()]

    @property
    def most_local_steps(self) -> int:
        """Return the most steps that any client of the federation takes.

        A tensor in `fixed` with an entry per step has this length, in every cohort and round.
        """
        task = self.task
        return max(
            count_steps(len(rows), task.batch_size, task.epochs) for rows in task.parts["train"]
        )

    # --- local training ------------------------------------------------------------------------

    def sgd(
        self,
        params: Params,
        *,
        epochs: int | None = None,
        lr: float | Tensor | None = None,
        proximal: tuple[float, Params] | None = None,
        names: Collection[str] | None = None,
        **options: Any,
    ) -> Params:
        """Train a copy of `params` by plain SGD on each lane's samples.

        `lr` is a number or [lane]. `proximal = (μ, anchor)` adds μ/2·‖w − anchor‖² to the loss.
        `names` (parameters and buffers) is the part that learns; the rest is frozen and runs in
        evaluation mode. `options` are those of `train`.
        """
        task = self.task
        learning = tuple(name for name in task.trainable if names is None or name in names)
        mu, anchor = proximal or (0.0, {})
        if not isinstance(lr, Tensor):
            lr = self.lr if lr is None else self.constant(lr)
        fixed: dict[str, Any] = {"lr": lr.expand(len(self))}
        if mu:
            fixed["anchor"] = {name: anchor[name] for name in learning}
        frozen: set[str] = set()
        if names is not None:
            frozen = {name for layer in task.layers for name in layer} - set(names)
        trained: Params = self.train(
            SGD(learning, mu), params, fixed, epochs=epochs, frozen=frozen, **options
        )
        return trained

    def train(
        self,
        step: Step | Sequence[Step],
        state: Any,
        fixed: Any = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        rows: Sequence[np.ndarray] | None = None,
        purpose: str = "batches",
        frozen: Collection[str] = (),
        report_loss: bool = True,
    ) -> Any:
        """Take a step for every batch of every lane, and return the new state.

        `state` and `fixed` are trees of lanes; `lanes/training.py` says what a step is. Several
        steps alternate, in every epoch from the first. `rows` replaces the lanes' training samples.
        `purpose` separates the shuffles of several trainings in a round. `report_loss` puts the
        mean loss into the metrics; a training that only prepares for the round's own does not.
        """
        task = self.task
        steps = (step,) if callable(step) else tuple(step)
        size = batch_size or task.batch_size
        trained = [task.parts["train"][client] for client in self.clients]
        own = trained if rows is None else rows
        lengths = [len(samples) for samples in own]
        epochs = task.epochs if epochs is None else epochs
        with task.use_mode(training=True, frozen=frozen), torch.no_grad():
            runner = make_runner(
                task, steps, size, frozen, state, fixed or {}, len(self), self.on_step
            )
            for epoch in range(epochs):
                runner.begin_epoch(self._order_samples(own, purpose, epoch, is_own=rows is None))
                for lanes, columns in iterate_steps(lengths, size, drop_last=True):
                    turn = columns.start // size % len(steps)
                    runner.step(steps[turn], lanes, columns)
            state, total = runner.finish()
        if report_loss:
            taken = [count_steps(length, size, epochs) for length in lengths]
            self.metrics["train_loss"] = total / to_device(task.device, taken)
        return state

    def _order_samples(
        self, rows: Sequence[np.ndarray], purpose: str, epoch: int, *, is_own: bool
    ) -> Tensor:
        """Return the lanes' samples in the order of one epoch, [lane, sample], padded."""

        def order(cohort: "Cohort") -> Tensor:
            shuffled = [cohort.shuffle(lane, own, purpose, epoch) for lane, own in enumerate(rows)]
            return pad_rows(shuffled, cohort.task.device)

        return self.draw_early((purpose, epoch), order) if is_own else order(self)

    def shuffle(self, lane: int, rows: np.ndarray, purpose: str, epoch: int) -> np.ndarray:
        """Return a lane's samples in the order of one epoch."""
        draw = self.draw(lane, purpose, epoch) if self.task.shuffle else None
        return order_samples(rows, draw)

    # --- draws for the next round --------------------------------------------------------------

    def draw_early(self, key: Any, make: Callable[["Cohort"], T]) -> T:
        """Return `make(cohort)`, which draws random numbers of this round and does nothing else.

        On a GPU, `predraw_next_round` may have made it while the device was busy.
        """
        if not self.task.backend.predraws:
            return make(self)
        self._draws[key] = make
        found: T | None = self.task.predrawn.pop((key, *self._identity()), None)
        return make(self) if found is None else found

    def predraw_next_round(self) -> None:
        """Make the draws of the same clients' next round now, while the device works."""
        task, following = self.task, replace(self, round=self.round + 1, _draws={})
        task.predrawn = {key: v for key, v in task.predrawn.items() if key[1] > self.round}
        for key, make in self._draws.items():
            task.predrawn[key, *following._identity()] = make(following)

    def _identity(self) -> tuple[Any, ...]:
        return self.round, tuple(self.clients), tuple(self.seeds)

    # --- evaluation and features ---------------------------------------------------------------

    @property
    def sharing(self) -> Sharing:
        """Return which lanes received the same model."""
        return Sharing(self.received.model, self.source if len(self.source) == len(self) else ())

    def evaluate(
        self,
        params: Params,
        part: str | Sequence[np.ndarray] = "test",
        *,
        is_shared: bool = False,
        log: PredictionLog | None = None,
    ) -> Score:
        """Score each lane's model on a part of its samples, or on the samples that are given.

        Lower layers that are the received ones run once for all lanes. With `is_shared`, `params`
        is one and the same model in all lanes. `log` gets what the models say of each sample.
        """
        sharing = Sharing(params, [0] * len(self)) if is_shared else self.sharing
        if not isinstance(part, str):
            return score_lanes(self.task, params, part, None, sharing, log)
        rows = [self.task.parts[part][client] for client in self.clients]
        return score_lanes(self.task, params, rows, (part, tuple(self.clients)), sharing, log)

    def features(self, cut: Cut, params: Params, samples: Samples) -> tuple[Any, Tensor]:
        """Return a table of what enters the upper layers, and each sample's row in it."""
        return compute_features(self.task, cut, params, samples, self.sharing, range(len(self)))

    def select_rows(self, table: Any, rows: Tensor) -> Any:
        """Return rows of a table that `features` made."""
        return select_rows(self.task, table, rows)

    def load_samples(self, rows: Iterable[np.ndarray]) -> Samples:
        """Return each lane's samples, brought to the device early if it is a GPU."""
        samples = Samples(rows, self.task.device)
        if self.task.backend.predraws:
            _ = samples.matrix, samples.counts
            if self.sharing.source:
                samples.group(self.sharing.group_lanes(range(len(self))))
        return samples
