"""The server of a real federation: the simulation's round loop, with its clients elsewhere."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fedala.errors import RunError, UserError
from fedala.flower.experiment import PARTS, Deployment, Experiment, Own, at_server, read
from fedala.flower.nodes import Nodes
from fedala.flower.records import LARGEST, Reply, check, decode, quote, to_record
from fedala.lanes.trees import Params, take
from fedala.methods import Method, State
from fedala.records import Evaluation, Fault, HistoryRow, PersonalModel
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver
from fedala.runs.plan import Plan
from fedala.runs.results import Result
from fedala.simulation.client_states import ClientStates, Lane
from fedala.simulation.rounds import CohortResult, RoundRequest, Simulation

log = getLogger("flwr")


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

    def __init__(
        self, experiment: Experiment, deployment: Deployment, nodes: Nodes, **options: Any
    ) -> None:
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
        # The run's options say what is tested, not what some client says of itself: a restart with
        # other clients has to come to the same.
        self.parts = ["test", "validation"] if experiment.validates else ["test"]
        self.clients = Elsewhere(self.task.device, everybody=True)
        self.expected = self.method.shared(self.task, self.start[0])

    def _take_in(self) -> None:
        """Notes how many samples the clients have said they have: no more of them is known, or needed, here."""
        for client in range(self.nodes.clients):
            for part in PARTS:
                size = self.nodes.sizes.get(client, {}).get(part, 0)
                self.task.parts[part][client] = range(size)  # type: ignore[index]

    def state(self) -> State:
        counted = [[client, round] for client, round in sorted(self.counted.items())]
        # Node ids are 64 bits without a sign, which tensors of this format do not have.
        bound = (
            np.array(sorted(self.nodes.bound.items()), dtype=np.uint64)
            .reshape(-1, 2)
            .view(np.int64)
        )
        return {
            **super().state(),
            "counted": torch.tensor(counted, dtype=torch.int64).view(-1, 2),
            "bound": torch.from_numpy(bound),
        }

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        counted = dict(state["counted"].tolist())
        bound = dict(state["bound"].numpy().view(np.uint64).tolist()) if "bound" in state else {}
        known = range(self.population)
        if not all(c in known and 0 < r <= round for c, r in counted.items()) or not all(
            c in known for c in bound
        ):
            raise ValueError("another federation's state")
        super().restore(round, state)
        self.counted = counted
        self.nodes.bind(bound)
        self._take_in()

    def run(
        self,
        on_model: Callable[[PersonalModel], None] | None = None,
        after: Callable[[int], None] = lambda round: None,
    ) -> Iterator[Evaluation]:
        """All rounds. Of their models, the clients' own stay with them."""
        return super().run(
            on_model and (lambda model: on_model(model) if model.client is None else None), after
        )

    def _last_models(
        self, joined: list[list[int]], on_model: Callable[[PersonalModel], None]
    ) -> None:
        super()._last_models([list(range(self.population))], on_model)  # the global one alone

    def _work(
        self, asked: RoundRequest, sent: list[Params], joined: list[list[int]]
    ) -> Iterator[CohortResult]:
        """What has come back from the round's participants, as far as it is good."""
        self._round = asked.round
        self.nodes.wait(self.deployment.start_timeout)
        self._take_in()
        return self._ask(
            MessageType.TRAIN if asked.train else MessageType.EVALUATE, asked, sent[0], joined[0]
        )

    def _score_sent(
        self, round: int, sent: list[Params], whom: list[list[int]], table: np.ndarray
    ) -> None:
        asked = RoundRequest(round, train=False, evaluates=True)
        for done in self._ask("evaluate.received", asked, sent[0] if round else {}, whom[0]):
            self._note(done.lanes, done.scores, table)

    def _ask(
        self, kind: str, asked: RoundRequest, sent: Params, clients: Sequence[int]
    ) -> Iterator[CohortResult]:
        shared = (
            None if _width(sent) > 1 else to_record(sent)
        )  # one and the same for everybody is packed once
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
        for client, answer in sorted(answers.items()):
            node = answer.metadata.src_node_id
            try:
                reply = Reply.unpack(answer.content, self.method.notes)
                done = self._done(client, reply, asked, models[client])
            except Exception as error:  # whatever is wrong with a reply costs this update alone
                log.warning(
                    "Round %d: the update of client %d (node %d) is dropped: %s.",
                    asked.round, client, node, quote(error),
                )  # fmt: skip
                continue
            if reply.has_lost_state:
                log.warning(
                    "Round %d: client %d had LOST its state and started over.", asked.round, client
                )
            if reply.is_finite and not all(map(math.isfinite, reply.scores + reply.left)):
                log.warning(
                    "Round %d: the loss of client %d (node %d) on its test samples is not finite; its update counts.",
                    asked.round, client, node,
                )  # fmt: skip
            yield done

    def _done(self, client: int, reply: Reply, asked: RoundRequest, sent: Params) -> CohortResult:
        """Check a reply and make it what a cohort of this one client has done."""
        if reply.client != client:
            raise UserError(f"it says that it is client {reply.client}")
        sizes = self.nodes.sizes[client]
        done = CohortResult(
            [(0, client)],
            {
                name: torch.tensor([value], dtype=torch.float64)
                for name, value in reply.notes.items()
            },
            upload=take(self.expected, slice(0)),
            finite=torch.tensor([reply.is_finite]),
            scores=self._scores(reply.scores, asked.evaluates, "scores"),
            left=self._scores(reply.left, asked.train and asked.looks_back, "left scores"),
        )
        tested = [int(score[0, 2]) for score in done.scores + done.left]
        known = [
            sizes[part] for figures in (done.scores, done.left) if figures for part in self.parts
        ]
        if [reply.examples, *tested] != [sizes["train"], *known]:
            self.nodes.forget(client)  # it may have other data now, and is asked again
            raise UserError("its numbers of samples are not those that it introduced itself with")
        if asked.train and reply.is_finite:
            done.upload = decode(reply.arrays, self.expected)
            check(done.upload, self.expected, sent, self.deployment.max_norm)
        elif reply.arrays or not (asked.train or reply.is_finite):
            raise UserError("it sends arrays that it should not have, or diverged without training")
        return done

    def _scores(self, figures: list[float], is_asked: bool, what: str) -> list[torch.Tensor]:
        """Figures as [lane, (correct, loss, samples)] for each part.

        Correct answers are whole, and no more than the samples. A loss may be infinite or NaN, as
        that of an honest client whose model has become too large is.
        """
        if len(figures) != (3 * len(self.parts) if is_asked else 0):
            raise UserError(
                f"its {what} are {len(figures)} numbers, which is not what it was asked for"
            )
        table = torch.tensor(figures, dtype=torch.float64).view(-1, 1, 3)
        for correct, loss, samples in table[:, 0].tolist():
            is_count = correct.is_integer() and samples.is_integer() and 0 <= correct <= samples
            if not is_count or loss < 0 or LARGEST < loss < math.inf:
                raise UserError(
                    f"its {what} make no sense: {correct:g} of {samples:g} correct, a loss of {loss:g}"
                )
        return list(table)

    def _heed(
        self, done: CohortResult, round: int, sent: list[Params], joined: list[list[int]]
    ) -> set[Lane]:
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
    nodes = Nodes(
        grid,
        clients,
        clients if method.everyone else min(deployment.min_nodes, clients),
        max_samples=deployment.max_samples,
        validates=experiment.validates,
        # Flower's simulation engine has no keys: its nodes are new in every run.
        rebind=deployment.rebind or isinstance(grid, InMemoryGrid),
    )

    def simulate(plan: Plan, method: Method, **options: Any) -> Federated:
        nodes.wait(deployment.start_timeout)
        return Federated(experiment, deployment, nodes, **options)

    def note(method: str, row: HistoryRow) -> None:
        log.info(
            "Round %d of %d: accuracy %.4f, loss %.4f",
            row.round,
            config.rounds,
            row.accuracy,
            row.loss,
        )

    out = Path(deployment.out).absolute() / deployment.experiment
    resume = (out / "config.toml").is_file()
    log.info("%s %s", "Going on with" if resume else "Everything is kept in", out)
    result = execute(
        replace(experiment.plan, has_local_clients=False),
        out,
        resume=resume,
        observer=RunObserver(
            on_row=note,
            on_fault=lambda method, fault: log.warning("%s.", fault),
            on_message=log.warning,
        ),
        simulate=simulate,
    )
    log.info(
        "Finished: accuracy %.4f after the last round, %.4f in the best.",
        result.history[-1].accuracy,
        result.best_accuracy,
    )
    return result
