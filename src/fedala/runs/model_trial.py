"""Try a user's model and loss on two samples before a run starts."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala.data import Dataset, Federation
from fedala.errors import UserError, first_line
from fedala.lanes.layers import call
from fedala.lanes.losses import Loss, OwnLoss
from fedala.lanes.outputs import keep_tensors, scores_of
from fedala.lanes.parameters import model_state
from fedala.lanes.task import Task
from fedala.lanes.trees import leaves
from fedala.metrics import OWN_LOSS

MakeModel = Callable[[], nn.Module]


def make_skeleton(make_model: MakeModel, *, is_own: bool) -> nn.Module:
    """Make a model without memory; a user's own model may need real tensors to be made or run."""
    if is_own:
        return make_model()
    with torch.device("meta"):
        return make_model()


def make_two(make_model: Any) -> tuple[nn.Module, nn.Module]:
    """Make a user's model twice, or refuse what is no function that makes a model."""
    wanted = "model must be a function that makes a new model at each call, such as lambda: Net(10)"
    if isinstance(make_model, nn.Module):
        raise UserError(
            f"{wanted}, and not a model: each seed starts from weights of its own, so "
            f"{type(make_model).__name__} is made more than once."
        )
    if isinstance(make_model, Mapping):
        raise UserError(f"{wanted}, and not a state dict: the function may load it.")
    if not callable(make_model):
        raise UserError(f"{wanted}, and not {type(make_model).__name__}.")
    try:
        one, other = make_model(), make_model()
    except UserError:
        raise
    except Exception as error:  # whatever the user's own code may raise
        raise UserError(f"The model cannot be made: {first_line(error)}; {wanted}.") from error
    if not isinstance(one, nn.Module):
        raise UserError(f"{wanted}, and this one returns {type(one).__name__}.")
    mine = {id(parameter) for parameter in one.parameters()}
    if one is other or any(id(parameter) in mine for parameter in other.parameters()):
        raise UserError(f"{wanted}, and this one returns the same model, or its layers, again.")
    if any(parameter.is_meta for parameter in one.parameters()):
        raise UserError(f"{wanted}, and this one's is on the device meta, so it has no numbers.")
    model_state(one)  # refuses lazy layers
    return one, other


def first_inputs(model: nn.Module, data: Dataset) -> Any:
    """Return the first two samples as the model gets them."""
    return _take_first(model, data, 2)[1]


def _take_first(model: nn.Module, data: Dataset, count: int) -> tuple[Task, Any]:
    """Return a task of the first samples, and its inputs."""
    task = Task(model, data.x[:count], data.y[:count], [np.arange(count)])
    return task, task.inputs(torch.arange(len(data.y[:count])))


def first_output(model: nn.Module, data: Dataset, count: int = 2, *, training: bool = False) -> Any:
    """Return the output of a model for the first samples. The model stays as it is."""
    return _run(model, *_take_first(model, data, count), training=training)


def _run(model: nn.Module, task: Task, x: Any, *, training: bool = False) -> Any:
    with torch.no_grad(), task.use_mode(training=training):
        if not training and all(value.dtype == task.dtype for value in model.parameters()):
            return model(x)
        state = {  # a run brings all weights to its precision
            name: value[0].to(task.dtype if value.is_floating_point() else value.dtype, copy=True)
            for name, value in model_state(model).items()
        }
        return call(model, state, x)


def try_model(model: nn.Module, data: Dataset, loss: Loss) -> tuple[str, ...]:
    """Refuse a model that cannot learn, or gives no score for each class, or target.

    Return a sentence if it gives more scores than there are classes.
    """
    if not any(value.requires_grad for value in model.parameters()):
        raise UserError(
            "The model has no parameters that learn: all of them have requires_grad=False, or "
            "there are none. At least those of its last layer must learn."
        )
    try:
        output = first_output(model, data)
    except Exception as error:  # whatever the user's own code may raise
        samples = f"samples of shape {tuple(data.x.shape[1:])}"
        raise UserError(f"The model cannot be run on {samples}: {first_line(error)}.") from error
    _try_highest_word(model, data)
    count, is_right = len(data.y[:2]), False
    if isinstance(loss, OwnLoss):
        _check_parts(output, count)
    if loss.metric == OWN_LOSS:
        return ()  # only the user's loss knows which scores it takes
    output = scores_of(output)
    shape = getattr(output, "shape", None)
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
    if data.kind != "classes" or output.shape[1] == data.classes:
        return ()
    return (
        f"The model gives {output.shape[1]:,} scores, and {data.name} has {data.classes:,} "
        "classes: it can answer with classes that no sample has.",
    )


def _try_highest_word(model: nn.Module, data: Dataset) -> None:
    """Refuse a model whose table of words is too short: lanes would read another client's rows."""
    if data.vocabulary is None:
        return
    row = int(data.x.flatten(1).amax(1).argmax())
    task = Task(model, data.x[row : row + 1], data.y[row : row + 1], [np.arange(1)])
    try:
        _run(model, task, task.inputs(torch.arange(1)))
    except Exception as error:  # it ran on the first two
        highest = int(data.x[row].max())
        raise UserError(
            f"The model cannot be run on every text: {first_line(error)}. The highest word is "
            f"{highest:,}, so a table needs at least {highest + 1:,} rows."
        ) from error


def _check_parts(output: Any, count: int) -> None:
    """Refuse an output whose parts an evaluation cannot take sample by sample."""
    if isinstance(output, Tensor):
        return
    wanted = (
        "A loss of your own gets the whole output of the model: a tensor, or a dict or tuple of "
        "tensors with a row for each sample"
    )
    for name, part in leaves(keep_tensors(output)):
        if not isinstance(part, Tensor):
            raise UserError(f"{wanted}. This model returns a {type(part).__name__}.")
        if part.shape[:1] != (count,):
            raise UserError(
                f"{wanted}. Of {count} samples, its {name!r} is a tensor of shape "
                f"{tuple(part.shape)}."
            )


def try_batch_of_one(model: nn.Module, federation: Federation, batch_size: int) -> None:
    """Refuse a model that cannot train on a single sample, if a client trains on such batches."""
    alone = [client for client, rows in enumerate(federation.train) if len(rows) == 1]
    if not alone and batch_size != 1:
        return
    try:
        with torch.random.fork_rng(devices=[]):  # dropout draws numbers
            first_output(model, federation.dataset, 1, training=True)
    except Exception as error:  # whatever the user's own code may raise
        reason = f"the model cannot train on a batch of one: {first_line(error)}"
        if not alone:
            raise UserError(f"With batch_size 1, {reason}. Choose at least 2.") from error
        raise UserError(
            f"Client {alone[0]} has a single training sample, and {reason}. Leave such clients "
            "out, or choose a model with GroupNorm or LayerNorm instead of BatchNorm."
        ) from error


def try_loss(loss: Loss, model: nn.Module, data: Dataset) -> None:
    """Refuse a user's loss that does not turn outputs and targets into one number."""
    output = first_output(model, data)
    try:
        loss(loss.select(output), data.y[:2])
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
