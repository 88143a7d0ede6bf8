"""Files of plain numbers: .npz, IDX (MNIST) and CIFAR's binary version.

A header says how much follows; it is believed only where the file is long enough to hold it, before memory is taken.
Nothing here ever loads a pickle.
"""

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.dataset import Raw, first_line
from fedala.errors import UserError

Array = np.ndarray[Any, Any]

_DEFLATE = 1032  # the most bytes that one byte of deflate can stand for
_SPELLINGS = (("x", "y"), ("images", "labels"), ("data", "labels"))
_PARTS = (("{}",), ("{}_train", "{}_val", "{}_test"), ("train_{}", "val_{}", "test_{}"))


def npz(path: Path) -> Raw:
    """Arrays x and y (or images and labels), or their train, val and test parts, which are merged."""
    try:
        with zipfile.ZipFile(path) as archive:
            held = [name.removesuffix(".npy") for name in archive.namelist()]
            pairs = [(_member(archive, x, path), _member(archive, y, path)) for x, y in _pairs(held, path)]
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged archive can end in almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    if len({(x.shape[1:], x.dtype) for x, _ in pairs}) > 1:
        raise UserError(f"{path}: its train and test parts differ in the shape or type of a sample; they must agree.")
    for x, y in pairs:
        if x.ndim == 0 or len(x) != len(np.atleast_1d(y)):
            raise UserError(f"{path} has x of shape {x.shape} but y of shape {y.shape}; they must be of one length.")
    x = pairs[0][0] if len(pairs) == 1 else np.concatenate([x for x, _ in pairs])
    return Raw(str(path), samples(x, path), np.concatenate([labels(y, path) for _, y in pairs]))


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


def _member(archive: zipfile.ZipFile, key: str, path: Path) -> Array:
    member = archive.getinfo(f"{key}.npy")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        if dtype.hasobject:
            raise UserError(
                f"{path}: {key} is an array of pickled Python objects, which are never loaded; save it as numbers."
            )
        declared = file.tell() + math.prod(shape) * dtype.itemsize
    real = min(member.compress_size, path.stat().st_size) * (
        1 if member.compress_type == zipfile.ZIP_STORED else _DEFLATE
    )
    if declared != member.file_size or declared > real:
        raise UserError(
            f"{path}: {key} says that its shape is {shape}, which is not what the file holds; save it again."
        )
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def samples(x: Array, path: Path) -> torch.Tensor:
    """uint8 of 3 or 4 dimensions are images, which become N×C×H×W; floating-point arrays become float32."""
    if x.dtype.kind == "f" or (x.dtype == np.uint8 and x.ndim == 2):
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and the dataset refuses it
            return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if x.dtype != np.uint8:
        raise UserError(f"{path}: x is {x.dtype}; images must be uint8, and anything else floating-point numbers.")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 2, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in (1, 2, 3, 4):
        raise UserError(f"{path}: x is uint8 of shape {x.shape}; images are N×H×W, N×H×W×C or N×C×H×W with C up to 4.")
    return torch.from_numpy(np.ascontiguousarray(x))


def labels(y: Array, path: Path) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Whole numbers, one for each sample; a column of them will do."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "biu" or (y.size and int(y.max()) >= 2**63):
        raise UserError(
            f"{path}: y is {y.dtype} of shape {y.shape}; labels must be whole numbers, one for each sample."
        )
    return y.astype(np.int64)


def idx(path: Path, dimensions: int) -> Array:
    """An IDX file of bytes, as MNIST is published in, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            if head[:4] != bytes((0, 0, 8, dimensions)):
                raise UserError(f"{path} is not an IDX file of bytes in {dimensions} dimensions.")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if size > path.stat().st_size * (_DEFLATE if path.suffix == ".gz" else 1):
                raise UserError(f"{path} says that it holds {size} bytes, more than it can; it is damaged.")
            data = file.read(size + 1)
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"{path} is not a readable IDX file ({first_line(error)}).") from None
    if len(data) != size:
        raise UserError(f"{path} says that it holds {size} bytes, and does not; it is damaged.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def mnist(folder: Path) -> Raw | None:
    """MNIST's four IDX files, train first, or None where there are none."""
    if not any((folder / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
        return None

    def part(name: str, dimensions: int) -> Array:
        plain = folder / name
        return idx(plain if plain.exists() else present(folder / f"{name}.gz"), dimensions)

    train, test = (part(f"{name}-images-idx3-ubyte", 3) for name in ("train", "t10k"))
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"{folder}: its train and t10k images differ in size; they must agree.")
    x = np.concatenate([train, test])
    y = np.concatenate([part(f"{name}-labels-idx1-ubyte", 1) for name in ("train", "t10k")])
    return Raw(str(folder), samples(x, folder), labels(y, folder))


def cifar10(folder: Path) -> Raw | None:
    """CIFAR-10's binary version."""
    return _cifar(folder, [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], 1)


def cifar100(folder: Path) -> Raw | None:
    """CIFAR-100's binary version: a coarse label, which is not used, before the fine one."""
    raw = _cifar(folder, ["train.bin", "test.bin"], 2)
    names = folder / "fine_label_names.txt"
    if raw and names.exists():
        raw = raw._replace(class_names=tuple(names.read_text(encoding="utf-8", errors="replace").split()))
    return raw


def _cifar(folder: Path, files: list[str], label_bytes: int) -> Raw | None:
    if not (folder / files[0]).exists():
        return None
    record = label_bytes + 3 * 32 * 32
    batches = []
    for name in files:
        path = present(folder / name)
        if path.stat().st_size % record:
            raise UserError(f"{path} is not CIFAR's binary version: its size is no multiple of {record} bytes.")
        batches.append(np.fromfile(path, dtype=np.uint8).reshape(-1, record))
    data = np.concatenate(batches)
    x = np.ascontiguousarray(data[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return Raw(str(folder), torch.from_numpy(x), data[:, label_bytes - 1].astype(np.int64))


def present(path: Path) -> Path:
    """`path`, which a dataset is not complete without."""
    if not path.exists():
        raise UserError(f"{path} is missing; the files beside it belong to it.")
    return path
