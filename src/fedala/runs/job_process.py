"""A process that carries out one group of a run, in a folder of its own (`jobs.py`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedala.errors import RunError, UserError, first_line
from fedala.records import Fault, HistoryRow
from fedala.runs.config import Config
from fedala.runs.devices import is_device_error
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.own_code import configure
from fedala.runs.plan import Plan, plan
from fedala.runs.processes import Parent


class _Relay:
    """Sends what happens in a group to the process that started this one."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._has_begun = False

    def observe(self) -> RunObserver:
        return RunObserver(
            self._row,
            self._fault,
            self._message,
            lambda: bool(self._parent.stop_signals),
            self._begin,
            self._earlier,
        )

    def _row(self, label: str, row: HistoryRow) -> None:
        self._parent.send(kind="row", label=label, content=row.columns())

    def _fault(self, label: str, fault: Fault) -> None:
        self._parent.send(kind="fault", label=label, content=vars(fault))

    def _message(self, sentence: str) -> None:
        if self._has_begun:  # the parent has said what comes before
            self._parent.send(kind="message", content=sentence)

    def _begin(self, label: str, seeds: Any) -> None:
        self._has_begun = True
        self._parent.send(kind="begin", label=label, content=[seeds[0], seeds[-1] + 1])

    def _earlier(self, label: str, rows: Any) -> None:
        self._parent.send(kind="earlier", label=label, content=[row.columns() for row in rows])


def carry_out_job(order: Mapping[str, Any], parent: Parent) -> int:
    """Carry out one group, as another process has ordered; return the exit code."""
    job = Path(order["job"])
    try:
        config = Config.parse(order["config"].encode(), job / "config.toml")
        observer = _Relay(parent).observe()
        found = execute(_plan_job(config, order), job, resume=True, observer=observer)
    except (Stopped, UserError, RunError) as error:
        # Sentences name the run's folder, and not the job's.
        reason = str(error).replace(order["job"], order["folder"])
        code = 0 if isinstance(error, Stopped) else 2 if isinstance(error, UserError) else 1
        outcome = "failed" if code else "stopped"
        end: dict[str, Any] = {"outcome": outcome, "reason": reason, "exit_code": code}
        parent.send(kind="end", content=end)
        return code
    except RuntimeError as error:
        # While it stops, a process may lose the GPU to another one that was killed (MPS).
        if not (parent.stop_signals and is_device_error(error)):
            raise
        reason = f"the GPU failed: {first_line(error)}"
        parent.send(kind="end", content={"outcome": "interrupted", "reason": reason})
        return 0
    written = next(iter(found.methods.values())).checkpoints
    figures = {name: getattr(written, name) for name in ("written", "bytes", "seconds")}
    parent.send(kind="end", content={"outcome": "done", "checkpoints": figures})
    return 0


def _plan_job(values: Mapping[str, Any], order: Mapping[str, Any]) -> Plan:
    """Return the plan of one group of a run, on a device of its own."""
    config = configure({**values, "device": order["device"]})
    whole = plan(config, is_rehearsed=True)
    return replace(whole, groups=(whole.groups[order["number"]],))
