"""Files that are complete or absent: written under another name, flushed to disk, renamed.

Also JSON with a checksum, files verified by their checksum, files of this program, and locks.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from fedala.errors import UserError
from fedala.io.untrusted import check_memory, read_file, require_file

#: The version of the formats of this program. Files of another version are refused.
VERSION = 1


class DamagedFile(UserError):
    """A file whose content is not the content that was written."""


def write_file(path: Path, data: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Write `data` to `path` in one step: any reader and any fault find the old file or the new.

    With `private`, only the owner may read it. Without `durable`, a power failure may lose it.
    """
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # a remainder of a fault, or a link that somebody else made
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


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user has asked for with `write_file`; a full disk is a sentence."""
    try:
        write_file(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write new files by name into a folder, and make it if need be: all of it, or nothing."""
    new = [one for one in (folder, *folder.parents) if not os.path.exists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            write_file(folder / name, data)
    except BaseException as error:
        for name in contents:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        for one in new:
            with contextlib.suppress(OSError):
                one.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{folder} cannot be written to: {error.strerror}.") from None
        raise


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file a second name in one step: a hard link if the disk has them, or a copy.

    A file that has that name is replaced.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # nothing is renamed if both are the same file


def flush(descriptor: int) -> None:
    """Wait until a file is on the disk."""
    os.fsync(descriptor)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def lock(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock, at most until the process ends; raise `UserError(busy)` if another holds it."""
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise UserError(busy) from None


def pack_checksummed(name: str, values: Mapping[str, Any]) -> bytes:
    """Return `values` as JSON under `name`, with the checksum of their text."""
    text = json.dumps(values)
    return json.dumps({"checksum": sha256(text.encode()), name: text}, indent=1).encode()


def read_checksummed(path: Path, name: str, max_bytes: int) -> dict[str, Any]:
    """Read a file of `pack_checksummed`. A missing file raises FileNotFoundError."""
    try:
        data = read_file(path, max_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
    except UserError as error:
        raise DamagedFile(str(error)) from None
    with refuse_damage(path):
        envelope = json.loads(data)
        text = envelope[name]
        if sha256(text.encode()) != envelope["checksum"]:
            raise ValueError("its checksum is wrong")
        values: dict[str, Any] = json.loads(text)
        return values


def read_verified(path: Path, digest: str | None = None) -> bytes:
    """Read a file that this program wrote; with `digest`, refuse any content but that one."""
    try:
        check_memory(require_file(path).stat().st_size, str(path))
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
    except UserError as error:
        raise DamagedFile(str(error)) from None
    if digest is not None and sha256(data) != digest:
        raise DamagedFile(
            f"{path} is damaged: its checksum differs from the one recorded when it was written."
        )
    return data


def read_packaged(package: str, name: str) -> str:
    """Return the text of a file that comes with a package of this program."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Turn any error that unexpected content raises into `DamagedFile`."""
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
        raise DamagedFile(
            f"{path} is damaged, or was not written by this program: {error}."
        ) from None
