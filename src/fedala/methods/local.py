"""Local: every client trains alone. What a federated method has to beat."""

from dataclasses import dataclass

from fedala.lanes.cohort import Cohort, Params, Task
from fedala.methods.base import Method, State


@dataclass(frozen=True)
class Local(Method):
    """No server: the client goes on with its own model, and nothing is sent."""

    name = "local"
    title = "Local"
    summary = "every client alone, nothing is sent"
    refuses_ala = "nothing is received that could be blended"

    def shared(self, task: Task, model: Params) -> Params:
        return {}

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        return state["local"], state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        return {}, {"local": cohort.sgd(initialized)}
