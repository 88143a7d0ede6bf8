"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers.
2019."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from fedala.lanes.layer_units import Layers
from fedala.lanes.layers import divide_layers
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


@dataclass(frozen=True)
class FedPer(PartlyShared):
    """The base layers are averaged. The upper, personal layers stay; both train together."""

    name = "fedper"
    title = "FedPer"
    summary = "the lower layers are averaged, every client keeps its own upper layers"
    kind = "own layers"

    layers: int = option(1, "K_P: personal layers, counted from the output", least=1)

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        personal, _ = divide_layers(self.title, layers, self.layers)
        return personal
