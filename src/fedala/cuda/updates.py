"""Optimiser steps on a GPU: one kernel for all parameters if all lanes have the same numbers, or
one for each parameter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedala.cuda import has_kernels
from fedala.cuda.buffers import is_laid_out
from fedala.lanes.optimizers import Numbers, UpdateRule, descend_fused
from fedala.lanes.trees import Params, State, is_shared


def update_lanes(
    rule: UpdateRule, params: Params, gradients: Params, slots: State, numbers: Numbers
) -> bool:
    """Take a step if there is a kernel for it; tell whether there was."""
    for name, gradient in gradients.items():
        own = [slot[name] for slot in slots.values() if isinstance(slot, dict)]
        if not _lie_alike(params[name], [gradient, *own]):
            return False
    others = [number for name, number in numbers.items() if name not in ("lr", "clip")]
    is_same = is_shared(numbers["lr"]) and not any(isinstance(n, Tensor) for n in others)
    if rule.kind == "sgd" and is_same:
        _step_sgd(rule, params, gradients, slots, numbers)
        return True
    if not has_kernels():
        return False
    from fedala.cuda.update_kernel import step_adam, step_sgd

    step = step_sgd if rule.kind == "sgd" else step_adam
    step(rule, params, gradients, slots, numbers)
    return True


def _lie_alike(param: Tensor, others: Sequence[Tensor]) -> bool:
    """Tell whether a kernel can go through these tensors of float32 number by number."""
    return (
        (param.is_contiguous() or is_laid_out(param))
        and all(t.dtype == torch.float32 for t in (param, *others))
        and all(t.stride() == param.stride() for t in others)
    )


def _step_sgd(
    rule: UpdateRule, params: Params, gradients: Params, slots: State, numbers: Numbers
) -> None:
    """Take the step of SGD for all parameters at once."""
    # With variants, one without momentum has slots too, and torch's kernel wants none then.
    has_momentum = numbers.get("momentum", 0.0) > 0
    velocities = [slots["momentum"][name] for name in gradients] if has_momentum else []
    descend_fused(
        [params[name] for name in gradients],
        list(gradients.values()),
        numbers["lr"][0],
        velocities,
        momentum=numbers.get("momentum", 0.0),
        weight_decay=numbers.get("weight_decay", 0.0),
        nesterov=rule.nesterov,
    )
