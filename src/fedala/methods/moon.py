"""MOON: Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.features import find_last_cut
from fedala.methods.base import Method
from fedala.methods.teachers import TeacherObjective
from fedala.options import option


@dataclass(frozen=True)
class MOON(Method):
    """FedAvg, with features drawn to the global model's and away from the client's previous one's.

    Features are what enters the last layer.
    """

    name = "moon"
    title = "MOON"
    summary = "FedAvg with a contrastive loss: features like the global model's, unlike the old"
    kind = "one model for all"
    has_personal_models = False
    requires_body = True
    requires_features = True
    lane_numbers = frozenset({"mu", "tau"})

    mu: float = option(1.0, "μ: weight of the contrastive loss", least=0)
    tau: float = option(0.5, "τ: temperature of the contrastive loss", above=0)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        cut = find_last_cut(cohort.task, initialized, self.title)
        trained = cohort.fit(
            initialized,
            objective=TeacherObjective(cut, add_contrast),
            fixed={
                "teachers": {"received": received.model, "previous": state["local"]},
                "numbers": {"mu": cohort.constant(self.mu), "tau": cohort.constant(self.tau)},
            },
        )
        return Message(trained), {"local": trained}


def add_contrast(
    loss: Tensor, features: Tensor, received: Tensor, previous: Tensor, mu: Tensor, tau: Tensor
) -> Tensor:
    """Return loss + μ·mean of −log(e^(s_g/τ) / (e^(s_g/τ) + e^(s_p/τ))), s the cosine to each."""
    to_received, to_previous = (
        F.cosine_similarity(features.flatten(1), others.flatten(1))
        for others in (received, previous)
    )
    return loss + mu * F.softplus((to_previous - to_received) / tau).mean()
