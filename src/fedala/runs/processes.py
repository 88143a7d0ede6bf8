"""Processes that do a part of the work, and report to the one that started them."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedala.io.child_processes import share_code
from fedala.runs.devices import share_cores


class Parent:
    """The process that started this one: it gets messages as lines of JSON.

    It asks to stop by closing its end of stdin; its death closes it, too. Then nobody reads the
    messages. This process ignores signals: one that is sent to all processes would count twice.
    What a user's code prints goes to stderr, because stdout is for the messages.
    """

    def __init__(self) -> None:
        self.stop_signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        sys.stdout.flush()
        # Without a buffer: it would keep a line that nobody read, and its end would be a fault.
        self._lines = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while os.read(0, 4096):
            pass
        self.stop_signals.append(signal.SIGTERM)

    def send(self, **message: Any) -> None:
        """Send a message."""
        try:
            self._lines.write(f"{json.dumps(message)}\n".encode())
        except BrokenPipeError:  # its death is noticed here before `_wait` notices it
            self.stop_signals.append(signal.SIGTERM)


class Worker:
    """A process that this one has started."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        receive: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None] = lambda: None,
        order: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a module as a program. A thread hands each of its messages to `receive`.

        `order`: what the program reads as the first line of its stdin.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=dict(environment),
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
        )
        self._receive, self._on_end = receive, on_end
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if order is not None and self.process.stdin:
            with suppress(BrokenPipeError):  # how the process ended says more
                self.process.stdin.write(json.dumps(order) + "\n")
                self.process.stdin.flush()

    def _listen(self) -> None:
        try:
            for line in self.process.stdout or ():
                self._receive(json.loads(line))
        finally:
            self._on_end()

    @property
    def is_running(self) -> bool:
        """Whether messages may still come."""
        return self._listener.is_alive()

    def ask_to_stop(self) -> None:
        """Ask the process to stop between two rounds."""
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def wait(self) -> int:
        """Wait until the process has ended and its messages are read; return its exit code.

        If a signal has killed it, that is 128 and the signal's number, as in a shell.
        """
        self._listener.join()
        self.ask_to_stop()
        with self.process:
            code = self.process.wait()
        return 128 - code if code < 0 else code


def worker_environment(jobs: int) -> dict[str, str]:
    """Return the environment of each of `jobs` processes: its share of the cores, the same code.

    OMP_NUM_THREADS stays as it is if it is set.
    """
    return {"OMP_NUM_THREADS": str(share_cores(jobs)), **share_code()}
