"""Ditto: Li, Hu, Beirami, Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021."""

from dataclasses import dataclass

from fedala.lanes.cohort import Cohort, Params, Task
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class Ditto(Method):
    """Beside FedAvg's model w, every client keeps a personal model v, trained with a pull towards the global model."""

    name = "ditto"
    title = "Ditto"
    summary = "FedAvg, and a second, personal model near the global one"

    lam: float = option(0.1, "λ: strength of the personal model's proximal term", least=0)
    epochs: int = option(2, "s: local epochs of the personal model", least=1)

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        return state["local"], state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        personal = cohort.sgd(initialized, epochs=self.epochs, proximal=(self.lam, received))
        return cohort.sgd(received), {"local": personal}
