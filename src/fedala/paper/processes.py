"""Run cells in several processes, which report to the one that started them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from fedala.errors import RunError
from fedala.paper.observer import CellObserver, Outcome
from fedala.records import HistoryRow


class Relay:
    """Sends what happens, as lines of JSON, to the process that started this one.

    That process asks to stop by closing its end of stdin; its death closes it, too. This process
    ignores signals: one that is sent to all processes would count twice.
    """

    def __init__(self) -> None:
        self.stop_signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        os.read(0, 1)
        self.stop_signals.append(signal.SIGTERM)

    def row(self, cell: str, row: HistoryRow) -> None:
        """Send one seed's evaluation of a round."""
        print(json.dumps({"cell": cell, "row": row.columns()}), flush=True)

    def end(self, cell: str, outcome: Outcome, reason: str = "") -> None:
        """Send how a cell ended."""
        print(json.dumps({"cell": cell, "outcome": outcome, "reason": reason}), flush=True)


def run_processes(
    arguments: list[str],
    jobs: int,
    observer: CellObserver,
    environment: dict[str, str],
    stop_signals: Sequence[int] = (),
) -> None:
    """Run the same command in several processes; each takes the next cell that is free."""
    command = [sys.executable, "-m", "fedala.cli.app", "paper", "run", *arguments, "--relay"]
    processes = [_start(command, environment) for _ in range(jobs)]
    lock = threading.Lock()
    listeners = [
        threading.Thread(target=_listen, args=[process, observer, lock]) for process in processes
    ]
    for listener in listeners:
        listener.start()
    try:
        while any(listener.is_alive() for listener in listeners):
            time.sleep(0.1)
            for process in processes if stop_signals else ():
                process.stdin.close()  # type: ignore[union-attr]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process, listener in zip(processes, listeners, strict=True):
            listener.join()
            with process:
                process.wait()
    for process in processes:
        if process.returncode and not stop_signals:
            raise RunError(
                f"One of the {jobs} processes ended with exit code {process.returncode}."
            )


def _start(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C does not reach it
    )


def _listen(process: "subprocess.Popen[str]", observer: CellObserver, lock: threading.Lock) -> None:
    """Hand what a process sends to the observer, one message at a time."""
    for line in process.stdout or ():
        message = json.loads(line)
        with lock:
            if "row" in message:
                observer.row(message["cell"], HistoryRow.from_columns(message["row"]))
            else:
                outcome = Outcome(message["outcome"])
                observer.end(message["cell"], outcome, message["reason"])
