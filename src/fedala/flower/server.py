"""The server of a real federation: the simulation's round loop, with clients on other machines."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fedala.errors import UserError
from fedala.flower.experiment import (
    CustomApp,
    Deployment,
    Experiment,
    prepare_server,
    read_run_config,
)
from fedala.flower.nodes import Nodes
from fedala.flower.transport import FlowerTransport
from fedala.flower.upload_mods import find_unclippable
from fedala.lanes.trees import matches
from fedala.methods import Method, ServerRound
from fedala.records import Fault, HistoryRow
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver
from fedala.runs.plan import Plan
from fedala.runs.results import RunResult
from fedala.simulation import Simulation

log = getLogger("flwr")

#: The environment variable of the server with the folder that a relative `out` lies in.
BASE = "FEDALA_RUNS"


def server_app(custom: CustomApp | None = None) -> ServerApp:
    """Make a Flower server app that runs any method. The run config says which."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, custom)

    return app


def serve(grid: Grid, run_config: Mapping[str, Any], custom: CustomApp | None = None) -> RunResult:
    """Run the whole experiment, in a run folder like any other."""
    config, deployment = read_run_config(run_config)
    experiment = prepare_server(config, custom)
    method = experiment.method
    if method.sends_model_stack and deployment.max_norm:
        raise UserError(
            f"max_norm does not apply to {method.title}, which sends several models: set it to 0."
        )
    if deployment.clipping_norm:
        initial = experiment.start(config.seed)
        if reason := find_unclippable(method, experiment.task, initial):
            raise UserError(f"clipping_norm does not apply: {reason}.")
    check_growth(experiment, deployment, custom)
    nodes = _make_nodes(grid, experiment, deployment)

    def simulate(plan: Plan, method: Method, **options: Any) -> Simulation:
        nodes.wait_until_ready(deployment.start_timeout)
        return _build_simulation(experiment, deployment, nodes, **options)

    def log_row(method: str, row: HistoryRow) -> None:
        log.info(
            "Round %d of %d: %s %.4f, loss %.4f",
            row.round, config.rounds, row.metric.title, row.score, row.loss,
        )  # fmt: skip

    out = find_run_folder(deployment)
    resume = (out / "config.toml").is_file()
    log.info("%s %s", "Resuming the run in" if resume else "Writing the run to", out)
    result = execute(
        replace(experiment.plan, has_local_clients=False),
        out,
        resume=resume,
        observer=RunObserver(
            on_row=log_row,
            on_fault=lambda method, fault: log.warning("%s.", fault),
            on_message=log.warning,
        ),
        simulate=simulate,
    )
    last = result.history[-1]
    log.info(
        "Finished: %s %.4f after the last round, %.4f in the best.",
        last.metric.title, last.score, result.best_score,
    )  # fmt: skip
    return result


def find_run_folder(deployment: Deployment) -> Path:
    """Return the run folder of an experiment, and say what a relative `out` lies under."""
    out = Path(deployment.out).expanduser()
    if not out.is_absolute():
        base = os.environ.get(BASE)
        here = Path(base).expanduser().absolute() if base else Path.cwd()
        reason = f"{BASE} names it" if base else "the SuperLink was started there"
        log.info(
            "out = %s is a folder in %s, because %s. An absolute path is the same wherever the "
            "SuperLink is started.",
            deployment.out, here, reason,
        )  # fmt: skip
        out = here / out
    return out / deployment.experiment


def check_growth(experiment: Experiment, deployment: Deployment, custom: CustomApp | None) -> None:
    """Refuse `max_clients` if nobody can join: by the data, or by the method."""
    population, method = experiment.population, experiment.method
    if not deployment.max_clients or deployment.max_clients == population:
        return
    if deployment.max_clients < population:
        raise UserError(
            f"max_clients is {deployment.max_clients}, but {population} clients are expected at "
            f"the start: set it to at least {population}, or to 0 if nobody joins later."
        )
    if custom is None:
        raise UserError(
            f"max_clients is for nodes with data of their own (CustomApp): this dataset is divided "
            f"among {population} clients, and nothing is left for others. Set it to 0."
        )
    reason = method.refuses_newcomers
    if method.requires_all_clients:
        reason = "every client must take part in every round"
    elif _has_state_per_client(experiment):
        reason = "its server keeps something for each client of the start"
    if reason:
        raise UserError(
            f"{method.title} takes no clients that join later, because {reason}: set max_clients "
            "to 0."
        )


def _has_state_per_client(experiment: Experiment) -> bool:
    """Tell whether the server's state has another shape with more clients."""
    method, task, seed = experiment.method, experiment.task, experiment.plan.config.seed
    shared = method.shared_part(task, experiment.start(seed))
    few, many = (
        method.init_server(task, shared, ServerRound(seed, 0, 1, range(count), [1] * count))
        for count in (2, 3)
    )
    return not matches(few, many)


def _make_nodes(grid: Grid, experiment: Experiment, deployment: Deployment) -> Nodes:
    population = experiment.population
    seats = max(population, deployment.max_clients)
    requires_all = experiment.method.requires_all_clients
    return Nodes(
        grid,
        population,
        population if requires_all else min(deployment.min_nodes, seats),
        max_clients=seats,
        max_samples=deployment.max_samples,
        validates=experiment.validates,
        # Flower's simulation engine has no keys: its nodes are new in every run.
        rebind=deployment.rebind or isinstance(grid, InMemoryGrid),
        can_connect=not isinstance(grid, InMemoryGrid),
    )


def _build_simulation(
    experiment: Experiment,
    deployment: Deployment,
    nodes: Nodes,
    *,
    on_fault: Callable[[Fault], None],
    on_message: Callable[[str], None],
    client_files: Path | None = None,
) -> Simulation:
    """Build the round loop over the nodes. Clients keep their states, so there are no files."""
    config = experiment.plan.config
    return Simulation(
        experiment.method,
        experiment.task,
        experiment.start,
        seeds=(config.seed,),
        rounds=int(config.rounds or 1),
        join_ratio=config.join_ratio,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        # The run's options decide what is tested, not what clients report: a restart with other
        # clients must test the same.
        validates=experiment.validates,
        on_divergence=config.on_divergence,
        on_fault=on_fault,
        on_message=on_message,
        transport=lambda setup: FlowerTransport(setup, nodes, deployment),
    )
