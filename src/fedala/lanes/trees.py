"""Nested dicts, tuples and lists of tensors: a client's state, a model's inputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def tree_map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The same tree with `f` of each leaf (and of the leaves at the same place in `others`)."""
    if isinstance(tree, dict):
        return {
            key: tree_map(f, value, *(other[key] for other in others))
            for key, value in tree.items()
        }
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(f, *leaves) for leaves in zip(tree, *others, strict=True))
    return f(tree, *others)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every leaf with its path: `{"local": {"fc.bias": t}}` gives `("local/fc.bias", t)`."""
    if isinstance(tree, dict | tuple | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{prefix}/{key}" if prefix else str(key))
    else:
        yield prefix, tree


def join(trees: Sequence[Any]) -> Any:
    """Trees of lanes, one after the other."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), *trees)


def take(tree: Any, lanes: Any) -> Any:
    """Some of the lanes. A slice gives views; a list or a tensor of lanes gives copies."""
    return tree_map(lambda leaf: leaf[lanes], tree)


def fits(tree: Any, template: Any) -> bool:
    """Whether the tree has all that the template has, of the same type and shape."""
    if isinstance(template, dict):
        return isinstance(tree, dict) and all(
            key in tree and fits(tree[key], template[key]) for key in template
        )
    return (
        isinstance(tree, Tensor) and tree.dtype == template.dtype and tree.shape == template.shape
    )


def count(tree: Any) -> int:
    """How many numbers stand in a tree."""
    return sum(leaf.numel() for _, leaf in leaves(tree))
