"""Decoded samples, kept on the disk for the next run, which maps them into its memory.

A user's cache folder holds one file for each dataset. It counts if it was made of exactly these
samples (`Identity`), and if its checksum is right. All else, and every fault of the disk, only
means that the samples are decoded again.
"""

import contextlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from fedala.errors import CacheWarning, byte_size, first_line
from fedala.io.files import DamagedFile, sha256
from fedala.io.tensor_files import map_tensor, read_about, save_mappable
from fedala.io.untrusted import read_file

#: The environment variable with the folder of the cache, or `off`.
VARIABLE = "FEDALA_CACHE"
#: Seconds that another process may take to decode the same samples.
_PATIENCE = 600.0
#: Seconds within which two changes of a file may have the same time, on the coarsest disks.
_SAME_TIME = 2.0


class Identity(NamedTuple):
    """What samples are decoded from."""

    digest: str
    newest: int = 0
    """When the latest change of a file was, in nanoseconds; 0 if the digest is of the content."""


def digest_code(module: ModuleType) -> str:
    """Return the digest of the code that makes something: if it changes, so may the tensor."""
    return sha256(read_file(Path(str(module.__file__)), 2**20))


def find_cache_folder() -> Path | None:
    """Return the folder of the user's cache; None if it is switched off."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() in ("off", "0", "no", "none"):
        return None
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedala"


def load_or_make(
    place: str,
    what: str,
    identify: Callable[[], Identity],
    make: Callable[[], tuple[torch.Tensor, Any]],
) -> tuple[torch.Tensor, Any]:
    """Return a tensor and what belongs to it, as JSON: from the cache, or made and kept there.

    `what` is made of samples in `place`, a file or folder. When they have changed, the new tensor
    replaces the old one.
    """
    try:
        folder = find_cache_folder()
    except RuntimeError:  # there is no home
        folder = None
    if folder is None:
        return make()
    identity = identify()
    path = folder / f"{_name_file(place, what)}.safetensors"
    if (kept := _read(path, identity)) is not None:
        return kept
    began = time.time()
    with _lock(path) as problem:
        # Another process may have been faster.
        if not problem and (kept := _read(path, identity, is_quiet=True)) is not None:
            return kept
        x, rest = make()
        # A file that changes while it is read, or right after, might keep its marks.
        is_settled = identity.newest < (began - _SAME_TIME) * 1e9
        if is_settled and identify() == identity:
            problem = problem or _write(path, x, {"identity": identity.digest, "rest": rest})
            if problem:
                warnings.warn(
                    f"The decoded samples cannot be kept in {folder} ({problem}), so the next run "
                    f"decodes them again; {VARIABLE} names another folder, or is off.",
                    CacheWarning,
                    stacklevel=2,
                )
    return x, rest


def _name_file(place: str, what: str) -> str:
    real = os.path.realpath(place) if os.path.exists(place) else place
    return sha256(json.dumps([real, what]).encode())[:32]


def _read(
    path: Path, identity: Identity, *, is_quiet: bool = False
) -> tuple[torch.Tensor, Any] | None:
    """Return what is kept, if it was made of the same samples and is sound."""
    try:
        if not path.exists():
            return None
        if not os.access(path, os.R_OK):
            raise PermissionError  # it is another user's
        if read_about(path).get("identity") != identity.digest:
            return None
        x, about = map_tensor(path)
        if about["identity"] == identity.digest:
            return x, about["rest"]
    except FileNotFoundError:
        pass
    except (DamagedFile, OSError) as error:
        if not is_quiet:
            why = "is damaged" if isinstance(error, DamagedFile) else "cannot be read"
            warnings.warn(
                f"The cache file {path} {why}, so the samples are decoded again.",
                CacheWarning,
                stacklevel=3,
            )
    return None


def _write(path: Path, x: torch.Tensor, about: dict[str, Any]) -> str:
    """Write a file; return what went wrong, if anything did."""
    try:
        free = shutil.disk_usage(path.parent).free
        if 2 * x.nbytes > free:
            return f"they take {byte_size(x.nbytes)}, more than half of the free disk space"
        save_mappable(path, x, about)
    except (OSError, SafetensorError) as error:
        return first_line(error)
    return ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[str]:
    """Be the only one to make a file, if possible; yield why it is not."""
    held = FileLock(path.with_suffix(".lock"))
    problem = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        held.acquire(timeout=_PATIENCE)
    except Timeout:
        problem = "another process has been decoding them for too long"
    except (OSError, NotImplementedError) as error:
        problem = first_line(error)
    try:
        yield problem
    finally:
        if not problem:
            held.release()
