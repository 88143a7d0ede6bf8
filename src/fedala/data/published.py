"""The files that image datasets are published in: IDX (MNIST) and CIFAR's binary version.

A header declares how much data follows. Before memory is taken, it is checked against the length of
the file.
"""

import contextlib
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from fedala.data.arrays import DEFLATE
from fedala.data.dataset import RawData
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_file, require_file

Array = np.ndarray[Any, Any]

_CHUNK = 2**22  # bytes that are unpacked at a time
_OVERHEAD = 2**16  # the most bytes of names and comments around compressed data


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
    if size > length * (DEFLATE if path.suffix == ".gz" else 1) or length > 2 * size + _OVERHEAD:
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
