"""A client of a real federation: a cohort of one lane, which runs the methods' own code on its own samples."""

from collections.abc import Callable
from logging import getLogger
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedala.flower.client_store import Kept, directory, name_of
from fedala.flower.experiment import PARTS, Own, at_client, read
from fedala.flower.records import Reply, to_params, to_record
from fedala.lanes.cohort import Cohort
from fedala.lanes.randomness import torch_seed
from fedala.lanes.trees import Params, take
from fedala.methods import State
from fedala.simulation.rounds import CohortResult, RoundRequest, scores, take_part

log = getLogger("flwr")


def client_app(own: Own | None = None, mods: list[Mod] | None = None) -> ClientApp:
    """A Flower client app that takes part in any method's rounds; the run config says which.

    Train messages initialise, test the initialised model, train and upload; evaluate messages train nothing.
    """
    app = ClientApp(mods=mods)
    known: dict[tuple[Any, ...], Client] = {}  # a process may get several messages

    def client_of(context: Context) -> "Client":
        key = tuple(sorted((*context.run_config.items(), *context.node_config.items())))
        if key not in known:
            known.clear()
            known[key] = Client(context, own)
        return known[key]

    def by(work: Callable[["Client", Message], Message]) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return work(client_of(context), message)
            except Exception as error:
                # Flower sends an error's words to the server. They may quote data or name files.
                log.error("This client cannot do what it is asked.", exc_info=error)
                raise ClientError(f"{type(error).__name__}; the node's own log says why") from None

        return handle

    app.train()(by(Client.take_part))
    app.evaluate()(by(Client.take_part))
    app.evaluate("received")(by(Client.score))
    app.query()(by(Client.introduce))
    return app


class ClientError(Exception):
    """What the server hears of an error at a node: its kind."""


class Client:
    """One client of one experiment, on its own machine."""

    def __init__(self, context: Context, own: Own | None) -> None:
        self.experiment, self.number = at_client(context, own)
        _, deployment = read(context.run_config)
        self.kept = Kept(directory(context.node_config), deployment.experiment, name_of(context))

    def introduce(self, message: Message) -> Message:
        """Who this is, and how many samples it has: the only thing that the server hears of them."""
        task = self.experiment.task
        sizes = {part: task.size(self.number, part) if task.parts[part] else 0 for part in PARTS}
        return Message(
            RecordDict({"metrics": MetricRecord({"client": self.number, **sizes})}),
            reply_to=message,
        )

    def take_part(self, message: Message) -> Message:
        """A round, from the state that the last participation that the server has counted (`since`) left."""
        asked, words = _asked(message)
        method, task = self.experiment.method, self.experiment.task
        received = to_params(_arrays(message), task.device)
        state, lost = self._state(int(words["since"]), received)
        done = take_part(
            method, self._cohort(asked, received), [(0, self.number)], state, asked, _parts(words)
        )
        if done.finite is not None and not done.finite:
            log.error(
                "This client's training diverged in round %d: nothing of it is kept or sent.",
                asked.round,
            )
            done.upload = {}
        elif asked.train:
            # On the disk before the server hears of it; if it never does, the state before this round is there as well.
            self.kept.save(asked.round, done.state, before=int(words["since"]), method=method.name)
        elif method.personal:
            self.kept.save_model(take(done.evaluated, 0))
        return self._reply(message, done, lost)

    def score(self, message: Message) -> Message:
        """What the received model scores as it is; before the first round, Θ⁰."""
        asked, words = _asked(message)
        received = to_params(_arrays(message), self.experiment.task.device)
        cohort = self._cohort(asked, received if asked.round else self._start())
        done = CohortResult(
            [(0, self.number)], {}, scores=scores(cohort, cohort.received, _parts(words))
        )
        return self._reply(message, done)

    def _start(self) -> Params:
        """Θ⁰ follows from the seed: it need not be sent."""
        return self.experiment.start(self.experiment.plan.config.seed)

    def _state(self, since: int, received: Params) -> tuple[State, bool]:
        """What this client has kept, and whether it should have kept something that is gone."""
        method, task, start = self.experiment.method, self.experiment.task, self._start()
        state = self.kept.load(since) if since else None
        if state is not None:
            return state, False
        if since:  # the received model in the place of its own, wherever it is one
            start |= {n: v for n, v in received.items() if n in start and v.shape == start[n].shape}
        return method.fresh(task, start), bool(since)

    def _cohort(self, asked: RoundRequest, received: Params) -> Cohort:
        config = self.experiment.plan.config
        # Layers that draw random numbers themselves (dropout) draw what they would draw in a simulation of single lanes.
        torch.manual_seed(torch_seed(config.seed, "torch", client=self.number, round=asked.round))
        rounds = int(config.rounds or 1)
        return Cohort(
            self.experiment.task, [self.number], [config.seed], asked.round, rounds, received, [0]
        )

    def _reply(self, message: Message, done: CohortResult, lost: bool = False) -> Message:
        reply = Reply(
            client=self.number,
            examples=self.experiment.task.size(self.number),
            arrays=to_record(done.upload),
            is_finite=done.finite is None or bool(done.finite),
            has_lost_state=lost,
            scores=[float(figure) for score in done.scores for figure in score[0]],
            left=[float(figure) for score in done.left for figure in score[0]],
            notes={
                n: float(v[0]) for n, v in done.notes.items() if n in self.experiment.method.notes
            },
        )
        return Message(reply.pack(), reply_to=message)


def _asked(message: Message) -> tuple[RoundRequest, dict[str, Any]]:
    [record] = message.content.config_records.values()
    words: dict[str, Any] = dict(record)
    trains = (
        message.metadata.message_type == MessageType.TRAIN
    )  # whatever the words say, nothing else does
    return RoundRequest(
        int(words["round"]), trains, bool(words["evaluates"]), bool(words["looks-back"])
    ), words


def _parts(words: dict[str, Any]) -> list[str]:
    return [part for part in PARTS if part in words["parts"]]


def _arrays(message: Message) -> ArrayRecord:
    [arrays] = message.content.array_records.values()
    return arrays
