"""Optimisers at the server: momentum, Adam, Yogi or Adagrad along the clients' mean change.

Momentum (FedAvgM): Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification. 2019. The others (FedAdam, FedYogi, FedAdagrad): Reddi, Charles,
Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Params, State, Task, Uploads
from fedala.methods.base import Method, ServerRound
from fedala.methods.wrapper import Wrapper, unwrap

#: The optimisers by name, and how a method's title names them.
TITLES = {"avgm": "momentum", "adam": "Adam", "yogi": "Yogi", "adagrad": "Adagrad"}


def default_lr(kind: str) -> float:
    """Return the server's learning rate η if none is given."""
    return 1.0 if kind == "avgm" else 0.01


@dataclass(frozen=True)
class ServerOptimizer:
    """One optimiser: it turns Δ, the mean of the uploads minus the global model, into a step."""

    lane_numbers: ClassVar[frozenset[str]] = frozenset({"lr", "momentum", "beta2", "tau"})

    kind: str
    lr: float
    momentum: float
    """β, of the adaptive optimisers β₁."""
    beta2: float
    tau: float

    def init_state(self, learned: Params) -> State:
        """Return the first moment m, and the second moment v if there is one."""
        state: State = {"m": {name: torch.zeros_like(value) for name, value in learned.items()}}
        if self.kind != "avgm":
            state["v"] = {
                name: torch.full_like(value, self.tau**2) for name, value in learned.items()
            }
        return state

    def step(self, model: Params, change: Params, state: State) -> tuple[Params, State]:
        """Return the model after a step along `change`, and the new moments."""
        decay = 1.0 if self.kind == "avgm" else 1 - self.momentum
        m = {name: self.momentum * state["m"][name] + decay * d for name, d in change.items()}
        if self.kind == "avgm":
            return {name: model[name] + self.lr * m[name] for name in m}, {"m": m}
        v = {name: self._second_moment(state["v"][name], d.square()) for name, d in change.items()}
        stepped = {
            name: model[name] + self.lr * m[name] / (v[name].sqrt() + self.tau) for name in m
        }
        return stepped, {"m": m, "v": v}

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        if self.kind == "adagrad":
            return v + square
        if self.kind == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class WithServerOptimizer(Wrapper):
    """`base`, with an optimiser's step at the server in place of the mean of the uploads.

    What does not learn (running statistics, counters) is averaged as before.
    """

    base: Method
    optimizer: ServerOptimizer

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.base.title} (server {TITLES[self.optimizer.kind]})"

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        learned = {name: value for name, value in initial.items() if name in task.trainable}
        server = self.base.init_server(task, initial, server_round)
        return {**server, "optimizer": self.optimizer.init_state(learned)}

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        before, state = server["global"], server["optimizer"]
        after = self.base.aggregate(server, uploads, server_round)
        change = {name: after["global"][name] - before[name] for name in state["m"]}
        stepped, moments = self.optimizer.step(before, change, state)
        return {**after, "global": {**after["global"], **stepped}, "optimizer": moments}


def with_server_optimizer(method: Method, optimizer: ServerOptimizer) -> Method:
    """Return the method with an optimiser at its server. Refuse one whose server does not average.

    A `+ala` averages if its base does.
    """
    base = unwrap(method)
    reason = base.refuses_server_optimizer
    own_steps = (type(base).init_server, type(base).aggregate)
    if not reason and own_steps != (Method.init_server, Method.aggregate):
        reason = "its server does more than average the uploads"
    if reason:
        raise UserError(
            f"server_optimizer {optimizer.kind} is refused for {method.title}: {reason}."
        )
    return WithServerOptimizer(method, optimizer)
