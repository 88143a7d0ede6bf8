"""Follow a run as it happens, and ask it to stop."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedala.errors import RunError
from fedala.records import Fault, HistoryRow
from fedala.runs.results import RunResult


class Stopped(RunError):
    """A run that was asked to stop, and did so between two rounds."""

    result: RunResult | None = None
    """What it has found until then."""


@dataclass(frozen=True)
class RunObserver:
    """Functions that a run calls as things happen; `method` is a method's name."""

    on_row: Callable[[str, HistoryRow], None] = lambda method, row: None
    on_fault: Callable[[str, Fault], None] = lambda method, fault: None
    on_message: Callable[[str], None] = lambda sentence: None
    should_stop: Callable[[], bool] = lambda: False
    """Called after every round."""
    on_begin: Callable[[str, Sequence[int]], None] = lambda method, seeds: None
    """Called before the rounds of some seeds of a method, which run side by side."""
    on_earlier: Callable[[str, Sequence[HistoryRow]], None] = lambda method, rows: None
    """Called next, with the evaluations of these seeds before a resume."""


def write_to_stderr(line: str) -> None:
    """Write past Python's buffers, which the program may be writing to at this very moment."""
    os.write(2, f"{line}\n".encode())


@contextmanager
def catch_stop_signals(
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
    announce: Callable[[str], None] = write_to_stderr,
    *,
    grace: float = 0.0,
) -> Iterator[list[int]]:
    """Collect the signals that ask to stop, so that the round can end. The second interrupts it.

    One that follows within `grace` seconds is the same one, passed on by the parent process.
    """
    caught: list[int] = []
    first = 0.0

    def catch(number: int, _: Any) -> None:
        nonlocal first
        if caught and time.monotonic() - first < grace:
            return
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        first = time.monotonic()
        announce("Finishing this round, then stopping; once more to stop at once.")

    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
