"""Files that are whole or not there: written under another name, flushed to disk, renamed.

Trees of tensors are safetensors files with what they are about in their header; nothing is pickled. Whoever reads one
gets what was written, to the bit and in the same memory layout, or a sentence that says what is wrong with it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from fedala.errors import UserError
from fedala.io.untrusted import check_room, regular
from fedala.io.untrusted import read as read_bounded

#: The version of the format. A file of another one is refused, not guessed at.
VERSION = 1


class Damaged(UserError):
    """A file that is not what was once written."""


def replace(path: Path, data: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Puts `data` at `path` in one step: whatever fails, and whoever looks, there is the old file or the new one.

    With `private`, the file is for its owner's eyes only; without `durable`, it need not outlive the machine.
    """
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # what a fault left, or a link that somebody laid
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
    )
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                flush(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        flush_folder(path.parent)


def flush(descriptor: int) -> None:
    """Waits until a file is on the disk."""
    os.fsync(descriptor)


def flush_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where the system knows how to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def lock(path: Path, busy: str) -> Iterator[None]:
    """Holds a lock, which ends with the process at the latest; `busy` is the sentence for whoever comes second."""
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise UserError(busy) from None


# --- values behind a checksum --------------------------------------------------------------------------------------


def pack_json(name: str, values: Mapping[str, Any]) -> bytes:
    """Write values as JSON under `name`, beside the checksum of their text."""
    text = json.dumps(values)
    return json.dumps({"checksum": sha256(text.encode()), name: text}, indent=1).encode()


def read_json(path: Path, name: str, most: int) -> dict[str, Any]:
    """Read what `pack_json` wrote, from a file of at most so many bytes. A missing file is a FileNotFoundError."""
    try:
        data = read_bounded(path, most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}.") from None
    except UserError as error:
        raise Damaged(str(error)) from None
    with damage(path):
        envelope = json.loads(data)
        text = envelope[name]
        if sha256(text.encode()) != envelope["checksum"]:
            raise ValueError("its checksum is wrong")
        values: dict[str, Any] = json.loads(text)
        return values


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn whatever unexpected content raises into `Damaged`."""
    try:
        yield
    except UserError:
        raise
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise Damaged(f"{path} is damaged, or was not written by this program: {error}.") from None


# --- trees of tensors ----------------------------------------------------------------------------------------------


def save(
    path: Path, tree: Mapping[str, Any], about: Mapping[str, Any] | None = None, **options: bool
) -> str:
    """Writes nested dicts of tensors, and some words about them, as `replace` does. Returns the file's digest."""
    data = pack(tree, about)
    replace(path, data, **options)
    return sha256(data)


def load(path: Path, digest: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree and the words that `save` wrote; with a `digest`, this very file and no other."""
    data = read(path, digest)
    with damage(path):
        return unpack(data)


def read(path: Path, digest: str | None = None) -> bytes:
    """The content of a file that `save` wrote; with a `digest`, of this very file and no other."""
    try:
        check_room(regular(path).stat().st_size, str(path))
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}.") from None
    except UserError as error:
        raise Damaged(str(error)) from None
    if digest is not None and sha256(data) != digest:
        raise Damaged(
            f"{path} is damaged: its checksum is not the one that was noted when it was written."
        )
    return data


def pack(tree: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of a file that holds the tree."""
    tensors: dict[str, Tensor] = {}
    orders: dict[str, list[int]] = {}
    shape = _flatten(tree, tensors, {})
    for name, tensor in tensors.items():
        # In memory, dimensions may stand in another order (channels last); torch then computes in another order, too.
        order = [
            d
            for _, d in sorted(
                (-s if n > 1 else 0, d) for d, (s, n) in enumerate(_dimensions(tensor))
            )
        ]
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            orders[name] = order
            tensor = tensor.permute(order)
        tensor = tensor.detach().cpu().contiguous()
        # A part of something larger is taken out of it: the format has no views.
        tensors[name] = (
            tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
        )
    words: dict[str, Any] = {
        "version": VERSION,
        "about": dict(about or {}),
        "tree": shape,
        "orders": orders,
    }
    words["digest"] = _digest(words, tensors)
    data: bytes = serialize(tensors, {"fedala": json.dumps(words)})
    return data


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree and the words of `pack`."""
    size = int.from_bytes(data[:8], "little")
    words = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fedala"])
    if words["version"] != VERSION:
        raise ValueError(
            f"it is of version {words['version']}, and this program reads version {VERSION}"
        )
    tensors = deserialize(data)
    if words.pop("digest") != _digest(words, tensors):
        raise ValueError("its content does not have the checksum that it was written with")
    for name, order in words["orders"].items():
        tensor = tensors[name]
        back = sorted(range(tensor.dim()), key=order.__getitem__)
        tensors[name] = tensor.permute(back)
    return _rebuild(words["tree"], tensors), words["about"]


def _digest(words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of everything that a file says: a flipped bit would still be a number."""
    digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _dimensions(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Each dimension's stride and length."""
    return zip(tensor.stride(), tensor.shape, strict=True)


def _flatten(
    tree: Mapping[str, Any], tensors: dict[str, Tensor], known: dict[Any, str]
) -> dict[str, Any]:
    """The tree's shape, with each leaf's number in its place: names of parameters may hold any character.

    What is one tensor under several names is kept once.
    """
    shape: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            shape[key] = _flatten(value, tensors, known)
        elif isinstance(value, torch.Tensor):
            same = (
                (value.data_ptr(), value.dtype, value.shape, value.stride())
                if value.numel()
                else id(value)
            )
            if same not in known:
                known[same] = str(len(tensors))
                tensors[known[same]] = value
            shape[key] = known[same]
        else:
            raise TypeError(
                f"{key} is no tensor and no dict of tensors, so it cannot be kept: {type(value).__name__}"
            )
    return shape


def _rebuild(shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        key: _rebuild(value, tensors) if isinstance(value, dict) else tensors[value]
        for key, value in shape.items()
    }
