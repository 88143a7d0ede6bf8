"""Nested dicts of tensors on disk: safetensors files, with a description in their header.

Nothing is pickled. A reader gets the tensors that were written, to the bit and in the same memory
layout, or an error that says what is wrong with the file.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from safetensors.torch import save_file
from torch import Tensor

from fedala.errors import UserError
from fedala.io import files
from fedala.io.child_processes import count_cores
from fedala.io.untrusted import open_file

#: Bytes of a tensor under one checksum.
_BLOCK = 2**24
#: The types of tensors that can be mapped, as the format calls them.
_MAPPABLE = {"U8": torch.uint8, "I32": torch.int32}


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


def save_mappable(path: Path, tensor: Tensor, about: Mapping[str, Any]) -> None:
    """Write one tensor for `map_tensor`, without a copy of it, under another name until complete.

    Only one process may write to `path` at a time.
    """
    header: dict[str, Any] = {"version": files.VERSION, "about": dict(about)}
    header["digest"] = _digest_blocks(header, tensor)
    temporary = path.with_name(f".{path.name}.new")
    try:
        save_file({"0": tensor}, temporary, {"fedala": json.dumps(header)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def map_tensor(path: Path) -> tuple[Tensor, dict[str, Any]]:
    """Return the tensor of `save_mappable`, in the memory of the file, and its description.

    Both are verified. What is written to the tensor does not reach the file.
    """
    with open_file(path) as file, files.refuse_damage(path):
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(data[:8], "little")
        header, form = _read_header(data[8:start]), json.loads(data[8:start])["0"]
        tensor = torch.frombuffer(data, dtype=_MAPPABLE[form["dtype"]], offset=start)
        tensor = tensor.reshape(form["shape"])
        if header["version"] != files.VERSION:
            raise ValueError(f"it is of version {header['version']}")
        if header.pop("digest") != _digest_blocks(header, tensor):
            raise ValueError("its content does not match its checksum")
        return tensor, dict(header["about"])


def _digest_blocks(header: Mapping[str, Any], tensor: Tensor) -> str:
    """Return a checksum of the header and of blocks of the tensor, which cores share."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    blocks = [data[first : first + _BLOCK] for first in range(0, len(data), _BLOCK)]
    shape = [str(tensor.dtype), list(tensor.shape)]
    with ThreadPoolExecutor(count_cores()) as pool:
        digests = list(pool.map(lambda block: hashlib.sha256(block).hexdigest(), blocks))
    return files.sha256(json.dumps([header, shape, digests], sort_keys=True).encode())


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
