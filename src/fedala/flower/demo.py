"""`fedala flower demo`: a federation of several machines, on one."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fedala.errors import RunError
from fedala.flower.experiment import Deployment, build_node_config, make_paths_absolute
from fedala.flower.local import LocalFederation
from fedala.flower.new import write_app
from fedala.records import HistoryRow
from fedala.runs.devices import share_cores
from fedala.runs.folder import RunFolder
from fedala.runs.plan import Plan

#: Seconds between two looks at the run folder, and between two looks at the run's status.
PAUSE = 0.3
STATUS_PAUSE = 10.0


def run_demo(
    plan: Plan,
    out: Path | None,
    *,
    row: Callable[[str, HistoryRow], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the plan's method on a SuperLink and one SuperNode per client; return the run's summary.

    Everything is in a temporary folder, which is deleted at the end. With `out`, the server's run
    folder is there and remains.
    """
    clients = int(plan.config.clients or 1)
    config = make_paths_absolute(plan.config)
    threads = share_cores(clients)
    with LocalFederation() as federation:
        say(f"SuperLink on 127.0.0.1:{federation.port}, with TLS and node authentication")
        folder = (out or federation.folder / "demo").absolute()
        app = federation.folder / "app"
        deployment = Deployment(experiment=folder.name, out=str(folder.parent), min_nodes=clients)
        write_app(app, config, deployment)
        for client in range(clients):
            federation.start_node(client, threads=threads, **build_node_config(config))
            say(f"SuperNode of client {client}: registered, started")
        run = federation.submit(app)
        say(f"Run {run} is submitted. Flower takes seconds to start a process for every message")
        follow_run(federation, run, RunFolder(folder), row)
        summary: dict[str, Any] = json.loads(RunFolder(folder).read_verified("summary.json"))
        return summary


def follow_run(
    federation: LocalFederation,
    run: str,
    folder: RunFolder,
    row: Callable[[str, HistoryRow], None] = lambda method, row: None,
    seconds: float = float("inf"),
) -> RunFolder:
    """Wait until a run ends, and pass each new row of its history to `row`."""
    start = last_look = time.monotonic()
    seen = 0
    summary = folder.path / "summary.json"
    while True:
        is_finished = summary.exists()
        rows: list[tuple[str, HistoryRow]] = []
        with suppress(OSError, ValueError, TypeError):  # not there yet, or half written
            for method, history in folder.history().items():
                rows += [(method, line) for line in history]
        for method, line in rows[seen:]:
            row(method, line)
            seen += 1
        if is_finished:
            return folder
        now = time.monotonic()
        if now - last_look > STATUS_PAUSE:
            last_look = now
            status = federation.read_status(run)
            if status.startswith("finished") and not summary.exists():
                _fail(federation, run, f"The run ended as {status} without a summary")
        if now - start > seconds:
            _fail(federation, run, f"The run did not end within {seconds:g} s")
        time.sleep(PAUSE)


def _fail(federation: LocalFederation, run: str, problem: str) -> NoReturn:
    log = federation.read_run_log(run)[-2000:]
    raise RunError(f"{problem}. The end of its log:\n{log}")
