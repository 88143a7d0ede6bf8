"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning. ICML 2020."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import (
    Cohort,
    Gradients,
    Message,
    Params,
    State,
    Task,
    Uploads,
    broadcast_lanes,
    densify,
)
from fedala.methods import Method, ServerRound


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates c and c_i correct the drift of local steps. Option II, η_g = 1."""

    name = "scaffold"
    title = "SCAFFOLD"
    summary = "control variates correct the drift of local steps"
    refuses_slots = "its control variates are the mean of plain steps"
    has_personal_models = False

    def extra_template(self, task: Task, initial: Params) -> State:
        return self.init_client(task, initial)

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        return {"global": initial, **self.init_client(task, initial)}

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(server["global"], {"c": server["c"]})

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        has_samples = (uploads.weights > 0).double()
        model, extra = uploads.average(has_samples)
        share = has_samples.sum() / sum(size > 0 for size in server_round.sizes)
        c = {name: value + share * extra["c"][name] for name, value in server["c"].items()}
        return {"global": model, "c": c}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"c": {name: torch.zeros_like(initial[name]) for name in task.trainable}}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        own, c = state["c"], received.extra["c"]
        correction = {name: value - own[name] for name, value in c.items()}
        trained = cohort.fit(
            initialized, gradients=correct_gradients, fixed={"correction": correction}
        )
        change, steps = {}, cohort.lr.new_tensor(cohort.local_steps())
        for name, value in c.items():
            scale = broadcast_lanes(steps.clamp(min=1) * cohort.lr, value)
            moved = (initialized[name] - trained[name]) / scale - value
            change[name] = moved * broadcast_lanes(steps > 0, value)  # no samples: c_i stays
        new = {name: value + change[name] for name, value in own.items()}
        return Message(trained, {"c": change}), {"c": new}


def correct_gradients(
    task: Task, model: Params, fixed: State, x: Any, y: Any
) -> tuple[Tensor, Gradients]:
    """Return ∇f(y) + c − c_i."""
    losses, gradients = task.gradients(model, x, y)
    for name, value in densify(gradients).items():
        gradients[name] = value + fixed["correction"][name]
    return losses, gradients
