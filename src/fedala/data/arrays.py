"""Files of plain numbers: .npz, IDX (MNIST) and CIFAR's binary version.

A header says how much follows; it is believed only where the file is long enough to hold it, before memory is taken.
Nothing here ever loads a pickle.
"""

import contextlib
import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from fedala.data.dataset import Raw, first_line
from fedala.errors import UserError
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_file, require_file

Array = np.ndarray[Any, Any]

_DEFLATE = 1032  # the most bytes that one byte of deflate can stand for
_CHUNK = 2**22  # bytes that are unpacked at a time
_OVERHEAD = 2**16  # the most bytes around compressed data: names, comments
_SPELLINGS = (("x", "y"), ("images", "labels"), ("data", "labels"))
_PARTS = (("{}",), ("{}_train", "{}_val", "{}_test"), ("train_{}", "val_{}", "test_{}"))


def npz(path: Path) -> Raw:
    """Arrays x and y (or images and labels), or their train, val and test parts, which are merged.

    All headers are read and checked first. Then every part is unpacked piece by piece into its place in the result,
    so that this takes no more memory than the result.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            held = [name.removesuffix(".npy") for name in archive.namelist()]
            pairs = [
                (_member(archive, x, path), _member(archive, y, path))
                for x, y in _pairs(held, path)
            ]
            layout = _check(pairs, path)
            every = [member for pair in pairs for member in pair]
            stored = sum(min(member.info.compress_size, path.stat().st_size) for member in every)
            instead = "if that is right, save it with np.savez, which does not compress"
            check_expansion(sum(member.size for member in every), stored, str(path), instead)
            sizes = [x.shape[0] for x, _ in pairs]
            shape = (sum(sizes), *layout.shape)
            check_memory(_needed(shape, layout, every), str(path))
            x = np.empty(shape, layout.dtype)
            for place, (member, _) in zip(np.cumsum([0, *sizes]), pairs, strict=False):
                _unpack(archive, member, x[place : place + member.shape[0]], layout.arrange)
            y = np.concatenate([labels(_array(archive, member), path) for _, member in pairs])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can end in almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    return Raw(str(path), torch.from_numpy(x), y)


def _pairs(held: list[str], path: Path) -> list[tuple[str, str]]:
    for x, y in _SPELLINGS:
        for parts in _PARTS:
            pairs = [(part.format(x), part.format(y)) for part in parts if part.format(x) in held]
            if pairs and all(label in held for _, label in pairs):
                return pairs
    raise UserError(
        f"{path} holds {', '.join(held)[:200] or 'nothing'}; it must hold the arrays x and y, "
        "or x_train, y_train, x_test and y_test."
    )


class Member(NamedTuple):
    """An array in an archive, by its header."""

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
    """How samples are kept: the shape and type of one, and how a block of what is read becomes a block of them."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    arrange: Callable[[Array], Array]


def _member(archive: zipfile.ZipFile, key: str, path: Path) -> Member:
    info = archive.getinfo(f"{key}.npy")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = header(file)
        if dtype.hasobject:
            raise UserError(
                f"{path}: {key} is an array of pickled Python objects, which are never loaded; save it as numbers."
            )
        member = Member(info, file.tell(), shape, fortran, dtype)
    declared = member.start + member.size
    real = min(info.compress_size, path.stat().st_size) * (
        1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE
    )
    if declared != info.file_size or declared > real or any(length < 0 for length in shape):
        raise UserError(
            f"{path}: {key} says that its shape is {shape}, which is not what the file holds; save it again."
        )
    return member


def _check(pairs: list[tuple[Member, Member]], path: Path) -> Layout:
    """What the headers of all parts say must go together, and be samples."""
    if len({(x.shape[1:], x.dtype) for x, _ in pairs}) > 1:
        raise UserError(
            f"{path}: its train and test parts differ in the shape or type of a sample; they must agree."
        )
    for x, y in pairs:
        if not x.shape or x.shape[0] != (y.shape or (1,))[0]:
            raise UserError(
                f"{path} has x of shape {x.shape} but y of shape {y.shape}; they must be of one length."
            )
        _check_labels(y.shape, y.dtype, path)
    return samples(pairs[0][0].shape, pairs[0][0].dtype, path)


