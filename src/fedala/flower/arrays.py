"""Messages in Flower's `ArrayRecord`.

A record holds the tensors of one lane of a message, without the lane. A model keeps its parameter
names, as in any Flower app. Extra tensors come under `EXTRA` and their keys, joined by "/".

The server trusts nothing that a client sends. It compares the declared names, types and shapes
with a template before it decodes a byte. Error messages quote names that the client chose, so they
go through `messages.clean_text` before they are printed.
"""

import math
import warnings
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Message, Params

Tree = dict[str, Any]
"""Nested dicts of tensors."""

#: What the names of extra tensors begin with.
EXTRA = "+extra/"
#: Levels of dicts that a tree may have.
MAX_DEPTH = 8
#: Bytes of an .npy header. Those of numpy itself have 128.
MAX_HEADER_SIZE = 4096
#: The largest value of a counter: beyond it, a float64 does not hold every whole number.
MAX_COUNT = 2**53
#: The serialisation that an Array declares for the bytes of `numpy.save`.
NUMPY = "numpy.ndarray"


def pack_message(message: Message) -> ArrayRecord:
    """Pack a message of one lane."""
    flat = flatten_message(message)
    return ArrayRecord({path: leaf[0].contiguous() for path, leaf in flat.items()})


def unpack_trusted_message(record: ArrayRecord, device: torch.device) -> Message:
    """Unpack a message of the server, as one lane. Its names alone tell its structure."""
    leaves = record.to_torch_state_dict()
    return nest_message({path: leaf.to(device).unsqueeze(0) for path, leaf in leaves.items()})


def unpack_message(record: ArrayRecord, template: Message) -> Message:
    """Unpack a message of a client, as one lane.

    It must have the names, types and shapes of `template`, and finite numbers. A whole number that
    is not negative in the template is a counter, and must be one here.
    """
    expected = flatten_message(template)
    if record.keys() != expected.keys():
        name = min(record.keys() ^ expected.keys())
        problem = "missing" if name in expected else "not a part of the model"
        raise UserError(f"{name} is {problem}")
    # A header that makes numpy warn is not one that numpy wrote.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leaves = [_decode(path, record[path], leaf) for path, leaf in expected.items()]
    for (path, wanted), leaf in zip(expected.items(), leaves, strict=True):
        _check_values(path, leaf, wanted)
    return nest_message(dict(zip(expected, leaves, strict=True)))


def check_distance(upload: Params, sent: Params, max_norm: float) -> None:
    """Refuse a model that is further than `max_norm` (L2) from the model that was sent."""
    moves = [
        (leaf - sent[name]).double().square().sum()
        for name, leaf in upload.items()
        if leaf.is_floating_point()
    ]
    norm = float(torch.stack(moves).sum().sqrt()) if moves else 0.0
    if norm > max_norm:
        raise UserError(
            f"it is {norm:.3g} away from the model that was sent, but max_norm is {max_norm:g}"
        )


def flatten_message(message: Message) -> dict[str, Tensor]:
    """Return the tensors of a message by their names in a record."""
    for name in message.model:
        if name.startswith(EXTRA):
            raise UserError(
                f"{EXTRA} marks extra tensors in messages: the parameter {name} must have "
                "another name."
            )
    extra = flatten_tree(message.extra)
    return {**message.model, **{f"{EXTRA}{path}": leaf for path, leaf in extra.items()}}


def nest_message(flat: Mapping[str, Tensor]) -> Message:
    """Rebuild a message from its tensors by name."""
    extra = {n.removeprefix(EXTRA): leaf for n, leaf in flat.items() if n.startswith(EXTRA)}
    model = {name: leaf for name, leaf in flat.items() if not name.startswith(EXTRA)}
    return Message(model, nest_leaves(extra))


def flatten_tree(tree: Mapping[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Tensor]:
    """Return the leaves of a tree by path. Refuse keys that would make two paths equal."""
    if depth > MAX_DEPTH:
        raise UserError(f"A tree of tensors has more than {MAX_DEPTH} levels.")
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if not key or "/" in key:
            raise UserError(
                f"The name {key!r} of an extra tensor is empty or contains '/', which separates "
                "names in messages."
            )
        if isinstance(value, dict):
            flat |= flatten_tree(value, f"{prefix}{key}/", depth + 1)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest_leaves(leaves: Mapping[str, Tensor]) -> Tree:
    """Rebuild the tree from its leaves by path. Empty dicts are lost."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        if len(parents) >= MAX_DEPTH or not name or not all(parents):
            raise UserError(f"{path} is not a path of 1 to {MAX_DEPTH} names")
        branch: Any = tree
        for key in parents:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise UserError(f"{path} lies below {key}, which is a tensor")
        if name in branch:
            raise UserError(f"{path} is both a tensor and a branch")
        branch[name] = leaf
    return tree


def _decode(path: str, array: Array, wanted: Tensor) -> Tensor:
    """Decode one array as one lane. Allocate memory only for the expected size."""
    kind, shape = np.dtype(str(wanted.dtype).removeprefix("torch.")), tuple(wanted.shape[1:])
    if (array.dtype, array.shape) != (str(kind), shape):
        raise UserError(
            f"{path} is {array.dtype} {list(array.shape[:9])}, but should be {kind} {list(shape)}"
        )
    if array.stype != NUMPY:
        raise UserError(f"{path} is serialised as {array.stype}, but should be as {NUMPY}")
    size = kind.itemsize * math.prod(shape)
    if not size <= len(array.data) <= size + MAX_HEADER_SIZE:
        raise UserError(f"{path} has {len(array.data)} bytes, but should have {size} and a header")
    file = BytesIO(array.data)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    if version not in readers:
        raise UserError(
            f"{path} is in version {version} of numpy's format, but should be in version (1, 0)"
        )
    if readers[version](file) != (shape, False, kind) or len(array.data) - file.tell() != size:
        raise UserError(f"{path} does not hold the {kind} {list(shape)} that it declares")
    content = np.frombuffer(array.data, np.uint8, size, file.tell()).copy()
    if kind == np.bool_ and (content > 1).any():
        raise UserError(f"{path} holds truth values that are neither true nor false")
    return torch.from_numpy(content.view(kind).reshape(shape)).to(wanted.device).unsqueeze(0)


def _check_values(path: str, leaf: Tensor, wanted: Tensor) -> None:
    if leaf.is_floating_point():
        if not bool(leaf.isfinite().all()):
            raise UserError(f"{path} is not finite")
    elif bool((wanted >= 0).all()):
        counts = leaf.long()  # in a narrower type, the bound would overflow
        if bool(((counts < 0) | (counts > MAX_COUNT)).any()):
            raise UserError(f"{path} is a counter, but is below 0 or above 2**53")
