"""FedRep: Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for
Personalized Federated Learning. ICML 2021."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Self

from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.layers import layers_of, upper
from fedala.methods.base import Method
from fedala.options import option


@dataclass(frozen=True)
class FedRep(Method):
    """The body (the representation) is averaged. The head (the last layer) stays at its client."""

    name = "fedrep"
    title = "FedRep"
    summary = "a common body, and a head that every client keeps to itself"

    epochs: int = option(5, "τ: local epochs of the head on the frozen body", least=1)

    def check_model(self, model: nn.Module) -> None:
        if len(layers_of(model)) < 2:
            raise UserError(
                "FedRep needs a model of at least two layers: the last is the head, the others "
                "are the body."
            )

    def shared_part(self, task: Task, model: Params) -> Params:
        return {name: value for name, value in model.items() if name not in task.layers[0]}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return {**state["local"], **received.model}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        head = cohort.task.layers[0]
        trained = cohort.fit(
            initialized,
            names=head,
            epochs=self.epochs,
            training="head",
            purpose="head",
            report_loss=False,
        )
        trained = cohort.fit(trained, names=initialized.keys() - set(head))
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}

    def scale_epochs(self, factor: Fraction) -> Self:
        return replace(self, epochs=ceil(factor * self.epochs))

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        head = [name for name in task.trainable if name in task.layers[0]]
        return {"head": head, "local": [name for name in task.trainable if name not in head]}

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        """Return the upper layers of the body: the head is not received, so it is not blended."""
        head = upper(model, 1)
        if isinstance(layers, str):
            chosen = tuple(name for name in upper(model, layers) if name not in head)
            if not chosen:
                raise UserError(f"layers={layers} takes FedRep's head alone, which never travels.")
            return chosen
        body = len(layers_of(model)) - 1
        if not 0 <= layers <= body:
            raise UserError(
                f"layers must be between 0 and {body}, the layers of FedRep's body, not {layers}."
            )
        return tuple(name for name in upper(model, layers + 1) if name not in head)
