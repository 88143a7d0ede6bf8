"""Folders of datasets as PFLlib writes them: a file for each client, in `train` and in `test`."""

import io
import os
import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedala.data.arrays import MOST_TOKENS, Array
from fedala.errors import UserError, first_line
from fedala.io.pickled_arrays import PickledArray, read_pickled_arrays
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_json

_PARTS = ("train", "test")
_MOST_CONFIG = 2**26  # bytes of config.json, which lists the counts of classes of all clients
_ADVICE = "if that is right, unpack it and save its arrays with np.savez"


class Conversion(NamedTuple):
    """What was converted."""

    clients: int
    train: int
    test: int
    shape: tuple[int, ...]
    empty: tuple[int, ...]
    """Clients without samples, which the file does not name."""


class _Samples(NamedTuple):
    x: Array
    y: Array


def convert_pfllib(folder: Path, out: Path) -> Conversion:
    """Write a dataset of PFLlib as one .npz file with its clients and its split.

    The file has x, y and client of `train` and of `test`: `x_train`, `y_train`, `client_train`, ….
    """
    if out.suffix != ".npz":
        raise UserError(f"The converted file must be called ….npz, not {out}.")
    if out.exists():
        raise UserError(f"{out} exists already; name a file that does not.")
    clients = _list_clients(folder)
    _check_config(folder, len(clients))
    parts = {
        part: [_read_client(folder / part / f"{client}.npz") for client in clients]
        for part in _PARTS
    }
    _check_agreement(parts, folder)
    length = _find_length(parts)
    arrays: dict[str, Array] = {}
    for part, samples in parts.items():
        check_memory(2 * sum(own.x.nbytes for own in samples), f"{folder / part}")
        arrays[f"x_{part}"] = np.concatenate([_pad(own.x, length) for own in samples])
        arrays[f"y_{part}"] = np.concatenate([own.y for own in samples])
        sizes = [len(own.y) for own in samples]
        arrays[f"client_{part}"] = np.repeat(np.array(clients, dtype=np.int64), sizes)
    _write(arrays, out)
    pairs = zip(clients, *parts.values(), strict=True)
    empty = tuple(client for client, *own in pairs if not any(len(samples.y) for samples in own))
    train, test = (len(arrays[f"y_{part}"]) for part in _PARTS)
    return Conversion(len(clients), train, test, arrays["x_train"].shape[1:], empty)


def _list_clients(folder: Path) -> list[int]:
    """Return the numbers of the clients, which must be the same in both parts."""
    found: dict[str, set[int]] = {}
    for part in _PARTS:
        try:
            names = os.listdir(folder / part)
        except OSError as error:
            raise UserError(
                f"{folder / part} cannot be read ({error.strerror}); a dataset of PFLlib has the "
                "folders train and test."
            ) from None
        stems = [re.fullmatch(r"(0|[1-9][0-9]{0,6})\.npz", name) for name in names]
        found[part] = {int(match[1]) for match in stems if match}
    if not found["train"] or found["train"] != found["test"]:
        lonely = sorted(found["train"] ^ found["test"])
        what = f"client {lonely[0]} is in one of them only" if lonely else "there are none"
        raise UserError(
            f"{folder} must have the files 0.npz, 1.npz, … in train and in test; {what}."
        )
    return sorted(found["train"])


def _check_config(folder: Path, clients: int) -> None:
    """Compare the number of clients with config.json, if there is one."""
    try:
        config = read_json(folder / "config.json", _MOST_CONFIG)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error.strerror}).") from None
    declared = config.get("num_clients") if isinstance(config, dict) else None
    if declared is not None and declared != clients:
        raise UserError(
            f"{folder / 'config.json'} says that there are {str(declared)[:20]} clients, and the "
            f"folders train and test have {clients}: files are missing, or left over."
        )


def _read_client(path: Path) -> _Samples:
    """Read a file of PFLlib: one pickled dict with x and y."""
    content, stored = _unpack(path)
    whole = read_pickled_arrays(content, stored, str(path))
    data = whole.objects[0] if isinstance(whole, PickledArray) and whole.objects else whole
    if not isinstance(data, dict) or not {"x", "y"} <= set(data):
        raise UserError(f"{path} does not hold a dict with x and y, as PFLlib writes it.")
    x, y = _convert_samples(data["x"], stored, path), _convert_labels(data["y"], path)
    if len(x) != len(y):
        raise UserError(f"{path} has {len(x)} samples in x but {len(y)} labels in y.")
    return _Samples(x, y)


