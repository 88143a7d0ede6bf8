"""What processes that this one starts need: how many cores there are, and the same code."""

import os
import sys


def count_cores() -> int:
    """Return how many cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def share_code() -> dict[str, str]:
    """Return this process's environment, with the folders that it imports code from."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path}
