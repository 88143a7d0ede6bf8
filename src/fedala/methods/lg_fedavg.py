"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think Locally, Act
Globally: Federated Learning with Local and Global Representations. 2020."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import divide_layers
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


@dataclass(frozen=True)
class LGFedAvg(PartlyShared):
    """The lower layers stay: each client learns its own representation. The upper are averaged."""

    name = "lg-fedavg"
    title = "LG-FedAvg"
    summary = "the upper layers are averaged, every client keeps its own lower layers"
    kind = "own layers"

    layers: int = option(1, "layers of the global model θ_g, counted from the output", least=1)

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        _, local = divide_layers(self.title, layers, self.layers)
        return local
