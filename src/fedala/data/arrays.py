"""Files of plain numbers: .npz, IDX (MNIST) and CIFAR's binary version.

A header declares how much data follows. Before memory is taken, it is checked against the length of
the file. Pickles are never loaded.
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

from fedala.data.dataset import RawData
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_file, require_file

Array = np.ndarray[Any, Any]

_DEFLATE = 1032  # the most bytes that one byte of deflate can unpack to
_CHUNK = 2**22  # bytes that are unpacked at a time
_OVERHEAD = 2**16  # the most bytes of names and comments around compressed data
_SPELLINGS = (("x", "y"), ("images", "labels"), ("data", "labels"))
_PARTS = (("{}",), ("{}_train", "{}_val", "{}_test"), ("train_{}", "val_{}", "test_{}"))


def read_npz(path: Path) -> RawData:
    """Read arrays x and y (or images and labels), or merge their train, val and test parts.

    All headers are checked first. Then every part is unpacked piece by piece into the result, so
    this takes no more memory than the result.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            pairs = [
                (_read_header(archive, x, path), _read_header(archive, y, path))
                for x, y in _find_pairs(names, path)
            ]
            layout = _check_headers(pairs, path)
            members = [member for pair in pairs for member in pair]
            stored = sum(min(member.info.compress_size, path.stat().st_size) for member in members)
            advice = "if that is right, save it with np.savez, which does not compress"
            check_expansion(sum(member.size for member in members), stored, str(path), advice)
            sizes = [x.shape[0] for x, _ in pairs]
            shape = (sum(sizes), *layout.shape)
            check_memory(_needed_memory(shape, layout, members), str(path))
            x = np.empty(shape, layout.dtype)
            for first, (member, _) in zip(np.cumsum([0, *sizes]), pairs, strict=False):
                _unpack(archive, member, x[first : first + member.shape[0]], layout.arrange)
            labels = [_read_array(archive, member) for _, member in pairs]
            y = np.concatenate([_convert_targets(part, path) for part in labels])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    return RawData(str(path), torch.from_numpy(x), y)


def read_npz_inputs(path: Path) -> torch.Tensor:
    """Read the array x (or images, or data) of a file that may have no labels."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            keys = [x for x, _ in _SPELLINGS if x in names]
            if keys:
                member = _read_header(archive, keys[0], path)
                layout = _choose_layout(member.shape, member.dtype, path)
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


def _find_pairs(names: list[str], path: Path) -> list[tuple[str, str]]:
    """Return the names of the samples and labels of each part."""
    for x, y in _SPELLINGS:
        for parts in _PARTS:
            pairs = [(part.format(x), part.format(y)) for part in parts if part.format(x) in names]
            if pairs and all(label in names for _, label in pairs):
                return pairs
    raise UserError(
        f"{path} holds {', '.join(names)[:200] or 'nothing'}; it must hold the arrays x and y, "
        "or x_train, y_train, x_test and y_test."
    )


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
    expansion = 1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE
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
    if len({(y.dtype.kind == "f", y.shape[1:]) for _, y in pairs if not _are_labels(y)}) > 1:
        raise UserError(
            f"{path}: its train and test parts differ in the shape or type of a target; "
            "they must agree."
        )
    return _choose_layout(pairs[0][0].shape, pairs[0][0].dtype, path)


def _needed_memory(shape: tuple[int, ...], layout: Layout, members: list[Member]) -> int:
    """Return the bytes for the samples, the labels, and the piece that is being unpacked."""
    targets = sum(math.prod(member.shape) for member in members[1::2])
    whole = max((member.size for member in members if member.fortran), default=0)
    row = max(member.size // max(1, member.shape[0]) for member in members if member.shape)
    return math.prod(shape) * layout.dtype.itemsize + 16 * targets + 2 * max(_CHUNK, row, whole)


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


def _choose_layout(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path) -> Layout:
    """Return the layout: uint8 of 3 or 4 dimensions are images N×C×H×W, floats become float32."""
    if dtype.kind == "f" or (dtype == np.uint8 and len(shape) == 2):
        return Layout(shape[1:], np.dtype(np.float32), lambda block: block)
    if dtype != np.uint8:
        raise UserError(
            f"{path}: x is {dtype}; it must be uint8 for images, or floating-point numbers."
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


def _are_labels(y: Member | Array) -> bool:
    """Tell whether targets are one whole number for each sample."""
    is_column = len(y.shape) == 1 or (len(y.shape) == 2 and y.shape[1] == 1)
    return is_column and y.dtype.kind in "biu"


def _check_targets(shape: tuple[int, ...], dtype: "np.dtype[Any]", path: Path) -> None:
    if len(shape) not in (1, 2) or dtype.kind not in "biuf":
        raise UserError(
            f"{path}: y is {dtype} of shape {shape}; it must be a whole number for each sample "
            "(its class), a row of zeros and ones (its labels), or one or several floats."
        )


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


@contextlib.contextmanager
def _open_idx(path: Path) -> Iterator[IO[bytes]]:
    """Open an IDX file, gzipped or not."""
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


def read_idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Read the shape of an IDX file of bytes, and check it against the length of the file."""
    with _open_idx(path) as file:
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes((0, 0, 8, dimensions)):
            raise UserError(f"{path} is not an IDX file of bytes in {dimensions} dimensions.")
        shape = struct.unpack(f">{dimensions}I", head[4:])
    size, length = math.prod(shape), path.stat().st_size
    if size > length * (_DEFLATE if path.suffix == ".gz" else 1) or length > 2 * size + _OVERHEAD:
        raise UserError(
            f"{path} is damaged: it declares {size} bytes, which do not fit its length."
        )
    check_expansion(size, length, str(path), "if that is right, unpack it with gunzip")
    return shape


