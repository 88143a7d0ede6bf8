"""The parameters of a model: as one lane, and in sentences."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from fedala.errors import UserError, printable
from fedala.lanes.trees import Params


def model_state(model: nn.Module) -> Params:
    """Return a model's parameters and buffers as one lane."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if lazy := [name for name, value in state.items() if is_lazy(value)]:
        raise UserError(
            f"{printable(lazy[0], 100)} of the model has no shape yet, because its layer is lazy. "
            "Run the model on one batch first."
        )
    return {name: value.detach().unsqueeze(0) for name, value in state.items()}


def list_few(names: Sequence[str]) -> str:
    """Name the first five parameters in a sentence."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
