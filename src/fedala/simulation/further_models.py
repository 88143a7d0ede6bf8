"""Test the models of the server and of absent clients, and tell what each kind of model scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedala.errors import UserError
from fedala.lanes import Message, Params, State
from fedala.lanes.messages import count_numbers_per_lane, drop_transient
from fedala.lanes.trees import count_bytes, take
from fedala.records import INITIALIZED, ModelFigures
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.model_scores import (
    EvaluationSchedule,
    ModelLog,
    TrainedRound,
    list_models,
)
from fedala.simulation.participation import list_absent
from fedala.simulation.round_results import RoundResults
from fedala.simulation.scores import ScoreTable, settle
from fedala.simulation.server_round import get_global_model
from fedala.simulation.transport import Setup, Transport


class FurtherModels:
    """The further kinds of models of one simulation, and the detailed metrics of all kinds."""

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        schedule: EvaluationSchedule,
        on_message: Callable[[str], None],
    ) -> None:
        self.setup, self.transport, self.schedule = setup, transport, schedule
        self.on_message = on_message
        #: What the next evaluation tells about the last round.
        self.last_round: TrainedRound | None = None
        self._missing: set[str] = set()  # kinds that the user has been told about

    def make_log(self) -> ModelLog:
        """Return the log of a round."""
        return ModelLog(len(self.setup.seeds), self.setup.population, self.setup.task.loss.metric)

    def make_request(
        self, round: int, sent: Sequence[Message], *, train: bool, evaluates_absent: bool
    ) -> RoundRequest:
        """Return what a round asks of its participants."""
        return self.schedule.make_request(
            round,
            train=train,
            evaluates_received="received" in self.schedule.kinds and self._is_whole_sent(sent),
            evaluates_absent=evaluates_absent,
        )

    def _is_whole_sent(self, sent: Sequence[Message]) -> bool:
        """Tell whether each client receives a model that can be tested; if not, say so."""
        is_stack = self.setup.method.sends_model_stack
        running = [message for message in sent if message != Message()]  # runs that have not ended
        if not is_stack and running and all(self._is_whole(message.model) for message in running):
            return True
        self._say_missing("received", "sends no whole model")
        return False

    def _is_whole(self, model: Params) -> bool:
        return self.setup.initial[0].keys() <= model.keys()

    def _say_missing(self, kind: str, reason: str) -> None:
        """Say once that a method does not have a kind of model."""
        if kind in self.schedule.kinds and kind not in self._missing:
            self._missing.add(kind)
            title = self.setup.method.title
            self.on_message(f"{title} {reason}, so its {kind} model is not evaluated.")

    # --- models of the server and of absent clients --------------------------------------------

    def test_server_models(
        self, work: RoundResults, servers: Sequence[State], evaluates_all: bool
    ) -> None:
        """Test the global model for those to which it belongs, and look at absent clients."""
        method = self.setup.method

        def get_models() -> list[Params]:
            return [
                self.setup.reset_transient(run, Message(get_global_model(method, server))).model
                for run, server in enumerate(servers)
            ]

        if self.setup.join_ratio < 1 and evaluates_all:
            if method.has_personal_models:
                self.predict_absent(work)
            else:
                self.score_absent(work, get_models())
        self.test_global_models(work, get_models)

    def test_global_models(
        self, work: RoundResults, get_models: Callable[[], Sequence[Params]]
    ) -> None:
        """Test every run's global model on the samples of all clients."""
        if "global" not in self.schedule.kinds:
            return
        models = get_models()
        if not all(map(self._is_whole, models)):
            self._say_missing("global", "has no whole global model")
            return
        population = list(range(self.setup.population))
        everybody = [population if joined else [] for joined in work.joined]
        predicts = "global" in work.request.predicts
        score, round = self.transport.score_models, work.request.round
        for result in score(round, models, everybody, predicts=predicts):
            tested = CohortResult(result.lanes, further_scores={"global": result.scores[0]})
            if INITIALIZED in result.predictions:
                tested.predictions["global"] = result.predictions[INITIALIZED]
            work.models.add(tested)

    def score_absent(self, work: RoundResults, models: Sequence[Params]) -> None:
        """Test every run's global model on the samples of absent clients: it is their model."""
        if not all(models):
            raise UserError(
                f"{self.setup.method.title} has no global model to test absent clients with: "
                "override global_model, or set has_personal_models."
            )
        absent = [self._list_absent(joined) for joined in work.joined]
        predicts = INITIALIZED in work.request.predicts
        score, round = self.transport.score_models, work.request.round
        for result in score(round, models, absent, predicts=predicts):
            work.add_figures(result)

    def _list_absent(self, joined: Sequence[int]) -> list[int]:
        """Return the clients that do not take part; none if the run has ended."""
        return list_absent(self.setup.population, joined) if joined else []

    def score_initial_models(self, known: np.ndarray | None = None) -> np.ndarray:
        """Test the initial model Θ⁰ of each run on the samples of all clients.

        With the scores that are `known`, test it only for clients that have none yet.
        """
        population, task = self.setup.population, self.setup.task
        clients = [list(range(population))] * len(self.setup.seeds)
        table = ScoreTable(np.zeros(self.setup.score_shape))
        if known is not None:
            table.values = self.fit_scores(known)
            is_new = table.values[:, :, 0, 2] == 0
            is_new &= [task.size(client, "test") > 0 for client in range(population)]
            clients = [np.flatnonzero(own).tolist() for own in is_new]
        if any(clients):
            for result in self.transport.score_models(0, self.setup.initial, clients):
                table.add(result.lanes, result.scores)
            settle([table])
        return table.values

    def fit_scores(self, known: np.ndarray) -> np.ndarray:
        """Return a table with rows of zeros for the clients that have joined since it was made."""
        runs, population, *rest = self.setup.score_shape
        joined = population - known.shape[1]
        is_possible = joined == 0 or (joined > 0 and self.transport.can_grow)
        if not is_possible or known.shape != (runs, population - joined, *rest):
            raise ValueError("another run's state")
        return np.pad(known, ((0, 0), (0, joined), (0, 0), (0, 0))) if joined else known

    def predict_absent(self, work: RoundResults) -> None:
        """Collect what the personal models of absent clients say, if details are due.

        Their scores are known from the rounds in which they took part.
        """
        if INITIALIZED not in work.request.predicts:
            return
        absent = [self._list_absent(joined) for joined in work.joined]
        for result in self.transport.predict_absent(work.request.round, absent):
            work.models.add(result)

    # --- the report ----------------------------------------------------------------------------

    def list_models(self, work: RoundResults, run: int, clients: Any) -> list[ModelFigures]:
        """Return what every kind of model scores in a run; `clients`: those that are evaluated."""
        is_detailed = INITIALIZED in work.request.predicts
        if not is_detailed and not self.schedule.has_further_kinds():
            return []
        scores = work.scores.values[run, :, 0]
        return list_models(
            work.models,
            self.schedule.kinds,
            run,
            scores,
            clients,
            self.last_round,
            is_detailed=is_detailed,
        )

    def finish_round(self, work: RoundResults) -> None:
        """Keep what the next evaluation tells about this round."""
        self.last_round = None
        if self.schedule.reports_round(work.request.round):
            sent = [self._count_bytes(message) for message in work.sent]
            uploaded = max((self._count_bytes(upload) for _, upload in work.uploads), default=0)
            self.last_round = TrainedRound.collect(work.models, sent, uploaded)
            if work.request.evaluate_trained and not work.models.has_scores("trained"):
                self._say_missing("trained", "keeps no whole model after training")

    def count_numbers(self, message: Message) -> int:
        """Return how many numbers of a message travel to or from one client."""
        travelling = message._replace(model=drop_transient(self.setup.task, message.model))
        return count_numbers_per_lane(travelling)

    def _count_bytes(self, message: Message) -> int:
        """Return how many bytes of a message travel to or from one client."""
        travelling = message._replace(model=drop_transient(self.setup.task, message.model))
        return count_bytes(take(travelling, slice(0, 1)))

    # --- between two rounds --------------------------------------------------------------------

    def state(self) -> State:
        """Return what a checkpoint must hold."""
        return {"last_round": self.last_round.state()} if self.last_round else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a checkpoint may be older than this part of it."""
        found = state.get("last_round")
        runs = len(self.setup.seeds)
        metric = self.setup.task.loss.metric
        self.last_round = TrainedRound.restore(found, runs, metric) if found else None
