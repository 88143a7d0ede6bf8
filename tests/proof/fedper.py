"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers.
2019."""

from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods import Method
from fedala.options import option


@dataclass(frozen=True)
class FedPer(Method):
    """The lower layers are averaged. The upper layers stay with their client."""

    name = "fedper"
    title = "FedPer"
    summary = "the lower layers are averaged, every client keeps its own upper layers"
    refuses_ala = "the upper layers are not received, so there is nothing to blend them with"

    layers: int = option(1, "K_P: personal layers, counted from the output", least=1)

    def shared_part(self, task: Task, model: Params) -> Params:
        personal = {name for layer in task.layers[: self.layers] for name in layer}
        return {name: value for name, value in model.items() if name not in personal}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return {**state["local"], **received.model}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}
