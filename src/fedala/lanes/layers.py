"""Layers counted from the output, and the computational cut below the upper p of them.

ALA, FedRep, FedPHP and evaluation ask two things of a model: which parameters form its upper
layers, and to compute in two halves: the features under the upper p layers, and the output from
such features. Our own models (`Layered`) can be cut anywhere. What counts as a layer of any other
module says `fedala.lanes.layer_units`. Only its last layer can be cut off, and only if a trial
shows that this changes nothing.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedala.errors import UserError
from fedala.lanes.layer_units import HasLayers, Layers, find_module, layers_of, trainable_names
from fedala.lanes.parameters import list_few
from fedala.lanes.trees import take
from fedala.options import suggest

State = Mapping[str, Tensor]


__all__ = [
    "Cut",
    "Layered",
    "call",
    "call_part",
    "find_last_layer",
    "layers_of",
    "split_patterns",
    "upper",
]


class Layered(HasLayers):
    """A model whose forward pass is a chain of stages, one per layer or block.

    It promises to take weights and activations in any memory layout, and to run under `vmap`: it
    uses `flatten` or `reshape`, not `view`. It uses its parameters as they are, in layers. It
    draws no random numbers.
    """

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return the computation of each layer, input first."""
        raise NotImplementedError

    def forward(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Run the stages `start` to `stop`; all of them by default."""
        for stage in self.stages()[start:stop]:
            x = stage(x)
        return x


def find_last_layer(model: nn.Module) -> str:
    """Name the module of the last layer."""
    return find_module(layers_of(model)[0])


def upper(
    model: nn.Module, layers: int | str | Sequence[str], shared: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return the parameters of the upper layers, or those that match a pattern, in model order.

    A number of layers takes those of their parameters that learn, a pattern all that match. A
    pattern is a regular expression that must match from the start of the name: `"fc"` takes
    `fc.weight` and `fc.bias`. A text has patterns separated by commas. If only some parameters are
    `shared`, layers count among those that have one of them, and nothing else is returned.
    """
    parameters = [name for name, _ in model.named_parameters()]
    if isinstance(layers, int):
        learning = set(trainable_names(model))
        every = layers_of(model)
        if shared is not None:
            learning.intersection_update(shared)
            every = tuple(layer for layer in every if learning.intersection(layer))
        if not 0 <= layers <= len(every):
            owner = "this model's layers" if shared is None else "layers that learn and are shared"
            raise UserError(
                f"layers must be between 0 and {len(every)}, the number of {owner}, not {layers}."
            )
        chosen = {name for layer in every[:layers] for name in layer}
        chosen.intersection_update(learning)
    else:
        chosen = set()
        for pattern in split_patterns(layers) if isinstance(layers, str) else layers:
            chosen |= _match(pattern, parameters)
        if shared is not None and not chosen <= set(shared):
            unshared = [name for name in parameters if name in chosen and name not in shared]
            raise UserError(
                f"ALA blends only what is shared, and layers takes {list_few(unshared)}, which is "
                f"not: choose among {list_few([n for n in parameters if n in shared])}."
            )
    return tuple(name for name in parameters if name in chosen)


def split_patterns(text: str) -> list[str]:
    """Return the patterns of a text, which commas separate."""
    patterns = [pattern.strip() for pattern in text.split(",")]
    if not all(patterns):
        raise UserError(
            "layers must be a number of layers, or patterns of parameters' names, separated by "
            f"commas, such as fc2,conv1; not {text!r}."
        )
    return patterns


def _match(pattern: str, parameters: Sequence[str]) -> set[str]:
    """Return the parameters that a pattern matches, at least one."""
    try:
        matches = {name for name in parameters if re.match(pattern, name)}
    except (re.error, TypeError) as error:
        raise UserError(
            f"{pattern!r} is not a pattern for the names of parameters: {error}."
        ) from error
    if not matches:
        raise UserError(
            f"No parameter matches the pattern {pattern!r}{_suggest_names(pattern, parameters)}."
        )
    return matches


def _suggest_names(pattern: str, parameters: Sequence[str]) -> str:
    """Return the end of a sentence: the modules or parameters that the pattern may have meant."""
    prefixes: dict[str, None] = {}
    for name in parameters:
        parts = name.split(".")
        prefixes |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    inside = [name for name in prefixes if pattern in name.rpartition(".")[2]]
    if inside:
        return f", which must match from the start of a name (did you mean {list_few(inside)}?)"
    tops = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
    close = difflib.get_close_matches(pattern, prefixes, n=1)
    return suggest(pattern, prefixes) if close else f"; the model has {list_few(tops)}"


def divide_layers(title: str, layers: Layers, count: int) -> tuple[list[str], list[str]]:
    """Return the names of the upper `count` layers, and those of all below.

    Refuse a model that has no layers below.
    """
    if len(layers) <= count:
        raise UserError(
            f"{title} needs a model of at least {count + 1} layers: it is divided below layer "
            f"{count}, counted from the output, and this one has {len(layers)}."
        )
    above, below = layers[:count], layers[count:]
    return [name for layer in above for name in layer], [name for layer in below for name in layer]


def call(model: nn.Module, state: State, x: Any, **kwargs: Any) -> Any:
    """Return the model's output with the given parameters and buffers.

    A tuple is passed as arguments, a dict as keywords.
    """
    if isinstance(x, tuple | list):
        return functional_call(model, dict(state), tuple(x), kwargs)
    if isinstance(x, Mapping):
        return functional_call(model, dict(state), (), {**x, **kwargs})
    return functional_call(model, dict(state), (x,), kwargs)


def call_part(model: nn.Module, path: str, state: State, *args: Any) -> Any:
    """Return the output of the sub-module at `path`, with its part of the model's state."""
    prefix = f"{path}."
    part = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    return functional_call(model.get_submodule(path), part, args)


class Cut:
    """A model in two halves: `upper` is the last p layers, `lower` all below.

    If the model cannot be cut, `lower` does nothing.
    """

    def __init__(self, model: nn.Module, p: int, probe: tuple[State, Any] | None = None) -> None:
        """`probe` is a state and two samples for the trial of a module that is not `Layered`."""
        layers = layers_of(model)
        self.model = model
        self.p = p
        self.depth = len(layers)
        self._last = find_module(layers[0]) if layers else ""
        if not isinstance(model, Layered) and 0 < p < self.depth:
            possible = (
                p == 1
                and probe is not None
                and self._owns(layers[0])
                and self._comes_last(layers[0], *probe)
            )
            self.p = 1 if possible else self.depth

    def __eq__(self, other: object) -> bool:
        """Tell whether it is the same cut through the same model: captured steps then fit both."""
        return isinstance(other, Cut) and self.model is other.model and self.p == other.p

    def __hash__(self) -> int:
        return hash((self.model, self.p))

    @property
    def cuts(self) -> bool:
        """Tell whether there is anything to compute below the cut."""
        return self.p < self.depth

    def lower(self, state: State, x: Any) -> Any:
        if self.p == self.depth:
            return x
        if isinstance(self.model, Layered):
            return call(self.model, state, x, stop=self.depth - self.p)
        if self.p == 0:
            return call(self.model, state, x)
        return self._features(state, x)

    def upper(self, state: State, features: Any) -> Any:
        if self.p == 0:
            return features
        if isinstance(self.model, Layered):
            return call(self.model, state, features, start=self.depth - self.p)
        if self.p == self.depth:
            return call(self.model, state, features)
        return call_part(self.model, self._last, state, features)

    # --- the last layer of a module that is not ours -------------------------------------------

    def _features(self, state: State, x: Any) -> Tensor | None:
        """Return the input of the last layer; None if its output is not the model's output."""
        calls: list[list[tuple[Any, int | None]]] = []

        def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(
                [
                    (value, getattr(value, "_version", None))
                    for value in (*args, *kwargs.items(), output)
                ]
            )

        handle = self.model.get_submodule(self._last).register_forward_hook(catch, with_kwargs=True)
        try:
            result = call(self.model, state, x)
        finally:
            handle.remove()
        match calls:
            case [[(Tensor() as features, before), (Tensor() as output, after)]] if (
                output is result
            ):
                # A tensor changed in place is still the same object; its version tells.
                return features if (features._version, output._version) == (before, after) else None
        return None

    def _owns(self, names: tuple[str, ...]) -> bool:
        """Tell whether the last module holds just these tensors, and shares none with another."""
        model, prefix = self.model, f"{self._last}."
        held = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        own = {name: id(value) for name, value in held if name.startswith(prefix)}
        others = {id(value) for name, value in held if name not in own}
        return set(own) == set(names) and others.isdisjoint(own.values())

    def _comes_last(self, names: tuple[str, ...], state: State, x: Any) -> bool:
        """Tell whether the features are rows, one per sample, that do not depend on the last layer.

        Only its parameters are followed: its buffers do not change while weights are learned.
        """
        parameters = {name for name, _ in self.model.named_parameters()}
        free = {name: value.detach() for name, value in state.items()}
        for name in parameters.intersection(names):
            free[name].requires_grad_(free[name].is_floating_point())
        try:
            with torch.enable_grad():
                two, three = (self._features(free, take(x, rows)) for rows in ([0, 1], [0, 1, 0]))
        except Exception:  # it may want batches of another size: then it runs whole
            return False
        if two is None or three is None or two.requires_grad:
            return False
        if len({two.shape[1:], three.shape[1:]}) > 1 or (two.shape[:1], three.shape[:1]) != (
            (2,),
            (3,),
        ):
            return False
        return bool(
            torch.dist(two.float(), three[:2].float()) <= 0.01 * two.float().norm()
        )  # equal apart from rounding
