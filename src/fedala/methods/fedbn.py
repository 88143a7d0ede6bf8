"""FedBN: Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedala.errors import UserError
from fedala.lanes.layer_units import Layers
from fedala.methods.partly_shared import PartlyShared

#: Batch, synchronised batch and instance normalisation are `_NormBase`; older torch has no RMSNorm.
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm))


@dataclass(frozen=True)
class FedBN(PartlyShared):
    """Parameters and statistics of normalisation layers stay. All else is averaged."""

    name = "fedbn"
    title = "FedBN"
    summary = "every client keeps its own normalisation layers"
    kind = "own layers"

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        norms = {path for path, module in model.named_modules() if isinstance(module, NORMS)}
        own = [name for layer in layers for name in layer if name.rpartition(".")[0] in norms]
        if not own:
            raise UserError(
                "FedBN keeps normalisation layers with their clients, and this model has none: "
                "choose a model with some, such as resnet18, or another method."
            )
        return own
