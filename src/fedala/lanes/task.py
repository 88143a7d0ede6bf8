"""What all lanes share: the model's skeleton, the loss, the samples, and how a client trains.

The forward pass with other weights in every lane is `torch.func.vmap` over `functional_call`. Lanes
are independent, so the gradient of the *sum* of their losses is each lane's own gradient. One lane
alone runs without vmap: that is the plain reference, and what a real client runs.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedala.errors import UserError
from fedala.lanes.attention import plain_attention
from fedala.lanes.augmentation import Augmentation
from fedala.lanes.backend import backend_for
from fedala.lanes.foreign_model import INDEX_TYPES, MOST_TRIED_SAMPLES, Trial
from fedala.lanes.late_gradients import Gradients, give_own_memory, join_gradients
from fedala.lanes.layer_order import learn_order
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import Cut, Layered, call, layers_of
from fedala.lanes.losses import Loss, LossFunction, as_loss
from fedala.lanes.normalization import Normalization, normalize_bytes, normalize_floats
from fedala.lanes.optimizers import UpdateRule
from fedala.lanes.outputs import keep_tensors
from fedala.lanes.parameters import list_few
from fedala.lanes.recipe import Optimizer, Recipe, Schedule
from fedala.lanes.recurrent import UnrolledRecurrence, is_recurrent
from fedala.lanes.row_gradients import RowGradients, find_padding_rows, large_embeddings
from fedala.lanes.samples import Samples, TrainingLength
from fedala.lanes.trees import Params, count_lanes, leaves, take, tree_map

Objective = Callable[["Task", Params, Any, Any, Any], Tensor]
"""Of (task, model, fixed, x, y) of one lane to the number that its training lowers."""


class Task:
    """A model, a loss, the clients' samples, and the options of local training."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        y: Any,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray] = (),
        validation: Sequence[np.ndarray] = (),
        *,
        loss: LossFunction | Loss = F.cross_entropy,
        batch_size: int = 10,
        lr: float = 0.005,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        keeps_optimizer: bool = False,
        epochs: int = 1,
        local_steps: int | None = None,
        shuffle: bool = True,
        device: torch.device | str = "cpu",
        precision: str = "float32",
        scale: bool = True,
        normalization: Normalization | None = None,
        augmentation: Augmentation | None = None,
        feature_memory: int | None = None,
    ) -> None:
        """`train`, `test` and `validation` hold each client's positions in `x` and `y`.

        A batch of size 0 is all of a client's samples. With `local_steps`, a round has so many
        steps instead of `epochs`. With `keeps_optimizer`, momentum and the like stay with a client
        from round to round. With `scale`, the model gets images of bytes as (x/255 − 0.5)/0.5. A
        `normalization` has other figures, and applies to floats too. `augmentation` is for
        training alone. `feature_memory` bounds the bytes of features under the upper layers that
        are kept at a time. Features that do not fit are computed at each use.
        """
        self.use_model(model)
        self.device = torch.device(device)
        self.backend, self.precision, self.scale = backend_for(self.device), precision, scale
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.normalization, self.augmentation = normalization, augmentation
        figures = normalization or Normalization()
        dimensions = x.ndim - 1 if isinstance(x, Tensor) else 3
        self._mean, self._std = figures.figures(self.device, self.dtype, dimensions)
        self.x = tree_map(lambda t: self._place(t.to(self.device)), x)
        if augmentation:
            black = x.new_zeros(x.shape[1], 1, 1, device=self.device)
            self._black = self._convert(self._place(black))
        self.parts = {"train": train, "test": test, "validation": validation}
        self.loss = as_loss(loss, y)
        self.loss.place_on(self.device, self.dtype)
        self.y = tree_map(lambda t: t.to(self.device), self.loss.prepare(y))
        #: Samples that run at once without gradients.
        self.chunk = self.backend.chunk_size(sum(leaf[:1].numel() for _, leaf in leaves(self.x)))
        default = self.backend.feature_memory()
        self.feature_memory = default if feature_memory is None else feature_memory
        self.recipe = Recipe(lr, optimizer or Optimizer(), schedule or Schedule())
        self.rule = UpdateRule.of([self.recipe.optimizer])
        self.keeps_optimizer, self.shuffle = keeps_optimizer, shuffle
        self.batch_size = batch_size or max([1, *map(len, train)])
        self.epochs, self.local_steps = epochs, local_steps
        #: Caches that only save time: draws for rounds to come, and evaluations' samples.
        self.predrawn: dict[Any, Any] = {}
        self.evaluation_samples: dict[Any, tuple[list[int], Samples]] = {}

    def use_model(self, model: nn.Module) -> None:
        """Use a model, or another one, from now on."""
        if not any(True for _ in model.parameters()):
            raise UserError("The model has no parameters, so there is nothing to learn.")
        for name in [key for key, v in vars(Task).items() if isinstance(v, cached_property)]:
            self.__dict__.pop(name, None)  # it was found out from another model
        self.model = model
        self.trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        # Torch honours `padding_idx` in lane 0 only if a gradient is taken from outside vmap, so
        # `gradients` does it.
        self.padding, self._is_recurrent = find_padding_rows(model), is_recurrent(model)
        self._feature_bytes: dict[int, int] = {}

    def free_caches(self) -> None:
        """Give back memory that only saves time."""
        self.predrawn.clear()
        self.evaluation_samples.clear()
        self.backend.free_caches()

    def copy_for_thread(self) -> "Task":
        """Return the same task with its own skeleton: a module runs in one thread at a time."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.__dict__.pop("embeddings", None)  # they are tied to the skeleton
        return other

    def with_epochs(self, epochs: int) -> "Task":
        """Return the same task with so many local epochs in a round."""
        other = copy.copy(self)
        other.epochs, other.local_steps = epochs, None
        return other

    @cached_property
    def layers(self) -> Layers:
        """The names of each layer's tensors, output first, as a run on two samples shows them."""
        rows = torch.arange(min(2, count_lanes(self.x)), device=self.device)
        return learn_order(self.model, self.inputs(rows)) if len(rows) else layers_of(self.model)

    @property
    def ordered_model(self) -> nn.Module:
        """The model's skeleton, which knows the order of its layers."""
        _ = self.layers
        return self.model

    @cached_property
    def transient(self) -> frozenset[str]:
        """Names of buffers that `state_dict` leaves out. They are neither sent nor saved."""
        saved = self.model.state_dict().keys()
        return frozenset(name for name, _ in self.model.named_buffers() if name not in saved)

    @cached_property
    def embeddings(self) -> dict[str, int | None]:
        """Weights whose gradients are kept as rows, with their padding rows."""
        return large_embeddings(self.model)

    # --- trials of a model ---------------------------------------------------------------------
    # Layouts, vmap and large batches only save time, but a user's model may depend on them: it may
    # call `view`, or mix its samples. So it is tried once, and a resumed run decides alike.

    @property
    def _trial(self) -> Trial:
        return Trial(self.model, self.loss, self.use_mode, self.device, self.dtype)

    def _trial_samples(self, most: int = 4) -> tuple[Any, Any]:
        rows = torch.arange(min(most, count_lanes(self.y)), device=self.device)
        return self.inputs(rows), self.targets(rows)

    @cached_property
    def uses_channels_last(self) -> bool:
        """Tell whether convolution weights stand channels last: on a CPU, where it is faster."""
        if self.device.type != "cpu" or not any(p.dim() == 4 for p in self.model.parameters()):
            return False
        samples = self._trial_samples()
        return isinstance(self.model, Layered) or self._trial.allows_channels_last(*samples)

    @cached_property
    def uses_vmap(self) -> bool:
        """Tell whether several lanes run as one program: if the model does not notice."""
        if isinstance(self.model, Layered):
            return True
        # With few samples, or with a whole batch, a model may take another path.
        sizes = {4, max(4, min(self.batch_size, MOST_TRIED_SAMPLES))}
        return all(self._trial.allows_vmap(*self._trial_samples(size)) for size in sizes)

    @cached_property
    def mixes_samples(self) -> bool:
        """Tell whether an output depends on the other samples of its batch, in evaluation mode.

        Batch normalisation without running statistics does that.
        """
        samples = self._trial_samples()
        return not isinstance(self.model, Layered) and self._trial.mixes_samples(*samples)

    @cached_property
    def draws_random_numbers(self) -> bool:
        """Tell whether the model draws random numbers itself (dropout)."""
        return self._trial.draws_random_numbers(take(self._trial_samples()[0], slice(0, 2)))

    def count_batch_operations(self) -> float:
        """Return the floating-point operations of a batch's forward pass, for one client."""
        x = self._trial_samples()[0]
        return self._trial.count_operations(x) / max(1, count_lanes(x)) * self.batch_size

    # --- samples -------------------------------------------------------------------------------

    def size(self, client: int, part: str = "train") -> int:
        """Return the number of a client's samples."""
        return len(self.parts[part][client])

    def training_length(self, epochs: int | None) -> TrainingLength:
        """Return how long a training of so many epochs is; None: the round's own training."""
        if epochs is not None:
            return TrainingLength(epochs)
        return TrainingLength(self.epochs, self.local_steps)

    def inputs(self, rows: Tensor) -> Any:
        """Return the samples at `rows`, ready for the model."""
        return tree_map(lambda t: self._convert(t[rows]), self.x)

    def targets(self, rows: Tensor) -> Any:
        """Return the targets at `rows`."""
        return tree_map(lambda t: t[rows], self.y)

    def training_batch(self, order: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of a part of an epoch's order, augmented if that is wanted."""
        if not self.augmentation:
            return self.inputs(order), self.targets(order)
        rows, transforms = self.augmentation.unpack(order)
        x = self.augmentation.apply(self.inputs(rows), transforms, self._black)
        return x, self.targets(rows)

    def _place(self, x: Tensor) -> Tensor:
        """Convert samples before they are used; bytes only if there is room for floats."""
        if self.normalization and x.is_floating_point():
            return normalize_floats(x, self.dtype, self._mean, self._std)
        return self._convert(x) if self.backend.has_room_for_floats(x.numel()) else x

    def _convert(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8 and self.scale:
            return normalize_bytes(x, self.dtype, self._mean, self._std)
        if x.dtype in INDEX_TYPES and not isinstance(self.model, Layered):
            return x.to(INDEX_TYPES[x.dtype])
        return x.to(self.dtype) if x.is_floating_point() else x

    # --- the model in every lane ---------------------------------------------------------------

    def cut(self, p: int, state: Params, samples: int, probe: Any = None) -> Cut:
        """Return the cut under the upper p layers.

        If the features of so many samples do not fit, it is the cut below everything. `state` is
        that of the lanes; `probe` is for modules that are not ours.
        """
        cut = Cut(self.model, p, probe)
        if 0 < cut.p < cut.depth and samples:
            if cut.p not in self._feature_bytes:
                first = {name: value[0] for name, value in state.items()}
                row = torch.zeros(1, dtype=torch.int64, device=self.device)
                with self.autocast():
                    features = cut.lower(first, self.inputs(row))
                self._feature_bytes[cut.p] = sum(
                    leaf.numel() * leaf.element_size() for _, leaf in leaves(features)
                )
            if samples * self._feature_bytes[cut.p] > self.feature_memory:
                return Cut(self.model, cut.depth)
        return cut

    def lay_out(self, value: Tensor) -> Tensor:
        """Copy a tensor of lanes into the memory order that is fastest for this model.

        One lane's [1, out, in, height, width] stands channels last if `uses_channels_last`.
        """
        if value.dim() == 5 and len(value) == 1 and self.uses_channels_last:
            return value.squeeze(0).clone(memory_format=torch.channels_last).unsqueeze(0)
        return value.clone(memory_format=torch.contiguous_format)

    @contextmanager
    def use_mode(self, training: bool, frozen: Collection[str] = ()) -> Iterator[None]:
        """Put the model into training or evaluation mode.

        Modules whose parameters are all `frozen` stay in evaluation mode; if a module has none, its
        buffers decide.
        """
        before = [(module, module.training) for module in self.model.modules()]
        self.model.train(training)
        for name, module in self.model.named_modules() if frozen else ():
            own = [f"{name}.{p}" for p, _ in [*module.named_parameters()] or module.named_buffers()]
            if own and all(p in frozen for p in own):
                module.eval()
        arithmetic = self.backend.use_arithmetic(self.model, self.precision)
        try:
            with plain_attention(self.model), arithmetic:
                yield
        finally:
            for module, training in before:
                module.training = training

    def autocast(self) -> AbstractContextManager[Any]:
        """Run a model's layers in bf16 if that is the precision; all else stays in float32."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def per_lane(self, f: Callable[..., Any], *trees: Any) -> Any:
        """Apply a model's function to each lane's part of the trees; to a single one plainly."""
        lanes = count_lanes(trees)
        with self.autocast():
            if lanes == 1:
                single = (tree_map(lambda t: t.squeeze(0), tree) for tree in trees)
                return tree_map(lambda t: t.unsqueeze(0), f(*single))
            if self.uses_vmap:
                with UnrolledRecurrence() if self._is_recurrent else nullcontext():
                    return vmap(f, randomness="different")(*trees)
            # Lanes are views: buffers that a module changes in place change in the trees.
            parts = [f(*take(trees, lane)) for lane in range(lanes)]
            return tree_map(lambda *values: torch.stack(values), *parts)

    def losses(self, params: Params, x: Any, y: Any, cut: Cut | None = None) -> Tensor:
        """Return each lane's loss on its batch, [lane]; with a `cut`, x are the features below."""

        def loss(state: Params, x: Any, y: Any) -> Tensor:
            output = cut.upper(state, x) if cut else call(self.model, state, x)
            return self.loss(self.loss.select(output), y)

        result: Tensor = self.per_lane(loss, params, x, y)
        return result

    def outputs(self, params: Params, x: Any, cut: Cut | None = None) -> Any:
        """Return each lane's outputs that the loss takes; with a `cut`, x are the features."""

        def output(state: Params, x: Any) -> Any:
            whole = cut.upper(state, x) if cut else call(self.model, state, x)
            return keep_tensors(self.loss.select(whole))

        return self.per_lane(output, params, x)

    def summed_scores(
        self, output: Any, y: Any, real: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return each lane's summed score and summed loss, as `Loss.score` does."""
        with self.autocast():  # losses of bf16 outputs are float32, as in training
            return self.loss.score(output, y, real, ends)

    def gradients(
        self,
        params: Params,
        x: Any,
        y: Any,
        names: Sequence[str] | None = None,
        objective: Objective | None = None,
        fixed: Any = None,
        cut: Cut | None = None,
        rows: RowGradients | None = None,
    ) -> tuple[Tensor, Gradients]:
        """Return each lane's loss, [lane], and the gradients of the named parameters, or of all.

        `objective(task, model, fixed, x, y)`, for one lane, replaces the loss. With a `cut`, x are
        the features below. Buffers are updated. `rows` take the gradients of large embeddings.
        """
        names = self.trainable if names is None else names
        if rows is None:
            by_rows = self.embeddings if count_lanes(params) == 1 or self.uses_vmap else {}
            rows = RowGradients(name for name in by_rows if name in names)
        with (
            torch.enable_grad(),
            rows if rows.found else nullcontext(),
            self.backend.keep_late(params, names) as late,
        ):
            state = {**params, **{name: params[name].detach().requires_grad_() for name in names}}
            if objective:
                losses = self.per_lane(partial(objective, self), state, fixed or {}, x, y)
            else:
                losses = self.losses(state, x, y, cut)
            if names and not losses.requires_grad:
                raise UserError(
                    "The loss does not depend on the parameters that should learn "
                    f"({list_few(names)}): do not detach it, or choose other layers."
                )
            wanted = [state[name] for name in names]
            slopes = torch.ones_like(losses)
            values = torch.autograd.grad(losses, wanted, slopes, allow_unused=True) if names else ()
        gradients: Gradients = {}
        for name, value in zip(names, give_own_memory(values), strict=True):
            own = list(late.get(name, ()))
            if name in rows.found:
                own += rows.gradients(name, params[name].shape, self.embeddings[name])
            gradients[name] = join_gradients(name, params[name], value, own)
        for name, row in self.padding:
            whole = gradients.get(name)
            if isinstance(whole, Tensor):
                whole.select(1, row).zero_()
        return losses.detach(), gradients
