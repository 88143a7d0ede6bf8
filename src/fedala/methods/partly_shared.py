"""What methods have in common that share a part of the model: `own_part` says what stays."""

from collections.abc import Collection

from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import layers_of, upper
from fedala.methods.base import Method


class PartlyShared(Method):
    """A part of the model stays with its client. The rest is averaged."""

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        """Return the parameters and buffers that stay. Refuse a model that has no such part.

        `layers` are the model's layers, output first.
        """
        raise NotImplementedError

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        self.own_part(model, layers_of(model))

    def shared_part(self, task: Task, model: Params) -> Params:
        own = set(self.own_part(task.model, task.layers))
        return {name: value for name, value in model.items() if name not in own}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return self.complete_model(cohort, received.model, state["local"]), state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        """Return the upper layers of the shared part: what is not received is not blended."""
        own = set(self.own_part(model, layers_of(model)))
        if isinstance(layers, int):
            shared = [name for name, _ in model.named_parameters() if name not in own]
            return upper(model, layers, shared)
        chosen = tuple(name for name in upper(model, layers) if name not in own)
        if not chosen:
            raise UserError(f"layers={layers} takes nothing that {self.title} shares.")
        return chosen