def read_idx(path: Path, into: Array) -> None:
    """Fill `into`, which has the shape of the header, with an IDX file of bytes, as in MNIST."""
    target = into.data.cast("B") if into.size else memoryview(b"")
    with _open_idx(path) as file:
        file.read(4 + 4 * into.ndim)
        filled = 0
        while filled < len(target) and (data := file.read(min(_CHUNK, len(target) - filled))):
            target[filled : filled + len(data)] = data
            filled += len(data)
        if filled < len(target) or file.read(1):
            raise UserError(
                f"{path} is damaged: it declares {len(target)} bytes, but holds more or fewer."
            )


def read_mnist(folder: Path) -> RawData | None:
    """Read MNIST's four IDX files, gzipped or not, train first; None if there are none."""
    if not any((folder / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
        return None

    def find(name: str) -> Path:
        plain = folder / name
        return plain if plain.exists() else require_part(folder / f"{name}.gz")

    def merge(kind: str, dimensions: int) -> Array:
        paths = [find(f"{part}-{kind}") for part in ("train", "t10k")]
        first, second = (read_idx_shape(path, dimensions) for path in paths)
        if first[1:] != second[1:]:
            raise UserError(f"{folder}: its train and t10k images differ in size; they must agree.")
        shape = (first[0] + second[0], *first[1:])
        check_memory(math.prod(shape) + _CHUNK, str(paths[0]))
        whole = np.empty(shape, np.uint8)
        read_idx(paths[0], whole[: first[0]])
        read_idx(paths[1], whole[first[0] :])
        return whole

    x, y = merge("images-idx3-ubyte", 3), merge("labels-idx1-ubyte", 1)
    return RawData(str(folder), torch.from_numpy(x[:, None]), y.astype(np.int64))


def read_cifar10(folder: Path) -> RawData | None:
    """Read CIFAR-10's binary version; None if there is none."""
    return _read_cifar(folder, [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], 1)


def read_cifar100(folder: Path) -> RawData | None:
    """Read CIFAR-100's binary version; None if there is none.

    Each record has a coarse label, which is not used, before the fine one.
    """
    raw = _read_cifar(folder, ["train.bin", "test.bin"], 2)
    names = folder / "fine_label_names.txt"
    if raw and names.exists():
        text = read_file(names, 2**20).decode(errors="replace")
        raw = raw._replace(class_names=tuple(text.split()))
    return raw


def _read_cifar(folder: Path, files: list[str], label_bytes: int) -> RawData | None:
    if not (folder / files[0]).exists():
        return None
    record = label_bytes + 3 * 32 * 32
    paths = [require_file(require_part(folder / name)) for name in files]
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size % record:
            raise UserError(
                f"{path} is not CIFAR's binary version: "
                f"its size is not a multiple of {record} bytes."
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
    return RawData(str(folder), torch.from_numpy(x[:first]), y[:first])


def require_part(path: Path) -> Path:
    """Return `path`, a file that belongs to a dataset, or raise `UserError` if it is missing."""
    if not path.exists():
        raise UserError(f"{path} is missing; the other files in its folder need it.")
    return path
