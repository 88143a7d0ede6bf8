"""ALA on any method, `method+ala`: it replaces the local initialisation and nothing else."""

import copy
from dataclasses import dataclass

from torch import nn

from fedala.lanes import Cohort, Message, Params, State, Task, local_aggregation
from fedala.lanes.heads import extend_model
from fedala.lanes.layers import upper
from fedala.lanes.local_aggregation import Outcome
from fedala.lanes.trees import count_lanes
from fedala.lanes.weight_learning import Settings
from fedala.methods.base import Method
from fedala.methods.returned import check_initialized, check_tensors, check_trained
from fedala.methods.wrapper import Wrapper


class InitializedByALA(Wrapper):
    """A method whose local model is ALA(received, local). It does all else as `base` does."""

    ala: Settings
    has_personal_models = True

    @property
    def metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.base.metrics | {"ala_epochs", "ala_weight", "ala_capped"}

    def check_model(self, model: nn.Module) -> None:
        self.base.check_model(model)
        if self.head:
            model = extend_model(copy.deepcopy(model), self.head, self.base.title)
        self.ala_parameters(model, self.ala.layers)

    def init_client(self, task: Task, initial: Params) -> State:
        governed = self.list_governed(task, self.base.shared_part(task, initial))
        learned = local_aggregation.init_state(initial, governed)
        own = self.base.init_client(task, initial)
        check_tensors(self.base, "init_client", own, lanes=count_lanes(initial))
        return _keep(own, initial, learned)

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        local = state["base"].get("local", state.get("local"))
        found = self.base.received_model(cohort, received, state["base"])
        model, base = check_initialized(self.base, cohort, found, "received_model")
        initialized, learned, outcome = local_aggregation.initialize(
            cohort,
            self.ala,
            state["ala"],
            local,
            model,
            governed=self.list_governed(cohort.task, model),
            start=self.complete_model(cohort, model, local),
        )
        self.report(cohort, outcome)
        return initialized, {**state, "base": base, "ala": learned}

    def list_governed(self, task: Task, received: Params) -> tuple[str, ...]:
        """Return the names that ALA blends.

        If the base names any that it does not receive, layers count among those that it does.
        """
        governed = self.ala_parameters(task.model, self.ala.layers)
        if all(name in received for name in governed):
            return governed
        return upper(task.model, self.ala.layers, received)

    def report(self, cohort: Cohort, outcome: Outcome) -> None:
        """Add what a cohort's ALA did to its metrics."""
        capped = outcome.initial & (outcome.epochs >= self.ala.max_epochs)
        cohort.metrics |= {
            "ala_epochs": outcome.epochs,
            "ala_weight": outcome.weight_mean,
            "ala_capped": capped.double(),
        }

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        # The personal model of the last round gives way to the one that ALA has initialised.
        base = {name: value for name, value in state["base"].items() if name != "personal"}
        return self.base.model_to_evaluate(cohort, initialized, received, base)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = self.base.train(cohort, initialized, received, state["base"])
        upload, base = check_trained(self.base, trained)
        return upload, _keep(base, upload.model, state["ala"])

    def model_when_absent(self, upload: Message, state: State) -> Params:
        model = self.base.model_when_absent(upload, state["base"])
        return model or state.get("local", {})

    def trained_model(
        self, cohort: Cohort, received: Message, upload: Message, state: State
    ) -> Params:
        model = self.base.trained_model(cohort, received, upload, state["base"])
        return model or state.get("local", {})

    def ala_weights(self, state: State) -> Params:
        learned: Params = state["ala"]["weights"]
        return learned


def _keep(base: State, local: Params, learned: State) -> State:
    """Return the base's state and ALA's, and the local model if the base does not keep one."""
    return {"base": base, "ala": learned, **({} if "local" in base else {"local": local})}


@dataclass(frozen=True)
class WithALA(InitializedByALA):
    """`base` with ALA."""

    base: Method
    ala: Settings

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.base.name}+ala"

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.base.title}+ALA"
