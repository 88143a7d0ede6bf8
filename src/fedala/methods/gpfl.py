"""GPFL: Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan. GPFL: Simultaneously Learning Global and
Personalized Feature Information for Personalized Federated Learning. ICCV 2023."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.class_features import count_classes, measure_features
from fedala.lanes.features import compute_loss, find_last_cut
from fedala.lanes.heads import Head, list_part, upper_body
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import Cut, call_part, find_last_layer
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


class ConditionalValve(nn.Module):
    """CoV: scales and shifts features f as a condition says, ReLU((γ + 1) ⊙ f + β) (equation 1)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features))
            for _ in range(2)
        )

    def forward(self, f: Tensor, condition: Tensor) -> Tensor:
        opened: Tensor = (self.gamma(condition) + 1) * f + self.beta(condition)
        return opened.relu()


class GuidedHead(Head):
    """The client's head behind the valve, and the embeddings C of all classes (GCE).

    `condition` is the client's p, a mean of embeddings.
    """

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        self.valve = ConditionalValve(last.in_features)
        self.embeddings = nn.Parameter(torch.randn(last.out_features, last.in_features))
        self.register_buffer("condition", self.embeddings.detach().mean(0))

    def forward(self, f: Tensor) -> Tensor:
        return super().forward(self.valve(f, self.condition))


@dataclass(frozen=True)
class GPFL(PartlyShared):
    """Body, valve and class embeddings are averaged, and the head stays at its client.

    The valve makes two feature vectors. The global one is guided by the embeddings of all classes,
    the personal one goes to the head.
    """

    name = "gpfl"
    title = "GPFL"
    summary = "class embeddings guide global features, next to those of the client's own head"
    kind = "features"
    requires_body = True
    requires_features = True
    requires_classes = True
    lane_numbers = frozenset({"lam", "mu"})
    head: ClassVar[type[Head]] = GuidedHead

    lam: float = option(0.01, "λ: weight of the magnitude-level guidance", least=0)
    mu: float = option(0.1, "μ: weight decay of the valve and the embeddings", least=0)

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        shared = list_part(model, "valve", "embeddings")
        return [name for name in layers[0] if name not in shared]

    def complete_model(self, cohort: Cohort, received: Params, local: Params) -> Params:
        """Return the received model with the own head, and p = Σ_c (n_c/n)·C_c of the received C.

        Without samples, all classes count the same.
        """
        last = find_last_layer(cohort.task.model)
        classes, _ = measure_features(cohort.task, self.title)
        counts = count_classes(cohort, classes)
        counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, 1)
        embeddings = received[f"{last}.embeddings"]
        shares = (counts / counts.sum(1, keepdim=True)).to(embeddings.dtype)
        condition = (shares.unsqueeze(1) @ embeddings).squeeze(1)
        return {**local, **received, f"{last}.condition": condition}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task, last = cohort.task, find_last_layer(cohort.task.model)
        fixed = {
            "frozen": received.model[f"{last}.embeddings"],
            "lam": cohort.constant(self.lam),
            "mu": cohort.constant(self.mu),
        }
        objective = Guided(find_last_cut(task, initialized, self.title), last)
        trained = cohort.fit(initialized, objective=objective, fixed=fixed)
        return Message(self.shared_part(task, trained)), {"local": trained}

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        """Return upper layers that are received and tested: of the body, and the valve."""
        return upper_body(model, layers, "valve")


@dataclass(frozen=True)
class Guided:
    """The objective L^P + L^alg + λ·L^mlg + μ/2·‖(V, C)‖² (equations 3 to 5).

    `fixed["frozen"]` is Ĉ, the embeddings as they were received.
    """

    cut: Cut
    last: str

    def __call__(self, task: Task, w: Params, fixed: State, x: Any, y: Tensor) -> Tensor:
        frozen, lam, mu = (fixed[name] for name in ("frozen", "lam", "mu"))
        path, classes = f"{self.last}.valve", f"{self.last}.embeddings"
        features, personal = compute_loss(task, self.cut, w, x, y)
        guided = call_part(task.model, path, w, features, frozen.mean(0)).to(task.dtype)
        cosines = F.normalize(guided, dim=-1) @ F.normalize(w[classes], dim=-1).T
        angle = F.cross_entropy(cosines, y.long())
        magnitude = torch.linalg.vector_norm(guided - frozen[y.long()], dim=-1).mean()
        decayed = [w[name] for name in w if name == classes or name.startswith(f"{path}.")]
        squares = torch.stack([value.square().sum() for value in decayed]).sum()
        total: Tensor = personal + angle + lam * magnitude + mu / 2 * squares
        return total
