"""The round loop: draw, send, let the clients work, aggregate, record.

Several runs (seeds) of one method go side by side: a lane is a client of a run. Between two rounds,
a simulation is its `round`, `servers`, `absent_scores` and its transport's client states. Every
draw is keyed, so there is no random state. A round happens as a whole or not at all: if something
goes wrong in its middle, these stay as they were.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedala.errors import RunError
from fedala.lanes import Message, Params, State, Task, UpdateRule
from fedala.lanes.heads import extend_task
from fedala.lanes.samples import to_device
from fedala.lanes.trees import matches, tree_map
from fedala.methods import Method, ServerRound
from fedala.records import INITIALIZED, Evaluation, Fault, NewcomerScores, PersonalModel
from fedala.simulation.client_round import CohortResult
from fedala.simulation.client_states import Lane, States
from fedala.simulation.evaluated_models import EvaluatedModels, RunModels
from fedala.simulation.further_models import FurtherModels
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.model_scores import EvaluationSchedule, has_details
from fedala.simulation.newcomers import Newcomers
from fedala.simulation.out_of_memory import retry_with_fewer_lanes
from fedala.simulation.participation import draw_participants, list_absent
from fedala.simulation.round_results import RoundResults
from fedala.simulation.scores import ScoreTable
from fedala.simulation.server_round import aggregate_uploads, init_server_state, send_message
from fedala.simulation.transport import Setup, Transport
from fedala.simulation.variants import Variant

OnModel = Callable[[PersonalModel], None]


class Simulation:
    """One method on one federation, over one or several seeds."""

    def __init__(
        self,
        method: Method,
        task: Task,
        initial: Callable[[int], Params],
        *,
        seeds: Sequence[int] = (0,),
        variants: Sequence[Variant] = (),
        rounds: int = 1,
        join_ratio: float = 1.0,
        eval_every: int = 1,
        eval_clients: str = "all",
        validates: bool | None = None,
        pick_by: str = "score",
        on_divergence: str = "skip",
        on_fault: Callable[[Fault], None] = lambda fault: None,
        on_message: Callable[[str], None] = lambda message: None,
        record_weights: int = 0,
        evaluate: Sequence[str] = (INITIALIZED,),
        metrics_every: int | None = None,
        held_out: int = 0,
        holdout_epochs: Sequence[int] = (0,),
        holdout_every: int = 1,
        transport: Callable[[Setup], Transport] | None = None,
        **local_options: Any,
    ) -> None:
        """`initial(seed)` is the initial model Θ⁰ of a run, as one lane.

        Without a `transport`, the clients are on this machine, and `local_options` are those of
        `LocalTransport`. With `variants` of the method, each of them runs with every seed; the
        runs of the first variant come first. `validates` tells whether validation samples are
        tested, by default if there are any; with `pick_by="loss"`, rows have their loss, too. Every
        `record_weights` rounds, evaluations tell how W is spread. `evaluate` names kinds of models
        (`records.MODEL_KINDS`), `metrics_every` is that of `EvaluationSchedule`, and the last
        `held_out` clients of the task are tested as `Newcomers`.
        """
        method.check_model(task.ordered_model)
        task, initial = extend_task(task, initial, method.head, method.title)
        if variants:
            task.rule = UpdateRule.of([variant.recipe.optimizer for variant in variants])
        method.check_optimizer(task.rule)
        self.method, self.task, self.rounds, self.join_ratio = method, task, rounds, join_ratio
        #: By run: its seed, and the number of its variant.
        self.seeds = tuple(seeds) * max(1, len(variants))
        self.variants = [i for i in range(max(1, len(variants))) for _ in seeds]
        self.eval_every, self.eval_clients = eval_every, eval_clients
        self.on_divergence, self.on_fault, self.on_message = on_divergence, on_fault, on_message
        if validates is None:
            known = len(task.parts["train"]) - held_out
            validates = any(len(rows) for rows in task.parts["validation"][:known])
        self.validated = list(dict.fromkeys(("score", pick_by))) if validates else []
        parts = ["test", "validation"] if validates else ["test"]
        models = {seed: initial(seed) for seed in seeds}
        self.initial = [models[seed] for seed in self.seeds]
        own = [variants[i] for i in self.variants] if variants else ()
        about = (self.initial, self.seeds, rounds, join_ratio, parts, own, held_out)
        self.setup = setup = Setup(method, task, *about)
        self.methods = [setup.method_of(run) for run in range(len(self.seeds))]
        self.transport: Transport = (
            transport(setup)
            if transport
            else LocalTransport(setup, on_message=on_message, **local_options)
        )
        every = metrics_every if has_details(task) else None
        schedule = EvaluationSchedule(rounds, eval_every, record_weights, evaluate, every)
        self.further_models = FurtherModels(setup, self.transport, schedule, on_message)
        holdout = (holdout_epochs, holdout_every, on_message)
        self.newcomers = Newcomers(setup, self.transport, schedule, *holdout)
        self._sizes = self._list_sizes()
        everybody = list(range(setup.population))
        begin = [self._server_round(run, 0, everybody) for run in range(len(self.seeds))]
        self.servers: list[State] = [
            init_server_state(method, task, shared, first)
            for method, shared, first in zip(self.methods, setup.shared, begin, strict=True)
        ]
        #: How many rounds have been trained.
        self.round = 0
        #: What each client's model scores while it is absent: [run, client, part, figure].
        self.absent_scores: np.ndarray | None = None
        self._diverged: dict[Lane, int] = {}  # rounds that did not count since the last row
        self._explained: set[Lane] = set()  # lanes whose first bad step has been looked for
        #: Runs that take part in no further round.
        self.stopped: set[int] = set()
        #: Whether `list_models` can be asked after every evaluation, and not only after the last.
        self.keeps_evaluated = False
        self._evaluated: EvaluatedModels | None = None

    @property
    def clients(self) -> States:
        """Return what the clients keep between rounds."""
        return self.transport.client_states

    def run(
        self,
        on_model: OnModel | None = None,
        after_round: Callable[[int], None] = lambda round: None,
    ) -> Iterator[Evaluation]:
        """Run all rounds that are left: T rounds give evaluations 0 to T.

        The models of the last evaluation go to `on_model`. `after_round` is called when a round has
        been trained and its evaluations have been taken. A run that has `stopped` in between has no
        further evaluations, and its models do not go to `on_model`.
        """
        while self.round < self.rounds and self.is_active:
            yield from self.step(self.round + 1, train=True)
            after_round(self.round)
        if not self.is_active:
            return
        yield from self.step(self.rounds + 1, train=False)
        if on_model:
            for run in self._active_runs:
                for model in self.list_models(run):
                    on_model(model)

    @property
    def is_active(self) -> bool:
        """Tell whether any run is left that has not stopped."""
        return len(self.stopped) < len(self.seeds)

    @property
    def _active_runs(self) -> list[int]:
        return [run for run in range(len(self.seeds)) if run not in self.stopped]

    def list_models(self, run: int) -> RunModels:
        """Return the models of a run's latest evaluation, until the next round begins."""
        assert self._evaluated is not None, "the models of this evaluation have not been kept"
        population = self.setup.population if self._has_models_here else 0
        absent = list_absent(population, self._evaluated.joined[run])
        beginners = [client for client in absent if (run, client) not in self.clients]
        models = self.transport.list_absent_models(run, absent)
        seed, initial = self.seeds[run], self.initial[run]
        return self._evaluated.of_run(run, seed, initial, models, beginners)

    @property
    def _has_models_here(self) -> bool:
        """Tell whether clients have models of their own, and they are on this machine."""
        return self.method.has_personal_models and self.transport.keeps_models()

    # --- between two rounds --------------------------------------------------------------------

    def state(self) -> State:
        """Return the simulation as tensors. The clients' states are not part of it."""
        servers = {str(run): server for run, server in enumerate(self.servers)}
        diverged = [[*lane, count] for lane, count in self._diverged.items()]
        state: State = {
            "servers": servers,
            "diverged": torch.tensor(diverged, dtype=torch.int64),
            "explained": torch.tensor(sorted(self._explained), dtype=torch.int64),
            **self.further_models.state(),
            **self.transport.state(),
        }
        if self.absent_scores is not None:
            state["left"] = torch.from_numpy(self.absent_scores)
        return state

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned after so many rounds."""
        if not matches(state["servers"], self.state()["servers"]):
            raise ValueError("another run's state")
        self.further_models.restore(state)
        self.transport.restore(round, state)
        scores = self.further_models.fit_scores(state["left"].numpy()) if "left" in state else None
        self.round, self.absent_scores = round, scores
        servers = tree_map(lambda t: t.to(self.task.device), state["servers"])
        self.servers = [servers[str(run)] for run in range(len(self.seeds))]
        self._diverged = {(run, client): n for run, client, n in state["diverged"].tolist()}
        self._explained = {(run, client) for run, client in state["explained"].tolist()}

    # --- one round -----------------------------------------------------------------------------

    def step(self, round: int, *, train: bool) -> list[Evaluation]:
        """Do round `round`, from 1. Its evaluation is number `round − 1`.

        If the device runs out of memory, the round is done again with half as many lanes.
        """
        return retry_with_fewer_lanes(
            lambda: self._do_round(round, train), self.transport, self.on_message
        )

    def _do_round(self, round: int, train: bool) -> list[Evaluation]:
        newcomers = self._test_newcomers(round, is_last=not train)
        work = self._begin_round(round, train)
        self._evaluated = None
        if work.request.evaluate and (self.keeps_evaluated or not train):
            self._evaluated = EvaluatedModels(self.method, self.task, self.servers, work.joined)
        for result in self.transport.run_round(work.request, work.sent, work.joined):
            self._take_result(work, result)
        if work.request.evaluate:
            evaluates_all = self.eval_clients == "all"
            self.further_models.test_server_models(work, self.servers, evaluates_all)
        servers = self._aggregate(work) if train else self.servers
        work.settle()
        diverged = dict(self._diverged)
        for lane in work.diverged:
            diverged[lane] = diverged.get(lane, 0) + 1
        evaluations = self._report(work, diverged, newcomers) if work.request.evaluate else []
        if train:
            self._finish_round(work, servers)
        self._diverged = {} if work.request.evaluate else diverged
        for fault in work.faults:
            self.on_fault(fault)
        return evaluations

    def _begin_round(self, round: int, train: bool) -> RoundResults:
        """Draw the participants, and make what the servers send."""
        if self.transport.begin_round():
            self._sizes = self._list_sizes()
        began = time.perf_counter()
        joined = self._draw_round(round)
        servers = [self._server_round(run, round, own) for run, own in enumerate(joined)]
        sent = [self._send(run, server_round) for run, server_round in enumerate(servers)]
        request = self.further_models.make_request(
            round, sent, train=train, evaluates_absent=self._evaluates_absent
        )
        absent = self._score_initial_models() if self._evaluates_absent else None
        scores = absent.copy() if absent else ScoreTable(np.zeros(self.setup.score_shape))
        keeps_absent = absent if absent and train else None
        log = self.further_models.make_log()
        return RoundResults(request, joined, servers, sent, scores, keeps_absent, began, log)

    def _send(self, run: int, server_round: ServerRound) -> Message:
        if not server_round.clients:
            return Message()
        message = send_message(self.methods[run], self.servers[run], server_round)
        return self.setup.reset_transient(run, message)

    def _server_round(self, run: int, round: int, clients: Sequence[int]) -> ServerRound:
        return ServerRound(self.seeds[run], round, self.rounds, clients, self._sizes)

    def _list_sizes(self) -> list[int]:
        """Return every client's number of training samples."""
        return [self.task.size(client) for client in range(self.setup.population)]

    def _draw_round(self, round: int) -> list[list[int]]:
        """Return who takes part in a round, by run; nobody if the run has stopped."""
        return [
            [] if run in self.stopped else self.draw_participants(seed, round)
            for run, seed in enumerate(self.seeds)
        ]

    def draw_participants(self, seed: int, round: int) -> list[int]:
        """Return who takes part in a round of a run."""
        members = self.transport.list_members(self.setup.population)
        drawn = draw_participants(seed, round, len(members), self.join_ratio)
        return [members[position] for position in drawn]

    def _take_result(self, work: RoundResults, result: CohortResult) -> None:
        """Note what a cohort did, and keep its clients' states."""
        work.add_figures(result)
        if self._evaluated and self._has_models_here:
            self._evaluated.add(result.lanes, result.evaluated, result.evaluated_elsewhere)
        if work.request.train:
            self._note_diverged(work, result)
            self.transport.keep_states(result, self.on_divergence)
            work.uploads.append((result.lanes, result.upload))

    def _note_diverged(self, work: RoundResults, result: CohortResult) -> None:
        """Note the lanes whose training failed. Their uploads and states do not count."""
        for position in result.diverged:
            run, client = lane = result.lanes[position]
            step = None
            if lane not in self._explained:
                find = self.transport.find_first_bad_step
                step = find(lane, work.request, work.sent, work.joined)
                work.explained.add(lane)
            variant = self.variants[run]
            fault = Fault(self.seeds[run], client, work.request.round - 1, position, step, variant)
            if self.on_divergence == "stop":
                raise RunError(f"{str(fault).capitalize()}, and on_divergence is stop.")
            work.faults.append(fault)
            work.diverged.add(lane)

    def _aggregate(self, work: RoundResults) -> list[State]:
        """Return every run's server after the round."""
        servers = list(self.servers)
        counted = list(work.counted())
        needed = self.transport.updates_needed()
        if len(counted) < needed:
            if needed > 1 or not work.uploads:
                self.on_message(
                    f"Round {work.request.round}: {len(counted)} good updates, but {needed} are "
                    "required. The global model does not change."
                )
            work.uploads = []
            return servers
        if work.uploads and work.request.evaluate:
            counts = [self.further_models.count_numbers(upload) for _, upload in work.uploads]
            work.uploaded = max(counts)
        for run, server_round in enumerate(work.servers):
            clients = sorted(client for other, client in counted if other == run)
            sizes = [self.task.size(client) for client in clients]
            if sum(sizes):
                weights = to_device(self.task.device, sizes).double()
                pieces = work.list_pieces(run, partial(self.setup.reset_transient, run))
                uploads = self.transport.collect_uploads(run, clients, weights, pieces)
                server = servers[run]
                servers[run] = aggregate_uploads(self.methods[run], server, uploads, server_round)
        return servers

    def _finish_round(self, work: RoundResults, servers: list[State]) -> None:
        self.servers, self.round = servers, work.request.round
        self._explained |= work.explained
        self.further_models.finish_round(work)
        if work.absent_scores:
            self.absent_scores = work.absent_scores.values
        self.transport.finish_round(work.request.round, set(work.counted()))

    # --- evaluation ----------------------------------------------------------------------------

    @property
    def _evaluates_absent(self) -> bool:
        """Tell whether absent clients are tested with the personal model of an earlier round."""
        return (
            self.join_ratio < 1 and self.eval_clients == "all" and self.method.has_personal_models
        )

    def _score_initial_models(self) -> ScoreTable:
        """Return the absent clients' scores; before its first round, a client has Θ⁰."""
        if self.absent_scores is None or self.transport.can_grow:
            self.absent_scores = self.further_models.score_initial_models(self.absent_scores)
        return ScoreTable(self.absent_scores.copy())

    def _test_newcomers(self, round: int, *, is_last: bool) -> list[list[NewcomerScores]]:
        """Test the held-out clients of every run, if that is due."""
        if not self.newcomers.are_due(round, is_last=is_last):
            return [[] for _ in self.seeds]
        joined = self._draw_round(round)
        rounds = [self._server_round(run, round, own) for run, own in enumerate(joined)]
        return self.newcomers.test(self.servers, rounds)

    def _report(
        self,
        work: RoundResults,
        diverged: Mapping[Lane, int],
        newcomers: Sequence[Sequence[NewcomerScores]],
    ) -> list[Evaluation]:
        """Return what is reported of every run."""
        evaluations = []
        weights = work.weights.collect(len(self.seeds))
        for run in self._active_runs:
            clients = slice(None) if self.eval_clients == "all" else work.joined[run]
            models = self.further_models.list_models(work, run, clients)
            row = work.make_row(
                run,
                clients,
                models,
                validated=self.validated,
                seed=self.seeds[run],
                sent=self.further_models.count_numbers(work.sent[run]),
                diverged=sum(n for lane, n in diverged.items() if lane[0] == run),
                metric=self.task.loss.metric,
                **self.transport.count_answers(),
            )
            scores = work.scores.values[run, :, 0]
            evaluations.append(Evaluation(row, scores, weights[run], models, run, newcomers[run]))
        return evaluations
