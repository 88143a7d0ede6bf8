"""FedCP: Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedCP: Separating Feature Information for
Personalized Federated Learning via Conditional Policy. KDD 2023."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.features import find_last_cut
from fedala.lanes.heads import Head, list_part, upper_body
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import find_last_layer
from fedala.methods.partly_shared import PartlyShared
from fedala.methods.teachers import TeacherObjective, mmd
from fedala.options import option


class PolicyHead(Head):
    """Two heads, and the policy that divides the features between them.

    The model's own layer is the global head. The policy network sees the features times `context`,
    v/‖v‖₂. Its shares r and s of a feature add up to 1.
    """

    context: Tensor

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        features = last.in_features
        self.personal = copy.deepcopy(last)
        self.policy = nn.Sequential(
            nn.Linear(features, 2 * features), nn.LayerNorm(2 * features), nn.ReLU()
        )
        self.register_buffer("context", find_context(last.weight.detach()))

    def forward(self, h: Tensor) -> Tensor:
        chosen = self.policy(h * self.context).unflatten(-1, (2, self.in_features))
        r, s = chosen.softmax(-2).unbind(-2)
        output: Tensor = super().forward(r * h) + self.personal(s * h)
        return output


def find_context(weight: Tensor) -> Tensor:
    """Return v/‖v‖₂ of a head, [..., class, feature], for its v = Σ_c w_c."""
    return F.normalize(weight.sum(-2), dim=-1)


def stay_near(loss: Tensor, features: Tensor, teacher: Tensor, lam: Tensor) -> Tensor:
    """Return loss + λ·MMD(features, features under the global body)."""
    return loss + lam * mmd(features, teacher)


@dataclass(frozen=True)
class FedCP(PartlyShared):
    """A policy sends a part of every feature through the global head, which is frozen, and the
    rest through the client's own. Body and policy are averaged.
    """

    name = "fedcp"
    title = "FedCP"
    summary = "a policy divides every feature between the global head and the client's own"
    kind = "features"
    requires_body = True
    requires_features = True
    lane_numbers = frozenset({"lam"})
    head: ClassVar[type[Head]] = PolicyHead

    lam: float = option(
        5.0, "λ: weight of the distance (MMD) to the global body's features", least=0
    )

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        return list_part(model, "personal", "context")

    def complete_model(self, cohort: Cohort, received: Params, local: Params) -> Params:
        last = find_last_layer(cohort.task.model)
        context = find_context(local[f"{last}.personal.weight"])
        return {**local, **received, f"{last}.context": context}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task, head = cohort.task, self._global_head(cohort.task)
        cut = find_last_cut(task, initialized, self.title)
        local = cohort.fit(
            initialized,
            objective=TeacherObjective(cut, stay_near),
            fixed={
                "teachers": {"teacher": {**initialized, **received.model}},
                "numbers": {"lam": cohort.constant(self.lam)},
            },
            names=initialized.keys() - head.keys(),
        )
        # The uploaded head lies halfway between the two (equation 6, as the authors compute it).
        both = {name: local[name].lerp(local[own], 0.5) for name, own in head.items()}
        return Message({**self.shared_part(task, local), **both}), {"local": local}

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        head = self._global_head(task)
        return {"local": [name for name in task.trainable if name not in head]}

    def _global_head(self, task: Task) -> dict[str, str]:
        """Return the names of the global head's tensors, each with that of the personal one."""
        names, owns = list_part(task.model, "weight", "bias"), list_part(task.model, "personal")
        return dict(zip(names, owns, strict=True))

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        """Return upper layers that a client trains and receives: of the body, and the policy."""
        return upper_body(model, layers, "policy")
