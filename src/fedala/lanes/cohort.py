"""Lanes: a group of clients working side by side as one tensor program.

A `Params` is a model's state (parameters and buffers by name) whose first dimension is the *lane*, one lane per
client. What a method does to parameters — blend, average, pull — is then plain tensor arithmetic. The forward pass
with other weights in every lane is `torch.func.vmap` over `functional_call`; lanes are independent, so the gradient
of the *sum* of their losses is each lane's own gradient. One lane alone runs without vmap: the plain reference, and
what a real client runs.

Clients differ in size. Lanes stand sorted, the longest first, so that the lanes that still have a batch at some step
are neighbours and a step is a slice. Nothing is padded in training: no result depends on who else is in the cohort.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.parameter import is_lazy

from fedala.errors import UserError, printable
from fedala.lanes.layers import Cut, Layered, call, layers_of
from fedala.lanes.randomness import draw
from fedala.lanes.row_gradients import RowGradient, RowGradients, large_embeddings
from fedala.lanes.trees import leaves, take, tree_map

T = TypeVar("T")
Params = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]
Gradients = dict[str, Tensor | RowGradient]
Objective = Callable[..., Tensor]
"""Of one lane: (state, x, y, …) to a number."""


def model_state(model: nn.Module) -> Params:
    """A model's parameters and buffers as one lane."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if lazy := [name for name, value in state.items() if is_lazy(value)]:
        raise UserError(
            f"{printable(lazy[0], 100)} of the model has no shape yet, because its layer is a lazy one: "
            "run the model on a batch before you hand it over."
        )
    return {name: value.detach().unsqueeze(0) for name, value in state.items()}


