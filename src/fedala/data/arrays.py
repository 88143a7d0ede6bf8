"""Archives of arrays: .npz files.

A header declares how much data follows. Before memory is taken, it is checked against the length of
the file. Pickles are never loaded.
"""

import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.data.columns import CLIENTS, PART_WORDS, MissingColumn, describe_clients
from fedala.data.dataset import RawData, encode_labels
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_expansion, check_memory, open_file

Array = np.ndarray[Any, Any]

#: The most bytes that one byte of deflate can unpack to.
DEFLATE = 1032
_CHUNK = 2**22  # bytes that are unpacked at a time
#: Tokens are numbers of rows of an embedding; a larger one would take more memory than there is.
MOST_TOKENS = 2**30
_SPELLINGS = (("x", "y"), ("images", "labels"), ("data", "labels"))
_PARTS = (("{}",), ("{}_train", "{}_val", "{}_test"), ("train_{}", "val_{}", "test_{}"))


def read_npz(path: Path, clients_by: str | None = None) -> RawData:
    """Read arrays x and y (or images and labels), or merge their train, val and test parts.

    An array `client`, or the one that `clients_by` names, says whose sample it is. It may have
    parts, as in `client_train`.

    All headers are checked first. Then every part is unpacked piece by piece into the result, so
    this takes no more memory than the result.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            parts, found = _find_pairs(names, path)
            pairs = [
                (_read_header(archive, x, path), _read_header(archive, y, path)) for x, y in found
            ]
            layout = _check_headers(pairs, path)
            key, keys = _find_owners(names, parts, path, clients_by)
            owners = [_read_header(archive, name, path) for name in keys]
            members = [member for pair in pairs for member in pair]
            stored = sum(min(member.info.compress_size, path.stat().st_size) for member in members)
            advice = "if that is right, save it with np.savez, which does not compress"
            check_expansion(sum(member.size for member in members), stored, str(path), advice)
            sizes = [x.shape[0] for x, _ in pairs]
            _check_owners(owners, sizes, key, path)
            shape = (sum(sizes), *layout.shape)
            needed = _needed_memory(shape, layout, members) + 3 * sum(own.size for own in owners)
            check_memory(needed, str(path))
            x = np.empty(shape, layout.dtype)
            for first, (member, _) in zip(np.cumsum([0, *sizes]), pairs, strict=False):
                _unpack(archive, member, x[first : first + member.shape[0]], layout.arrange)
            labels = [_read_array(archive, member) for _, member in pairs]
            y, class_names = _convert_all_targets(labels, path)
            clients = _name_owners([_read_array(archive, member) for member in owners])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    raw = RawData(str(path), torch.from_numpy(x), y, class_names)
    if key is not None:
        raw = raw._replace(clients=clients, notes=(describe_clients(key, clients, "array"),))
    if parts != _PARTS[0]:
        split = [PART_WORDS[part.replace("{}", "").strip("_")] for part in parts]
        raw = raw._replace(split=np.repeat(np.array(split, dtype=np.uint8), sizes))
    return raw


def read_npz_inputs(path: Path) -> torch.Tensor:
    """Read the array x (or images, or data) of a file that may have no labels."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            keys = [x for x, _ in _SPELLINGS if x in names]
            if keys:
                member = _read_header(archive, keys[0], path)
                layout = choose_layout(member.shape, member.dtype, path)
                stored = min(member.info.compress_size, path.stat().st_size)
                advice = "if that is right, save it with np.savez, which does not compress"
                check_expansion(member.size, stored, str(path), advice)
                shape = (member.shape[0], *layout.shape)
                check_memory(_needed_memory(shape, layout, [member]), str(path))
                x = np.empty(shape, layout.dtype)
                _unpack(archive, member, x, layout.arrange)
                return torch.from_numpy(x)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    samples = read_npz(path).x  # those of its train and test parts
    assert isinstance(samples, torch.Tensor)
    return samples


