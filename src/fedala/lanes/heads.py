"""A last layer with more parameters than the model brings: a second head, a policy, class means."""

import copy
from collections.abc import Callable, Collection

import torch
from torch import nn

from fedala.errors import UserError
from fedala.lanes.layer_units import find_module, layers_of, note_layers
from fedala.lanes.layers import find_last_layer, upper
from fedala.lanes.randomness import torch_seed
from fedala.lanes.task import Task
from fedala.lanes.trees import Params

Start = Callable[[int], Params]
"""Makes the initial model of a seed, as one lane."""


class Head(nn.Linear):
    """A linear layer with more parameters, which a method puts in the place of the last one.

    `weight` and `bias` are those of the model's own layer, under their own names. A class adds
    parameters, modules or buffers in `__init__`, where they may start from the layer's own values,
    and computes the output from the features in `forward`.
    """

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(1, 1, device="meta")
        self.in_features, self.out_features = last.in_features, last.out_features
        self.weight, self.bias = last.weight, last.bias


def extend_model(
    model: nn.Module, head: type[Head], title: str, last: str | None = None
) -> nn.Module:
    """Replace the last layer of a model by a `head`, unless that has been done.

    `last` names the layer, if the order of the layers is not known. `title` is the method's, for
    the sentence that refuses a model.
    """
    layers = layers_of(model)
    name = find_module(layers[0]) if last is None else last
    layer = model.get_submodule(name)
    if isinstance(layer, head):
        return model
    if not name and isinstance(layer, nn.Linear):
        raise UserError(
            f"{title} adds parameters to the last layer, and this model is a single nn.Linear: it "
            "needs a layer below, or at least an nn.Sequential around it."
        )
    if type(layer) is not nn.Linear:
        raise UserError(
            f"{title} adds parameters to the last layer, which must be an nn.Linear, and this "
            f"model's is {type(layer).__name__}."
        )
    before = _tensor_names(model)
    with torch.device(layer.weight.device):
        model.set_submodule(name, head(layer))
    new = [name for name in _tensor_names(model) if name not in before]
    note_layers(model, ((*layers[0], *new), *layers[1:]))
    return model


def extend_task(
    task: Task, start: Start, head: type[Head] | None, title: str
) -> tuple[Task, Start]:
    """Return the task with an extended model, and a function that makes its initial models.

    The model's own parameters start as they do without the head; those of the head are drawn with a
    key of their own. Without a head, and if the task is extended already, nothing changes.
    """
    if head is None:
        return task, start
    name = find_module(task.layers[0])
    if isinstance(task.model.get_submodule(name), head):
        return task, start
    extended = copy.copy(task)
    extended.use_model(extend_model(copy.deepcopy(task.ordered_model), head, title))

    def start_extended(seed: int) -> Params:
        state = start(seed)
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        last = nn.Linear(weight.shape[2], weight.shape[1], bias is not None, device="meta")
        last.weight = nn.Parameter(weight[0].cpu())
        if bias is not None:
            last.bias = nn.Parameter(bias[0].cpu())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "head"))
            drawn = head(last)
        own = {**dict(drawn.named_parameters()), **dict(drawn.named_buffers())}
        for part, value in own.items():
            if part not in ("weight", "bias"):
                dtype = task.dtype if value.is_floating_point() else value.dtype
                state[f"{name}.{part}"] = value.detach().to(task.device, dtype).unsqueeze(0)
        return {part: state[part] for part in _tensor_names(extended.model)}

    return extended, start_extended


def upper_body(model: nn.Module, layers: int | str, part: str) -> tuple[str, ...]:
    """Return the upper layers of the body, together with a part of the head, for ALA to blend.

    `part` is the module of the head that is trained and received, as the body is. A number counts
    layers of the body, and 0 takes nothing; a pattern may take any of both.
    """
    head, along = f"{find_last_layer(model)}.", list_part(model, part)
    body = [name for name, _ in model.named_parameters() if not name.startswith(head)]
    if isinstance(layers, str):
        return upper(model, layers, [*body, *along])
    chosen = upper(model, layers, body)
    return (*chosen, *along) if chosen else ()


def list_part(model: nn.Module, *parts: str) -> tuple[str, ...]:
    """Return the names of the tensors in some parts of the head: modules, parameters or buffers.

    If the model is not extended, there are none.
    """
    last = find_last_layer(model)
    paths = [f"{last}.{part}" for part in parts]
    return tuple(
        name
        for name in _tensor_names(model)
        if any(name == path or name.startswith(f"{path}.") for path in paths)
    )


def find_extended_layer(model: nn.Module, names: Collection[str]) -> str | None:
    """Name the layer that the names of saved tensors show to be extended; None: they show none."""
    new = set(names) - _tensor_names(model).keys()
    linear = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    shown = [path for path in linear if any(name.startswith(f"{path}.") for name in new)]
    return shown[0] if shown else None


def _tensor_names(model: nn.Module) -> dict[str, None]:
    return dict.fromkeys([*dict(model.named_parameters()), *dict(model.named_buffers())])
