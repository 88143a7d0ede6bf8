"""APPLE: Luo, Wu. Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning. IJCAI 2022."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes.cohort import Cohort, Params, Task, broadcast_lanes, dense
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class APPLE(Method):
    """Every client has a core model, and learns with it the weights p_i of its personal model, Σ_j p_ij·core_j."""

    name = "apple"
    title = "APPLE"
    summary = "each client learns how much of every client's core model to add up"
    everyone = True
    stacked = True
    schedule_depends_on_rounds = True
    refuses_ala = "APPLE downloads several models, and ALA blends a single one"

    eta: float = option(0.01, "η₂: learning rate of the directed relationship vector p_i", least=0)
    mu: float = option(
        0.1,
        "μ: strength of the pull of p_i towards p_0, the clients' shares of the samples",
        least=0,
    )
    scheduled: float = option(
        0.2, "L: share of the rounds after which the pull has faded to 0", least=0, most=1
    )
    scale_core: bool = option(True, "step the core by N·lr, N the number of clients, and not by lr")

    # --- the server ------------------------------------------------------------------------------------------------

    def serve(self, task: Task, start: Params, sizes: Sequence[int]) -> State:
        some = next(value for value in start.values() if value.is_floating_point())
        share = torch.tensor([sizes], dtype=some.dtype, device=some.device) / max(1, sum(sizes))
        return {
            "cores": {name: torch.stack([value] * len(sizes), 1) for name, value in start.items()},
            "p_0": share,
        }

    def send(self, server: State, clients: list[int]) -> Params:
        return {**server["cores"], "p_0": server["p_0"]}

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        place = torch.tensor(clients, device=weights.device)
        cores = {
            name: value.index_copy(1, place, uploads[name][None])
            for name, value in server["cores"].items()
        }
        return {"cores": cores, "p_0": server["p_0"]}

    # --- the client ------------------------------------------------------------------------------------------------

    def fresh(self, task: Task, start: Params) -> State:
        return {"core": start}  # and p_i, once the server has said what p_0 is

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        state = {"p": received["p_0"], **state}
        return personal(
            cohort.task, state["core"], state["p"], received, which(cohort, state["p"])
        ), state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        task, p_0 = cohort.task, received["p_0"]
        clients = (p_0 > 0).sum(
            1
        )  # a client without samples is no part of it, and its p_ij stays 0
        fixed = {
            "cores": {name: received[name] for name in task.trainable},
            "mine": which(cohort, p_0),
            "p_0": p_0,
            "pull": torch.full_like(
                p_0[:, 0], self.mu * self.schedule(cohort.round, cohort.rounds)
            ),
            "rate": task.lr * (clients if self.scale_core else torch.ones_like(clients)).to(p_0),
        }
        trained = cohort.train(self.step, {"core": state["core"], "p": state["p"]}, fixed)
        return trained["core"], trained

    def schedule(self, round: int, rounds: int) -> float:
        """λ(r), r counted from 0: half a cosine from 1 to 0 over the first L·T rounds, then 0."""
        until = self.scheduled * rounds
        return (math.cos(math.pi * (round - 1) / until) + 1) / 2 if round - 1 < until else 0.0

    def step(self, task: Task, state: State, fixed: dict[str, Any], x: Any, y: Any) -> Tensor:
        core, p, mine, p_0 = state["core"], state["p"], fixed["mine"], fixed["p_0"]
        with torch.autocast(task.device.type, enabled=False):
            model = personal(task, core, p, fixed["cores"], mine)
        losses, gradients = task.gradients(model, x, y)
        with torch.autocast(task.device.type, enabled=False):
            # By the chain rule: ∂L/∂p_ij = ⟨∂L/∂w, core_j⟩ and ∂L/∂core_i = p_ii·∂L/∂w.
            others, own = torch.zeros_like(p), torch.zeros_like(p[:, 0])
            rate = fixed["rate"] * (p * mine).sum(1)
            for name, gradient in dense(gradients).items():
                flat = gradient.flatten(1)
                others += flat @ fixed["cores"][name][0].flatten(1).T
                own += (flat * core[name].flatten(1)).sum(1)
                core[name].sub_(broadcast_lanes(rate, gradient) * gradient)
            slope = torch.where(mine > 0, own[:, None], others) + fixed["pull"][:, None] * (p - p_0)
            p.sub_(torch.where(p_0 > 0, slope, 0), alpha=self.eta)
        return losses


def which(cohort: Cohort, p: Tensor) -> Tensor:
    """[lane, client]: 1 where the client is the lane's own, else 0."""
    return torch.eye(p.shape[1], device=p.device, dtype=p.dtype)[list(cohort.clients)]


def personal(task: Task, core: Params, p: Tensor, cores: Params, mine: Tensor) -> Params:
    """Σ_j p_ij·core_j: the others' cores as downloaded, the own one (`mine` says which it is) as it now is.

    What does not learn stays the client's own, running statistics among it: a negative p would break their variances.
    """
    others, own = p * (1 - mine), (p * mine).sum(1)
    return core | {
        name: torch.tensordot(others, cores[name][0], 1)
        + broadcast_lanes(own, core[name]) * core[name]
        for name in task.trainable
    }
