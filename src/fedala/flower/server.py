"""The server of a real federation: the simulation's round loop, with its clients elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedala.clients import ClientStates, Lane
from fedala.cohort import Params
from fedala.errors import RunError, UserError
from fedala.flower.experiment import PARTS, Deployment, Experiment, Own, at_server, read
from fedala.flower.nodes import Nodes
from fedala.flower.records import check, to_params, to_record
from fedala.methods import Method, State
from fedala.running import Plan, Result, Watcher, execute
from fedala.simulation import Asked, Done, Fault, Personal, Row, Simulation
from fedala.trees import take

log = getLogger("flwr")

#: Columns of the history that are the server's: clients' notes go beside them.
COLUMNS = {
    "method", "seed", "round", "accuracy", "loss", "accuracy_joined", "accuracy_validation", "sent", "uploaded", "diverged",
    "clients", "seconds",
}  # fmt: skip


def server_app(own: Own | None = None) -> ServerApp:
    """A Flower server app that runs any method; the run config says which."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, own)

    return app


class Elsewhere(ClientStates):
    """Clients that keep their states themselves."""

    def scatter(self, lanes: Sequence[Lane], state: State) -> None:
        pass


class Federated(Simulation):
    """A simulation whose clients are nodes of a federation. Between rounds, `counted` belongs to what it is."""

    def __init__(self, experiment: Experiment, deployment: Deployment, nodes: Nodes, **options: Any) -> None:
        config = experiment.plan.config
        self.nodes, self.deployment = nodes, deployment
        #: The last round of each client whose update was taken in: the client goes on from what that round left.
        self.counted: dict[int, int] = {}
        self._round = 0
        nothing: list[Any] = [range(0)] * nodes.clients
        experiment.task.parts = {part: list(nothing) for part in PARTS}
        self.task = experiment.task
        self._take_in()
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
        self.clients = Elsewhere(self.task.device, everybody=True)
        self.expected = self.method.shared(self.task, self.start[0])

    def _take_in(self) -> None:
        """Notes how many samples the clients have said they have: no more of them is known, or needed, here."""
        for client, sizes in self.nodes.sizes.items():
            for part, size in sizes.items():
                self.task.parts[part][client] = range(size)  # type: ignore[index]

    def state(self) -> State:
        counted = [[client, round] for client, round in sorted(self.counted.items())]
        return {**super().state(), "counted": torch.tensor(counted, dtype=torch.int64).view(-1, 2)}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        super().restore(round, state)
        self.counted = dict(state["counted"].tolist())

    def run(
        self,
        on_model: Callable[[Personal], None] | None = None,
        after: Callable[[int], None] = lambda round: None,
    ) -> Iterator[Row]:
        """All rounds. Of their models, the clients' own stay with them."""
        return super().run(on_model and (lambda model: on_model(model) if model.client is None else None), after)

    def _last_models(self, joined: list[list[int]], on_model: Callable[[Personal], None]) -> None:
        super()._last_models([list(range(self.population))], on_model)  # the global one alone

    def _work(self, asked: Asked, sent: list[Params], joined: list[list[int]]) -> Iterator[Done]:
        """What has come back from the round's participants, as far as it is good."""
        self._round = asked.round
        self.nodes.wait(self.deployment.start_timeout)
        self._take_in()
        return self._ask(MessageType.TRAIN if asked.train else MessageType.EVALUATE, asked, sent[0], joined[0])

    def _score_sent(self, round: int, sent: list[Params], whom: list[list[int]], table: np.ndarray) -> None:
        asked = Asked(round, train=False, evaluates=True)
        for done in self._ask("evaluate.received", asked, sent[0] if round else {}, whom[0]):
            self._note(done.lanes, done.scores, table)

    def _ask(self, kind: str, asked: Asked, sent: Params, clients: Sequence[int]) -> Iterator[Done]:
        shared = None if _width(sent) > 1 else to_record(sent)  # one and the same for everybody is packed once
        models = {client: _lane(sent, place) for place, client in enumerate(clients)}
        contents = {}
        for client, model in models.items():
            words = ConfigRecord({
                "round": asked.round,
                "evaluates": asked.evaluates,
                "looks-back": asked.looks_back,
                "parts": list(self.parts),
                "since": self.counted.get(client, 0),
            })  # fmt: skip
            arrays = to_record(model) if shared is None else shared
            contents[client] = RecordDict({"arrays": arrays, "config": words})
        answers = self.nodes.exchange(kind, contents, asked.round, self.deployment.round_timeout)
        for client, reply in sorted(answers.items()):
            try:
                done = self._done(client, reply)
                if done.finite is not None and not done.finite:
                    done.upload = take(self.expected, slice(0))  # it has sent nothing, and says so
                elif asked.train:
                    check(done.upload, self.expected, models[client], self.deployment.max_norm)
            except (UserError, KeyError, TypeError, ValueError, RuntimeError) as error:
                log.warning(
                    "Round %d: the update of client %d (node %d) is dropped: %s.",
                    asked.round, client, reply.metadata.src_node_id, error,
                )  # fmt: skip
                continue
            yield done

    def _done(self, client: int, reply: Message) -> Done:
        """A reply as what a cohort of this one client has done."""
        [arrays], [record] = reply.content.array_records.values(), reply.content.metric_records.values()
        metrics: dict[str, Any] = dict(record)
        if metrics["client"] != client:
            raise UserError(f"it says that it is client {metrics['client']}")
        if metrics["lost"]:
            log.warning("Round %d: client %d had LOST its state and started over.", self._round, client)
        notes = {n.removeprefix("note."): float(value) for n, value in metrics.items() if n.startswith("note.")}
        if strange := [name for name in notes if name in COLUMNS or not name.isidentifier()]:
            raise UserError(f"it has no business to note {strange[0]!r}")
        return Done(
            [(0, client)],
            {name: torch.tensor([value]) for name, value in notes.items()},
            upload=to_params(arrays, self.task.device),
            finite=torch.tensor([bool(metrics["finite"])]),
            scores=self._scores(metrics, "scores"),
            left=self._scores(metrics, "left"),
        )

    def _scores(self, metrics: Mapping[str, Any], name: str) -> list[torch.Tensor]:
        figures = torch.tensor(metrics[name], dtype=torch.float64).view(-1, 1, 3)
        correct, _, samples = figures.unbind(2)
        if len(figures) not in (0, len(self.parts)) or not ((correct >= 0) & (correct <= samples)).all():
            raise UserError(f"its {name} make no sense")
        return list(figures)

    def _heed(self, done: Done, round: int, sent: list[Params], joined: list[list[int]]) -> set[Lane]:
        """A client that has diverged: its node has kept nothing of the round."""
        if done.finite is None or done.finite:
            return set()
        [(_, client)] = done.lanes
        fault = Fault(self.seeds[0], client, round - 1, 0, None)
        if self.on_divergence == "stop":
            raise RunError(f"{str(fault).capitalize()}, and on_divergence is stop.")
        self.on_fault(fault)
        if self.on_divergence == "reset":
            self.counted.pop(client, None)
        return set(done.lanes)

    def _aggregate(self, uploads: list[tuple[Sequence[Lane], Params]]) -> tuple[list[State], int]:
        needed = self.population if self.method.everyone else self.deployment.min_updates
        uploads = [(lanes, upload) for lanes, upload in uploads if lanes]
        if len(uploads) < needed:
            log.warning(
                "Round %d: %d good updates, and %d are needed: the global model stays.",
                self._round,
                len(uploads),
                needed,
            )
            return self.servers, 0
        self.counted |= {client: self._round for lanes, _ in uploads for _, client in lanes}
        return super()._aggregate(uploads)


