"""`fedala flower demo`: a federation of several machines, on one."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedala.errors import RunError
from fedala.flower.experiment import Deployment, data_at_nodes, with_absolute_paths
from fedala.flower.local import LocalFederation
from fedala.flower.new import write
from fedala.records import HistoryRow
from fedala.runs.folder import RunFolder
from fedala.runs.plan import Plan


def demo(
    plan: Plan,
    out: Path | None,
    *,
    row: Callable[[str, HistoryRow], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the plan's method on a SuperLink and one SuperNode per client; return the run's summary.

    Everything is in a temporary folder, which is deleted in the end. `out`: where to keep the
    server's run folder.
    """
    clients = int(plan.config.clients or 1)
    config = with_absolute_paths(plan.config)
    with LocalFederation() as federation:
        say(f"SuperLink on 127.0.0.1:{federation.port}, with TLS and node authentication")
        folder = (out or federation.folder / "demo").absolute()
        app = federation.folder / "app"
        deployment = Deployment(experiment=folder.name, out=str(folder.parent), min_nodes=clients)
        write(app, config, deployment)
        for client in range(clients):
            federation.node(client, **data_at_nodes(config))
            say(f"SuperNode of client {client}: registered, started")
        run = federation.run(app)
        say(
            f"Run {run} is submitted; Flower starts a process for every message, which takes seconds"
        )
        follow(federation, run, RunFolder(folder), row)
        summary: dict[str, Any] = json.loads(RunFolder(folder).read_verified("summary.json"))
        return summary


def follow(
    federation: LocalFederation,
    run: str,
    folder: RunFolder,
    row: Callable[[str, HistoryRow], None] = lambda method, row: None,
    seconds: float = float("inf"),
) -> RunFolder:
    """Waits for a run to end, and hands on the rows of its history as they come."""
    began = looked = time.monotonic()
    seen = 0
    while True:
        done = (folder.path / "summary.json").exists()
        rows: list[tuple[str, HistoryRow]] = []
        with suppress(OSError, ValueError, TypeError):  # not there yet, or being written
            for method, history in folder.history().items():
                rows += [(method, line) for line in history]
        for method, line in rows[seen:]:
            row(method, line)
            seen += 1
        if done:
            return folder
        now = time.monotonic()
        if now - looked > 10:
            looked = now
            status = federation.status(run)
            if status.startswith("finished") and not (folder.path / "summary.json").exists():
                raise RunError(
                    f"The run has ended as {status}. Its last words:\n{federation.run_log(run)[-2000:]}"
                )
        if now - began > seconds:
            raise RunError(
                f"The run has not ended after {seconds:g} s:\n{federation.run_log(run)[-2000:]}"
            )
        time.sleep(0.3)
