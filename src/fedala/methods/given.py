"""Refuse a method's function that changes what it was given, in a sentence.

What a function gets belongs to others, too: clients share what they received, a client whose
training fails keeps the state that it had, and the models that were tested are saved later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedala.errors import MethodError
from fedala.lanes import Message
from fedala.lanes.parameters import list_few
from fedala.lanes.trees import leaves
from fedala.methods.base import Method
from fedala.methods.wrapper import is_own, unwrap


@contextmanager
def forbid_changes(method: Method, function: str, **given: Any) -> Iterator[None]:
    """Refuse a user's function that changes a tensor or a dict among the trees it was given.

    Torch counts how often a tensor has been written to, so the device has nothing to do.
    """
    if not is_own(method):  # a test does it; and a model may write to its buffers when it runs
        yield
        return
    trees = {name: _name_parts(tree) for name, tree in given.items()}
    before = {path: (leaf, _count_writes(leaf)) for path, leaf in leaves(trees)}
    yield
    after = dict(leaves(trees))
    changed = [
        path
        for path, (leaf, writes) in before.items()
        if after.pop(path, None) is not leaf or _count_writes(leaf) != writes
    ]
    if changed := [*changed, *after]:  # what is left has been added
        raise MethodError(
            f"{unwrap(method).title}: {function} changes {list_few(changed)}, and must leave what "
            "it was given as it is. Make a new tensor (0.9 * m + g, and not m.mul_(0.9).add_(g)), "
            "in a new dict."
        )


def _name_parts(tree: Any) -> Any:
    """Return the parts of messages under their names."""
    if isinstance(tree, Message):
        return tree._asdict()
    return [_name_parts(one) for one in tree] if isinstance(tree, list) else tree


def _count_writes(leaf: Any) -> int:
    """Return how often a tensor has been written to, as far as torch knows."""
    is_counted = isinstance(leaf, Tensor) and not leaf.is_inference()
    return leaf._version if is_counted else 0
