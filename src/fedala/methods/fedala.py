"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local Aggregation for Personalized Federated Learning.
AAAI 2023. And ALA on any other method, `method+ala`: it replaces local initialisation and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fedala.cuda.head_learner import choose_learner
from fedala.lanes import local_aggregation
from fedala.lanes.cohort import Cohort, Params, Task
from fedala.lanes.local_aggregation import Outcome
from fedala.lanes.weight_learning import Settings
from fedala.methods.base import Method, State
from fedala.methods.fedavg import FedAvg


@dataclass(frozen=True)
class WithALA(Method):
    """`base`, with its local model initialised by ALA(received, local). On FedAvg, this is FedALA."""

    base: Method
    ala: Settings

    @property
    def is_fedala(self) -> bool:
        return type(self.base) is FedAvg

    @property
    def name(self) -> str:  # type: ignore[override]
        return "fedala" if self.is_fedala else f"{self.base.name}+ala"

    @property
    def title(self) -> str:  # type: ignore[override]
        return "FedALA" if self.is_fedala else f"{self.base.title}+ALA"

    @property
    def everyone(self) -> bool:  # type: ignore[override]
        return self.base.everyone

    @property
    def notes(self) -> frozenset[str]:  # type: ignore[override]
        return self.base.notes | {"ala_epochs", "ala_weight", "ala_capped"}

    @property
    def schedule_depends_on_rounds(self) -> bool:  # type: ignore[override]
        return self.base.schedule_depends_on_rounds

    def governed(self, model: nn.Module, layers: int) -> tuple[str, ...]:
        return self.base.governed(model, layers)

    def shared(self, task: Task, model: Params) -> Params:
        return self.base.shared(task, model)

    def serve(self, task: Task, start: Params, sizes: Sequence[int]) -> State:
        return self.base.serve(task, start, sizes)

    def send(self, server: State, clients: list[int]) -> Params:
        return self.base.send(server, clients)

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        return self.base.aggregate(server, uploads, weights, clients)

    def fresh(self, task: Task, start: Params) -> State:
        learned = local_aggregation.init_state(start, self.governed(task.model, self.ala.layers))
        return self._state(self.base.fresh(task, start), start, learned)

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        names = self.governed(cohort.task.model, self.ala.layers)
        local = state["base"].get("local", state.get("local"))
        start = {**local, **received}  # what the server does not send is the client's own
        initialized, learned, outcome = local_aggregation.initialize(
            cohort,
            self.ala,
            state["ala"],
            local,
            received,
            governed=names,
            start=start,
            choose_learner=choose_learner,
        )
        self.note(cohort, outcome)
        return initialized, {**state, "ala": learned}

    def note(self, cohort: Cohort, outcome: Outcome) -> None:
        """What is recorded of a cohort's ALA."""
        capped = outcome.initial & (outcome.epochs >= self.ala.max_epochs)
        cohort.notes |= {
            "ala_epochs": outcome.epochs,
            "ala_weight": outcome.weight_mean,
            "ala_capped": capped.double(),
        }

    def evaluated(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> Params:
        # The personal model that the last round left gives way to the one that ALA has just initialised.
        base = {name: value for name, value in state["base"].items() if name != "personal"}
        return self.base.evaluated(cohort, initialized, received, base)

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        upload, kept = self.base.train(cohort, initialized, received, state["base"])
        return upload, self._state(kept, upload, state["ala"])

    def ala_weights(self, state: State) -> Params:
        learned: Params = state["ala"]["weights"]
        return learned

    def left(self, upload: Params, state: State) -> Params:
        return self.base.left(upload, state["base"])

    @staticmethod
    def _state(base: State, local: Params, learned: State) -> State:
        """The base's state and ALA's; and the local model, where the base does not keep one itself."""
        return {"base": base, "ala": learned, **({} if "local" in base else {"local": local})}
