"""`fedala flower demo`: a federation of several machines, on one."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedala.errors import RunError
from fedala.flower.experiment import Deployment, data_at_nodes, with_absolute_paths
from fedala.flower.local import LocalFederation
from fedala.flower.new import write
from fedala.running import Plan
from fedala.simulation import Row
from fedala.store import RunFolder


def demo(
    plan: Plan, folder: Path, out: Path, *, row: Callable[[str, Row], None], say: Callable[[str], None]
) -> RunFolder:
    """Starts a SuperLink and a SuperNode for every client in `folder`, runs the plan's method on them into `out`, ends them."""
    clients = int(plan.config.clients or 1)
    config = with_absolute_paths(plan.config)
    write(folder / "app", config, Deployment(experiment=out.name, out=str(out.parent), min_nodes=clients))
    with LocalFederation(folder / "federation") as federation:
        say(f"SuperLink on 127.0.0.1:{federation.port}, with TLS and node authentication")
        for client in range(clients):
            federation.node(client, **data_at_nodes(config))
            say(f"SuperNode of client {client}: registered, started")
        run = federation.run(folder / "app")
        say(f"Run {run} is submitted; Flower starts a process for every message, which takes seconds")
        return follow(federation, run, RunFolder(out), row)


def follow(
    federation: LocalFederation,
    run: str,
    folder: RunFolder,
    row: Callable[[str, Row], None] = lambda method, row: None,
    seconds: float = float("inf"),
) -> RunFolder:
    """Waits for a run to end, and hands on the rows of its history as they come."""
    began = looked = time.monotonic()
    seen = 0
    while True:
        done = (folder.path / "summary.json").exists()
        rows = []
        with suppress(OSError, ValueError, TypeError):  # not there yet, or being written
            rows = folder.history()
        for line in rows[seen:]:
            row(str(line.pop("method")), line)
            seen += 1
        if done:
            return folder
        now = time.monotonic()
        if now - looked > 10:
            looked = now
            status = federation.status(run)
            if status.startswith("finished") and not (folder.path / "summary.json").exists():
                raise RunError(f"The run has ended as {status}. Its last words:\n{federation.run_log(run)[-2000:]}")
        if now - began > seconds:
            raise RunError(f"The run has not ended after {seconds:g} s:\n{federation.run_log(run)[-2000:]}")
        time.sleep(0.3)
