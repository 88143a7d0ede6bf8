"""A method around another method: it does everything as its base does, except what it overrides."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Self

from torch import nn

from fedala.lanes import Cohort, Message, Params, State, Task, UpdateRule, Uploads
from fedala.methods.base import Method, ServerRound


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name))


def unwrap(method: Method) -> Method:
    """Return the method inside all wrappers."""
    while isinstance(method, Wrapper):
        method = method.base
    return method


def is_own(method: Method) -> bool:
    """Tell whether a method, whatever is around it, is a user's and not of this package."""
    return not type(unwrap(method)).__module__.startswith("fedala.")


class Wrapper(Method):
    """A method that does all as `base` does."""

    base: Method

    name = _of_base("name")
    title = _of_base("title")
    summary = _of_base("summary")
    has_personal_models = _of_base("has_personal_models")
    requires_all_clients = _of_base("requires_all_clients")
    sends_model_stack = _of_base("sends_model_stack")
    head = _of_base("head")
    schedule_depends_on_rounds = _of_base("schedule_depends_on_rounds")
    refuses_newcomers = _of_base("refuses_newcomers")
    metrics = _of_base("metrics")

    def check_model(self, model: nn.Module) -> None:
        self.base.check_model(model)

    def check_task(self, task: Task, initial: Params) -> None:
        self.base.check_task(task, initial)

    def check_optimizer(self, rule: UpdateRule) -> None:
        self.base.check_optimizer(rule)

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        return self.base.trainings(task)

    def shared_part(self, task: Task, model: Params) -> Params:
        return self.base.shared_part(task, model)

    def extra_template(self, task: Task, initial: Params) -> State:
        return self.base.extra_template(task, initial)

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        return self.base.init_server(task, initial, server_round)

    def send(self, server: State, server_round: ServerRound) -> Message:
        return self.base.send(server, server_round)

    def send_to_newcomers(self, server: State, server_round: ServerRound) -> Message:
        return self.base.send_to_newcomers(server, server_round)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        return self.base.aggregate(server, uploads, server_round)

    def global_model(self, server: State) -> Params:
        return self.base.global_model(server)

    def init_client(self, task: Task, initial: Params) -> State:
        return self.base.init_client(task, initial)

    def received_model(
        self, cohort: Cohort, received: Message, state: State
    ) -> tuple[Params, State]:
        return self.base.received_model(cohort, received, state)

    def complete_model(self, cohort: Cohort, received: Params, local: Params) -> Params:
        return self.base.complete_model(cohort, received, local)

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return self.base.initialize(cohort, received, state)

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return self.base.model_to_evaluate(cohort, initialized, received, state)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        return self.base.train(cohort, initialized, received, state)

    def model_when_absent(self, upload: Message, state: State) -> Params:
        return self.base.model_when_absent(upload, state)

    def trained_model(
        self, cohort: Cohort, received: Message, upload: Message, state: State
    ) -> Params:
        return self.base.trained_model(cohort, received, upload, state)

    def scale_epochs(self, factor: Fraction) -> Self:
        base = self.base.scale_epochs(factor)
        change: dict[str, Any] = {"base": base}
        return self if base is self.base else replace(self, **change)

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        return self.base.ala_parameters(model, layers)

    def ala_weights(self, state: State) -> Params:
        return self.base.ala_weights(state)
