"""Run cells in several processes, which report to the one that started them."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from fedala.cells.observer import CellObserver, Outcome
from fedala.errors import RunError
from fedala.records import HistoryRow
from fedala.runs.mps import share_gpus
from fedala.runs.observer import write_to_stderr
from fedala.runs.processes import Parent, Worker, worker_environment


class Relay:
    """Sends what happens to the process that started this one."""

    def __init__(self) -> None:
        self._parent = Parent()
        self.stop_signals = self._parent.stop_signals

    def row(self, cell: str, row: HistoryRow) -> None:
        """Send one seed's evaluation of a round."""
        self._parent.send(cell=cell, row=row.columns())

    def end(self, cell: str, outcome: Outcome, reason: str = "") -> None:
        """Send how a cell ended."""
        self._parent.send(cell=cell, outcome=outcome, reason=reason)


def run_processes(
    arguments: list[str],
    devices: Sequence[str],
    observer: CellObserver,
    stop_signals: Sequence[int] = (),
) -> None:
    """Run `fedala` with these arguments for each of `devices`; each takes the next free cell."""
    lock, jobs = threading.Lock(), len(devices)

    def receive(message: dict[str, Any]) -> None:
        """Hand what a process sends to the observer, one message at a time."""
        with lock:
            if "row" in message:
                observer.row(message["cell"], HistoryRow.from_columns(message["row"]))
            else:
                outcome = Outcome(message["outcome"])
                observer.end(message["cell"], outcome, message["reason"])

    with share_gpus(devices, write_to_stderr) as shared:
        environment = {**worker_environment(jobs), **shared}
        workers = []
        for device in devices:
            words = [*arguments, f"--device={device}", "--relay"]
            workers.append(Worker("fedala.cli.app", words, environment, receive))
        try:
            while any(worker.is_running for worker in workers):
                time.sleep(0.1)
                for worker in workers if stop_signals else ():
                    worker.ask_to_stop()
        except BaseException:
            for worker in workers:
                worker.process.kill()
            raise
        finally:
            codes = [worker.wait() for worker in workers]
    for code in codes:
        if code and not stop_signals:
            raise RunError(f"One of the {jobs} processes ended with exit code {code}.")
