"""Carry out the groups of a run in several processes at a time, each on its own device.

Each process works in a folder of its own (`job_folders.py`), and sends what happens. One that fails
does not stop the others.
"""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from fedala.errors import RunError, UserError
from fedala.records import Fault, HistoryRow
from fedala.runs.batches import Batch
from fedala.runs.checkpoint import Checkpoints
from fedala.runs.devices import share_devices
from fedala.runs.digests import Digests
from fedala.runs.folder import RunFolder
from fedala.runs.job_folders import absorb_job_folder, gather_job_folders, make_job_folder
from fedala.runs.mps import share_gpus
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan
from fedala.runs.processes import Worker, worker_environment
from fedala.runs.results import MethodResult
from fedala.runs.resume import Progress, find_checkpoints, resume_advice, select_histories

#: The program of a process that carries out one group.
PROGRAM = "fedala.cli.jobs"
#: What a stopped run says before it says how far it has got.
_STOPPED_AFTER = "Stopped after "


class JobsFailed(RunError):
    """Some processes of a run have failed. What the others have done is kept."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass
class _Ending:
    """How the process of a group has ended."""

    outcome: str = "failed"
    """done, stopped, interrupted (in a round, after it was asked to stop) or failed."""
    reason: str = ""
    checkpoints: Mapping[str, Any] | None = None
    exit_code: int = 1


@dataclass
class Jobs:
    """Processes that carry out the groups of one run, at most `count` at a time."""

    count: int
    endings: dict[int, _Ending] = field(default_factory=dict)
    """By group."""
    groups: list[int] = field(default_factory=list)
    """Those that were not finished before."""

    def carry_out(
        self,
        plan: Plan,
        folder: RunFolder,
        about: Digests,
        batches: list[Batch],
        progress: Mapping[tuple[int, int], Progress],
        observer: RunObserver,
    ) -> dict[tuple[int, int], Progress]:
        """Carry out all groups that are not finished; return how far every finished one has got.

        `progress`: how far each batch of each group had got before.
        """
        finished = {
            key: one
            for key, one in progress.items()
            if all(progress[key[0], batch.number].is_finished for batch in batches)
        }
        self.groups = [n for n in range(len(plan.groups)) if (n, 0) not in finished]
        _Crew(self, plan, folder, batches, observer).run(deque(self.groups))
        gather_job_folders(folder, plan.groups, batches)
        history = folder.history()
        for number, ending in self.endings.items():
            for batch in batches if ending.outcome == "done" else ():
                found = Checkpoints(find_checkpoints(folder, number, batch), about.identity).find()
                histories = select_histories(history, plan.groups[number], batch)
                finished[number, batch.number] = Progress(found, histories, is_finished=True)
        return finished

    def add_figures(self, results: Mapping[str, MethodResult], number: int) -> None:
        """Give the results of a group what its process has counted of its checkpoints."""
        ending, first = self.endings.get(number), next(iter(results.values()))
        if ending and ending.checkpoints and first.checkpoints:
            vars(first.checkpoints).update(ending.checkpoints)

    def check_endings(self, plan: Plan, folder: Path) -> None:
        """Raise an error if some groups are not finished."""
        failed = {n: one for n, one in self.endings.items() if one.outcome == "failed"}
        if failed:
            reasons = [f"{plan.groups[n].title} failed: {one.reason}" for n, one in failed.items()]
            raise JobsFailed(
                f"{' '.join(reasons)} What was finished is kept in {folder}; "
                f"{resume_advice(plan.config, folder)}.",
                next(iter(failed.values())).exit_code,
            )
        ends = []
        for number, ending in self.endings.items():
            if ending.outcome == "stopped":
                ends.append(ending.reason.removeprefix(_STOPPED_AFTER))
            elif ending.outcome == "interrupted":
                reason = ending.reason.removesuffix(".")
                ends.append(f"the last checkpoint of {plan.groups[number].title} ({reason})")
        if ends:
            raise Stopped(f"{_STOPPED_AFTER}{', '.join(ends)}")
        if left := [plan.groups[n].title for n in self.groups if n not in self.endings]:
            raise Stopped(f"Stopped before {', '.join(left)}")


class _Crew:
    """The processes of a run while they work."""

    def __init__(
        self,
        jobs: Jobs,
        plan: Plan,
        folder: RunFolder,
        batches: list[Batch],
        observer: RunObserver,
    ) -> None:
        self.jobs, self.plan, self.folder = jobs, plan, folder
        self.batches, self.observer = batches, observer
        self.workers: dict[int, Worker] = {}
        """By group: the processes that are running."""
        self.devices: dict[int, str] = {}
        self._messages: SimpleQueue[tuple[int, dict[str, Any] | None]] = SimpleQueue()

    def run(self, waiting: deque[int]) -> None:
        """Carry out these groups in turn, until all have ended or the observer asks to stop."""
        count = max(1, min(self.jobs.count, len(waiting)))
        devices = share_devices(self.plan.config.device, count)
        with share_gpus(devices, self.observer.on_message) as shared:
            try:
                self._work(waiting, deque(devices), {**worker_environment(count), **shared})
            finally:
                for worker in self.workers.values():
                    worker.process.kill()
                    worker.wait()

    def _work(self, waiting: deque[int], free: deque[str], environment: dict[str, str]) -> None:
        unabsorbed = deque(waiting)
        while waiting or self.workers:
            if self.observer.should_stop():
                waiting.clear()
                for worker in self.workers.values():
                    worker.ask_to_stop()
            while waiting and free:
                number, device = waiting.popleft(), free.popleft()
                try:
                    self._start(number, device, environment)
                except (OSError, UserError) as error:  # of the disk: others may still finish
                    reason = f"its folder cannot be made ({str(error).removesuffix('.')})."
                    self.jobs.endings[number] = _Ending("failed", reason, exit_code=1)
                    free.append(device)
            ended = self._receive()
            if ended is not None:
                free.append(self.devices.pop(ended))
            # In the order of the groups, as one process would write them.
            while unabsorbed and self._is_done(unabsorbed[0]):
                absorb_job_folder(self.folder, unabsorbed.popleft(), self.plan.groups, self.batches)

    def _is_done(self, number: int) -> bool:
        ending = self.jobs.endings.get(number)
        return number not in self.workers and ending is not None and ending.outcome == "done"

    def _start(self, number: int, device: str, environment: dict[str, str]) -> None:
        job = make_job_folder(self.folder, number, self.plan.groups[number])
        order = {
            "config": self.plan.config.text(),
            "device": device,
            "folder": os.fspath(self.folder.path),
            "job": os.fspath(job),
            "number": number,
        }
        self.devices[number] = device
        self.workers[number] = Worker(
            PROGRAM,
            [],
            environment,
            lambda message: self._messages.put((number, message)),
            lambda: self._messages.put((number, None)),
            order,
        )

    def _receive(self) -> int | None:
        """Wait a moment for a message; return the group if its process has ended."""
        try:
            number, message = self._messages.get(timeout=0.1)
        except Empty:
            return None
        if message is not None:
            self._follow(number, message)
            return None
        code = self.workers.pop(number).wait()
        reason = f"its process ended with exit code {code}."
        outcome = "failed"
        if code > 128:
            reason = f"its process was killed by signal {code - 128}."
            # Whoever asks all processes to stop may kill one before it can listen.
            outcome = "interrupted" if self.observer.should_stop() else "failed"
        self.jobs.endings.setdefault(number, _Ending(outcome, reason, exit_code=code or 1))
        return number

    def _follow(self, number: int, message: dict[str, Any]) -> None:
        """Hand what a process sends to the observer."""
        kind, label, content = message["kind"], message.get("label", ""), message["content"]
        if kind == "row":
            self.observer.on_row(label, HistoryRow.from_columns(content))
        elif kind == "fault":
            self.observer.on_fault(label, Fault(**content))
        elif kind == "begin":
            self.observer.on_begin(label, range(*content))
        elif kind == "earlier":
            self.observer.on_earlier(label, [HistoryRow.from_columns(row) for row in content])
        elif kind == "end":
            self.jobs.endings[number] = _Ending(**content)
        else:
            self.observer.on_message(content)
