"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning. ICML 2020."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import (
    Cohort,
    Message,
    Params,
    State,
    Task,
    Uploads,
    broadcast_lanes,
    densify,
    tree_map,
)
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates c and c_i correct the drift of local steps: y ← y − η(∇f_i(y) − c_i + c)."""

    name = "scaffold"
    title = "SCAFFOLD"
    summary = "FedAvg, with control variates that correct the drift of local steps"
    kind = "one model for all"
    has_personal_models = False
    lane_numbers = frozenset({"eta_g"})
    refuses_slots = "its control variates are means of plain gradients"
    refuses_server_optimizer = "it has a server step of its own, scaffold.eta_g"

    eta_g: float = option(1.0, "η_g: the server's step from the global model to the mean", above=0)
    variant: str = option(
        "II",
        "how c_i is renewed. I: the gradient at the received model. II: the mean of the steps",
        choices=("I", "II"),
    )

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
        for name in c:
            model[name] = torch.lerp(server["global"][name], model[name], self.eta_g)
        return {"global": model, "c": c}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"c": {name: torch.zeros_like(initial[name]) for name in task.trainable}}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        own, c = state["c"], received.extra["c"]
        correction = tree_map(torch.sub, c, own)
        trained = cohort.fit(initialized, linear=correction)
        if self.variant == "I":
            change = tree_map(torch.sub, mean_gradients(cohort, received.model), own)
        else:
            moved = {name: initialized[name] - trained[name] for name in c}
            change = tree_map(torch.sub, divide(moved, cohort.lr * count_steps(cohort)), c)
        has_samples = cohort.lr.new_tensor(cohort.sizes()) > 0  # without samples, c_i stays
        change = {name: v * broadcast_lanes(has_samples, v) for name, v in change.items()}
        return Message(trained, {"c": change}), {"c": tree_map(torch.add, own, change)}


def mean_gradients(cohort: Cohort, model: Params) -> Params:
    """Return the mean of ∇f(x) over the batches of one more epoch. The model stays as it is."""
    zeros = {name: torch.zeros_like(model[name]) for name in cohort.task.trainable}
    summed = cohort.train(
        add_gradients,
        {"model": model, "sum": zeros},
        epochs=1,
        purpose="control variate",
        report_loss=False,
    )
    return divide(summed["sum"], count_steps(cohort, epochs=1))


def add_gradients(task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
    """Add a batch's gradients to the sum, as a step that leaves the parameters alone."""
    losses, gradients = task.gradients(state["model"], x, y)
    for name, value in densify(gradients).items():
        state["sum"][name].add_(value)
    return losses


def count_steps(cohort: Cohort, epochs: int | None = None) -> Tensor:
    """Return the number of steps of each lane, [lane]; 1 for a lane without samples."""
    return cohort.lr.new_tensor(cohort.local_steps(epochs=epochs)).clamp(min=1)


def divide(params: Params, numbers: Tensor) -> Params:
    return {name: value / broadcast_lanes(numbers, value) for name, value in params.items()}
