"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020."""

from dataclasses import dataclass

from fedala.lanes.cohort import Cohort, Params
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose local loss has a proximal term, μ/2·‖w − g‖²."""

    name = "fedprox"
    title = "FedProx"
    summary = "FedAvg with a pull towards the global model"
    personal = False

    mu: float = option(0.001, "μ: strength of the proximal term", least=0)

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        return cohort.sgd(initialized, proximal=(self.mu, received)), state
