"""FedRep: Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for Personalized Federated Learning.
ICML 2021."""

from dataclasses import dataclass

from torch import nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort, Params, Task
from fedala.lanes.layers import layers_of, upper
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class FedRep(Method):
    """The body (the representation) is averaged; the head, the last layer, is the client's own and never leaves it."""

    name = "fedrep"
    title = "FedRep"
    summary = "a common body, and a head that every client keeps to itself"

    epochs: int = option(
        5, "τ: local epochs of the head on the frozen body, before the body's own", least=1
    )

    def shared(self, task: Task, model: Params) -> Params:
        if len(task.layers) < 2:
            raise UserError(
                "FedRep needs a model of two layers or more: the last is the head, the others are the body."
            )
        return {name: value for name, value in model.items() if name not in task.layers[0]}

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        return {**state["local"], **received}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        head = cohort.task.layers[0]
        trained = cohort.sgd(
            initialized, names=head, epochs=self.epochs, purpose="head", note=False
        )
        trained = cohort.sgd(trained, names=initialized.keys() - set(head))
        return self.shared(cohort.task, trained), {"local": trained}

    def governed(self, model: nn.Module, layers: int) -> tuple[str, ...]:
        """The upper layers of the body: the head is not received, so there is nothing to blend it with."""
        body = len(layers_of(model)) - 1
        if not 0 <= layers <= body:
            raise UserError(
                f"layers must be between 0 and {body}, the layers of FedRep's body, not {layers}."
            )
        head = upper(model, 1)
        return tuple(name for name in upper(model, layers + 1) if name not in head)
