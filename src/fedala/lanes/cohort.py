"""A cohort: a group of clients that work side by side as one tensor program, one lane per client.

Clients differ in size. Lanes stand sorted, the longest first, so that the lanes that still have a
batch at some step are neighbours, and a step is a slice. Nothing is padded in training: no result
depends on who else is in the cohort.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedala.lanes.evaluation import PredictionLog, Score, score_lanes
from fedala.lanes.features import FeatureBatches, Sharing, compute_features
from fedala.lanes.layers import Cut, Layered
from fedala.lanes.messages import Message
from fedala.lanes.optimizers import Numbers
from fedala.lanes.randomness import draw
from fedala.lanes.recipe import Recipe, is_constant
from fedala.lanes.samples import Samples, order_samples, pad_rows, to_device
from fedala.lanes.task import Objective, Task
from fedala.lanes.training import FitStep, GradientFunction, OnStep, Step, make_runner
from fedala.lanes.trees import Number, Params, State

T = TypeVar("T")


@dataclass(repr=False)
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
    #: How each lane trains; empty: all lanes as the task says.
    recipes: Sequence[Recipe] = ()
    #: The optimisers' slots that stay from round to round, by training; None: none stay.
    kept_slots: dict[str, State] | None = None
    #: What the clients report of the round, by name, [lane].
    metrics: dict[str, Tensor] = field(default_factory=dict)
    #: Whether the run tests a client with a model of its last round while it is absent.
    tests_absent: bool = False
    #: Called after every step of a training, to find out where it went wrong.
    on_step: OnStep | None = None
    _draws: dict[Any, Callable[["Cohort"], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(a < b for a, b in pairwise(self.sizes())):
            raise ValueError(
                "lanes must be sorted by their number of training samples, the longest first"
            )

    def __repr__(self) -> str:
        return f"<Cohort of {len(self)} lanes, round {self.round} of {self.rounds}>"

    def __len__(self) -> int:
        return len(self.clients)

    def sizes(self, part: str = "train") -> list[int]:
        """Return each lane's number of samples."""
        return [self.task.size(client, part) for client in self.clients]

    def draw(self, lane: int, purpose: str, epoch: int = 0) -> np.random.Generator:
        """Return the generator of one lane and purpose in this round."""
        seed, client = self.seeds[lane], self.clients[lane]
        return draw(seed, purpose, client=client, round=self.round, epoch=epoch)

    def constant(self, value: Number) -> Tensor:
        """Return a number for every lane, [lane], as steps take it in `fixed`.

        A number that changes from round to round (a schedule) reaches a step in this way.
        """
        if isinstance(value, Tensor):
            return value.to(self.task.dtype)
        one = torch.full((1,), value, dtype=self.task.dtype, device=self.task.device)
        return one.expand(len(self))

    def spread(self, values: Sequence[float]) -> Tensor:
        """Return one number per lane, or one for all lanes, as [lane]."""
        values = values[:1] if is_constant(values) else values
        numbers = to_device(self.task.device, torch.tensor(values, dtype=torch.float64))
        return numbers.expand(len(self))

    @property
    def _lane_recipes(self) -> Sequence[Recipe]:
        """Each lane's recipe, or one for all."""
        return self.recipes or (self.task.recipe,)

    @property
    def lr(self) -> Tensor:
        """Return this round's learning rate of each lane, [lane]."""
        return self.scale_lr(1.0)

    def scale_lr(self, factor: Number) -> Tensor:
        """Return this round's learning rate times `factor`, [lane]."""
        if isinstance(factor, Tensor):
            return (self.lr * factor).to(self.task.dtype)
        rates = [one.rate(self.round, self.rounds) * factor for one in self._lane_recipes]
        return self.constant(rates[0] if is_constant(rates) else self.spread(rates))

    def optimizer_numbers(self, lr: Number | None = None) -> Numbers:
        """Return the numbers of this round's optimiser steps, for `UpdateRule.update`."""
        optimizers = [one.optimizer for one in self._lane_recipes]
        rates = self.lr if lr is None else self.constant(lr).expand(len(self))
        return {"lr": rates, **self.task.rule.select_numbers(optimizers, self.spread)}

    def load_slots(self, training: str, params: Params) -> State:
        """Return the optimiser's slots that a training starts from: zero, or kept ones."""
        kept = (self.kept_slots or {}).get(training)
        return self.task.rule.init_slots(params) if kept is None else kept

    def keep_slots(self, training: str, slots: State) -> None:
        """Keep the slots for the next round, if the run keeps them."""
        if self.kept_slots is not None:
            self.kept_slots[training] = slots

    def local_steps(
        self, *, epochs: int | None = None, batch_size: int | None = None
    ) -> Sequence[int]:
        """Return how many steps each lane takes in a training."""
        length, size = self.task.training_length(epochs), batch_size or self.task.batch_size
        return [length.count_steps(samples, size) for samples in self.sizes()]

    @property
    def most_local_steps(self) -> int:
        """Return the most steps that any client of the federation takes.

        A tensor in `fixed` with an entry per step has this length, in every cohort and round.
        """
        task = self.task
        length = task.training_length(None)
        return max(length.count_steps(len(rows), task.batch_size) for rows in task.parts["train"])

    # --- local training ------------------------------------------------------------------------

    def fit(
        self,
        params: Params,
        *,
        objective: Objective | None = None,
        gradients: GradientFunction | None = None,
        fixed: Any = None,
        lr: Number | None = None,
        linear: Params | None = None,
        proximal: tuple[Number, Params] | None = None,
        names: Collection[str] | None = None,
        training: str = "local",
        **options: Any,
    ) -> Params:
        """Train a copy of `params` with the run's optimiser on each lane's samples.

        `objective(task, model, fixed, x, y)`, a function of one lane, replaces the loss, or
        `gradients(task, model, fixed, x, y)`, of all lanes, its gradients. Either is hashable, as a
        step is, and `fixed` is what it needs, [lane, …]. `lr` is a number or [lane]. `linear` adds
        ⟨linear, w⟩ to the loss, and `proximal = (μ, anchor)` μ/2·‖w − anchor‖². `names` (parameters
        and buffers) is the part that learns; the rest is frozen and runs in evaluation mode.
        `training` names the optimiser's slots if the run keeps them (`Method.trainings`). `options`
        are those of `train`. If only upper layers learn, they learn on features, which are computed
        once.
        """
        task = self.task
        learning = tuple(name for name in task.trainable if names is None or name in names)
        mu, anchor = proximal or (0.0, {})
        is_proximal = isinstance(mu, Tensor) or mu != 0
        constants: dict[str, Any] = {"optimizer": self.optimizer_numbers(lr), "own": fixed or {}}
        if linear:
            constants["linear"] = {name: linear[name] for name in learning}
        if is_proximal:
            constants |= {"anchor": {name: anchor[name] for name in learning}, "mu": mu}
        frozen: set[str] = set()
        if names is not None:
            frozen = {name for layer in task.layers for name in layer} - set(names)
        slots = self.load_slots(training, {name: params[name] for name in learning})
        cut = None if gradients or objective else self._cut_below(names, params)
        step = FitStep(task.rule, learning, gradients, objective, bool(linear), is_proximal, cut)
        begin = {"model": params, "slots": slots}
        below = (cut, params) if cut else None
        trained = self.train(step, begin, constants, frozen=frozen, below=below, **options)
        self.keep_slots(training, trained["slots"])
        model: Params = trained["model"]
        return model

    def _cut_below(self, names: Collection[str] | None, params: Params) -> Cut | None:
        """Return the cut below all that learns; None if the features there cannot be computed once.

        A module that is not ours may draw random numbers where it is frozen.
        """
        task = self.task
        if names is None or task.augmentation or not isinstance(task.model, Layered):
            return None
        learning = [i for i, layer in enumerate(task.layers) if set(names).intersection(layer)]
        with task.use_mode(training=False), torch.no_grad():
            cut = task.cut(max(learning, default=-1) + 1, params, sum(self.sizes()))
        return cut if learning and cut.cuts else None

    def optimize(
        self,
        step: Step | Sequence[Step],
        state: State,
        fixed: State | None = None,
        *,
        learned: Mapping[str, Params],
        lr: Number | None = None,
        **options: Any,
    ) -> State:
        """Do as `train`, with steps that use the run's optimiser.

        `learned` has the models that the optimiser steps, by training (`Method.trainings`). A step
        finds their slots in `state["slots"]`, by training, and the optimiser's numbers in
        `fixed["optimizer"]`. `lr` is as in `fit`.
        """
        slots = {}
        for training, model in learned.items():
            params = {name: model[name] for name in self.task.trainable}
            slots[training] = self.load_slots(training, params)
        constants = {**(fixed or {}), "optimizer": self.optimizer_numbers(lr)}
        trained: State = self.train(step, {**state, "slots": slots}, constants, **options)
        for training, kept in trained.pop("slots").items():
            self.keep_slots(training, kept)
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
        below: tuple[Cut, Params] | None = None,
        report_loss: bool = True,
    ) -> Any:
        """Take a step for every batch of every lane, and return the new state.

        `state` and `fixed` are trees of lanes; `lanes/training.py` says what a step is. Several
        steps alternate, in every epoch from the first. `rows` replaces the lanes' training samples.
        `purpose` separates the shuffles of several trainings in a round. With `below`, a cut and
        models whose layers below it are frozen, steps get features for x. `report_loss` puts the
        mean loss into the metrics; a training that only prepares for the round's own does not.
        """
        task = self.task
        steps = (step,) if callable(step) else tuple(step)
        size = batch_size or task.batch_size
        trained = [task.parts["train"][client] for client in self.clients]
        own = trained if rows is None else rows
        lengths = [len(samples) for samples in own]
        length = task.training_length(epochs)
        with task.use_mode(training=True, frozen=frozen), torch.no_grad():
            batches = self._batch_features(*below, own) if below else None
            runner = make_runner(
                task, steps, size, frozen, state, fixed or {}, len(self), self.on_step, batches
            )
            ordered = [np.arange(len(samples)) for samples in own] if batches else own
            key = (bool(batches), purpose) if rows is None else None
            for epoch in range(length.count_epochs(lengths, size)):
                order = self._order_samples(ordered, purpose, epoch, key)
                (batches or runner).begin_epoch(order)
                for lanes, columns in length.iterate_steps(lengths, size, epoch):
                    turn = columns.start // size % len(steps)
                    runner.step(steps[turn], lanes, columns)
            state, total = runner.finish()
        if report_loss:
            taken = [length.count_steps(samples, size) for samples in lengths]
            self.metrics["train_loss"] = total / to_device(task.device, taken)
        return state

    def _batch_features(
        self, cut: Cut, params: Params, rows: Sequence[np.ndarray]
    ) -> FeatureBatches:
        samples = self.load_samples(rows)
        return FeatureBatches(self.task, *self.features(cut, params, samples), samples.matrix)

    def _order_samples(
        self, rows: Sequence[np.ndarray], purpose: str, epoch: int, key: Any
    ) -> Tensor:
        """Return the lanes' samples in the order of one epoch, [lane, sample], padded.

        They stand as `Task.training_batch` reads them: with their transforms, if there are any.
        With a `key`, the rows are the same in every round.
        """

        def order(cohort: "Cohort") -> Tensor:
            ordered = [cohort.shuffle(lane, own, purpose, epoch) for lane, own in enumerate(rows)]
            if augmentation := cohort.task.augmentation:
                for lane, own in enumerate(ordered):
                    draw = cohort.draw(lane, f"{purpose} augmentation", epoch)
                    ordered[lane] = augmentation.pack(own, draw)
            return pad_rows(ordered, cohort.task.device)

        return order(self) if key is None else self.draw_early((key, epoch), order)

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

    def load_samples(self, rows: Iterable[np.ndarray]) -> Samples:
        """Return each lane's samples, brought to the device early if it is a GPU."""
        samples = Samples(rows, self.task.device)
        if self.task.backend.predraws:
            _ = samples.matrix, samples.counts
            if self.sharing.source:
                samples.group(self.sharing.group_lanes(range(len(self))))
        return samples
