"""What a model may return: a tensor of scores, or an object, a dict or a tuple that holds one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def scores_of(output: Any) -> Any:
    """Return the scores of an output: itself, its `logits`, or the first of a tuple.

    An output that has none of these is returned as it is, for the loss to refuse.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output


def keep_tensors(output: Any) -> Any:
    """Leave out the entries of a dict that are no tensors, such as a language model's cache."""
    if not isinstance(output, dict):
        return output
    kept = {name: value for name, value in output.items() if _holds_tensors(value)}
    return kept if type(output) is dict else type(output)(**kept)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_holds_tensors, value))
    return isinstance(value, Tensor)