def _needed(shape: tuple[int, ...], layout: Layout, members: list[Member]) -> int:
    """Bytes of memory to read all members: the samples, the labels, and what is unpacked at a time."""
    whole = max((member.size for member in members if member.fortran), default=0)
    row = max(member.size // max(1, member.shape[0]) for member in members if member.shape)
    return math.prod(shape) * layout.dtype.itemsize + 16 * shape[0] + 2 * max(_CHUNK, row, whole)


def _array(archive: zipfile.ZipFile, member: Member) -> Array:
    """The whole of a small array."""
    with archive.open(member.info) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _unpack(
    archive: zipfile.ZipFile, member: Member, into: Array, arrange: Callable[[Array], Array]
) -> None:
    """Fill `into` with an array of an archive, some rows at a time. One in Fortran's order has no rows to take."""
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what float32 cannot hold is refused by the dataset
        if member.fortran:
            into[...] = arrange(_array(archive, member))
            return
        row = member.size // max(1, member.shape[0])
        rows = max(1, _CHUNK // max(1, row))
        with archive.open(member.info) as file:
            file.read(member.start)
            for first in range(0, member.shape[0] if row else 0, rows):
                part = into[first : first + rows]
                block = np.frombuffer(file.read(len(part) * row), member.dtype)
                part[...] = arrange(block.reshape(len(part), *member.shape[1:]))


def samples(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path) -> Layout:
    """uint8 of 3 or 4 dimensions are images, which become N×C×H×W; floating-point arrays become float32."""
    if dtype.kind == "f" or (dtype == np.uint8 and len(shape) == 2):
        return Layout(shape[1:], np.dtype(np.float32), lambda block: block)
    if dtype != np.uint8:
        raise UserError(
            f"{path}: x is {dtype}; images must be uint8, and anything else floating-point numbers."
        )
    if len(shape) == 3:
        return Layout((1, *shape[1:]), dtype, lambda block: block[:, None])
    if len(shape) == 4 and shape[3] in (1, 2, 3, 4):
        return Layout((shape[3], *shape[1:3]), dtype, lambda block: block.transpose(0, 3, 1, 2))
    if len(shape) != 4 or shape[1] not in (1, 2, 3, 4):
        raise UserError(
            f"{path}: x is uint8 of shape {shape}; images are N×H×W, N×H×W×C or N×C×H×W with C up to 4."
        )
    return Layout(shape[1:], dtype, lambda block: block)


def _check_labels(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path) -> None:
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or dtype.kind not in "biu":
        raise UserError(
            f"{path}: y is {dtype} of shape {shape}; labels must be whole numbers, one for each sample."
        )


def labels(y: Array, path: Path) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Whole numbers, one for each sample; a column of them will do."""
    _check_labels(y.shape, y.dtype, path)
    if y.size and int(y.max()) >= 2**63:
        raise UserError(
            f"{path}: y holds {y.max()}; labels must be whole numbers of at most 63 bits."
        )
    return y.reshape(-1).astype(np.int64)


@contextlib.contextmanager
def _idx_file(path: Path) -> Iterator[IO[bytes]]:
    """An IDX file, unpacked on the way if it is gzipped."""
    try:
        with open_file(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield file
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"{path} is not a readable IDX file ({first_line(error)}).") from None


def idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """What the header of an IDX file of bytes says, held against the length of the file."""
    with _idx_file(path) as file:
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes((0, 0, 8, dimensions)):
            raise UserError(f"{path} is not an IDX file of bytes in {dimensions} dimensions.")
        shape = struct.unpack(f">{dimensions}I", head[4:])
    size, length = math.prod(shape), path.stat().st_size
    if size > length * (_DEFLATE if path.suffix == ".gz" else 1) or length > 2 * size + _OVERHEAD:
        raise UserError(
            f"{path} says that it holds {size} bytes, which do not fit its length; it is damaged."
        )
    check_expansion(size, length, str(path), "if that is right, unpack it with gunzip")
    return shape


def idx(path: Path, into: Array) -> None:
    """Fill `into`, which has the shape of its header, with an IDX file of bytes, as MNIST is published in."""
    target = into.data.cast("B") if into.size else memoryview(b"")
    with _idx_file(path) as file:
        file.read(4 + 4 * into.ndim)
        filled = 0
        while filled < len(target) and (data := file.read(min(_CHUNK, len(target) - filled))):
            target[filled : filled + len(data)] = data
            filled += len(data)
        if filled < len(target) or file.read(1):
            raise UserError(
                f"{path} says that it holds {len(target)} bytes, and does not; it is damaged."
            )


def mnist(folder: Path) -> Raw | None:
    """MNIST's four IDX files, gzipped or not, train first, or None where there are none."""
    if not any((folder / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
        return None

    def place(name: str) -> Path:
        plain = folder / name
        return plain if plain.exists() else present(folder / f"{name}.gz")

    def merged(kind: str, dimensions: int) -> Array:
        paths = [place(f"{part}-{kind}") for part in ("train", "t10k")]
        first, second = (idx_shape(path, dimensions) for path in paths)
        if first[1:] != second[1:]:
            raise UserError(f"{folder}: its train and t10k images differ in size; they must agree.")
        shape = (first[0] + second[0], *first[1:])
        check_memory(math.prod(shape) + _CHUNK, str(paths[0]))
        whole = np.empty(shape, np.uint8)
        idx(paths[0], whole[: first[0]])
        idx(paths[1], whole[first[0] :])
        return whole

    x = merged("images-idx3-ubyte", 3)
    return Raw(
        str(folder), torch.from_numpy(x[:, None]), merged("labels-idx1-ubyte", 1).astype(np.int64)
    )


def cifar10(folder: Path) -> Raw | None:
    """CIFAR-10's binary version."""
    return _cifar(folder, [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], 1)


def cifar100(folder: Path) -> Raw | None:
    """CIFAR-100's binary version: a coarse label, which is not used, before the fine one."""
    raw = _cifar(folder, ["train.bin", "test.bin"], 2)
    names = folder / "fine_label_names.txt"
    if raw and names.exists():
        raw = raw._replace(
            class_names=tuple(read_file(names, 2**20).decode(errors="replace").split())
        )
    return raw


def _cifar(folder: Path, files: list[str], label_bytes: int) -> Raw | None:
    if not (folder / files[0]).exists():
        return None
    record = label_bytes + 3 * 32 * 32
    paths = [require_file(present(folder / name)) for name in files]
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size % record:
            raise UserError(
                f"{path} is not CIFAR's binary version: its size is no multiple of {record} bytes."
            )
    check_memory(sum(sizes) + 2 * max(sizes), str(folder))
    rows = sum(sizes) // record
    x, y = np.empty((rows, 3, 32, 32), np.uint8), np.empty(rows, np.int64)
    first = 0
    for path, size in zip(paths, sizes, strict=True):
        batch = np.frombuffer(read_file(path, size), dtype=np.uint8).reshape(-1, record)
        last = first + len(batch)
        x[first:last] = batch[:, label_bytes:].reshape(-1, 3, 32, 32)
        y[first:last] = batch[:, label_bytes - 1]
        first = last
    return Raw(str(folder), torch.from_numpy(x[:first]), y[:first])


def present(path: Path) -> Path:
    """`path`, which a dataset is not complete without."""
    if not path.exists():
        raise UserError(f"{path} is missing; the files beside it belong to it.")
    return path
