"""Try a model that is not ours: does it notice what only should save time?

A trial runs the model with made-up weights on a few samples, once plainly and once in the other
way, and compares outputs, losses and gradients.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedala.lanes.layers import call
from fedala.lanes.losses import Loss
from fedala.lanes.operations import OperationCounter
from fedala.lanes.outputs import keep_tensors
from fedala.lanes.recurrent import unroll_recurrence
from fedala.lanes.trees import Params, count_lanes, leaves, take, tree_map

Run = Callable[..., Any]
"""Calls objective(state, x, y) in some way: run(objective, state, x, y)."""


#: Whole numbers that a model gets as another type: some functions of torch take no other indices.
INDEX_TYPES = dict.fromkeys((torch.int8, torch.int16, torch.int32), torch.int64)
#: Samples of a trial at most: more only cost time and memory.
MOST_TRIED_SAMPLES = 64


@dataclass(frozen=True)
class Trial:
    """One model and its loss, ready to be tried."""

    model: nn.Module
    loss: Loss
    use_mode: Callable[[bool], AbstractContextManager[None]]
    device: torch.device
    dtype: torch.dtype

    def allows_channels_last(self, x: Any, y: Any) -> bool:
        """Tell whether the model gives the same with convolution weights channels last."""

        def lay_out(value: Tensor) -> Tensor:
            return value.clone(memory_format=torch.channels_last) if value.dim() == 4 else value

        def run(objective: Run, state: Params, x: Any, y: Any) -> Any:
            return objective(tree_map(lay_out, state), x, y)

        return self._agrees_with_plain(run, x, y)

    def allows_vmap(self, x: Any, y: Any) -> bool:
        """Tell whether the model gives the same under vmap."""

        def run(objective: Run, *trees: Any) -> Any:
            stacked = vmap(objective, randomness="different")
            with unroll_recurrence(self.model):
                return take(stacked(*tree_map(lambda t: torch.stack([t, t]), trees)), 0)

        return self._agrees_with_plain(run, x, y)

    def mixes_samples(self, x: Any, y: Any) -> bool:
        """Tell whether a sample's output in evaluation mode depends on the rest of its batch.

        A model that fails on a batch of one, or returns something else than rows, counts as such.
        One that draws random numbers does not: its outputs differ anyway.
        """
        if count_lanes(x) < 2:
            return False
        state = make_up_state(self.model, self.device, self.dtype)

        def run(x: Any) -> Any:
            return keep_tensors(self.loss.select(call(self.model, state, x)))

        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with self.use_mode(False), torch.no_grad(), torch.random.fork_rng(devices=devices):
                before = self._random_states()
                together = run(x)
                alone = [run(take(x, slice(i, i + 1))) for i in range(count_lanes(x))]
                if not all(map(torch.equal, before, self._random_states())):
                    return False
            found = [leaf for _, leaf in leaves(tree_map(lambda *v: torch.cat(v), *alone))]
            expected = [leaf for _, leaf in leaves(together)]
            return not _are_close(found, expected, 0.02)
        except Exception:  # whatever the user's model may raise
            return True

    def count_operations(self, x: Any) -> float:
        """Return about how many operations a forward pass has; infinity if the model fails."""
        state = make_up_state(self.model, self.device, self.dtype)
        counter = OperationCounter()
        try:
            with (
                self.use_mode(False),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(action="ignore"),  # a compiled model sees the counter
                counter,
            ):
                call(self.model, state, x)
        except Exception:  # whatever the user's model may raise
            return float("inf")
        return counter.total

    def draws_random_numbers(self, x: Any) -> bool:
        """Tell whether the model draws random numbers, in training or in evaluation mode."""
        return any(self._draws_in_mode(training, x) for training in (True, False))

    def _draws_in_mode(self, training: bool, x: Any) -> bool:
        state = make_up_state(self.model, self.device, self.dtype)
        with self.use_mode(training), torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                call(self.model, state, x)
            except Exception:  # two samples may not be enough for it
                return True
            return not torch.equal(before, torch.get_rng_state())

    def _agrees_with_plain(self, run: Run, x: Any, y: Any) -> bool:
        """Tell whether `run(objective, state, x, y)` gives what `objective(state, x, y)` gives.

        Rounding aside, outputs and losses must agree in evaluation and in training mode, gradients
        in evaluation mode only: in training, batch normalisation over a few samples magnifies
        rounding. A model that draws random numbers may draw others. If the plain model fails, the
        answer is no.
        """

        def run_plainly(objective: Run, *trees: Any) -> Any:
            return objective(*trees)

        for training in (False, True):
            try:
                expected, draws = self._try(run_plainly, training, x, y)
                found, _ = self._try(run, training, x, y)
            except Exception:  # whatever the user's model or loss may raise
                return False
            if not draws and not _are_close(found, expected, 0.05):
                return False
        return True

    def _try(self, run: Run, training: bool, x: Any, y: Any) -> tuple[list[Tensor], bool]:
        """Run made-up weights; return all results, and whether random numbers were drawn."""
        state = make_up_state(self.model, self.device, self.dtype)
        learning = [
            state[name].requires_grad_()
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point()
        ]

        def objective(state: Params, x: Any, y: Any) -> tuple[list[Tensor], Tensor]:
            output = self.loss.select(call(self.model, state, x))
            tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)]
            return tensors, self.loss(output, y)

        devices = [self.device] if self.device.type == "cuda" else []
        with (
            self.use_mode(training),
            torch.enable_grad(),
            torch.random.fork_rng(devices=devices),
        ):
            before = self._random_states()
            outputs, loss = run(objective, state, x, y)
            draws = not all(map(torch.equal, before, self._random_states()))
            # They must exist in training mode, too, but are not compared there.
            gradients = torch.autograd.grad(loss, learning, materialize_grads=True)
        joined = [] if training else [torch.cat([g.flatten() for g in gradients])]
        return [value.detach().float() for value in (*outputs, loss, *joined)], draws

    def _random_states(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def make_up_state(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Params:
    """Return weights of one lane that no layer makes overflow."""
    generator = torch.Generator().manual_seed(0)
    state: Params = {}
    for name, p in model.named_parameters():
        inputs = p.numel() // p.shape[0] if p.dim() and len(p) else 1
        value = torch.randn(p.shape, generator=generator) / max(1, inputs) ** 0.5
        state[name] = value.to(device, dtype if p.is_floating_point() else p.dtype)
    for name, b in model.named_buffers():
        made = b.detach().to(device, copy=True) if not b.is_meta else None
        if made is None:
            make_up = torch.ones_like if b.is_floating_point() else torch.zeros_like
            made = make_up(b, device=device)
        state[name] = made.to(dtype) if b.is_floating_point() else made
    return state


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """Tell whether all tensors agree within a share of their norm."""
    if [a.shape for a in found] != [b.shape for b in expected]:
        return False
    for a, b in zip(found, expected, strict=True):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return False
        a, b = a[finite].float(), b[finite].float()
        if (a - b).norm() > tolerance * b.norm():
            return False
    return True
