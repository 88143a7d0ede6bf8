"""What methods have in common whose clients train a model of their own from round to round."""

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods.base import Method


class OwnModel(Method):
    """A client starts from its own model. What it does with the received one, a method says."""

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return state["local"], state
