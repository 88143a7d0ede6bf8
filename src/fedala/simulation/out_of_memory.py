"""A round that runs out of GPU memory is done again with fewer lanes."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fedala.errors import RunError
from fedala.lanes import Task
from fedala.simulation.transport import Transport

T = TypeVar("T")


def retry_with_fewer_lanes(
    do_round: Callable[[], T], transport: Transport, on_message: Callable[[str], None]
) -> T:
    """Do a round; after an out-of-memory error, again with half as many lanes.

    Whatever fails, the clients are as they were before the round.
    """
    while True:
        try:
            return do_round()
        except torch.OutOfMemoryError as error:
            shortage = str(error).split(". ")[0]
        except Exception:
            transport.undo_round()
            raise
        # Here the error is gone, and with it the frames that held the round's memory.
        transport.undo_round()
        reduced = transport.reduce_lanes()
        if reduced is None:
            raise RunError(f"Out of GPU memory with a single client: {shortage}.")
        on_message("Out of GPU memory with {} lanes; retrying with {}.".format(*reduced))


def halve_lanes(lanes: int) -> int | None:
    """Return how many lanes to try next; None if there is nothing to halve."""
    return lanes // 2 if lanes > 1 else None


def free_memory(task: Task) -> None:
    """Give back memory that only saves time."""
    task.free_caches()
    gc.collect()
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
