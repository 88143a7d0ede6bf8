"""pFedMe: Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS
2020."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedala.lanes import (
    Cohort,
    Gradients,
    Message,
    Params,
    State,
    Task,
    UpdateRule,
    Uploads,
    align,
    broadcast_lanes,
    descend,
    interpolate,
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
    kind = "own model"
    lane_numbers = frozenset({"personal_lr", "lam", "beta"})
    refuses_server_optimizer = "it has a server step of its own, pfedme.beta"

    personal_lr: float = option(0.01, "learning rate of the personal model θ", above=0)
    lam: float = option(
        15.0, "λ: strength of the pull between the personal model θ and the local model w", least=0
    )
    steps: int = option(5, "K: steps of the personal model on each batch", least=1)
    beta: float = option(1.0, "β: the server's step from the global model to the mean", least=0)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        mean = uploads.average().model
        return {"global": {**mean, **interpolate(server["global"], mean, self.beta)}}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"personal": initial}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        w = {name: initialized[name] for name in cohort.task.trainable}
        fixed = {
            "theta_lr": cohort.constant(self.personal_lr),
            "lam": self.lam,
            "w_lr": cohort.scale_lr(self.lam),
        }
        step, begin = EnvelopeStep(cohort.task.rule, self.steps), {"w": w, "theta": initialized}
        trained = cohort.optimize(step, begin, fixed, learned={"local": w})
        # Running statistics are those of θ: w itself never sees a sample.
        return Message({**trained["theta"], **trained["w"]}), {"personal": trained["theta"]}


@dataclass(frozen=True)
class EnvelopeStep:
    """K steps θ ← θ − personal_lr·(∇f(θ) + λ(θ − w)), then w ← w − lr·λ(w − θ).

    The steps of θ are plain. The optimiser steps w, along the envelope's gradient λ(w − θ).
    """

    rule: UpdateRule
    steps: int

    def __call__(self, task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
        w, theta = state["w"], state["theta"]
        for _ in range(self.steps):
            losses, gradients = task.gradients(theta, x, y)
            pull(theta, gradients, w, fixed["lam"])
            descend(theta, gradients, fixed["theta_lr"])
        if self.rule.is_plain:
            for name, value in w.items():
                value.lerp_(theta[name], broadcast_lanes(fixed["w_lr"], value))
        else:
            slopes: Gradients = {
                name: align(fixed["lam"], value) * (value - theta[name])
                for name, value in w.items()
            }
            self.rule.update(task, w, slopes, state["slots"]["local"], fixed["optimizer"])
        return losses
