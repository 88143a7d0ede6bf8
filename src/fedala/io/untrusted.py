"""Files from elsewhere: none is believed. What is opened is a file, and what it promises is held against what there is."""

import io
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedala.errors import UserError

#: Compressed data may unpack to this many bytes, or to so many times its own size. Real samples stay far below that.
FREELY, RATIO = 2**28, 100


def regular(path: Path) -> Path:
    """`path`, if it is a file: a pipe would be waited for, and a device may have no end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file, and cannot be read as one.")
    return path


def opened(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes. A pipe or a device is refused, even one that has just been put there."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(regular(path), flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a file, and cannot be read as one.")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes."""
    with opened(path) as file:
        data = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if data is None or len(data) > most:
        raise UserError(
            f"{path} is larger than {most:,} bytes, which is too much for what it should be."
        )
    return data


def read_json(path: Path, most: int) -> Any:
    """Read a JSON file of at most so many bytes.

    It must be unambiguous: no key twice, no whole number of more than 64 bits, only text that can be written again.
    """
    data = read(path, most)
    try:
        content = json.loads(data.decode(), object_pairs_hook=_without_repeats, parse_int=_whole)
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


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:100]!r} is there twice")
        content[key] = value
    return content


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("it holds a number of more than 64 bits")
    return number


def check_room(size: int, what: str) -> None:
    """Refuses what does not fit, before memory is taken: a system promises more than it has, and then ends the process."""
    free = free_memory()
    if size > free:
        raise UserError(
            f"{what} takes {size / 2**30:.1f} GiB of memory, and there are {free / 2**30:.1f} left."
        )


def check_expansion(size: int, stored: int, what: str, instead: str) -> None:
    """Refuse `stored` bytes that unpack to `size`, if nobody's samples compress that well. `instead` says what to do."""
    if size > max(FREELY, RATIO * stored):
        raise UserError(
            f"{what} has {stored / 2**20:.1f} MiB that unpack to {size / 2**30:.2f} GiB. More than {RATIO} times "
            f"its size is only read up to {FREELY // 2**20} MiB: {instead}."
        )


def free_memory() -> int:
    """Bytes of memory that can be had, or 4 GiB where the system does not say."""
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
        if column.startswith("accuracy") and isinstance(value, int | float):
            is_outside = value < 0 or value > 1
            if is_outside or (value != value and not allow_nan):
                raise ValueError(f"{column} is {value}, which is not from 0 to 1")
