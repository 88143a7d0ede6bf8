"""Nested dicts of tensors on disk: safetensors files, with a description in their header.

Nothing is pickled. A reader gets the tensors that were written, to the bit and in the same memory
layout, or an error that says what is wrong with the file.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from fedala.errors import UserError
from fedala.io import files
from fedala.io.untrusted import open_file


def save(
    path: Path, tree: Mapping[str, Any], about: Mapping[str, Any] | None = None, **options: bool
) -> str:
    """Write a tree of tensors and its description with `files.write_file`; return the SHA-256."""
    data = pack(tree, about)
    files.write_file(path, data, **options)
    return files.sha256(data)


def load(path: Path, digest: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the tree and the description that `save` wrote; check the file against `digest`."""
    data = files.read_verified(path, digest)
    with files.refuse_damage(path):
        return unpack(data)


def read_about(path: Path) -> dict[str, Any]:
    """Read the description alone, which is in the file's first bytes. It is not verified."""
    try:
        with open_file(path) as file, files.refuse_damage(path):
            size = int.from_bytes(file.read(8), "little")
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError("its header is longer than the file")
            about: dict[str, Any] = _read_header(file.read(size))["about"]
            return dict(about)
    except OSError as error:
        raise files.DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
    except UserError as error:  # it is gone, or not a regular file
        raise files.DamagedFile(str(error)) from None


def _read_header(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(json.loads(data)["__metadata__"]["fedala"])
    return header


def pack(tree: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of a file that holds the tree and its description."""
    tensors: dict[str, Tensor] = {}
    orders: dict[str, list[int]] = {}
    shape = _flatten(tree, tensors, {})
    for name, tensor in tensors.items():
        # Channels last keeps another order in memory, and torch then adds up in another order.
        order = _memory_order(tensor)
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            orders[name] = order
            tensor = tensor.permute(order)
        tensor = tensor.detach().cpu().contiguous()
        # The format has no views: a part of a larger tensor is copied out of it.
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        tensors[name] = tensor if is_whole else tensor.clone()
    header: dict[str, Any] = {
        "version": files.VERSION,
        "about": dict(about or {}),
        "tree": shape,
        "orders": orders,
    }
    header["digest"] = _digest(header, tensors)
    data: bytes = serialize(tensors, {"fedala": json.dumps(header)})
    return data


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree and the description that `pack` was given."""
    size = int.from_bytes(data[:8], "little")
    header = _read_header(data[8 : 8 + size])
    if header["version"] != files.VERSION:
        raise ValueError(
            f"it is of version {header['version']}, and this program reads version {files.VERSION}"
        )
    tensors = deserialize(data)
    if header.pop("digest") != _digest(header, tensors):
        raise ValueError("its content does not match its checksum")
    for name, order in header["orders"].items():
        tensor = tensors[name]
        inverse = sorted(range(tensor.dim()), key=order.__getitem__)
        tensors[name] = tensor.permute(inverse)
    return _rebuild(header["tree"], tensors), header["about"]


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of the header and all numbers: a flipped bit would still be a number."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions in the order of memory, the largest stride first."""

    def key(dimension: int) -> tuple[int, int]:
        has_steps = tensor.shape[dimension] > 1
        return -tensor.stride(dimension) if has_steps else 0, dimension

    return sorted(range(tensor.dim()), key=key)


def _flatten(
    tree: Mapping[str, Any], tensors: dict[str, Tensor], numbers: dict[Any, str]
) -> dict[str, Any]:
    """Collect the tensors and return the tree with a number for each: names may hold any character.

    A tensor with several names is stored once.
    """
    shape: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            shape[key] = _flatten(value, tensors, numbers)
        elif isinstance(value, torch.Tensor):
            identity: Any = id(value)
            if value.numel():
                identity = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if identity not in numbers:
                numbers[identity] = str(len(tensors))
                tensors[numbers[identity]] = value
            shape[key] = numbers[identity]
        else:
            raise TypeError(
                f"{key} cannot be saved: it must be a tensor or a dict of tensors, "
                f"not {type(value).__name__}"
            )
    return shape


def _rebuild(shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        key: _rebuild(value, tensors) if isinstance(value, dict) else tensors[value]
        for key, value in shape.items()
    }