def _find_pairs(names: list[str], path: Path) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Return the parts, as patterns of names, and the names of the samples and labels of each."""
    for x, y in _SPELLINGS:
        for patterns in _PARTS:
            parts = tuple(part for part in patterns if part.format(x) in names)
            pairs = [(part.format(x), part.format(y)) for part in parts]
            if pairs and all(label in names for _, label in pairs):
                return parts, pairs
    raise UserError(
        f"{path} holds {', '.join(names)[:200] or 'nothing'}; it must hold the arrays x and y, "
        "or x_train, y_train, x_test and y_test."
    )


def _find_owners(
    names: list[str], parts: tuple[str, ...], path: Path, wanted: str | None
) -> tuple[str | None, list[str]]:
    """Return what the arrays are called that name the clients, and their names by part."""
    for stem in (wanted,) if wanted else CLIENTS:
        keys = [part.format(stem) for part in parts]
        if set(keys) <= set(names):
            return stem, keys
        if wanted or not {stem, *keys}.isdisjoint(names):
            raise MissingColumn(
                f"{path} holds {', '.join(names)[:200]}; to name the clients, it needs "
                f"{' and '.join(keys)}, with a client for every sample.",
                "clients_by",
            )
    return None, []


def _check_owners(owners: list["Member"], sizes: list[int], key: str | None, path: Path) -> None:
    for member, size in zip(owners, sizes, strict=False):
        if member.shape != (size,) or member.dtype.kind not in "iuUS":
            raise UserError(
                f"{path}: {key} is {member.dtype} of shape {member.shape}; it must name the client "
                f"of each of the {size} samples, by a whole number or a string."
            )


def _name_owners(owners: list[Array]) -> list[str]:
    """Return the name of each sample's client, one object for each name."""
    names: list[str] = []
    for part in owners:
        values, places = np.unique(part, return_inverse=True)
        texts = [v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist()]
        names += [texts[place] for place in places.tolist()]
    return names


