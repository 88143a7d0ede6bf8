"""FedProx-C: FedProx with fine-tuning as local initialisation. Zhang, Hua, Wang, Song, Xue, Ma,
Guan. FedALA: Adaptive Local Aggregation for Personalized Federated Learning. AAAI 2023, where ALA
is compared with it."""

from dataclasses import dataclass

from fedala.lanes import Message, Number, Params
from fedala.methods.fedavg_c import FedAvgC
from fedala.options import option


@dataclass(frozen=True)
class FedProxC(FedAvgC):
    """FedAvg-C with FedProx's loss, L + μ/2·‖w − g‖², in fine-tuning and in training."""

    name = "fedprox-c"
    title = "FedProx-C"
    summary = "FedProx, with the global model fine-tuned by each client first"
    kind = "fine-tuned"
    lane_numbers = frozenset({"mu"})

    mu: float = option(0.001, "μ: strength of the proximal term", least=0)

    def proximal(self, received: Message) -> tuple[Number, Params]:
        return self.mu, received.model
