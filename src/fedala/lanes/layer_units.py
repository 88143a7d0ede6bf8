"""What counts as one layer: a module with parameters of its own, or a block of a repeated kind.

The order of the layers, output first, is that in which a forward pass uses them
(`fedala.lanes.layer_order` finds it and notes it at the model). A model that nobody has run yet has
its layers in order of registration, the last one first.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import nn

Layers = tuple[tuple[str, ...], ...]
"""The names of the parameters and buffers of each layer, output first."""

#: Where a model keeps the order of its layers once a forward pass has shown it.
_NOTE = "_fedala_layers"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class HasLayers(nn.Module):
    """A module that lists its layers itself."""

    #: Names of the sub-modules that form each layer, output first.
    layers: ClassVar[tuple[tuple[str, ...], ...]]


def layers_of(model: nn.Module) -> Layers:
    """Return the names of the parameters and buffers of each layer, output first.

    A linear layer's weight and bias are one layer.
    """
    if isinstance(model, HasLayers):
        names = _tensor_names(model)
        declared = [[name for name in names if _is_below(name, group)] for group in model.layers]
        return _collect(model, declared)
    noted = model.__dict__.get(_NOTE)
    if noted is not None and noted[0] == _signature(model):
        known: Layers = noted[1]
        return known
    return arrange_layers(model, [[unit] for unit in units_of(model)])


def is_order_known(model: nn.Module) -> bool:
    """Tell whether the layers are in the order of use, and not just in that of registration."""
    if isinstance(model, HasLayers) or _is_chain(model):
        return True
    noted = model.__dict__.get(_NOTE)
    return noted is not None and noted[0] == _signature(model)


def note_layers(model: nn.Module, layers: Layers) -> None:
    """Keep the order of a model's layers with it, until its parameters change."""
    if not isinstance(model, HasLayers):
        model.__dict__[_NOTE] = _signature(model), layers


def _signature(model: nn.Module) -> tuple[Any, ...]:
    """Return what the order depends on; if it changes, the order is not known any more."""
    return tuple((n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters())


def _is_chain(module: nn.Module) -> bool:
    """Tell whether a module runs its children one after another, as they are registered."""
    children = list(module.children())
    return not children or (
        type(module) is nn.Sequential and all(_is_chain(child) for child in children)
    )


# --- units: what is never taken apart -------------------------------------------------------------


def units_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the parameters and buffers of each unit by its module's name, the last one first.

    A unit is a block, or a module with parameters of its own outside of blocks.
    """
    blocks = _find_blocks(model)
    owners = {name: _unit_of(name, blocks) for name in _tensor_names(model)}
    holders = [
        _unit_of(f"{name}." if name else "", blocks)
        for name, module in reversed(list(model.named_modules()))
        if any(True for _ in module.parameters(False))
    ]
    found = {
        holder: tuple(name for name, owner in owners.items() if owner == holder)
        for holder in dict.fromkeys(holders)
    }
    return {unit: names for unit, names in found.items() if names}


def _find_blocks(model: nn.Module) -> list[str]:
    """Name the blocks of a model, the outermost only.

    A block is a module with several parameterised modules in it that stands in an `nn.ModuleList`,
    or in another container of torch if the model has several of its class there. Attention, the
    layers of torch's Transformers, a layer with an adapter around it and a linear layer that a
    method has extended are blocks anywhere.
    """
    listed = {
        f"{path}.{name}" if path else name: (parent, child)
        for path, parent in model.named_modules()
        if isinstance(parent, _CONTAINERS)
        for name, child in parent.named_children()
    }
    classes = Counter(type(child) for _, child in listed.values())
    blocks: list[str] = []
    for path, module in model.named_modules():
        if not path or _is_below(f"{path}.", blocks):
            continue
        parent, _ = listed.get(path, (None, None))
        is_repeated = isinstance(parent, nn.ModuleList) or (
            parent is not None and classes[type(module)] > 1
        )
        is_block = is_repeated and not isinstance(module, _CONTAINERS) and _has_several(module)
        is_extended = "base_layer" in dict(module._modules) or isinstance(module, nn.Linear)
        is_block |= isinstance(module, _ATTENTION) or (is_extended and _has_several(module))
        if is_block:
            blocks.append(path)
    return blocks


def _has_several(module: nn.Module) -> bool:
    return len({_owner(name) for name, _ in module.named_parameters()}) > 1


def _unit_of(name: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if _is_below(name, [block])), _owner(name))


def _owner(name: str) -> str:
    """Name the module that a parameter or buffer belongs to.

    A parametrised weight (`fc.parametrizations.weight.original0`) belongs to the layer, `fc`.
    """
    before, found, _ = f".{name}".partition(".parametrizations.")
    return before[1:] if found else name.rpartition(".")[0]


def find_module(names: Iterable[str]) -> str:
    """Name the innermost module that holds all these tensors."""
    paths = [_owner(name).split(".") for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


# --- from units to layers -------------------------------------------------------------------------


def arrange_layers(model: nn.Module, order: Sequence[Sequence[str]]) -> Layers:
    """Return the layers of a model whose units are used in this order, output first.

    Units that are used side by side form one layer. A layer that does not learn counts together
    with the first one below it that does; below all that learn, it stays a layer of its own.
    """
    units = units_of(model)
    learning = set(trainable_names(model))
    layers: list[list[str]] = []
    frozen: list[list[str]] = []
    for side_by_side in order:
        layer = [name for unit in side_by_side for name in units[unit]]
        if learning.isdisjoint(layer):
            frozen.append(layer)
            continue
        layers.append([name for part in (*frozen, layer) for name in part])
        frozen = []
    return _collect(model, [*layers, *frozen])


def _collect(model: nn.Module, layers: Sequence[Sequence[str]]) -> Layers:
    """Return the layers with their names in the model's order, and every name in one of them.

    What is in no layer (tensors that are not used, buffers of modules without parameters) counts
    to the lowest: it lies below every cut.
    """
    names = _tensor_names(model)
    found = [tuple(name for name in names if name in set(layer)) for layer in layers if layer]
    rest = tuple(name for name in names if not any(name in layer for layer in found))
    if rest:
        found[-1:] = [(*(found[-1] if found else ()), *rest)]
    return tuple(found)


def list_registered_layers(model: nn.Module) -> Layers:
    """Return the layers as first versions counted them: each module, the last registered first."""
    if isinstance(model, HasLayers):
        return layers_of(model)
    owners = {name: _owner(name) for name in _tensor_names(model)}
    holders = [
        _owner(f"{name}.") if name else ""
        for name, module in reversed(list(model.named_modules()))
        if any(True for _ in module.parameters(False))
    ]
    return _collect(
        model,
        [[name for name in owners if owners[name] == holder] for holder in dict.fromkeys(holders)],
    )


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Name the parameters that learn; all of them if none is marked so."""
    parameters = dict(model.named_parameters())
    learning = tuple(name for name, value in parameters.items() if value.requires_grad)
    return learning or tuple(parameters)


def _tensor_names(model: nn.Module) -> list[str]:
    return [*dict(model.named_parameters()), *dict(model.named_buffers())]


def _is_below(name: str, prefixes: Iterable[str]) -> bool:
    return any(not prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
