"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across
Heterogeneous Clients. AAAI 2022."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads
from fedala.lanes.class_features import average_class_means, measure_features, sum_class_features
from fedala.lanes.features import compute_loss, find_last_cut
from fedala.lanes.heads import Head
from fedala.lanes.layers import Cut, find_last_layer
from fedala.methods.base import Method, ServerRound
from fedala.options import option


class NearestPrototype(Head):
    """The last layer, for training, and class prototypes, which decide in evaluation mode.

    A class without a prototype is further away than all others. As long as there is none at all,
    the last layer decides.
    """

    prototypes: Tensor
    is_known: Tensor

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        self.register_buffer("prototypes", torch.zeros(last.out_features, last.in_features))
        self.register_buffer("is_known", torch.zeros(last.out_features))

    def forward(self, features: Tensor) -> Tensor:
        scores = super().forward(features)
        if self.training:
            return scores
        products = F.linear(features, self.prototypes)
        squares = features.square().sum(-1, keepdim=True) + self.prototypes.square().sum(-1)
        squares = (squares - 2 * products).clamp(min=0)
        # A finite number, so that the loss of a sample of such a class is one, too.
        beyond = 2 * (squares * self.is_known).amax(-1, keepdim=True) + 100
        distances = torch.where(self.is_known > 0, squares, beyond)
        return torch.where(self.is_known.any(), -distances, scores)


@dataclass(frozen=True)
class FedProto(Method):
    """No model travels: class means of the features do. Each client stays near everybody's."""

    name = "fedproto"
    title = "FedProto"
    summary = "own models, whose features stay near the mean of each class over all clients"
    kind = "features"
    requires_body = True
    requires_features = True
    requires_classes = True
    lane_numbers = frozenset({"lam"})
    refuses_ala = "FedProto receives no model"
    refuses_server_optimizer = "no model is uploaded"
    head: ClassVar[type[Head]] = NearestPrototype

    lam: float = option(1.0, "λ: weight of the distance to the classes' prototypes", least=0)

    def shared_part(self, task: Task, model: Params) -> Params:
        return {}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def extra_template(self, task: Task, initial: Params) -> State:
        classes, features = measure_features(task, self.title)
        means = torch.zeros(1, classes, features, dtype=task.dtype, device=task.device)
        return {"prototypes": means, "counts": means[..., 0].long()}

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        means = self.extra_template(task, initial)["prototypes"]
        return {"prototypes": means, "is_known": means[..., 0].clone()}

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message({}, server)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        """Average each class over the clients that have it. Without any, its prototype stays."""
        own, before = uploads.stack().extra, server["prototypes"]
        prototypes, is_new = average_class_means(own["prototypes"], own["counts"], before)
        is_known = torch.maximum(server["is_known"], is_new.to(before.dtype))
        return {"prototypes": prototypes, "is_known": is_known}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        last = find_last_layer(cohort.task.model)
        prototypes = {f"{last}.{part}": value for part, value in received.extra.items()}
        return {**state["local"], **prototypes}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task = cohort.task
        cut = find_last_cut(task, initialized, self.title)
        fixed = {**received.extra, "lam": cohort.constant(self.lam)}
        local = cohort.fit(initialized, objective=NearPrototypes(cut), fixed=fixed)
        found = sum_class_features(cohort, cut, local, *measure_features(task, self.title))
        own = {"prototypes": found.means.to(task.dtype), "counts": found.counts.long()}
        return Message({}, own), {"local": local}


@dataclass(frozen=True)
class NearPrototypes:
    """The objective loss + λ·MSE(features, prototypes of their classes)."""

    cut: Cut

    def __call__(self, task: Task, model: Params, fixed: State, x: Any, y: Tensor) -> Tensor:
        features, loss = compute_loss(task, self.cut, model, x, y)
        apart = features.to(task.dtype) - fixed["prototypes"][y.long()]
        known = fixed["is_known"][y.long()].unsqueeze(-1)  # a class without one pulls nothing
        penalty: Tensor = fixed["lam"] * (known * apart.square()).mean()
        return loss + penalty
