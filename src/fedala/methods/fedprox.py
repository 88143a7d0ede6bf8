"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous
Networks. MLSys 2020."""

from dataclasses import dataclass

from fedala.lanes import Cohort, Message, Params, State
from fedala.methods.base import Method
from fedala.options import option


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term in the local loss, μ/2·‖w − g‖²."""

    name = "fedprox"
    title = "FedProx"
    summary = "FedAvg with a pull towards the global model"
    kind = "one model for all"
    has_personal_models = False
    lane_numbers = frozenset({"mu"})

    mu: float = option(0.001, "μ: strength of the proximal term", least=0)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        return Message(cohort.fit(initialized, proximal=(self.mu, received.model))), state
