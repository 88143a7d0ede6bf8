"""FedAvg-C: FedAvg with fine-tuning as local initialisation. Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local
Aggregation for Personalized Federated Learning. AAAI 2023, where it is what ALA is compared with."""

from dataclasses import dataclass

from fedala.lanes.cohort import Cohort, Params, Task
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class FedAvgC(Method):
    """FedAvg whose clients fine-tune the received model on their own data, are evaluated with it, and train on from there."""

    name = "fedavg-c"
    title = "FedAvg-C"
    summary = "FedAvg, with the global model fine-tuned by each client first"
    refuses_ala = "fine-tuning stands where ALA would stand, in the local initialisation"

    epochs: int = option(
        14, "E: epochs of fine-tuning on local data, before the round's own training", least=0
    )

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        proximal = self.proximal(received)
        return cohort.sgd(
            received, epochs=self.epochs, proximal=proximal, purpose="tuning", note=False
        ), state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        trained = cohort.sgd(initialized, proximal=self.proximal(received))
        return trained, {"local": trained}  # kept for the rounds that the client is not part of

    def proximal(self, received: Params) -> tuple[float, Params] | None:
        """A term that is added to the loss; here there is none."""
        return None
