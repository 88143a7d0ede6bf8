"""Read files that may come from anywhere, and trust none of them.

Only regular files are opened, and a size that a file declares is checked before memory is taken.
"""

import io
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.metrics import SHARES

#: Compressed data may always unpack to this many bytes, and beyond that to `MAX_EXPANSION` times
#: its own size. Real samples stay far below that.
ALWAYS_ALLOWED, MAX_EXPANSION = 2**28, 100


def require_file(path: Path) -> Path:
    """Return `path` if it is a file or absent: a pipe may block, and a device may be endless."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; it must be a regular file.")
    return path


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file to read bytes. The check also holds if `path` changes meanwhile."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(require_file(path), flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a file; it must be a regular file.")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:
        raise UserError(
            f"{path} is larger than {max_bytes:,} bytes, the most that a file of its kind may have."
        )
    return data


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file of at most `max_bytes`; see `parse_json`."""
    return parse_json(read_file(path, max_bytes), str(path))


def parse_json(data: bytes, path: str) -> Any:
    """Return the content of a JSON file; `path` is for messages.

    Duplicate keys, whole numbers of more than 64 bits and text that is not Unicode are refused.
    """
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_int=_parse_int)
        if b"\\u" in data:  # an escape can stand for half a character
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{path} is not readable JSON: it holds text that is not Unicode."
        ) from None
    except RecursionError:
        raise UserError(f"{path} is not readable JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from None
    return content


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:100]!r} is there twice")
        content[key] = value
    return content


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("it holds a number of more than 64 bits")
    return number


def check_memory(size: int, what: str) -> None:
    """Refuse data that does not fit into memory; the system would kill the process only later."""
    free = free_memory()
    if size > free:
        raise UserError(
            f"{what} needs {size / 2**30:.1f} GiB of memory, and only {free / 2**30:.1f} are free."
        )


def check_expansion(size: int, stored: int, what: str, advice: str) -> None:
    """Refuse `stored` bytes that unpack to an implausible `size`. `advice` says what to do."""
    if size > max(ALWAYS_ALLOWED, MAX_EXPANSION * stored):
        raise UserError(
            f"{what} has {stored / 2**20:.1f} MiB that unpack to {size / 2**30:.2f} GiB. "
            f"Above {ALWAYS_ALLOWED // 2**20} MiB, at most {MAX_EXPANSION} times the stored size "
            f"is read: {advice}."
        )


def free_memory() -> int:
    """Return the bytes of free memory, or 4 GiB if the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
            )
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30


def check_accuracies(row: Mapping[str, Any], *, allow_nan: bool = True) -> None:
    """Raise a ValueError if an accuracy in a row of a table is not from 0 to 1.

    NaN is the accuracy of clients without test samples.
    """
    for column, value in row.items():
        if column.startswith(SHARES) and isinstance(value, int | float):
            is_outside = value < 0 or value > 1
            if is_outside or (value != value and not allow_nan):
                raise ValueError(f"{column} is {value}, which is not from 0 to 1")
