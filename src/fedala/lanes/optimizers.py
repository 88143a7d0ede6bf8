"""SGD, Adam and AdamW for lanes: what torch.optim does to one model, done to every lane.

An `UpdateRule` says which terms a step has. It is part of a captured step. The numbers of these
terms are in the step's `fixed`: the learning rates are [lane], and any other number is a float for
all lanes or [lane]. Momentum and the like are `slots` in the step's state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.backend import Backend
from fedala.lanes.late_gradients import (
    Gradients,
    LateGradient,
    PulledGradient,
    ScaledGradient,
    ShiftedGradient,
    SparseGradient,
    list_late,
)
from fedala.lanes.recipe import Optimizer, is_constant
from fedala.lanes.trees import (
    Number,
    Params,
    State,
    align,
    broadcast_lanes,
    flatten_lanes,
    is_shared,
)

Numbers = dict[str, Any]
"""The numbers of a step by name. `lr` is [lane], each other one a `Number`."""


@dataclass(frozen=True)
class UpdateRule:
    """Which terms an optimiser's step has."""

    kind: str = "sgd"
    has_momentum: bool = False
    nesterov: bool = False
    has_weight_decay: bool = False
    clips: bool = False

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> "UpdateRule":
        """Return the rule that covers optimisers of one kind, with whatever numbers."""
        first = optimizers[0]
        return cls(
            first.kind,
            any(one.momentum > 0 for one in optimizers),
            first.nesterov,
            any(one.weight_decay > 0 for one in optimizers),
            any(one.clip < math.inf for one in optimizers),
        )

    @property
    def is_plain(self) -> bool:
        """Whether a step is lr times the gradient, and nothing else."""
        return self == UpdateRule()

    @property
    def keeps_slots(self) -> bool:
        """Whether a step depends on those before it."""
        return self.kind != "sgd" or self.has_momentum

    def init_slots(self, params: Params) -> State:
        """Return what the first step starts from. All of it is zero."""
        zeros = {name: torch.zeros_like(value) for name, value in params.items()}
        if self.kind == "sgd":
            return {"momentum": zeros} if self.has_momentum else {}
        first = next(iter(params.values()))
        squares = {name: torch.zeros_like(value) for name, value in params.items()}
        return {"mean": zeros, "square": squares, "steps": first.new_zeros(len(first))}

    def select_numbers(
        self, optimizers: Sequence[Optimizer], spread: Callable[[Sequence[float]], Tensor]
    ) -> Numbers:
        """Return the numbers that a step needs, of one optimiser per lane or one for all.

        `spread` brings numbers to the device. Adam has all of them there, in float64, because
        1 − β₂ would lose its digits in float32.
        """
        names = []
        if self.has_momentum or self.kind != "sgd":
            names.append("momentum")
        names += ["weight_decay"] * self.has_weight_decay + ["clip"] * self.clips
        if self.kind != "sgd":
            names += ["beta2", "epsilon"]
        columns = {name: [getattr(one, name) for one in optimizers] for name in names}
        return {
            name: values[0] if self.kind == "sgd" and is_constant(values) else spread(values)
            for name, values in columns.items()
        }

    def update(
        self, task: Any, params: Params, gradients: Gradients, slots: State, numbers: Numbers
    ) -> None:
        """Take one step, in place."""
        if self.is_plain:
            # Late gradients stay late: a kernel of the step would take them as whole tensors.
            late = list_late(gradients)
            if late or is_shared(numbers["lr"]) or not task.backend.has_updates:
                descend(params, gradients, numbers["lr"], task.backend)
                return
        whole = densify(gradients)
        targets = {name: params[name].detach() for name in whole}
        if self.clips:
            factors = find_clip_factors(whole, numbers["clip"])
            for value in whole.values():
                value.mul_(broadcast_lanes(factors, value).to(value.dtype))
        if self.kind != "sgd":
            slots["steps"].add_(1)
        if not task.backend.update_lanes(self, targets, whole, slots, numbers):
            self._update_each(targets, whole, slots, numbers)

    def _update_each(
        self, params: Params, gradients: Params, slots: State, numbers: Numbers
    ) -> None:
        """Take the step of one parameter after the other, as plain PyTorch."""
        step = self._step_sgd if self.kind == "sgd" else self._step_adam
        for name, gradient in gradients.items():
            target = params[name]
            if self.has_weight_decay:
                decay, lr = (align(numbers[key], target) for key in ("weight_decay", "lr"))
                if self.kind == "adamw":
                    target.mul_(1 - lr * decay)
                else:
                    gradient = gradient + target * decay
            step(name, target, gradient, slots, numbers)

    def _step_sgd(
        self, name: str, target: Tensor, gradient: Tensor, slots: State, numbers: Numbers
    ) -> None:
        if self.has_momentum:
            velocity, momentum = slots["momentum"][name], align(numbers["momentum"], target)
            velocity.mul_(momentum).add_(gradient)
            gradient = gradient + velocity * momentum if self.nesterov else velocity
        target.addcmul_(gradient, align(numbers["lr"], target), value=-1)

    def _step_adam(
        self, name: str, target: Tensor, gradient: Tensor, slots: State, numbers: Numbers
    ) -> None:
        mean, square, steps = slots["mean"][name], slots["square"][name], slots["steps"].double()
        beta1, beta2 = numbers["momentum"], numbers["beta2"]
        mean.mul_(align(beta1, target)).add_(gradient * align(1 - beta1, target))
        square.mul_(align(beta2, target)).add_(gradient.square() * align(1 - beta2, target))
        rate = align(numbers["lr"] / (1 - beta1**steps), target)
        root = align((1 - beta2**steps).sqrt(), target)
        target.sub_(rate * mean / (square.sqrt() / root + align(numbers["epsilon"], target)))


