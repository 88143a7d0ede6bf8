"""A client of a real federation: a cohort of one lane, which runs the methods on its samples."""

from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any

import torch
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fedala.flower.arrays import pack_message, unpack_trusted_message
from fedala.flower.client_store import ClientStore, choose_state_dir, name_client
from fedala.flower.experiment import CustomApp, prepare_client, read_run_config, set_threads
from fedala.flower.messages import PARTS, Introduction, Reply, Request
from fedala.flower.state_owner import check_states, identify_model
from fedala.flower.upload_mods import find_misfit, prepare_mods, refuse_message
from fedala.lanes import Cohort, Message, Params, State
from fedala.lanes.messages import add_transient, drop_transient
from fedala.lanes.randomness import torch_seed
from fedala.lanes.trees import take
from fedala.simulation.client_round import (
    CohortResult,
    init_client_state,
    run_client_round,
    score_model,
)

log = getLogger("flwr")


def client_app(custom: CustomApp | None = None, mods: list[Mod] | None = None) -> ClientApp:
    """Make a Flower client app that takes part in any method's rounds. The run config says which.

    A train message initialises a model, tests it, trains it and uploads it. An evaluate message
    does not train. Flower's privacy mods apply to train messages only, all other mods to every
    message.
    """
    mods = mods or []
    app = ClientApp(mods=prepare_mods(mods))
    clients: dict[tuple[Any, ...], Client] = {}  # a process may get several messages

    def get_client(context: Context) -> "Client":
        key = tuple(sorted((*context.run_config.items(), *context.node_config.items())))
        if key not in clients:
            clients.clear()
            clients[key] = Client(context, custom, mods)
        return clients[key]

    def handle(
        work: Callable[["Client", FlowerMessage], FlowerMessage],
    ) -> Callable[..., FlowerMessage]:
        def handler(message: FlowerMessage, context: Context) -> FlowerMessage:
            try:
                return work(get_client(context), message)
            except Exception as error:
                # Flower sends the text of an error to the server. It may quote data or name files.
                log.error("This client cannot handle a message.", exc_info=error)
                raise ClientError(f"{type(error).__name__}; the node's own log says why") from None

        return handler

    app.train()(handle(Client.take_part))
    app.evaluate()(handle(Client.take_part))
    app.evaluate("received")(handle(Client.score_received))
    app.query()(handle(Client.introduce))
    return app


class ClientError(Exception):
    """An error at a node, as the server sees it: only its class."""


class Client:
    """One client of one experiment, on its own machine."""

    def __init__(
        self, context: Context, custom: CustomApp | None, mods: Sequence[Mod] = ()
    ) -> None:
        set_threads(context.node_config)
        self.experiment, self.number = prepare_client(context, custom)
        self.mods = mods
        _, self.deployment = read_run_config(context.run_config)
        folder = choose_state_dir(context.node_config)
        self.store = ClientStore(folder, self.deployment.experiment, name_client(context))
        self.model = identify_model(self._make_initial_model())
        check_states(self.store, self.experiment.method.name, self.model)

    def introduce(self, message: FlowerMessage) -> FlowerMessage:
        """Tell the server which client this is, and how many samples it has."""
        task, method = self.experiment.task, self.experiment.method
        if self.mods or self.deployment.clipping_norm:
            initial, bound = self._make_initial_model(), self.deployment.clipping_norm
            if reason := find_misfit(self.mods, method, task, initial, bound):
                return refuse_message(message, reason)
        sizes = {part: task.size(self.number, part) if task.parts[part] else 0 for part in PARTS}
        return FlowerMessage(Introduction(self.number, sizes).pack(), reply_to=message)

    def take_part(self, message: FlowerMessage) -> FlowerMessage:
        """Take part in a round, from the state of the last round that the server counted."""
        request = Request.unpack(message)
        round, since = request.work.round, request.since
        method = self.experiment.method
        received = self._unpack(request)
        state, has_lost_state = self._load_state(since, received)
        cohort = self._make_cohort(round, received)
        lanes = [(0, self.number)]
        result = run_client_round(method, cohort, lanes, state, request.work, request.parts)
        if result.diverged:
            log.error(
                "The training of this client diverged in round %d. It saves and sends nothing.",
                round,
            )
            result.upload = Message()
        elif request.work.train:
            # Save before the server hears of it. If the reply gets lost, the state before this
            # round is still there.
            about = {"method": method.name, "model": self.model}
            self.store.save(round, result.state, previous=since, **about)
        elif method.has_personal_models:
            model = drop_transient(self.experiment.task, result.evaluated)
            self.store.save_model(take(model, 0))
        return self._reply(message, result, has_lost_state)

    def score_received(self, message: FlowerMessage) -> FlowerMessage:
        """Score the received model as it is. In round 0 that is Θ⁰, which is not sent."""
        request = Request.unpack(message)
        round = request.work.round
        received = self._unpack(request) if round else Message(self._make_initial_model())
        cohort = self._make_cohort(round, received)
        scores = score_model(cohort, received.model, request.parts)
        return self._reply(message, CohortResult([(0, self.number)], scores=scores))

    def _unpack(self, request: Request) -> Message:
        task, initial = self.experiment.task, self._make_initial_model()
        received = unpack_trusted_message(request.arrays, task.device)
        return add_transient(task, received, self.experiment.method.shared_part(task, initial))

    def _make_initial_model(self) -> Params:
        """Return Θ⁰, which follows from the seed."""
        return dict(self.experiment.initial)

    def _load_state(self, since: int, received: Message) -> tuple[State, bool]:
        """Return the client's state, and whether it lost the one that it should have."""
        state = self.store.load(since) if since else None
        if state is not None:
            return state, False
        initial = self._make_initial_model()
        if since:  # a client that lost its state starts from the received model
            for name, value in received.model.items():
                if name in initial and value.shape == initial[name].shape:
                    initial[name] = value
        task, method = self.experiment.task, self.experiment.method
        return init_client_state(method, task, initial), bool(since)

    def _make_cohort(self, round: int, received: Message) -> Cohort:
        config, task = self.experiment.plan.config, self.experiment.task
        # Layers that draw random numbers (dropout) draw the same as in a simulation of one lane.
        torch.manual_seed(torch_seed(config.seed, "torch", client=self.number, round=round))
        rounds = int(config.rounds or 1)
        return Cohort(task, [self.number], [config.seed], round, rounds, received, [0])

    def _reply(
        self, message: FlowerMessage, result: CohortResult, has_lost_state: bool = False
    ) -> FlowerMessage:
        task, known = self.experiment.task, self.experiment.method.metrics
        upload = result.upload._replace(model=drop_transient(task, result.upload.model))
        reply = Reply(
            client=self.number,
            examples=self.experiment.task.size(self.number),
            arrays=pack_message(upload),
            is_finite=not result.diverged,
            has_lost_state=has_lost_state,
            scores=_list_scores(result.scores),
            trained_scores=_list_scores(result.scores_after_training),
            notes={name: float(v[0]) for name, v in result.metrics.items() if name in known},
        )
        return FlowerMessage(reply.pack(), reply_to=message)


def _list_scores(scores: list[torch.Tensor]) -> list[float]:
    """Return the scores of one lane for each part, in a row."""
    return [figure for score in scores for figure in score[0].tolist()]
