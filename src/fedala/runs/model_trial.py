"""Try a user's model and loss on two samples before a run starts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedala.data import Dataset
from fedala.errors import UserError, first_line
from fedala.lanes.losses import Loss
from fedala.lanes.task import Task
from fedala.metrics import OWN_LOSS

MakeModel = Callable[[], nn.Module]


def make_skeleton(make_model: MakeModel, *, is_own: bool) -> nn.Module:
    """Make a model without memory; a user's own model may need real tensors to be made or run."""
    if is_own:
        return make_model()
    with torch.device("meta"):
        return make_model()


def first_output(model: nn.Module, data: Dataset) -> Any:
    """Return the output of a model, in evaluation mode, for the first two samples."""
    task = Task(model, data.x[:2], data.y[:2], [np.arange(2)])
    with torch.no_grad(), task.use_mode(training=False):
        return model(task.inputs(torch.arange(len(data.y[:2]))))


def try_model(model: nn.Module, data: Dataset, loss: Loss) -> None:
    """Refuse a model that does not turn samples into a score for each class, or target."""
    try:
        output = first_output(model, data)
    except Exception as error:  # whatever the user's own code may raise
        samples = f"samples of shape {tuple(data.x.shape[1:])}"
        raise UserError(f"The model cannot be run on {samples}: {first_line(error)}.") from error
    if loss.metric == OWN_LOSS:
        return  # only the user's loss knows what it takes
    shape = getattr(output, "shape", None)
    count, is_right = len(data.y[:2]), False
    if shape is not None and data.kind == "classes":
        is_right = len(shape) == 2 and shape[1] >= data.classes
    elif shape is not None:
        is_right = tuple(shape) == (count, data.classes)
        is_right |= tuple(shape) == (count,) and data.classes == 1
    if not is_right:
        kind = type(output).__name__
        actual = f"a {kind}" if shape is None else f"a tensor of shape {tuple(shape)}"
        wanted = f"a score for each of the {data.targets}"
        if data.kind != "classes":
            wanted = f"one output for each of the {data.targets}"
        raise UserError(
            f"The model turns {count} samples into {actual}; it must give {wanted}: "
            f"({count}, {data.classes})."
        )


def try_loss(loss: Loss, model: nn.Module, data: Dataset) -> None:
    """Refuse a user's loss that does not turn outputs and targets into one number."""
    output = first_output(model, data)
    try:
        loss(output, data.y[:2])
    except UserError:
        raise
    except Exception as error:  # whatever the user's own code may raise
        raise UserError(
            f"The loss cannot be computed from an output of shape {_shape_of(output)} and targets "
            f"of shape {tuple(data.y[:2].shape)}: {first_line(error)}."
        ) from error


def _shape_of(output: Any) -> str:
    shape = getattr(output, "shape", None)
    return type(output).__name__ if shape is None else str(tuple(shape))
