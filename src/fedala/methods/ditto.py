"""Ditto: Li, Hu, Beirami, Smith. Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Self

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods.own_model import OwnModel
from fedala.options import option


@dataclass(frozen=True)
class Ditto(OwnModel):
    """Next to FedAvg's model w, a client trains a personal model v, pulled to the global model."""

    name = "ditto"
    title = "Ditto"
    summary = "FedAvg, and a second, personal model near the global one"
    kind = "own model"
    lane_numbers = frozenset({"lam"})

    lam: float = option(0.1, "λ: strength of the personal model's proximal term", least=0)
    epochs: int = option(2, "s: local epochs of the personal model", least=1)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        personal = cohort.fit(
            initialized,
            epochs=self.epochs,
            proximal=(self.lam, received.model),
            training="personal",
            purpose="personal",  # w's epoch has FedAvg's draws, and v has its own
        )
        return Message(cohort.fit(received.model)), {"local": personal}

    def scale_epochs(self, factor: Fraction) -> Self:
        return replace(self, epochs=ceil(factor * self.epochs))

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        return {"personal": task.trainable, "local": task.trainable}
