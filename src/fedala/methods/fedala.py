"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local Aggregation for
Personalized Federated Learning. AAAI 2023."""

from dataclasses import dataclass

from fedala.lanes.weight_learning import Settings
from fedala.methods.fedavg import FedAvg
from fedala.methods.with_ala import InitializedByALA


@dataclass(frozen=True)
class FedALA(Settings, InitializedByALA):
    """FedAvg, with each client's local model initialised by ALA. Its hyperparameters are ALA's."""

    name = "fedala"
    title = "FedALA"
    summary = (
        "each client blends the global model into its own, element by element, with learned weights"
    )
    kind = "blended"
    base = FedAvg()
    refuses_ala = "FedALA is FedAvg with ALA already"

    @property
    def ala(self) -> Settings:  # type: ignore[override]
        return self