def find_clip_factors(gradients: Mapping[str, Tensor], largest: Number) -> Tensor:
    """Return the factor of each lane's gradients that bounds their norm, [lane], at most 1."""
    norms = [torch.linalg.vector_norm(flatten_lanes(value), dim=1) for value in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors: Tensor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return factors


def descend(
    params: Params, gradients: Gradients, lr: Tensor, backend: Backend | None = None
) -> None:
    """Take one step of gradient descent, in place. `lr` is [lane]."""
    late = [
        one
        for one in list_late(gradients)
        if all(gradients.get(name) is one for name in one.names)  # of all its parameters
    ]
    factors = -lr if late else lr

    def add(gradient: LateGradient) -> None:
        gradient.add_to([params[name].detach() for name in gradient.names], factors)

    works = [partial(add, gradient) for gradient in late]
    (backend or Backend(lr.device)).run_together(works)
    added = {name for gradient in late for name in gradient.names}
    whole = densify({name: value for name, value in gradients.items() if name not in added})
    targets = [params[name].detach() for name in whole]
    # A model may learn nothing but row gradients: a kernel wants at least one tensor.
    if targets and is_shared(lr) and all(map(_can_fuse, targets, whole.values())):
        descend_fused(targets, list(whole.values()), lr[0])
    else:
        for target, gradient in zip(targets, whole.values(), strict=True):
            target.addcmul_(gradient, broadcast_lanes(lr, gradient).to(target.dtype), value=-1)


@contextmanager
def try_step(params: Params, gradients: Gradients, lr: Tensor) -> Iterator[Params]:
    """Yield the parameters after a step of gradient descent, for as long as the context lasts.

    They are copies, but for large tables: these take the step themselves, and are put back.
    """
    tables = {name: one for name, one in gradients.items() if isinstance(one, SparseGradient)}
    put_back = [gradient.save_rows(params[name]) for name, gradient in tables.items()]
    stepped = {name: params[name] if name in tables else params[name].clone() for name in gradients}
    try:
        descend(stepped, gradients, lr)
        yield stepped
    finally:
        for put in put_back:
            put()


def _can_fuse(target: Tensor, gradient: Tensor) -> bool:
    """Tell whether one GPU kernel can step this parameter together with others."""
    return (
        target.is_cuda
        and target.dtype == gradient.dtype == torch.float32
        and target.stride() == gradient.stride()
    )


def descend_fused(
    targets: list[Tensor],
    gradients: list[Tensor],
    lr: Tensor,
    velocities: Sequence[Tensor] = (),
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Take a step of SGD for all parameters in one kernel of torch's."""
    torch._fused_sgd_(
        targets,
        gradients,
        list(velocities),
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr.float(),
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


def densify(gradients: Gradients) -> Params:
    """Return gradients as whole tensors, for arithmetic that needs them so."""
    whole: Params = {}
    for late in list_late(gradients):
        whole |= dict(zip(late.names, late.densify(), strict=True))
    return {
        name: value if isinstance(value, Tensor) else whole[name]
        for name, value in gradients.items()
    }


def pull(params: Params, gradients: Gradients, anchor: Params, mu: Number) -> None:
    """Add the gradient of a proximal term, μ/2·‖w − anchor‖², in place."""
    late, whole = _divide(gradients)
    for name, gradient in late.items():
        strength = align(mu, anchor[name])
        gradients[name] = PulledGradient(
            gradient.names, gradient, params[name].detach(), anchor[name], strength
        )
    for name, value in whole.items():
        difference = params[name] - anchor[name]
        if isinstance(mu, Tensor):
            gradients[name] = value.addcmul_(difference, align(mu, value))
        else:
            gradients[name] = value.add_(difference, alpha=mu)


def shift(gradients: Gradients, shifts: Params) -> None:
    """Add the gradient of a linear term, ⟨shift, w⟩, in place."""
    late, whole = _divide(gradients)
    for name, gradient in late.items():
        gradients[name] = ShiftedGradient(gradient.names, gradient, shifts[name])
    for name, value in whole.items():
        gradients[name] = value + shifts[name]


def scale_gradients(gradients: Gradients, factors: Tensor) -> Gradients:
    """Return gradients times a number of each lane, [lane]."""
    late, whole = _divide(gradients)
    scaled: Gradients = {
        name: ScaledGradient(value.names, value, factors) for name, value in late.items()
    }
    return scaled | {name: value * align(factors, value) for name, value in whole.items()}


def _divide(gradients: Gradients) -> tuple[dict[str, LateGradient], Params]:
    """Return the gradients that stay late in a sum with whole tensors, and all others as such."""
    late = {
        name: value
        for name, value in gradients.items()
        if isinstance(value, LateGradient) and value.stays_late
    }
    return late, densify({name: value for name, value in gradients.items() if name not in late})
