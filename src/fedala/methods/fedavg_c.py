"""FedAvg-C: FedAvg with fine-tuning as local initialisation. Zhang, Hua, Wang, Song, Xue, Ma, Guan.
FedALA: Adaptive Local Aggregation for Personalized Federated Learning. AAAI 2023, where ALA is
compared with it."""

from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.methods.base import Method
from fedala.options import option


@dataclass(frozen=True)
class FedAvgC(Method):
    """Clients fine-tune the received model, are tested with it, and train it further."""

    name = "fedavg-c"
    title = "FedAvg-C"
    summary = "FedAvg, with the global model fine-tuned by each client first"
    refuses_ala = "fine-tuning is the local initialisation already"

    epochs: int = option(14, "E: epochs of fine-tuning before the round's own training", least=0)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        tuned = cohort.sgd(
            received.model,
            epochs=self.epochs,
            proximal=self.proximal(received),
            purpose="tuning",
            report_loss=False,
        )
        return tuned, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.sgd(initialized, proximal=self.proximal(received))
        return Message(trained), {"local": trained}  # for the rounds without this client

    def proximal(self, received: Message) -> tuple[float, Params] | None:
        """Return a proximal term to add to the loss; here there is none."""
        return None
