"""Files from elsewhere: none is believed. What is opened is a file, and what it promises is held against what there is."""

import os
from pathlib import Path

from fedala.errors import UserError


def regular(path: Path) -> Path:
    """`path`, if it is a file: a pipe would be waited for, and a device may have no end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file, and cannot be read as one.")
    return path


def read(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes."""
    with regular(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} is larger than {most:,} bytes, which is too much for what it should be.")
    return data


def check_room(size: int, what: str) -> None:
    """Refuses what does not fit, before memory is taken: a system promises more than it has, and then ends the process."""
    free = free_memory()
    if size > free:
        raise UserError(f"{what} takes {size / 2**30:.1f} GiB of memory, and there are {free / 2**30:.1f} left.")


def free_memory() -> int:
    """Bytes of memory that can be had, or 4 GiB where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30
