"""The server of a real federation: the simulation's round loop, with clients on other machines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fedala.errors import RunError, UserError
from fedala.flower.experiment import (
    CustomApp,
    Deployment,
    Experiment,
    prepare_server,
    read_run_config,
)
from fedala.flower.messages import PARTS
from fedala.flower.nodes import Nodes
from fedala.flower.transport import FlowerTransport
from fedala.lanes.cohort import Params
from fedala.lanes.trees import take
from fedala.methods import Method, State
from fedala.records import Fault, PersonalModel, Row
from fedala.runs.execute import Plan, Result, RunObserver, execute
from fedala.simulation.client_states import ClientStates, Lane
from fedala.simulation.rounds import CohortResult, RoundRequest, Simulation

log = getLogger("flwr")


def server_app(custom: CustomApp | None = None) -> ServerApp:
    """Make a Flower server app that runs any method. The run config says which."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, custom)

    return app


def serve(grid: Grid, run_config: Mapping[str, Any], custom: CustomApp | None = None) -> Result:
    """Run the whole experiment, in a run folder like any other."""
    config, deployment = read_run_config(run_config)
    experiment = prepare_server(config, custom)
    method = experiment.method
    if method.stacked and deployment.max_norm:
        raise UserError(
            f"max_norm does not apply to {method.title}, which sends several models: set it to 0."
        )
    nodes = _make_nodes(grid, experiment, deployment)

    def simulate(plan: Plan, method: Method, **options: Any) -> FederatedSimulation:
        nodes.wait_until_ready(deployment.start_timeout)
        return FederatedSimulation(experiment, deployment, nodes, **options)

    def log_row(method: str, row: Row) -> None:
        log.info(
            "Round %d of %d: accuracy %.4f, loss %.4f",
            row["round"], config.rounds, row["accuracy"], row["loss"],
        )  # fmt: skip

    out = Path(deployment.out).absolute() / deployment.experiment
    resume = (out / "config.toml").is_file()
    log.info("%s %s", "Resuming the run in" if resume else "Writing the run to", out)
    result = execute(
        replace(experiment.plan, here=False),
        out,
        resume=resume,
        watcher=RunObserver(
            row=log_row, fault=lambda method, fault: log.warning("%s.", fault), say=log.warning
        ),
        simulate=simulate,
    )
    log.info(
        "Finished: accuracy %.4f after the last round, %.4f in the best.",
        result.history[-1]["accuracy"], result.best_accuracy,
    )  # fmt: skip
    return result


def _make_nodes(grid: Grid, experiment: Experiment, deployment: Deployment) -> Nodes:
    population = len(experiment.task.parts["train"])
    requires_all = experiment.method.everyone
    return Nodes(
        grid,
        population,
        population if requires_all else min(deployment.min_nodes, population),
        max_samples=deployment.max_samples,
        validates=experiment.validates,
        # Flower's simulation engine has no keys: its nodes are new in every run.
        rebind=deployment.rebind or isinstance(grid, InMemoryGrid),
    )


class RemoteClientStates(ClientStates):
    """The states of clients that keep them on their own machines."""

    def scatter(self, lanes: Sequence[Lane], state: State) -> None:
        """Do nothing."""


