"""FedRep: Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for
Personalized Federated Learning. ICML 2021."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Self

from torch import nn

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.layer_units import Layers
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


@dataclass(frozen=True)
class FedRep(PartlyShared):
    """The body (the representation) is averaged. The head (the last layer) stays at its client."""

    name = "fedrep"
    title = "FedRep"
    summary = "a common body, and a head that every client keeps to itself"
    kind = "own layers"
    requires_body = True

    epochs: int = option(5, "τ: local epochs of the head on the frozen body", least=1)

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        return layers[0]

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
