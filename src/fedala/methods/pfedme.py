"""pFedMe: Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, lerp

from fedala.lanes.cohort import Cohort, Params, Task, average, descend, pull
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class PFedMe(Method):
    """On every batch a personal model θ is fitted near the local model w, and w follows it: SGD on f's Moreau envelope."""

    name = "pfedme"
    title = "pFedMe"
    summary = "a personal model near the local one, which follows it"

    personal_lr: float = option(0.01, "learning rate of the personal model θ", above=0)
    lam: float = option(
        15.0, "λ: strength of the pull between the personal model θ and the local model w", least=0
    )
    steps: int = option(5, "K: steps of the personal model on each batch", least=1)
    beta: float = option(
        1.0, "β: how far the server goes from the global model to the clients' mean", least=0
    )

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        mean = average(uploads, weights)
        return {
            "global": {
                n: lerp(server["global"][n], v, self.beta) if v.is_floating_point() else v
                for n, v in mean.items()
            }
        }

    def fresh(self, task: Task, start: Params) -> State:
        return {"personal": start}

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        w = {name: initialized[name] for name in cohort.task.trainable}
        trained = cohort.train(self.step, {"w": w, "theta": initialized})
        # Running statistics are those of θ: w itself never sees a sample.
        return {**trained["theta"], **trained["w"]}, {"personal": trained["theta"]}

    def step(self, task: Task, state: State, fixed: Any, x: Any, y: Any) -> Tensor:
        w, theta = state["w"], state["theta"]
        for _ in range(
            self.steps
        ):  # θ ← θ − personal_lr·(∇f(θ) + λ(θ − w)); θ goes on from the batch before
            losses, gradients = task.gradients(theta, x, y)
            pull(theta, gradients, w, self.lam)
            descend(theta, gradients, self.personal_lr)
        for name in w:  # w ← w − lr·λ(w − θ)
            w[name].lerp_(theta[name], task.lr * self.lam)
        return losses
