"""Clients on this machine: one cohort after another, or several in threads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.evaluation import PredictionLog
from fedala.lanes.randomness import torch_seed
from fedala.lanes.trees import count_lanes, join, share, take, tree_map
from fedala.methods import Method
from fedala.records import INITIALIZED
from fedala.simulation.client_round import (
    CohortResult,
    RoundRequest,
    run_client_round,
    score_model,
    take_slots,
)
from fedala.simulation.client_states import ClientStates, Lane
from fedala.simulation.divergence import check_step, choose_states, state_after_divergence
from fedala.simulation.out_of_memory import free_memory, halve_lanes
from fedala.simulation.participation import form_cohorts, list_lanes
from fedala.simulation.transport import Setup, Transport

T = TypeVar("T")


class LocalTransport(Transport):
    """Simulates all clients here."""

    client_states: ClientStates

    def __init__(
        self,
        setup: Setup,
        *,
        lanes: int | None = None,
        threads: int = 1,
        client_memory: int | None = None,
        client_files: Path | None = None,
        on_message: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`lanes` bounds how many clients form a cohort; `threads` cohorts run at a time.

        `client_memory` bounds the bytes of host memory for the states of absent clients; the rest
        goes to files, in the folder `client_files` if they are to outlive the process.
        """
        self.setup, self.lanes, self.threads = setup, lanes, threads
        if threads > 1 and setup.task.draws_random_numbers:
            # Such layers draw from torch's own generator: results would depend on which is first.
            self.threads = 1
            on_message(
                "The model draws random numbers (dropout), so clients train one after another "
                f"and not in {threads} threads."
            )
        if lanes != 1 and not setup.task.uses_vmap:
            on_message(
                "The model cannot run for several clients as one program (torch.func.vmap refuses "
                "it, or gives other results), so the clients of a cohort run one after another."
            )
        self.client_states = ClientStates(
            setup.task.device,
            everybody=setup.join_ratio == 1,
            budget=client_memory,
            folder=client_files,
        )
        self._pool: ThreadPoolExecutor | None = None
        self._thread_tasks = threading.local()

    # --- a round -------------------------------------------------------------------------------

    def run_round(
        self, request: RoundRequest, sent: Sequence[Message], joined: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        setup = self.setup

        def work(lanes: list[Lane]) -> CohortResult:
            cohort = self.make_cohort(lanes, request.round, sent, joined)
            state = self._load_states(cohort.task, lanes)
            method = setup.method_for(lanes, cohort)
            result = run_client_round(method, cohort, lanes, state, request, setup.parts)
            if request.train and setup.join_ratio == 1:
                cohort.predraw_next_round()
            return result

        return self._run_cohorts(work, self._form_cohorts(joined), request.round)

    def run_newcomers(
        self,
        work: Callable[[Method, Cohort, Sequence[Lane], State], T],
        round: int,
        sent: Sequence[Message],
        clients: Sequence[Sequence[int]],
    ) -> Iterator[T]:
        def begin(lanes: list[Lane]) -> T:
            cohort = self.make_cohort(lanes, round, sent, clients)
            method = self.setup.method_for(lanes, cohort)
            return work(method, cohort, lanes, self._init_states(lanes))

        return self._run_cohorts(begin, self._form_cohorts(clients), round)

    def score_models(
        self,
        round: int,
        models: Sequence[Params],
        clients: Sequence[Sequence[int]],
        *,
        predicts: bool = False,
    ) -> Iterator[CohortResult]:
        sent = [Message(model) for model in models]
        for lanes in self._form_cohorts(clients):
            cohort = self.make_cohort(lanes, round, sent, clients)
            log = PredictionLog() if predicts else None
            scores = score_model(cohort, cohort.received.model, self.setup.parts, log)
            found = {INITIALIZED: log.collect(len(lanes))} if log else {}
            yield CohortResult(lanes, scores=scores, predictions=found)

    def predict_absent(
        self, round: int, clients: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        task = self.setup.task
        for lane in list_lanes(clients):
            if model := self._model_of_absent(lane):  # some methods keep none in a client's state
                log = PredictionLog()
                cohort = Cohort(task, [lane[1]], [self.setup.seeds[lane[0]]], round)
                cohort.evaluate(model, log=log)
                yield CohortResult([lane], predictions={INITIALIZED: log.collect(1)})

    def _model_of_absent(self, lane: Lane) -> Params:
        state = self.client_states.get(lane)
        if state is None:
            return self.setup.initial[lane[0]]
        model = self.setup.method.model_when_absent(Message(), state)
        moved: Params = tree_map(lambda t: t.to(self.setup.task.device), model)
        return moved

    def _form_cohorts(self, clients: Sequence[Sequence[int]]) -> Iterator[list[Lane]]:
        by_run = self.setup.method.sends_model_stack
        return form_cohorts(self.setup.task, list_lanes(clients), self.lanes, by_run=by_run)

    def _run_cohorts(
        self, work: Callable[[list[Lane]], T], cohorts: Iterator[list[Lane]], round: int
    ) -> Iterator[T]:
        """Yield what each cohort did, in order."""
        if self.threads == 1:
            for lanes in cohorts:
                run, client = lanes[0]
                seed = self.setup.seeds[run]
                torch.manual_seed(torch_seed(seed, "torch", client=client, round=round))
                yield work(lanes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self.threads, initializer=torch.set_num_threads, initargs=(1,)
            )
        yield from self._pool.map(work, cohorts)

    def make_cohort(
        self,
        lanes: Sequence[Lane],
        round: int,
        sent: Sequence[Message],
        joined: Sequence[Sequence[int]],
    ) -> Cohort:
        """Make a cohort with what the servers sent: one message per run, or one per client."""
        setup = self.setup
        messages: list[Message] = []
        source: dict[Lane, int] = {}
        count = 0
        for run in sorted({run for run, _ in lanes}):
            width = count_lanes(sent[run])
            for position, client in enumerate(joined[run]):
                source[run, client] = count + (position if width > 1 else 0)
            messages.append(sent[run])
            count += width
        index = [source[lane] for lane in lanes]
        received = Message()
        if count == 1:
            received = share(messages[0], len(lanes))
        elif count:
            received = take(join(messages), index)
        clients = [client for _, client in lanes]
        seeds = [setup.seeds[run] for run, _ in lanes]
        return Cohort(
            self._thread_task(),
            clients,
            seeds,
            round,
            setup.rounds,
            received,
            index,
            setup.recipes_of(lanes),
        )

    def _thread_task(self) -> Task:
        """Return the task, or this thread's copy of it."""
        if self.threads == 1 or threading.current_thread() is threading.main_thread():
            return self.setup.task
        if not hasattr(self._thread_tasks, "task"):
            self._thread_tasks.task = self.setup.task.copy_for_thread()
        task: Task = self._thread_tasks.task
        return task

    # --- states --------------------------------------------------------------------------------

    def _load_states(self, task: Task, lanes: Sequence[Lane]) -> State:
        return self.client_states.gather(lanes, lambda lane: self.setup.init_client(task, lane))

    def _init_states(self, lanes: Sequence[Lane]) -> State:
        task = self._thread_task()
        new: State = join([self.setup.init_client(task, lane) for lane in lanes])
        return new

    def keep_states(self, result: CohortResult, policy: str) -> None:
        if result.is_finite is not None and result.diverged:
            instead = state_after_divergence(
                policy, result.state_before, lambda: self._init_states(result.lanes)
            )
            result.state = choose_states(result.is_finite, result.state, instead)
        self.client_states.scatter(result.lanes, result.state)

    def reduce_lanes(self) -> tuple[int, int] | None:
        everybody = len(self.setup.seeds) * self.setup.population
        before = min(self.lanes or everybody, everybody)
        after = halve_lanes(before)
        if after is None:
            return None
        self.lanes = after
        free_memory(self.setup.task)
        return before, after

    def find_first_bad_step(
        self,
        lane: Lane,
        request: RoundRequest,
        sent: Sequence[Message],
        joined: Sequence[Sequence[int]],
    ) -> int | None:
        """Train the client once more, alone, until a step's loss or result is not finite."""
        cohort = self.make_cohort([lane], request.round, sent, joined)
        steps = 0

        def count_and_check(losses: Tensor, state: Any) -> None:
            nonlocal steps
            steps += 1
            check_step(losses, state)

        cohort.on_step = count_and_check
        method = self.setup.method_of(lane[0])
        state = take_slots(cohort, self._load_states(cohort.task, [lane]))
        try:
            initialized, state = method.initialize(cohort, cohort.received, state)
            method.train(cohort, initialized, cohort.received, state)
        except FloatingPointError:
            return steps
        return None
