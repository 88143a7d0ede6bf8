"""FedDBE: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan. Eliminating Domain Bias for Federated
Learning in Representation Space. NeurIPS 2023. It is the publication's FedAvg+DBE."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedala.lanes import (
    Cohort,
    Message,
    Params,
    State,
    Task,
    UpdateRule,
    Uploads,
    broadcast_lanes,
)
from fedala.lanes.features import compute_loss, find_last_cut
from fedala.lanes.heads import Head, list_part
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import Cut
from fedala.methods.base import ServerRound
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


class BiasMemory(Head):
    """The last layer, and the memory z̄ᵖ (PRBM) that is added to the features before it."""

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        self.memory = nn.Parameter(torch.zeros(last.in_features))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features + self.memory)


@dataclass(frozen=True)
class FedDBE(PartlyShared):
    """A client's own bias of the features is in a vector of its own, and stays with the client.

    The mean of its other features is held near the consensus z̄ᵍ: the clients' mean in round 1,
    which is a round of FedAvg.
    """

    name = "feddbe"
    title = "FedDBE"
    summary = "each client's bias of the features is in a vector that it keeps to itself"
    kind = "features"
    requires_body = True
    requires_features = True
    lane_numbers = frozenset({"kappa", "mu"})
    head: ClassVar[type[Head]] = BiasMemory

    kappa: float = option(50.0, "κ: weight of the distance to the consensus", least=0)
    mu: float = option(
        1.0, "μ: share of the newest batch in the moving mean of the features", above=0, most=1
    )

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        return list_part(model, "memory")

    def extra_template(self, task: Task, initial: Params) -> State:
        [name] = list_part(task.model, "memory")
        width = task.model.get_parameter(name).shape
        return {"mean": torch.zeros(1, *width, dtype=task.dtype, device=task.device)}

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        is_known = torch.zeros(1, dtype=torch.bool, device=task.device)
        return {"global": initial, **self.extra_template(task, initial), "is_known": is_known}

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(server["global"], {name: server[name] for name in ("mean", "is_known")})

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        model, extra = uploads.average()
        is_known = server["is_known"]
        mean = torch.where(is_known, server["mean"], extra["mean"])
        return {"global": model, "mean": mean, "is_known": torch.ones_like(is_known)}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task, consensus, is_known = cohort.task, received.extra["mean"], received.extra["is_known"]
        begin = {
            "model": initialized,
            # The first moving mean is the first batch's.
            "moving": {"mean": torch.zeros_like(consensus), "share": cohort.constant(1.0)},
        }
        own = {
            "consensus": consensus,
            "is_known": is_known.to(task.dtype),
            "kappa": cohort.constant(self.kappa),
            "mu": cohort.constant(self.mu),
        }
        cut, [memory] = find_last_cut(task, initialized, self.title), self.own_part(task.model, ())
        step = DebiasStep(task.rule, cut, memory)
        trained = cohort.optimize(step, begin, {"own": own}, learned={"local": initialized})
        # The server needs the mean once. After that, nothing of it leaves the client.
        mean = trained["moving"]["mean"] * broadcast_lanes(~is_known, consensus)
        local = trained["model"]
        return Message(self.shared_part(task, local), {"mean": mean}), {"local": local}


@dataclass(frozen=True)
class DebiasStep:
    """A step on loss + κ/2·MSE(z̄, z̄ᵍ), z̄ the moving mean of the features.

    As long as there is no consensus, it is a step on the loss, and the memory stays.
    """

    rule: UpdateRule
    cut: Cut
    memory: str

    def __call__(self, task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
        model, moving = state["model"], state["moving"]
        own = {**fixed["own"], "moving": moving}
        losses, gradients = task.gradients(model, x, y, None, self.objective, own)
        self.rule.update(task, model, gradients, state["slots"]["local"], fixed["optimizer"])
        moving["share"].copy_(fixed["own"]["mu"])
        return losses

    def objective(self, task: Task, w: Params, fixed: State, x: Any, y: Any) -> Tensor:
        """Return the objective of one lane, and put the new moving mean into `fixed`."""
        is_known, moving = fixed["is_known"], fixed["moving"]
        w = {**w, self.memory: w[self.memory] * is_known}
        features, loss = compute_loss(task, self.cut, w, x, y)
        newest = features.flatten(0, -2).mean(0).to(task.dtype)
        mean = (1 - moving["share"]) * moving["mean"] + moving["share"] * newest
        moving["mean"].copy_(mean.detach())
        distance = (mean - fixed["consensus"]).square().mean() / 2
        penalty: Tensor = fixed["kappa"] * is_known * distance
        return loss + penalty