class Task:
    """What all lanes share: the model's skeleton, the loss, the samples, and how a client trains on its own."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        y: Any,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray] = (),
        validation: Sequence[np.ndarray] = (),
        *,
        loss: Loss = F.cross_entropy,
        batch_size: int = 10,
        lr: float = 0.005,
        epochs: int = 1,
        shuffle: bool = True,
        device: torch.device | str = "cpu",
        precision: str = "float32",
        scale: bool = True,
        feature_memory: int | None = None,
    ) -> None:
        """`train`, `test` and `validation` hold each client's positions in `x` and `y`, in the client's own order.

        With `scale`, images of bytes come to the model as (x/255 − 0.5)/0.5. `feature_memory` bounds the bytes of features
        under the upper layers that are kept at a time; those that would not fit are computed whenever they are needed.
        """
        self.model = model
        self.device = torch.device(device)
        self.precision = precision
        self.scale = scale
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.x = tree_map(lambda t: self._placed(t.to(self.device)), x)
        self.y = tree_map(lambda t: t.to(self.device), y)
        self.parts = {"train": train, "test": test, "validation": validation}
        self.loss = loss
        #: Samples that go through a model at once where no gradient is kept: for a CPU's caches, or a GPU's memory.
        self.chunk = 64
        self.feature_memory = 2**30 if feature_memory is None else feature_memory
        self._feature_bytes: dict[int, int] = {}
        if self.device.type == "cuda":
            sample = sum(leaf[:1].numel() for _, leaf in leaves(self.x))
            activations = 400 * max(
                1, sample
            )  # bytes: the widest layers of image models are some hundred times their input
            memory = torch.cuda.get_device_properties(self.device).total_memory
            self.chunk = max(16, min(16384, memory // 8 // activations))
            if feature_memory is None:
                self.feature_memory = memory // 8
        self.batch_size, self.lr, self.epochs, self.shuffle = batch_size, lr, epochs, shuffle
        self.layers = layers_of(model)
        if not any(True for _ in model.parameters()):
            raise UserError("The model has no parameters: there is nothing to learn.")
        self.trainable = tuple(
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        )
        #: On a GPU: the steps that have been captured, by what they do; what rounds to come have drawn; whom evaluations test.
        self.captured: dict[Any, Any] = {}
        self.ahead: dict[Any, Any] = {}
        self.tested: dict[Any, tuple[list[int], Samples]] = {}
        # Torch honours `padding_idx` in lane 0 only when a gradient is taken from outside vmap, so it is done here.
        self.padding = tuple(
            (f"{name}.weight" if name else "weight", module.padding_idx)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None
        )

    def forget(self) -> None:
        """Gives the memory back that only saves time."""
        for kept in (self.captured, self.ahead, self.tested):
            kept.clear()

    def twin(self) -> "Task":
        """The same task with a skeleton of its own, to be used in another thread."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.__dict__.pop("embeddings", None)  # they are tied to the skeleton
        return other

    def draws(self, start: Params) -> bool:
        """Whether the model draws random numbers itself (dropout), seen by running it on two samples."""
        rows = torch.tensor([0, 1], device=self.device)[
            : len(next(leaf for _, leaf in leaves(self.y)))
        ]
        with self.mode(training=True), torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                call(
                    self.model,
                    {name: value[0].clone() for name, value in start.items()},
                    self.inputs(rows),
                )
            except (RuntimeError, ValueError):  # two samples are not enough for it
                return True
            return not torch.equal(before, torch.get_rng_state())

    def laid_out(self, value: Tensor) -> Tensor:
        """Copy a tensor of lanes into the memory order that is fastest for this model.

        One lane's [1, out, in, height, width] stands channels last if `uses_channels_last`.
        """
        if value.dim() == 5 and len(value) == 1 and self.uses_channels_last:
            return value.squeeze(0).clone(memory_format=torch.channels_last).unsqueeze(0)
        return value.clone(memory_format=torch.contiguous_format)

    # Layouts and vmap only save time, but a model may depend on them: its forward pass or its loss
    # may call `view`, `stride`, `is_contiguous`, `data_ptr` or `item`. So the task tries the model
    # both ways, once. The trial depends on nothing that changes during a run: a resumed run decides
    # as the uninterrupted one did.

    @cached_property
    def uses_channels_last(self) -> bool:
        """Tell whether convolution weights stand channels last.

        They do so on a CPU, where it is faster, if the model does not notice.
        """
        if self.device.type != "cpu" or not any(p.dim() == 4 for p in self.model.parameters()):
            return False
        if isinstance(self.model, Layered):
            return True

        def run(objective: Objective, state: Params, x: Any, y: Any) -> Any:
            def lay_out(value: Tensor) -> Tensor:
                return value.clone(memory_format=torch.channels_last) if value.dim() == 4 else value

            return objective(tree_map(lay_out, state), x, y)

        return self._agrees_with_plain(run)

    @cached_property
    def uses_vmap(self) -> bool:
        """Tell whether several lanes run as one program: if the model does not notice."""
        if isinstance(self.model, Layered):
            return True

        def run(objective: Objective, *trees: Any) -> Any:
            stacked = vmap(objective, randomness="different")
            return take(stacked(*tree_map(lambda t: torch.stack([t, t]), trees)), 0)

        return self._agrees_with_plain(run)

    def _agrees_with_plain(self, run: Callable[..., Any]) -> bool:
        """Tell whether `run(objective, state, x, y)` gives what `objective(state, x, y)` gives.

        Rounding aside, outputs and losses must agree in evaluation and in training mode, gradients
        in evaluation mode only: in training, batch normalisation over a few samples magnifies
        rounding. A model that draws random numbers may draw others. If the plain model fails, the
        answer is no.
        """
        for training in (False, True):
            try:
                expected, draws = self._try_model(
                    lambda objective, *trees: objective(*trees), training
                )
                found, _ = self._try_model(run, training)
            except Exception:  # whatever the user's model or loss may raise
                return False
            if not draws and not _are_close(found, expected):
                return False
        return True

    def _try_model(self, run: Callable[..., Any], training: bool) -> tuple[list[Tensor], bool]:
        """Run a made-up state on four samples.

        Returns all results, and whether the model drew random numbers.
        """
        rows = torch.arange(
            min(4, len(next(leaf for _, leaf in leaves(self.y)))), device=self.device
        )
        generator = torch.Generator().manual_seed(0)
        state, learning = {}, []
        for name, p in self.model.named_parameters():
            inputs = p.numel() // p.shape[0] if p.dim() and len(p) else 1
            value = (
                torch.randn(p.shape, generator=generator) / max(1, inputs) ** 0.5
            )  # no layer makes it overflow
            state[name] = value.to(self.device, self.dtype if p.is_floating_point() else p.dtype)
            if p.is_floating_point():
                learning.append(state[name].requires_grad_())
        for name, b in self.model.named_buffers():
            made_up = torch.ones_like if b.is_floating_point() else torch.zeros_like
            value = (
                made_up(b, device=self.device)
                if b.is_meta
                else b.detach().to(self.device, copy=True)
            )
            state[name] = value.to(self.dtype) if b.is_floating_point() else value

        def objective(state: Params, x: Any, y: Any) -> tuple[list[Tensor], Tensor]:
            output = call(self.model, state, x)
            return [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)], self.loss(
                output, y
            )

        devices = [self.device] if self.device.type == "cuda" else []
        with self.mode(training), torch.enable_grad(), torch.random.fork_rng(devices=devices):
            before = self._random_states()
            outputs, loss = run(objective, state, self.inputs(rows), self.targets(rows))
            draws = not all(map(torch.equal, before, self._random_states()))
            gradients = (
                () if training else torch.autograd.grad(loss, learning, materialize_grads=True)
            )
        joined = [torch.cat([gradient.flatten() for gradient in gradients])] if gradients else []
        return [value.detach().float() for value in (*outputs, loss, *joined)], draws

    def _random_states(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    @cached_property
    def embeddings(self) -> dict[str, int | None]:
        """Weights whose gradients are kept as rows, with their padding rows."""
        return large_embeddings(self.model)

    def size(self, client: int, part: str = "train") -> int:
        return len(self.parts[part][client])

    def cut(self, p: int, state: Params, samples: int, probe: Any = None) -> Cut:
        """The cut under the upper p layers, or one below everything where the features of so many samples would not fit.

        `state` is that of the lanes; `probe` is for modules that are not ours.
        """
        cut = Cut(self.model, p, probe)
        if 0 < cut.p < cut.depth and samples:
            if cut.p not in self._feature_bytes:
                first = {name: value[0] for name, value in state.items()}
                features = cut.lower(
                    first, self.inputs(torch.zeros(1, dtype=torch.int64, device=self.device))
                )
                self._feature_bytes[cut.p] = sum(
                    leaf.numel() * leaf.element_size() for _, leaf in leaves(features)
                )
            if samples * self._feature_bytes[cut.p] > self.feature_memory:
                return Cut(self.model, cut.depth)
        return cut

    def inputs(self, rows: Tensor) -> Any:
        """The samples at `rows`, ready for the model."""
        return tree_map(lambda t: self._ready(t[rows]), self.x)

    def targets(self, rows: Tensor) -> Any:
        return tree_map(lambda t: t[rows], self.y)

    def _placed(self, x: Tensor) -> Tensor:
        """On a GPU that has room for it, samples are made ready once; elsewhere, whenever they are used."""
        if (
            self.device.type == "cuda"
            and x.numel() * 4 < torch.cuda.get_device_properties(self.device).total_memory // 10
        ):
            return self._ready(x)
        return x

    def _ready(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8 and self.scale:
            return x.to(self.dtype).div_(255).sub_(0.5).div_(0.5)
        return x.to(self.dtype) if x.is_floating_point() else x

    @contextmanager
    def mode(self, training: bool, frozen: Collection[str] = ()) -> Iterator[None]:
        """The model in training or in evaluation mode; modules whose parameters are all `frozen` stay in evaluation mode.

        Of a module without parameters (a normalisation that learns nothing), the buffers decide.
        """
        before = [(module, module.training) for module in self.model.modules()]
        self.model.train(training)
        for name, module in self.model.named_modules() if frozen else ():
            own = [f"{name}.{p}" for p, _ in [*module.named_parameters()] or module.named_buffers()]
            if own and all(p in frozen for p in own):
                module.eval()
        try:
            with self._arithmetic():
                yield
        finally:
            for module, training in before:
                module.training = training

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.device.type == "cuda":
                from fedala.cuda.graphs import fast

                few = sum(isinstance(module, nn.Conv2d) for module in self.model.modules()) <= 4
                stack.enter_context(fast(self.precision, special=few))
            if self.precision == "bf16":
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            yield

    # --- the model in every lane -----------------------------------------------------------------------------------

    def per_lane(self, f: Callable[..., Any], *trees: Any) -> Any:
        """`f` of each lane's part of the trees. A single lane is called plainly, as a module would be."""
        lanes = _lanes_of(trees)
        if lanes == 1:
            return tree_map(
                lambda t: t.unsqueeze(0),
                f(*(tree_map(lambda t: t.squeeze(0), tree) for tree in trees)),
            )
        if self.uses_vmap:
            return vmap(f, randomness="different")(*trees)
        # Lanes are views: what a module changes in place (running statistics) changes in the trees.
        return tree_map(
            lambda *parts: torch.stack(parts), *(f(*take(trees, lane)) for lane in range(lanes))
        )

    def losses(self, params: Params, x: Any, y: Any, cut: Cut | None = None) -> Tensor:
        """Each lane's loss on its batch; with a `cut`, from the features below it."""

        def loss(state: Params, x: Any, y: Any) -> Tensor:
            output = cut.upper(state, x) if cut else call(self.model, state, x)
            if self.loss is F.cross_entropy:
                check_scores(output)
            return self.loss(output, y)

        result: Tensor = self.per_lane(loss, params, x, y)
        return result

    def summed_losses(self, output: Tensor, y: Tensor, real: Tensor, ends: Sequence[int]) -> Tensor:
        """Each lane's summed loss over its real samples, the first `ends[lane]` of its row."""
        if self.loss is F.cross_entropy:
            each = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").view(
                y.shape
            )
            return torch.where(real, each, 0).sum(1)
        return torch.stack(
            [self.loss(output[lane, :end], y[lane, :end]) * end for lane, end in enumerate(ends)]
        )

    def gradients(
        self,
        params: Params,
        x: Any,
        y: Any,
        names: Sequence[str] | None = None,
        objective: Objective | None = None,
        *fixed: Any,
    ) -> tuple[Tensor, Gradients]:
        """Each lane's loss on its batch, and the gradients of the named parameters (of all that learn, by default).

        `objective(state, x, y, *fixed)`, for one lane, may stand for the loss. Buffers (running statistics) are updated in place.
        """
        names = self.trainable if names is None else names
        by_rows = self.embeddings if _lanes_of(params) == 1 or self.uses_vmap else {}
        rows = RowGradients(name for name in by_rows if name in names)
        with torch.enable_grad(), rows if rows.found else nullcontext():
            state = {**params, **{name: params[name].detach().requires_grad_() for name in names}}
            losses = (
                self.per_lane(objective, state, x, y, *fixed)
                if objective
                else self.losses(state, x, y)
            )
            if names and not losses.requires_grad:
                raise UserError(
                    f"The loss does not depend on the parameters that should learn: {few(names)}."
                )
            wanted = [state[name] for name in names]
            values = torch.autograd.grad(losses.sum(), wanted, allow_unused=True) if names else ()
        gradients: Gradients = {
            name: rows.gradient(name, params[name].shape, self.embeddings[name])
            if rows.found.get(name)
            else torch.zeros_like(params[name])  # a parameter that the model does not use
            if value is None
            else value
            for name, value in zip(names, values, strict=True)
        }
        for name, row in self.padding:
            whole = gradients.get(name)
            if isinstance(whole, Tensor):
                whole.select(1, row).zero_()
        return losses.detach(), gradients


def check_scores(output: Any, dimensions: int | None = None) -> None:
    """Refuse a model whose output is not class scores: a tensor, of so many dimensions."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else None
    if shape is None or (dimensions is not None and len(shape) != dimensions):
        what = (
            f"a tensor of {len(shape)} dimensions per lane"
            if shape is not None
            else f"a {type(output).__name__}"
        )
        raise UserError(
            f"The model must return a tensor of scores [sample, class], and it returns {what}."
        )


def few(names: Sequence[str]) -> str:
    """Name parameters in a sentence: the first five of them."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _lanes_of(trees: Any) -> int:
    return len(next(leaf for _, leaf in leaves(trees)))


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether all tensors agree within five percent, which is more than rounding."""
    if [a.shape for a in found] != [b.shape for b in expected]:
        return False
    for a, b in zip(found, expected, strict=True):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return False
        a, b = a[finite], b[finite]
        if (a - b).norm() > 0.05 * b.norm():
            return False
    return True


Groups = tuple[tuple[int, ...], ...]
"""Lanes that have the same lower layers, together."""


class Samples:
    """Each lane's samples, as positions in the dataset; on the device once somebody needs them there."""

    def __init__(self, rows: Iterable[np.ndarray], device: torch.device) -> None:
        self.rows, self.device = list(rows), device
        self.lengths = [len(row) for row in self.rows]
        self._grouped: dict[Groups, tuple[list[Tensor], Tensor]] = {}

    @cached_property
    def matrix(self) -> Tensor:
        """A row for each lane, padded with zeros."""
        return pad(self.rows, self.device)

    @cached_property
    def counts(self) -> Tensor:
        """Each lane's number of samples."""
        return to_device(self.device, self.lengths)

    def grouped(self, groups: Groups) -> tuple[list[Tensor], Tensor]:
        """The samples of each group, one lane after the other; and if these stand in one table, each lane's places in it."""
        if groups not in self._grouped:
            places, filled = [np.empty(0, np.int64)] * len(self.rows), 0
            for lane in (lane for group in groups for lane in group):
                places[lane] = np.arange(filled, filled := filled + self.lengths[lane])
            joined = [np.concatenate([self.rows[lane] for lane in group]) for group in groups]
            on_device = [to_device(self.device, torch.from_numpy(rows)) for rows in joined]
            self._grouped[groups] = on_device, pad(places, self.device)
        return self._grouped[groups]


class Score(NamedTuple):
    """Per lane: correct answers, summed loss, samples."""

    correct: Tensor
    loss: Tensor
    samples: Tensor


Step = Callable[[Task, Any, Any, Any, Any], Tensor]
"""(task, state, fixed, x, y) of the lanes that have a batch: changes `state` in place, returns the lanes' losses."""


def descend(params: Params, gradients: Gradients, lr: float) -> None:
    """One step of gradient descent, in place."""
    whole = {name: value for name, value in gradients.items() if isinstance(value, Tensor)}
    if whole:
        torch._foreach_add_(
            [params[name].detach() for name in whole], list(whole.values()), alpha=-lr
        )
    for name, value in gradients.items():
        if isinstance(value, RowGradient):
            value.add_to(params[name].detach(), -lr)


def dense(gradients: Gradients) -> Params:
    """Gradients as whole tensors, for arithmetic that needs them so."""
    return {
        name: value.dense() if isinstance(value, RowGradient) else value
        for name, value in gradients.items()
    }


def pull(params: Params, gradients: Gradients, anchor: Params, mu: float) -> None:
    """Adds the gradient of a proximal term, μ/2·‖w − anchor‖², in place."""
    for name, value in dense(gradients).items():
        gradients[name] = value.add_(params[name] - anchor[name], alpha=mu)


@dataclass(frozen=True)
class SGD:
    """The step of plain SGD on the named parameters, with a pull of strength μ towards `fixed["anchor"]` where μ > 0."""

    lr: float
    names: tuple[str, ...]
    mu: float = 0.0

    def __call__(self, task: Task, state: Params, fixed: dict[str, Any], x: Any, y: Any) -> Tensor:
        losses, gradients = task.gradients(state, x, y, self.names)
        if self.mu:
            pull(state, gradients, fixed["anchor"], self.mu)
        descend(state, gradients, self.lr)
        return losses


@dataclass
class Cohort:
    """Some clients of one round, as lanes. `seeds[i]` is the seed of the run that lane i belongs to."""

    task: Task
    clients: Sequence[int]
    seeds: Sequence[int]
    round: int = 1
    rounds: int = 1
    #: What the server sent, per lane, and which of the server's models each lane got: lanes that share one share its work.
    received: Params = field(default_factory=dict)
    source: Sequence[int] = ()
    #: What happened, by name, one number per lane; the simulation records it.
    notes: dict[str, Tensor] = field(default_factory=dict)
    #: Sees the losses and the state after every step of a training, to find out where it went wrong.
    watch: Callable[[Tensor, Any], None] | None = None
    _draws: dict[Any, Callable[["Cohort"], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes()
        if any(a < b for a, b in pairwise(sizes)):
            raise ValueError(
                "lanes must be sorted by their number of training samples, the longest first"
            )

    def __len__(self) -> int:
        return len(self.clients)

    def sizes(self, part: str = "train") -> list[int]:
        return [self.task.size(client, part) for client in self.clients]

    def draw(self, lane: int, purpose: str, epoch: int = 0) -> np.random.Generator:
        return draw(
            self.seeds[lane], purpose, client=self.clients[lane], round=self.round, epoch=epoch
        )

    # --- local training --------------------------------------------------------------------------------------------

    def sgd(
        self,
        params: Params,
        *,
        epochs: int | None = None,
        lr: float | None = None,
        proximal: tuple[float, Params] | None = None,
        names: Collection[str] | None = None,
        **options: Any,
    ) -> Params:
        """Plain SGD over each lane's training samples, starting from a copy of `params`.

        `proximal = (μ, anchor)` adds μ/2·‖w − anchor‖² to the loss. `names` (parameters and buffers) is the part that learns; the
        rest is frozen and runs in evaluation mode.
        """
        task = self.task
        learning = tuple(name for name in task.trainable if names is None or name in names)
        mu, anchor = proximal or (0.0, {})
        step = SGD(task.lr if lr is None else lr, learning, mu)
        fixed = {"anchor": {name: anchor[name] for name in learning}} if mu else {}
        frozen = (
            set()
            if names is None
            else {name for layer in task.layers for name in layer} - set(names)
        )
        trained: Params = self.train(step, params, fixed, epochs=epochs, frozen=frozen, **options)
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
        note: bool = True,
        turn: int = 0,
    ) -> Any:
        """Takes a step for every batch of every lane, and returns the new state.

        `state` and `fixed` are trees of lanes. A step gets the part of the lanes that have a batch, changes that part of
        `state` in place and returns the lanes' losses; it must depend on nothing else that changes from round to round.
        Several steps take turns, in every epoch beginning with number `turn`. `rows` replaces the lanes' training samples.
        `purpose` tells the shuffles of several trainings in a round apart; the loss of those that only prepare for the round's
        own training is not to be noted (`note`).
        """
        task = self.task
        turns = (step,) if callable(step) else tuple(step)
        fixed = fixed or {}
        size = batch_size or task.batch_size
        own = [task.parts["train"][client] for client in self.clients] if rows is None else rows
        lengths = [len(r) for r in own]
        epochs = task.epochs if epochs is None else epochs
        with task.mode(training=True, frozen=frozen), torch.no_grad():
            replay = task.device.type == "cuda" and not self.watch
            captured = self._captured(turns, size, frozen, state, fixed) if replay else None
            if captured:
                state, fixed, total = captured.load(state, fixed, len(self))
            else:
                state = tree_map(task.laid_out, state)
                total = torch.zeros(len(self), device=task.device, dtype=task.dtype)
            for epoch in range(epochs):

                def order(cohort: "Cohort", epoch: int = epoch) -> Tensor:
                    return pad(
                        [cohort.shuffled(i, own[i], purpose, epoch) for i in range(len(own))],
                        task.device,
                    )

                table = order(self) if rows is not None else self.drawn((purpose, epoch), order)
                if captured:
                    captured.order(table)
                for lanes, columns in steps(lengths, size, drop_last=True):
                    due = (turn + columns.start // size) % len(turns)
                    if captured and columns.stop - columns.start == size:
                        captured.step(lanes.stop, due)
                        continue
                    place = table[lanes, columns]
                    x, y = task.inputs(place), task.targets(place)
                    losses = turns[due](task, take(state, lanes), take(fixed, lanes), x, y)
                    total[lanes] += losses
                    if self.watch:
                        self.watch(losses, state)
            if captured:
                state, total = tree_map(torch.clone, (state, total))
        if note:
            taken = [epochs * max(n // size, int(n > 0)) for n in lengths]
            self.notes["train_loss"] = total / to_device(task.device, taken)
        return state

    def _captured(
        self, turns: tuple[Step, ...], size: int, frozen: Collection[str], state: Any, fixed: Any
    ) -> Any:
        from fedala.cuda.graphs import Captured, is_shared

        shapes = tuple((name, *value.shape[1:]) for name, value in leaves((state, fixed)))
        shared = tuple(is_shared(value) for _, value in leaves(fixed))
        key = (turns, size, frozenset(frozen), shapes, shared)
        known = self.task.captured.get(key)
        if known is None or known.lanes < len(self):
            known = self.task.captured[key] = Captured(
                self.task, turns, size, len(self), state, fixed
            )
        return known

    def drawn(self, key: Any, make: Callable[["Cohort"], T]) -> T:
        """What `make` draws for this round, and nothing else: on a GPU, it may have done so while the device was busy."""
        if self.task.device.type != "cuda":
            return make(self)
        self._draws[key] = make
        found: T | None = self.task.ahead.pop((key, *self._who()), None)
        return make(self) if found is None else found

    def look_ahead(self) -> None:
        """Draws for the same clients' next round what they have drawn in this one. There is time now: the device works."""
        following = replace(self, round=self.round + 1, _draws={})
        self.task.ahead = {
            key: value for key, value in self.task.ahead.items() if key[1] > self.round
        }
        for key, make in self._draws.items():
            self.task.ahead[key, *following._who()] = make(following)

    def _who(self) -> tuple[Any, ...]:
        return self.round, tuple(self.clients), tuple(self.seeds)

    def shuffled(self, lane: int, rows: np.ndarray, purpose: str, epoch: int) -> np.ndarray:
        """A lane's samples in the order of one epoch."""
        return (
            rows[self.draw(lane, purpose, epoch).permutation(len(rows))]
            if self.task.shuffle
            else rows
        )

    # --- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, params: Params, part: str | Sequence[np.ndarray] = "test") -> Score:
        """Each lane's model on its own samples. The lower layers that are the received ones run once for all lanes."""
        task = self.task
        order, samples = self._tested(part)
        with task.mode(training=False):
            cut = task.cut(self._own_layers(params), params, sum(samples.lengths))
            table, where = self.features(cut, params, samples, order)
            needed = {name for layer in task.layers[: cut.p] for name in layer}
            state = {name: value for name, value in params.items() if name in needed}
            sorted_already = order == list(range(len(self)))
            if not sorted_already:
                state = take(state, order)
            if len(self) == 1:
                state = tree_map(task.laid_out, state)
            correct, loss = torch.zeros(2, len(self), device=task.device, dtype=task.dtype)
            for start in range(0, where.shape[1], self._width()):
                columns = slice(start, min(start + self._width(), where.shape[1]))
                lanes = slice(0, sum(length > start for length in samples.lengths))
                x, y = (
                    self.rows(table, where[lanes, columns]),
                    task.targets(samples.matrix[lanes, columns]),
                )
                output = task.per_lane(cut.upper, take(state, lanes), x) if cut.p else x
                check_scores(output, y.dim() + 1)
                # No sample's output depends on its neighbours here: shorter lanes are padded, the padding is not counted.
                real = (
                    torch.arange(columns.start, columns.stop, device=task.device)
                    < samples.counts[lanes, None]
                )
                correct[lanes] += ((output.argmax(-1) == y) & real).sum(1)
                ends = [min(length - start, y.shape[1]) for length in samples.lengths[lanes]]
                loss[lanes] += task.summed_losses(output, y, real, ends)
        score = Score(correct, loss, samples.counts)
        if sorted_already:
            return score
        back = to_device(task.device, sorted(range(len(self)), key=order.__getitem__))
        return Score(*(figures[back] for figures in score))

    def _tested(self, part: str | Sequence[np.ndarray]) -> tuple[list[int], Samples]:
        """Lanes by their number of samples to be tested with, and these samples in that order."""

        def gather(rows: Sequence[np.ndarray]) -> tuple[list[int], Samples]:
            order = sorted(range(len(self)), key=lambda lane: -len(rows[lane]))
            return order, Samples((rows[lane] for lane in order), self.task.device)

        if not isinstance(part, str):
            return gather(part)
        key = part, tuple(self.clients)
        found = self.task.tested.get(key)
        if found is None:
            if len(self.task.tested) > 16:  # other clients every round
                self.task.tested.clear()
            found = self.task.tested[key] = gather(
                [self.task.parts[part][client] for client in self.clients]
            )
        return found

    def _width(self) -> int:
        """Samples per lane and step of an evaluation."""
        return max(1, 8 * self.task.chunk // len(self))

    def _own_layers(self, params: Params) -> int:
        """How many upper layers are not the received ones, told by identity: the tensors that were handed out are the same."""
        own = len(self.task.layers)
        while own and all(
            params[name] is self.received.get(name) for name in self.task.layers[own - 1]
        ):
            own -= 1
        return own

    # --- features under the upper layers ---------------------------------------------------------------------------

    @torch.no_grad()
    def features(
        self, cut: Cut, params: Params, samples: Samples, lanes: Sequence[int] = ()
    ) -> tuple[Any, Tensor]:
        """What enters the upper layers, for each lane's samples: a table, and each lane's places in it.

        Lanes whose lower layers are one and the same received model go through it together, in large batches. Where the
        model cannot be cut there is nothing to compute: the table is None, and stands for the samples themselves.
        `lanes` says whose the samples are, where they do not stand in the lanes' own order.
        """
        task, lanes = self.task, lanes or range(len(self))
        if not cut.cuts:
            return None, samples.matrix
        shared = self._own_layers(params) <= cut.p and len(self.source) == len(self)
        groups = self._groups(lanes, shared)
        joined, places = samples.grouped(groups)
        table = []
        for group, rows in zip(groups, joined, strict=True):
            lane = lanes[group[0]]
            state = {
                name: task.laid_out(value[lane].unsqueeze(0)).squeeze(0)
                for name, value in params.items()
            }
            table += [
                cut.lower(state, task.inputs(chunk))
                for chunk in torch.split(rows, task.chunk)
                if len(chunk)
            ]
        return tree_map(lambda *parts: torch.cat(parts), *table) if table else None, places

    def _groups(self, lanes: Sequence[int], shared: bool = True) -> Groups:
        """The lanes that received the same model, together."""
        groups: dict[int, list[int]] = {}
        for place, lane in enumerate(lanes):
            groups.setdefault(self.source[lane] if shared else lane, []).append(place)
        return tuple(map(tuple, groups.values()))

    def samples(self, rows: Iterable[np.ndarray]) -> Samples:
        """Each lane's samples, brought to the device now, as features of a shared body need them."""
        samples = Samples(rows, self.task.device)
        if self.task.device.type == "cuda":
            _ = samples.matrix, samples.counts
            if len(self.source) == len(self):
                samples.grouped(self._groups(range(len(self))))
        return samples

    def rows(self, table: Any, places: Tensor) -> Any:
        """Rows of a table that `features` made."""
        return self.task.inputs(places) if table is None else tree_map(lambda t: t[places], table)


def steps(lengths: Sequence[int], size: int, *, drop_last: bool) -> Iterator[tuple[slice, slice]]:
    """The steps of one pass over ragged lanes, the longest first: which lanes (neighbours), and which of their samples.

    Lanes with a full batch go together; lanes whose last batch is shorter go as a group of their own, by its length.
    """
    for start in range(0, max(lengths, default=0), size):
        full = sum(n >= start + size for n in lengths)
        if full:
            yield slice(0, full), slice(start, start + size)
        if drop_last and start > 0:
            continue
        lane = full
        while lane < len(lengths) and lengths[lane] > start:
            end = lane + sum(n == lengths[lane] for n in lengths[lane:])
            yield slice(lane, end), slice(start, lengths[lane])
            lane = end


def pad(rows: Sequence[Any], device: torch.device) -> Tensor:
    """Ragged rows of positions as one matrix on the device, padded with zeros."""
    matrix = np.zeros((len(rows), max((len(row) for row in rows), default=0)), dtype=np.int64)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return to_device(device, torch.from_numpy(matrix))


def to_device(device: torch.device, values: Any) -> Tensor:
    """Numbers of the host on the device. From pinned memory, so that the host need not wait until the device gets to it."""
    tensor: Tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def broadcast_lanes(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each lane, shaped so as to go with `like`."""
    return numbers.view(-1, *[1] * (like.ndim - 1))


def average(params: Params, weights: Tensor) -> Params:
    """The weighted mean over lanes, as one lane. Integer counters are not averaged: the first lane's stay."""
    share = weights / weights.sum()

    def mean(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value[:1].clone()
        total: Tensor = torch.tensordot(share.to(value.dtype), value, 1)
        return total.unsqueeze(0)

    return {name: mean(value) for name, value in params.items()}
