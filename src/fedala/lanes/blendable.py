"""Refuse what ALA cannot blend: something that is no model, or two models that are not alike."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedala.errors import UserError
from fedala.lanes.parameters import model_state
from fedala.lanes.trees import Params


def check_module(model: Any) -> None:
    """Refuse what is no model."""
    if isinstance(model, nn.Module):
        return
    what, hint = type(model).__name__, ""
    if isinstance(model, Mapping):
        what, hint = "a state dict", " Load it into a model with load_state_dict."
    elif isinstance(model, type):
        what, hint = f"the class {model.__name__}", " Make an instance of it."
    raise UserError(f"ALA blends two models of type nn.Module, not {what}.{hint}")


def state_to_blend(model: nn.Module) -> Params:
    """Return a model's state as one lane. Refuse a model that cannot be blended."""
    check_module(model)
    state = model_state(model)
    if not any(True for _ in model.parameters()):
        raise UserError("The model has no parameters: there is nothing to blend.")
    devices = {str(value.device) for value in state.values()}
    if "meta" in devices:
        raise UserError(
            "The model is on the device meta, so it has no numbers: move it with to_empty and "
            "load a state."
        )
    if len(devices) > 1:
        raise UserError(
            f"The model is spread over {', '.join(sorted(devices))}: ALA needs it on one device."
        )
    return state


def check_twins(local: Params, received: Params) -> None:
    """Refuse two models whose states differ in names, shapes or types."""
    mine, others = (
        {name: (value.shape, value.dtype) for name, value in state.items()}
        for state in (local, received)
    )
    for name in {**local, **received}:
        if mine.get(name) != others.get(name):
            raise UserError(
                f"The local and the received model must be alike, and differ in {name}."
            )
