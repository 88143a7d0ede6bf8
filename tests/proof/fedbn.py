"""FedBN: Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021."""

from dataclasses import dataclass

from torch import nn

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods import Method


@dataclass(frozen=True)
class FedBN(Method):
    """Parameters and statistics of batch normalisation stay local. All else is averaged."""

    name = "fedbn"
    title = "FedBN"
    summary = "every client keeps its own batch normalisation"
    refuses_ala = "batch normalisation is not received, so there is nothing to blend it with"

    def shared_part(self, task: Task, model: Params) -> Params:
        kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
        norms = [name for name, module in task.model.named_modules() if isinstance(module, kinds)]
        return {
            name: value for name, value in model.items() if name.rpartition(".")[0] not in norms
        }

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return {**state["local"], **received.model}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}
