"""Local: every client trains alone. A federated method has to beat this."""

from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods.own_model import OwnModel


@dataclass(frozen=True)
class Local(OwnModel):
    """The client trains its own model, and nothing is sent."""

    name = "local"
    title = "Local"
    summary = "every client alone, nothing is sent"
    kind = "own model"
    refuses_ala = "nothing is received that could be blended"
    refuses_server_optimizer = "no model is uploaded"

    def shared_part(self, task: Task, model: Params) -> Params:
        return {}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        return Message(), {"local": cohort.fit(initialized)}