class FederatedSimulation(Simulation):
    """The simulation's round loop over the nodes of a federation."""

    def __init__(
        self, experiment: Experiment, deployment: Deployment, nodes: Nodes, **options: Any
    ) -> None:
        config = experiment.plan.config
        self.task, self.nodes, self.deployment = experiment.task, nodes, deployment
        self._current_round = 0
        empty: list[Any] = [range(0)] * nodes.population
        self.task.parts = {part: list(empty) for part in PARTS}
        self._update_sizes()
        super().__init__(
            experiment.method,
            experiment.task,
            experiment.start,
            seeds=(config.seed,),
            rounds=int(config.rounds or 1),
            join_ratio=config.join_ratio,
            eval_every=config.eval_every,
            eval_clients=config.eval_clients,
            on_divergence=config.on_divergence,
            **options,
        )
        # The run's options decide what is tested, not what clients report: a restart with other
        # clients must test the same.
        self.parts = ["test", "validation"] if experiment.validates else ["test"]
        self.clients = RemoteClientStates(self.task.device, everybody=True)
        template = self.method.shared(self.task, self.start[0])
        self.transport = FlowerTransport(nodes, deployment, template, self.parts, self.method.notes)

    def state(self) -> State:
        """Return the state of the round loop and of the transport."""
        return {**super().state(), **self.transport.state()}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned after this many rounds."""
        super().restore(round, state)
        self.transport.restore(round, state)
        self._update_sizes()

    def run(
        self,
        on_model: Callable[[PersonalModel], None] | None = None,
        after: Callable[[int], None] = lambda round: None,
    ) -> Iterator[Row]:
        """Run all rounds. Only the global model goes to `on_model`: clients keep their own."""

        def pass_global(model: PersonalModel) -> None:
            if on_model and model.client is None:
                on_model(model)

        return super().run(on_model and pass_global, after)

    def _update_sizes(self) -> None:
        """Give the task the numbers of samples that the clients reported."""
        for client in range(self.nodes.population):
            for part in PARTS:
                size = self.nodes.sizes.get(client, {}).get(part, 0)
                self.task.parts[part][client] = range(size)  # type: ignore[index]

    def _last_models(
        self, joined: list[list[int]], on_model: Callable[[PersonalModel], None]
    ) -> None:
        super()._last_models([list(range(self.population))], on_model)  # only the global one

    def _work(
        self, request: RoundRequest, sent: list[Params], joined: list[list[int]]
    ) -> Iterator[CohortResult]:
        """Yield the good results of the round's participants."""
        self._current_round = request.round
        self.transport.wait_until_ready()
        self._update_sizes()
        return self.transport.exchange(request, _split_models(sent[0], joined[0]))

    def _score_sent(
        self, round: int, sent: list[Params], clients: list[list[int]], table: np.ndarray
    ) -> None:
        """Score the models as they are sent. Clients make Θ⁰ themselves, in round 0."""
        request = RoundRequest(round, train=False, evaluates=True)
        models = _split_models(sent[0] if round else {}, clients[0])
        for result in self.transport.exchange(request, models, scores_received=True):
            self._note(result.lanes, result.scores, table)

    def _heed(
        self, result: CohortResult, round: int, sent: list[Params], joined: list[list[int]]
    ) -> set[Lane]:
        """Report a client that diverged. Its node has not saved the round."""
        if result.finite is None or result.finite:
            return set()
        [(_, client)] = result.lanes
        fault = Fault(self.seeds[0], client, round - 1, 0, None)
        if self.on_divergence == "stop":
            raise RunError(f"{str(fault).capitalize()}, and on_divergence is stop.")
        self.on_fault(fault)
        if self.on_divergence == "reset":
            self.transport.reset(client)
        return set(result.lanes)

    def _aggregate(self, uploads: list[tuple[Sequence[Lane], Params]]) -> tuple[list[State], int]:
        """Aggregate the good updates, unless there are too few of them."""
        required = self.population if self.method.everyone else self.deployment.min_updates
        uploads = [(lanes, upload) for lanes, upload in uploads if lanes]
        if len(uploads) < required:
            log.warning(
                "Round %d: %d good updates, but %d are required. The global model does not change.",
                self._current_round, len(uploads), required,
            )  # fmt: skip
            return self.servers, 0
        self.transport.confirm(self._current_round, [lanes[0][1] for lanes, _ in uploads])
        return super()._aggregate(uploads)


def _split_models(sent: Params, clients: Sequence[int]) -> dict[int, Params]:
    """Return each client's model: a lane of its own, or the one that all clients share."""
    width = len(next(iter(sent.values()))) if sent else 0
    if width <= 1:
        return dict.fromkeys(clients, sent)
    return {client: take(sent, slice(i, i + 1)) for i, client in enumerate(clients)}
