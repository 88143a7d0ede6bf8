"""A step of SGD, Adam or AdamW on one parameter of all lanes, each with its own numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fedala.cuda.compiling import Kernel
from fedala.lanes.optimizers import Numbers, UpdateRule
from fedala.lanes.trees import Params, State

BLOCK = 1024


@Kernel
@triton.jit
def _step_sgd(
    weights, gradients, velocities, lrs, momenta, decays, N,
    lr_stride, momentum_stride, decay_stride,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, mask = lane * N + n, n < N
    param = tl.load(weights + at, mask=mask, other=0.0)
    gradient = tl.load(gradients + at, mask=mask, other=0.0)
    if DECAY:
        gradient += param * tl.load(decays + lane * decay_stride).to(tl.float32)
    if MOMENTUM:
        momentum = tl.load(momenta + lane * momentum_stride).to(tl.float32)
        velocity = tl.load(velocities + at, mask=mask, other=0.0) * momentum + gradient
        tl.store(velocities + at, velocity, mask=mask)
        gradient = gradient + velocity * momentum if NESTEROV else velocity
    tl.store(weights + at, param - tl.load(lrs + lane * lr_stride) * gradient, mask=mask)


@Kernel
@triton.jit
def _step_adam(
    weights, gradients, means, squares, steps, lrs, betas1, betas2, epsilons, decays, N,
    lr_stride, beta1_stride, beta2_stride, epsilon_stride, decay_stride,
    DECAY: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, mask = lane * N + n, n < N
    param = tl.load(weights + at, mask=mask, other=0.0)
    gradient = tl.load(gradients + at, mask=mask, other=0.0)
    lr = tl.load(lrs + lane * lr_stride)
    if DECAY:
        decay = tl.load(decays + lane * decay_stride).to(tl.float32)
        if DECOUPLED:
            param -= lr * decay * param
        else:
            gradient += param * decay
    beta1 = tl.load(betas1 + lane * beta1_stride)
    beta2 = tl.load(betas2 + lane * beta2_stride)
    step = tl.load(steps + lane).to(tl.float64)
    rate = (lr / (1 - libdevice.pow(beta1, step))).to(tl.float32)
    root = libdevice.sqrt(1 - libdevice.pow(beta2, step)).to(tl.float32)
    mean = tl.load(means + at, mask=mask, other=0.0)
    mean = mean * beta1.to(tl.float32) + gradient * (1 - beta1).to(tl.float32)
    square = tl.load(squares + at, mask=mask, other=0.0)
    square = square * beta2.to(tl.float32) + gradient * gradient * (1 - beta2).to(tl.float32)
    tl.store(means + at, mean, mask=mask)
    tl.store(squares + at, square, mask=mask)
    epsilon = tl.load(epsilons + lane * epsilon_stride).to(tl.float32)
    param -= rate * mean / (tl.sqrt(square) / root + epsilon)
    tl.store(weights + at, param, mask=mask)


def step_sgd(
    rule: UpdateRule, params: Params, gradients: Params, slots: State, numbers: Numbers
) -> None:
    """Take a step of SGD on every parameter [lane, …], in place."""
    lr = numbers["lr"]
    momentum, decay = (_tensor(numbers.get(name), lr) for name in ("momentum", "weight_decay"))
    strides = [number.stride(0) for number in (lr, momentum, decay)]
    for name, gradient in gradients.items():
        param = params[name]
        velocity = slots["momentum"][name] if rule.has_momentum else param
        _step_sgd[_grid(param)](
            param, gradient, velocity, lr, momentum, decay, param[0].numel(), *strides,
            rule.has_momentum, rule.nesterov, rule.has_weight_decay, BLOCK,
        )  # fmt: skip


def step_adam(
    rule: UpdateRule, params: Params, gradients: Params, slots: State, numbers: Numbers
) -> None:
    """Take a step of Adam or AdamW on every parameter [lane, …], in place."""
    lr = numbers["lr"]
    names = ("momentum", "beta2", "epsilon", "weight_decay")
    tensors = [lr, *(_tensor(numbers.get(name), lr) for name in names)]
    strides = [number.stride(0) for number in tensors]
    for name, gradient in gradients.items():
        param, mean, square = params[name], slots["mean"][name], slots["square"][name]
        _step_adam[_grid(param)](
            param, gradient, mean, square, slots["steps"], *tensors, param[0].numel(), *strides,
            rule.has_weight_decay, rule.kind == "adamw", BLOCK,
        )  # fmt: skip


def _grid(param: Tensor) -> tuple[int, int]:
    return triton.cdiv(param[0].numel(), BLOCK), len(param)


def _tensor(number: float | Tensor | None, like: Tensor) -> Tensor:
    """Return a number as [lane]; one that the rule does not use is not read."""
    if isinstance(number, Tensor):
        return number
    return like if number is None else torch.full_like(like, number, dtype=torch.float64)
