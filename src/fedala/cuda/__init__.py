"""What makes lanes fast on a GPU. Models and methods know nothing of it; results are those of the plain path."""

import importlib.util


def has_kernels() -> bool:
    """Whether Triton is there to compile them. It comes with torch for CUDA on Linux; elsewhere everything goes its usual way."""
    return importlib.util.find_spec("triton") is not None
