"""FedRoD: Chen, Chao. On Bridging Generic and Personalized Federated Learning for Image
Classification. ICLR 2022. With the linear personal head."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedala.lanes import Cohort, Message, Params, State, Task, align
from fedala.lanes.class_features import count_classes, measure_features
from fedala.lanes.features import find_last_cut
from fedala.lanes.heads import Head, list_part
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import Cut
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option

#: Stands for log 0, the prior of a class that a client does not have: exp of it is 0, and it stays
#: a number in every loss.
LOG_ZERO = -1e4


class PersonalOnGeneric(Head):
    """The generic head G, which is the model's own, and a personal head P on top: G(z) + P(z)."""

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        self.personal = nn.Linear(last.in_features, last.out_features, last.bias is not None)
        for value in self.personal.parameters():  # a personal predictor starts as the generic one
            nn.init.zeros_(value)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = super().forward(features) + self.personal(features)
        return scores


@dataclass(frozen=True)
class FedRoD(PartlyShared):
    """Body and generic head learn as if all classes were equally frequent, and are averaged.

    The personal head learns the client's own risk on top of both, and stays with the client.
    """

    name = "fedrod"
    title = "FedRoD"
    summary = "a generic head for balanced classes, and a personal one on top of it"
    kind = "features"
    requires_features = True
    requires_classes = True
    lane_numbers = frozenset({"gamma"})
    head: ClassVar[type[Head]] = PersonalOnGeneric

    gamma: float = option(1.0, "γ: exponent of the class counts in the balanced softmax", least=0)

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        return list_part(model, "personal")

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task = cohort.task
        classes, _ = measure_features(task, self.title)
        prior = count_classes(cohort, classes).log().clamp(min=LOG_ZERO)
        prior = (prior * align(self.gamma, prior)).to(task.dtype)
        cut = find_last_cut(task, initialized, self.title)
        objective = TwoRisks(cut, frozenset(list_part(task.model, "personal")))
        trained = cohort.fit(initialized, objective=objective, fixed={"prior": prior})
        return Message(self.shared_part(task, trained)), {"local": trained}


@dataclass(frozen=True)
class TwoRisks:
    """The objective: the balanced risk of G, and P's empirical risk on frozen z and G."""

    cut: Cut
    personal: frozenset[str]

    def __call__(self, task: Task, w: Params, fixed: State, x: Any, y: Any) -> Tensor:
        features = self.cut.lower(w, x)
        without = {name: torch.zeros_like(w[name]) for name in self.personal}
        frozen = {name: w[name] if name in self.personal else w[name].detach() for name in w}
        generic = self.cut.upper({**w, **without}, features)
        both = self.cut.upper(frozen, features.detach())
        select = task.loss.select
        return task.loss(select(generic) + fixed["prior"], y) + task.loss(select(both), y)