def _unpack(path: Path) -> tuple[bytes, int]:
    """Return the pickle inside the array `data`, and the bytes that it takes in the file."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            info = archive.getinfo("data.npy")
            stored = min(info.compress_size, path.stat().st_size)
            check_expansion(info.file_size, stored, str(path), _ADVICE)
            check_memory(4 * info.file_size, str(path))
            with archive.open(info) as member:
                content = io.BytesIO(member.read())
        formats = np.lib.format
        is_first = formats.read_magic(content) == (1, 0)
        read = formats.read_array_header_1_0 if is_first else formats.read_array_header_2_0
        shape, _, dtype = read(content)
    except (UserError, MemoryError):
        raise
    except KeyError:
        raise UserError(f"{path} has no array data, which files of PFLlib have.") from None
    except Exception as error:  # a damaged archive can raise almost any kind of error
        raise UserError(f"{path} is not a readable .npz file ({first_line(error)}).") from None
    if shape != () or dtype != np.dtype(object):
        raise UserError(
            f"{path} holds {dtype} of shape {shape}, and not one dict as PFLlib writes it."
        )
    return content.read(), stored


def _convert_samples(x: Any, stored: int, path: Path) -> Array:
    """Return samples as the .npz reader takes them: bytes, float32, or rows of tokens."""
    if isinstance(x, PickledArray) and x.numbers is not None:
        numbers = x.numbers
        is_row = numbers.dtype.kind in "iu" and numbers.ndim == 2 and numbers.dtype != np.uint8
        if numbers.dtype.kind not in "biuf" or numbers.ndim < 2:
            raise UserError(
                f"{path}: x is {numbers.dtype} of shape {numbers.shape}; it must hold samples of "
                "numbers."
            )
        if is_row:
            return _check_tokens(numbers, path)
        if numbers.dtype == np.uint8:
            return numbers
        # Windows of sensors (HAR) stand there as images of one row, channels × 1 × steps.
        if numbers.ndim == 4 and numbers.shape[2] == 1 < numbers.shape[3]:
            numbers = numbers[:, :, 0]
        # PFLlib itself makes floats of everything that is not a text.
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32)
    rows = _list_rows(x, path)
    longest = max(map(len, rows), default=0)
    check_expansion(4 * longest * len(rows), stored, str(path), _ADVICE)
    tokens = np.zeros((len(rows), longest), dtype=np.int32)
    for row, own in zip(tokens, rows, strict=True):
        if not all(type(token) is int and 0 <= token < MOST_TOKENS for token in own):
            raise UserError(f"{path}: x holds texts whose tokens are not whole numbers from 0 on.")
        row[: len(own)] = own
    return tokens


def _list_rows(x: Any, path: Path) -> list[list[int]]:
    """Return texts as lists of tokens. PFLlib writes a text as (tokens, length)."""
    if isinstance(x, PickledArray) and x.objects is not None and len(x.shape) == 2:
        rows: Sequence[Any] = x.objects[:: x.shape[1]] if x.shape[1] else []
    else:
        rows = x.objects if isinstance(x, PickledArray) and x.objects is not None else x
    if not isinstance(rows, list):
        raise UserError(f"{path}: x is a {type(x).__name__}; it must be an array or texts.")
    rows = [row[0] if isinstance(row, tuple) and len(row) == 2 else row for row in rows]
    if not all(isinstance(row, list) for row in rows):
        raise UserError(f"{path}: x holds objects that are not rows of tokens.")
    return rows


def _check_tokens(tokens: Array, path: Path) -> Array:
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < MOST_TOKENS:
        raise UserError(
            f"{path}: x holds whole numbers from {tokens.min()} to {tokens.max()}; tokens are from "
            f"0 to {MOST_TOKENS - 1}."
        )
    return tokens.astype(np.int32)


def _convert_labels(y: Any, path: Path) -> Array:
    values = y.numbers if isinstance(y, PickledArray) else None
    objects = y.objects if isinstance(y, PickledArray) else y
    if isinstance(objects, list) and all(
        type(value) is int and abs(value) < 2**62 for value in objects
    ):
        values = np.array(objects, dtype=np.int64)
    is_number = values is not None and values.ndim == 1 and values.dtype.kind in "biuf"
    if values is None or not is_number or not bool((values == np.floor(values)).all()):
        raise UserError(f"{path}: y must hold one whole number for each sample, its class.")
    if values.size and not -(2**62) < float(values.min()) <= float(values.max()) < 2**62:
        raise UserError(f"{path}: y holds numbers that are too large for classes.")
    return values.astype(np.int64)


def _check_agreement(parts: dict[str, list[_Samples]], folder: Path) -> None:
    """Refuse clients whose samples differ in type or shape; texts may differ in length."""
    kinds = {
        (str(own.x.dtype), () if own.x.dtype == np.int32 else own.x.shape[1:])
        for samples in parts.values()
        for own in samples
        if len(own.y)
    }
    if len(kinds) != 1:
        told = ", ".join(f"{kind} of shape {shape}" for kind, shape in sorted(kinds)[:2])
        raise UserError(f"{folder}: its files must hold samples of one kind, not {told or 'none'}.")


def _find_length(parts: dict[str, list[_Samples]]) -> int | None:
    """Return the length of the longest text, or None if the samples are not texts."""
    filled = [own.x for samples in parts.values() for own in samples if len(own.y)]
    return max(x.shape[1] for x in filled) if filled[0].dtype == np.int32 else None


def _pad(x: Array, length: int | None) -> Array:
    if length is None or x.shape[1] == length:
        return x
    return np.pad(x, ((0, 0), (0, length - x.shape[1])))


def _write(arrays: dict[str, Array], out: Path) -> None:
    """Write an .npz file that is complete or absent; not compressed, so that it loads quickly."""
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as f:
            temporary = Path(f.name)
            try:
                np.savez(f, **arrays)  # type: ignore[arg-type]
                f.close()
                temporary.chmod(0o644)  # temporary files are private
                os.replace(temporary, out)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}).") from None
