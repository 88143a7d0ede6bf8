"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017."""

from dataclasses import dataclass

from fedala.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The received model replaces the local one, each client trains it, the server averages."""

    name = "fedavg"
    title = "FedAvg"
    summary = "one global model, averaged"
    kind = "one model for all"
    has_personal_models = False