def _width(params: Params) -> int:
    return len(next(iter(params.values()))) if params else 0


def _lane(params: Params, place: int) -> Params:
    """What goes to the client at this place: a lane of its own, or the one that all share."""
    lane: Params = take(params, slice(place, place + 1)) if _width(params) > 1 else params
    return lane


def serve(grid: Grid, run_config: Mapping[str, Any], own: Own | None = None) -> Result:
    """The whole run, kept in a run folder like any other."""
    config, deployment = read(run_config)
    experiment = at_server(config, own)
    method = experiment.method
    if method.stacked and deployment.max_norm:
        raise UserError(f"max_norm has no meaning for {method.title}, which sends several models.")
    clients = len(experiment.task.parts["train"])
    nodes = Nodes(grid, clients, clients if method.everyone else min(deployment.min_nodes, clients))

    def simulate(plan: Plan, method: Method, **options: Any) -> Federated:
        nodes.wait(deployment.start_timeout)
        return Federated(experiment, deployment, nodes, **options)

    def note(method: str, row: Row) -> None:
        log.info("Round %d of %d: accuracy %.4f, loss %.4f", row["round"], config.rounds, row["accuracy"], row["loss"])

    out = Path(deployment.out).absolute() / deployment.experiment
    resume = (out / "config.toml").is_file()
    log.info("%s %s", "Going on with" if resume else "Everything is kept in", out)
    result = execute(
        replace(experiment.plan, here=False),
        out,
        resume=resume,
        watcher=Watcher(row=note, fault=lambda method, fault: log.warning("%s.", fault), say=log.warning),
        simulate=simulate,
    )
    log.info(
        "Finished: accuracy %.4f after the last round, %.4f in the best.",
        result.history[-1]["accuracy"],
        result.best_accuracy,
    )
    return result
