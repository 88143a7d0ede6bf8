"""FedAvg-C: FedAvg with fine-tuning as local initialisation. Zhang, Hua, Wang, Song, Xue, Ma, Guan.
FedALA: Adaptive Local Aggregation for Personalized Federated Learning. AAAI 2023, where ALA is
compared with it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Number, Params, State, Task
from fedala.methods.base import Method
from fedala.options import option


@dataclass(frozen=True)
class FedAvgC(Method):
    """Clients fine-tune the received model, are tested with it, and train it further."""

    name = "fedavg-c"
    title = "FedAvg-C"
    summary = "FedAvg, with the global model fine-tuned by each client first"
    kind = "fine-tuned"
    refuses_ala = "fine-tuning is the local initialisation already"

    epochs: int = option(14, "E: epochs of fine-tuning before the round's own training", least=0)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        tuned = cohort.fit(
            received.model,
            epochs=self.epochs,
            proximal=self.proximal(received),
            training="tuning",
            purpose="tuning",
            report_loss=False,
        )
        return tuned, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized, proximal=self.proximal(received))
        return Message(trained), {"local": trained}  # for the rounds without this client

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        return {"tuning": task.trainable, "local": task.trainable}

    def proximal(self, received: Message) -> tuple[Number, Params] | None:
        """Return a proximal term to add to the loss; here there is none."""
        return None
