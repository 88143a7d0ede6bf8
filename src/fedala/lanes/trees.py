"""Nested dicts, tuples and lists of tensors: a client's state, a model's inputs, a message."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""A model's parameters and buffers by name, [lane, …]."""
Number = float | Tensor
"""One number for all lanes, or one for each, [lane]."""
State = dict[str, Any]
"""What a client or a server keeps between rounds: nested dicts of tensors, [lane, …]."""


def tree_map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `f` to each leaf, and to the leaves at the same position in `others`."""
    if isinstance(tree, dict):
        mapped = {
            key: tree_map(f, value, *(other[key] for other in others))
            for key, value in tree.items()
        }
        # An output object that is a dict keeps its type: it may have attributes.
        return mapped if type(tree) in (dict, OrderedDict) else type(tree)(**mapped)
    if isinstance(tree, tuple | list):
        values = [tree_map(f, *leaves) for leaves in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return f(tree, *others)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every leaf with its path: `{"local": {"fc.bias": t}}` gives `("local/fc.bias", t)`."""
    if isinstance(tree, dict | tuple | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            path = f"{prefix}/{key}" if prefix else str(key)
            if isinstance(value, dict | tuple | list):
                yield from leaves(value, path)
            else:  # a generator for each leaf would cost more than the rest
                yield path, value
    else:
        yield prefix, tree


def first_leaf(tree: Any) -> Tensor | None:
    """Return the first leaf of a tree; None if it has no leaf."""
    return next((leaf for _, leaf in leaves(tree)), None)


def count_lanes(tree: Any) -> int:
    """Return the number of lanes of a tree; 0 if it has no leaf."""
    leaf = first_leaf(tree)
    return 0 if leaf is None else len(leaf)


def count_bytes(tree: Any) -> int:
    """Return how many bytes the tensors of a tree take."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def join(trees: Sequence[Any]) -> Any:
    """Join trees of lanes, one after the other."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), *trees)


def take(tree: Any, lanes: Any) -> Any:
    """Take some of the lanes. A slice gives views; a list or a tensor of lanes gives copies.

    A number that is not a tensor stays the number of all lanes.
    """
    return tree_map(lambda leaf: leaf[lanes] if isinstance(leaf, Tensor) else leaf, tree)


def share(tree: Any, lanes: int) -> Any:
    """Give one lane to `lanes` lanes, without a copy."""
    return tree_map(lambda leaf: leaf.expand(lanes, *leaf.shape[1:]), tree)


def replace_models(stack: Params, places: Sequence[int], models: Params) -> Params:
    """Return a stack of models, [1, place, …], with other models, [i, …], at the places[i]."""
    index = torch.tensor(places, device=next(iter(stack.values())).device)
    return {name: v.index_copy(1, index, models[name].unsqueeze(0)) for name, v in stack.items()}


def is_shared(leaf: Tensor) -> bool:
    """Tell whether all lanes of a tensor are the same memory, as `share` makes it."""
    return len(leaf) == 1 or leaf.stride(0) == 0


def matches(tree: Any, template: Any) -> bool:
    """Tell whether the tree has all that the template has, of the same type and shape."""
    if isinstance(template, dict):
        return isinstance(tree, dict) and all(
            key in tree and matches(tree[key], template[key]) for key in template
        )
    return (
        isinstance(tree, Tensor) and tree.dtype == template.dtype and tree.shape == template.shape
    )


def broadcast_lanes(numbers: Tensor, like: Tensor) -> Tensor:
    """Shape one number per lane so that it broadcasts to `like`, [lane, …]."""
    return numbers.view(-1, *[1] * (like.ndim - 1))


def align(number: Number, target: Tensor) -> Any:
    """Return a number in the form in which it multiplies each lane of `target`, [lane, …]."""
    if isinstance(number, Tensor):
        return broadcast_lanes(number, target).to(target.dtype)
    return number


def interpolate(a: Params, b: Params, share: Number) -> Params:
    """Return a + share·(b − a) of all floating-point tensors in b. Counters are left out."""
    return {
        name: torch.lerp(a[name], value, align(share, value))
        for name, value in b.items()
        if value.is_floating_point()
    }


def flatten_lanes(value: Tensor) -> Tensor:
    """Return [lane, number]: a parameter may be a single number, [lane]."""
    return value.reshape(len(value), -1)


def are_finite(values: Iterable[Tensor]) -> Tensor:
    """Tell for each lane whether all numbers of some tensors, [lane, …], are finite.

    The largest and the smallest number tell it: they are NaN if any number is. To find them writes
    nothing to memory, and a large table takes a tenth of the time that `isfinite` takes.
    """
    extremes = []
    for value in map(flatten_lanes, values):
        is_empty = not value.numel()
        extremes += [value.sum(1)] if is_empty else [value.amax(1), value.amin(1)]
    return torch.stack([extreme.isfinite() for extreme in extremes]).all(0)


def squared_distances(a: Params, b: Params) -> Tensor:
    """Return ‖a_i − b_j‖² of all pairs of models, [i, j].

    It is the sum of squared differences: a Gram matrix in float32 would lose near pairs. Few
    columns at a time fit into a cache, and do not add up many rounding errors.
    """
    some = next(iter(a.values()))
    total = some.new_zeros(count_lanes(a), count_lanes(b), dtype=torch.float64)
    for name, value in a.items():
        columns = (torch.split(flatten_lanes(v), 4096, 1) for v in (value, b[name]))
        for x, y in zip(*columns, strict=True):
            distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
            total += distances.double().square()
    return total
