"""How a process of the command line uses memory."""

import contextlib
import ctypes
import sys


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory; otherwise each step gets new pages for its gradients."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            library = ctypes.CDLL(None)
            trim_threshold, mmap_threshold = -1, -3
            library.mallopt(mmap_threshold, 32 * 2**20)
            library.mallopt(trim_threshold, 2**30)