class Member(NamedTuple):
    """The header of an array in an archive."""

    info: zipfile.ZipInfo
    start: int
    """Bytes before the numbers."""
    shape: tuple[int, ...]
    fortran: bool
    dtype: "np.dtype[Any]"

    @property
    def size(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The shape and type of a sample, and how a block of the file becomes a block of samples."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    arrange: Callable[[Array], Array]


def _read_header(archive: zipfile.ZipFile, key: str, path: Path) -> Member:
    """Read the header of an array, and check it against the length of the file."""
    info = archive.getinfo(f"{key}.npy")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        formats = np.lib.format
        is_first = version == (1, 0)
        read = formats.read_array_header_1_0 if is_first else formats.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise UserError(
                f"{path}: {key} is an array of pickled Python objects, which are never loaded; "
                "save it as numbers."
            )
        member = Member(info, file.tell(), shape, fortran, dtype)
    declared = member.start + member.size
    expansion = 1 if info.compress_type == zipfile.ZIP_STORED else DEFLATE
    possible = min(info.compress_size, path.stat().st_size) * expansion
    if declared != info.file_size or declared > possible or any(length < 0 for length in shape):
        raise UserError(
            f"{path}: {key} declares the shape {shape}, which does not match the file; "
            "save it again."
        )
    return member


def _check_headers(pairs: list[tuple[Member, Member]], path: Path) -> Layout:
    """Check that all parts have samples and labels that go together; return their layout."""
    if len({(x.shape[1:], x.dtype) for x, _ in pairs}) > 1:
        raise UserError(
            f"{path}: its train and test parts differ in the shape or type of a sample; "
            "they must agree."
        )
    for x, y in pairs:
        if not x.shape or x.shape[0] != (y.shape or (1,))[0]:
            raise UserError(
                f"{path} has x of shape {x.shape} but y of shape {y.shape}; "
                "they must have the same length."
            )
        _check_targets(y.shape, y.dtype, path)
    if len({y.dtype.kind == "U" for _, y in pairs}) > 1:
        raise UserError(f"{path}: y must hold strings in all of its parts, or in none.")
    if len({(y.dtype.kind == "f", y.shape[1:]) for _, y in pairs if not _are_labels(y)}) > 1:
        raise UserError(
            f"{path}: its train and test parts differ in the shape or type of a target; "
            "they must agree."
        )
    return choose_layout(pairs[0][0].shape, pairs[0][0].dtype, path)


def _needed_memory(shape: tuple[int, ...], layout: Layout, members: list[Member]) -> int:
    """Return the bytes for the samples, the labels, and the piece that is being unpacked."""
    targets = sum(math.prod(member.shape) for member in members[1::2])
    names = 3 * sum(member.size for member in members[1::2] if member.dtype.kind == "U")
    whole = max((member.size for member in members if member.fortran), default=0)
    row = max(member.size // max(1, member.shape[0]) for member in members if member.shape)
    pieces = 2 * max(_CHUNK, row, whole)
    return math.prod(shape) * layout.dtype.itemsize + 16 * targets + names + pieces


def _read_array(archive: zipfile.ZipFile, member: Member) -> Array:
    """Read a whole array."""
    with archive.open(member.info) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _unpack(
    archive: zipfile.ZipFile, member: Member, into: Array, arrange: Callable[[Array], Array]
) -> None:
    """Fill `into` with an array, some rows at a time, or at once if it is in Fortran's order."""
    # `Dataset` refuses values that float32 cannot hold.
    with np.errstate(over="ignore", invalid="ignore"):
        if member.fortran:
            into[...] = arrange(_read_array(archive, member))
            return
        row = member.size // max(1, member.shape[0])
        rows = max(1, _CHUNK // max(1, row))
        with archive.open(member.info) as file:
            file.read(member.start)
            for first in range(0, member.shape[0] if row else 0, rows):
                part = into[first : first + rows]
                block = np.frombuffer(file.read(len(part) * row), member.dtype)
                part[...] = arrange(block.reshape(len(part), *member.shape[1:]))


def choose_layout(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path | str) -> Layout:
    """Return the layout: uint8 of 3 or 4 dimensions are images N×C×H×W, floats become float32.

    Rows of other whole numbers are tokens, and become int32.
    """
    if dtype.kind == "f" or (dtype == np.uint8 and len(shape) == 2):
        return Layout(shape[1:], np.dtype(np.float32), lambda block: block)
    if dtype.kind in "iu" and dtype != np.uint8 and len(shape) == 2:
        return Layout(shape[1:], np.dtype(np.int32), partial(_convert_tokens, path=path))
    if dtype != np.uint8:
        raise UserError(
            f"{path}: x is {dtype} of shape {shape}; it must be uint8 for images, floating-point "
            "numbers, or rows of whole numbers, which are tokens."
        )
    if len(shape) == 3:
        return Layout((1, *shape[1:]), dtype, lambda block: block[:, None])
    if len(shape) == 4 and shape[3] in (1, 2, 3, 4):
        return Layout((shape[3], *shape[1:3]), dtype, lambda block: block.transpose(0, 3, 1, 2))
    if len(shape) != 4 or shape[1] not in (1, 2, 3, 4):
        raise UserError(
            f"{path}: x is uint8 of shape {shape}; "
            "images are N×H×W, N×H×W×C or N×C×H×W with C up to 4."
        )
    return Layout(shape[1:], dtype, lambda block: block)


def _convert_tokens(block: Array, path: Path | str) -> Array:
    """Return tokens as int32. `Dataset` compares them with its vocabulary."""
    if block.size and not 0 <= int(block.min()) <= int(block.max()) < MOST_TOKENS:
        raise UserError(
            f"{path}: x holds whole numbers from {block.min()} to {block.max()}; tokens are from 0 "
            f"to {MOST_TOKENS - 1}. If they are features, save them as floating-point numbers."
        )
    return block.astype(np.int32)


def _are_labels(y: Member | Array) -> bool:
    """Tell whether targets are one whole number for each sample."""
    is_column = len(y.shape) == 1 or (len(y.shape) == 2 and y.shape[1] == 1)
    return is_column and y.dtype.kind in "biu"


def _check_targets(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path) -> None:
    is_name = dtype.kind == "U" and len(shape) == 1
    if len(shape) not in (1, 2) or not (is_name or dtype.kind in "biuf"):
        raise UserError(
            f"{path}: y is {dtype} of shape {shape}; it must be a whole number for each sample "
            "or a string (its class), a row of zeros and ones (its labels), or one or more floats."
        )


def _convert_all_targets(parts: list[Array], path: Path) -> tuple[Array, tuple[str, ...]]:
    """Return the targets of all parts, and the names of the classes if they are strings."""
    if all(part.dtype.kind == "U" for part in parts):
        return encode_labels([label for part in parts for label in part.tolist()])
    return np.concatenate([_convert_targets(part, path) for part in parts]), ()


def _convert_targets(y: Array, path: Path) -> Array:
    """Return labels, or a column of labels, as int64 N; other targets as they are.

    `Dataset` refuses those that it cannot use, such as values that float32 cannot hold.
    """
    _check_targets(y.shape, y.dtype, path)
    if not _are_labels(y):
        with np.errstate(over="ignore", invalid="ignore"):
            return y.astype(np.float32 if y.dtype.kind == "f" else np.int64)
    if y.size and int(y.max()) >= 2**63:
        raise UserError(
            f"{path}: y holds {y.max()}; labels must be whole numbers of at most 63 bits."
        )
    return y.reshape(-1).astype(np.int64)
