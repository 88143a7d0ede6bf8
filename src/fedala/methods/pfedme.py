"""pFedMe: Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS
2020."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, lerp

from fedala.lanes import (
    Cohort,
    Message,
    Params,
    State,
    Task,
    Uploads,
    broadcast_lanes,
    descend,
    pull,
)
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class PFedMe(Method):
    """SGD on f's Moreau envelope: a personal model θ is fitted near w, and w follows it."""

    name = "pfedme"
    title = "pFedMe"
    summary = "a personal model near the local one, which follows it"
    refuses_server_optimizer = "it has a server step of its own, pfedme.beta"

    personal_lr: float = option(0.01, "learning rate of the personal model θ", above=0)
    lam: float = option(
        15.0, "λ: strength of the pull between the personal model θ and the local model w", least=0
    )
    steps: int = option(5, "K: steps of the personal model on each batch", least=1)
    beta: float = option(1.0, "β: the server's step from the global model to the mean", least=0)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        before = server["global"]
        mixed = {
            name: lerp(before[name], mean, self.beta) if mean.is_floating_point() else mean
            for name, mean in uploads.average().model.items()
        }
        return {"global": mixed}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"personal": initial}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        w = {name: initialized[name] for name in cohort.task.trainable}
        rates = {"theta": cohort.constant(self.personal_lr), "w": cohort.scale_lr(self.lam)}
        trained = cohort.train(self.step, {"w": w, "theta": initialized}, rates)
        # Running statistics are those of θ: w itself never sees a sample.
        return Message({**trained["theta"], **trained["w"]}), {"personal": trained["theta"]}

    def step(self, task: Task, state: State, rates: State, x: Any, y: Any) -> Tensor:
        """Take K steps θ ← θ − personal_lr·(∇f(θ) + λ(θ − w)), then w ← w − lr·λ(w − θ)."""
        w, theta = state["w"], state["theta"]
        for _ in range(self.steps):
            losses, gradients = task.gradients(theta, x, y)
            pull(theta, gradients, w, self.lam)
            descend(theta, gradients, rates["theta"])
        for name, value in w.items():
            value.lerp_(theta[name], broadcast_lanes(rates["w"], value))
        return losses
