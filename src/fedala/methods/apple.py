"""APPLE: Luo, Wu. Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning.
IJCAI 2022."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import (
    Cohort,
    Combination,
    Message,
    Params,
    State,
    Task,
    UpdateRule,
    Uploads,
    broadcast_lanes,
    scale_gradients,
)
from fedala.lanes.row_gradients import Read
from fedala.lanes.trees import flatten_lanes, replace_models
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class APPLE(Method):
    """A client learns its core model and the weights p_i of its personal model, Σ_j p_ij·core_j."""

    name = "apple"
    title = "APPLE"
    summary = "each client learns how much of every client's core model to add up"
    kind = "others' models"
    requires_all_clients = True
    sends_model_stack = True
    schedule_depends_on_rounds = True
    former_defaults = MappingProxyType({"scale_core": True})
    refuses_ala = "APPLE downloads several models, and ALA blends a single one"
    refuses_server_optimizer = "the server keeps the models of all clients, and no global one"

    eta: float = option(0.01, "η₂: learning rate of the directed relationship vector p_i", least=0)
    mu: float = option(
        0.1,
        "μ: strength of the pull of p_i towards p_0, the clients' shares of the samples",
        least=0,
    )
    scheduled: float = option(
        0.2, "L: share of the rounds after which the pull has faded to 0", least=0, most=1
    )
    scale_core: bool = option(False, "step the core by N·lr, N the number of clients, not by lr")

    # --- the server ----------------------------------------------------------------------------

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        sizes = server_round.sizes
        share = torch.tensor([sizes], dtype=task.dtype, device=task.device) / max(1, sum(sizes))
        cores = {name: torch.stack([value] * len(sizes), 1) for name, value in initial.items()}
        return {"cores": cores, "p_0": share}

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(server["cores"], {"p_0": server["p_0"]})

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        cores = replace_models(server["cores"], uploads.clients, uploads.stack().model)
        return {"cores": cores, "p_0": server["p_0"]}

    # --- the client ----------------------------------------------------------------------------

    def init_client(self, task: Task, initial: Params) -> State:
        return {"core": initial}  # and p_i, once the server has sent p_0

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return state["core"], {"p": received.extra["p_0"], **state}

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return self._compose_personal(cohort, received, state)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task, p_0 = cohort.task, received.extra["p_0"]
        clients = (p_0 > 0).sum(1)  # a client without samples has no part, and its p_ij stays 0
        scale = clients if self.scale_core else torch.ones_like(clients)
        fixed = {
            "cores": {name: received.model[name] for name in task.trainable},
            "own": mark_own(cohort, p_0),
            "p_0": p_0,
            "pull": cohort.constant(self.mu * self.schedule(cohort.round, cohort.rounds)),
        }
        trained = cohort.optimize(
            Step(task.rule, self.eta),
            {"core": state["core"], "p": state["p"]},
            fixed,
            learned={"local": state["core"]},
            lr=cohort.lr * scale.to(p_0),
        )
        return Message(trained["core"]), trained

    def trained_model(
        self, cohort: Cohort, received: Message, upload: Message, state: State
    ) -> Params:
        return self._compose_personal(cohort, received, state)

    def _compose_personal(self, cohort: Cohort, received: Message, state: State) -> Params:
        personal = Personal(state["core"], received.model, state["p"], mark_own(cohort, state["p"]))
        # What does not learn is the client's own, running statistics too: a negative p would break
        # their variances.
        core: Params = state["core"]
        return core | {name: personal.compose(name) for name in cohort.task.trainable}

    def schedule(self, round: int, rounds: int) -> float:
        """λ(r), r from 0: half a cosine from 1 to 0 over the first L·T rounds, then 0."""
        until = self.scheduled * rounds
        return (math.cos(math.pi * (round - 1) / until) + 1) / 2 if round - 1 < until else 0.0


@dataclass(frozen=True)
class Step:
    """Steps core_i and p_i. By the chain rule, with w = Σ_j p_ij·core_j and g = ∂L/∂w:

    ∂L/∂p_ij = ⟨g, core_j⟩ and ∂L/∂core_i = p_ii·g. The optimiser steps the core; p_i takes plain
    steps at the rate η₂.
    """

    rule: UpdateRule
    eta: float

    def __call__(self, task: Task, state: State, fixed: dict[str, Any], x: Any, y: Any) -> Tensor:
        core, p, own, p_0 = state["core"], state["p"], fixed["own"], fixed["p_0"]
        personal, numbers = Personal(core, fixed["cores"], p, own), fixed["optimizer"]
        losses, gradients, slope = personal.gradients(task, core, x, y)
        slots = state["slots"]["local"]
        self.rule.update(
            task, core, scale_gradients(gradients, personal.self_weight), slots, numbers
        )
        slope = slope + fixed["pull"][:, None] * (p - p_0)
        p.sub_(torch.where(p_0 > 0, slope, 0), alpha=self.eta)
        return losses


def mark_own(cohort: Cohort, p: Tensor) -> Tensor:
    """[lane, client]: 1 for the lane's own client, else 0.

    A newcomer is none of the clients: its core has no part in its model, so it learns p_i alone.
    """
    marks = torch.eye(p.shape[1], device=p.device, dtype=p.dtype)
    known = [min(client, p.shape[1]) for client in cohort.clients]
    return torch.cat([marks, torch.zeros_like(marks[:1])])[known]


class Personal(Combination):
    """Σ_j p_ij·core_j: the others' cores as downloaded, the own one as it now is."""

    def __init__(self, core: Params, cores: Params, p: Tensor, own: Tensor) -> None:
        """`own` is that of `mark_own`."""
        self.core, self.cores, self.p, self.own = core, cores, p, own
        self.self_weight = (p * own).sum(1)

    def compose(self, name: str) -> Tensor:
        core, others = self.core[name], self.p * (1 - self.own)
        total: Tensor = torch.tensordot(others, self.cores[name][0], 1)
        return total + broadcast_lanes(self.self_weight, core) * core

    def find_slopes(self, name: str, gradient: Tensor) -> Tensor:
        flat = flatten_lanes(gradient)
        by_other = flat @ flatten_lanes(self.cores[name][0]).T
        by_own = (flat * flatten_lanes(self.core[name])).sum(1)
        return torch.where(self.own > 0, by_own[:, None], by_other)

    def read(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        core = self.core[name]
        others = torch.stack([read(other.expand_as(core)) for other in self.cores[name][0]])
        sides = [1] * (others.ndim - 2)
        is_own, shares = (value.T.reshape(*value.T.shape, *sides) for value in (self.own, self.p))
        terms = torch.where(is_own > 0, read(core), others)
        return (shares * terms).sum(0), terms
