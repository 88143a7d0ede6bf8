"""The round loop on one machine: draw, send, initialise, evaluate, train, upload, aggregate, record.

Several runs (seeds) of one method go side by side: a lane is a client of a run. Everything a simulation is between
two rounds stands in `round`, `servers`, `clients` and `left`; every draw is keyed, so there is no random state. A round
happens altogether or not at all: what goes wrong in its middle leaves these as they were.
"""

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.errors import RunError
from fedala.lanes.cohort import Cohort, Params, Task, broadcast_lanes, to_device
from fedala.lanes.local_aggregation import summarize_weights
from fedala.lanes.randomness import draw, torch_seed
from fedala.lanes.trees import count, fits, join, leaves, take, tree_map
from fedala.methods import Method, State
from fedala.records import Fault, PersonalModel, Row
from fedala.simulation.client_states import ClientStates, Lane

#: What becomes of a client whose loss or model is no longer finite. In all cases its round does not count.
POLICIES = {
    "skip": "the client keeps its last good model",
    "reset": "the client starts anew, with the initial model",
    "stop": "the run ends",
}


@dataclass(frozen=True)
class RoundRequest:
    """What a round asks of its participants."""

    round: int
    train: bool
    #: Whether the initialised model is tested, and whether the one that training leaves is, too.
    evaluates: bool
    looks_back: bool = False
    #: Whether W is looked at.
    records: bool = False


@dataclass
class CohortResult:
    """What a cohort has done in a round."""

    lanes: Sequence[Lane]
    notes: dict[str, torch.Tensor]
    before: State = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: Params = field(default_factory=dict)
    upload: Params = field(default_factory=dict)
    state: State = field(default_factory=dict)
    finite: torch.Tensor | None = None
    #: For every part of the data that is tested, [lane, (correct, loss, samples)]: of `evaluated`, and of what is left.
    scores: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)


def take_part(
    method: Method,
    cohort: Cohort,
    lanes: Sequence[Lane],
    state: State,
    asked: RoundRequest,
    parts: Sequence[str],
) -> CohortResult:
    """A cohort's part of a round, on one machine or on its own."""
    before = state
    initialized, state = method.initialize(cohort, cohort.received, state)
    done = CohortResult(lanes, cohort.notes, {**state, **before})
    if asked.records:
        done.weights = method.ala_weights(state)
    if asked.evaluates:
        done.evaluated = method.evaluated(cohort, initialized, cohort.received, state)
        done.scores = scores(cohort, done.evaluated, parts)
    if asked.train:
        done.upload, done.state = method.train(cohort, initialized, cohort.received, state)
        done.finite = _finite(cohort, done.upload, done.state)
        if asked.looks_back:
            done.left = scores(cohort, method.left(done.upload, done.state), parts)
    return done


def scores(cohort: Cohort, model: Params, parts: Sequence[str]) -> list[torch.Tensor]:
    """Each lane's model on each part of its data: [lane, (correct, loss, samples)]."""
    return [torch.stack([t.double() for t in cohort.evaluate(model, part)], 1) for part in parts]


class Simulation:
    """One method on one federation, over one or several seeds."""

    def __init__(
        self,
        method: Method,
        task: Task,
        start: Callable[[int], Params],
        *,
        seeds: Sequence[int] = (0,),
        rounds: int = 1,
        join_ratio: float = 1.0,
        lanes: int | None = None,
        threads: int = 1,
        eval_every: int = 1,
        eval_clients: str = "all",
        client_memory: int | None = None,
        client_files: Path | None = None,
        on_divergence: str = "skip",
        on_fault: Callable[[Fault], None] = lambda fault: None,
        say: Callable[[str], None] = lambda sentence: None,
        record_weights: int = 0,
    ) -> None:
        """`start(seed)` is the initial model Θ⁰ of a run, as one lane; `lanes` bounds how many clients are one tensor
        program, and `threads` of these programs run at a time.

        `client_memory` bounds the bytes of host memory for the state of clients that are not taking part; what is beyond it
        goes to files, in the folder `client_files` if they are to outlive the process. `on_divergence` is one of `POLICIES`.
        Every `record_weights` rounds (0: never), the rows tell how ALA's W is spread, at the first evaluation from there on.
        """
        self.method, self.task = method, task
        self.seeds, self.rounds, self.join_ratio = tuple(seeds), rounds, join_ratio
        self.lanes, self.eval_every, self.eval_clients = lanes, eval_every, eval_clients
        self.record_weights = record_weights
        self._pool: ThreadPoolExecutor | None = None
        self._twins = threading.local()
        self.population = len(task.parts["train"])
        self.parts = ["test"] + (
            ["validation"] if any(len(rows) for rows in task.parts["validation"]) else []
        )
        self.start = [start(seed) for seed in self.seeds]
        # Layers that draw from torch's own generator would depend on which thread comes first.
        self.threads = 1 if threads > 1 and task.draws(self.start[0]) else threads
        sizes = [task.size(client) for client in range(self.population)]
        self.servers: list[State] = [
            method.serve(task, method.shared(task, model), sizes) for model in self.start
        ]
        self.clients = ClientStates(
            task.device, everybody=join_ratio == 1, budget=client_memory, folder=client_files
        )
        #: How many rounds have been trained.
        self.round = 0
        self.on_divergence, self.on_fault, self.say = on_divergence, on_fault, say
        self._diverged: dict[
            Lane, int
        ] = {}  # rounds that did not count since the last row, by lane
        self._explained: set[Lane] = set()
        #: Per run, client and part: what the model that the client was left with scores (correct, loss, samples).
        self.left: np.ndarray | None = None
        self._unsettled: list[tuple[np.ndarray, int, Sequence[Lane], torch.Tensor]] = []

    def run(
        self,
        on_model: Callable[[PersonalModel], None] | None = None,
        after: Callable[[int], None] = lambda round: None,
    ) -> Iterator[Row]:
        """All rounds that are left: T rounds give evaluations 0 to T. The models of the last one go to `on_model`.

        `after` is called when a round has been trained and its rows have been taken.
        """
        while self.round < self.rounds:
            yield from self.step(self.round + 1, train=True)
            after(self.round)
        yield from self.step(self.rounds + 1, train=False, on_model=on_model)

    # --- what it is between two rounds -----------------------------------------------------------------------------

    def state(self) -> State:
        """The servers, the scores of left models and who has diverged, as tensors; `clients` have a file each."""
        servers = {str(run): server for run, server in enumerate(self.servers)}
        diverged = torch.tensor(
            [[*lane, n] for lane, n in self._diverged.items()], dtype=torch.int64
        )
        explained = torch.tensor(sorted(self._explained), dtype=torch.int64)
        left = {} if self.left is None else {"left": torch.from_numpy(self.left)}
        return {"servers": servers, "diverged": diverged, "explained": explained, **left}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave after so many rounds."""
        if (
            not fits(state["servers"], self.state()["servers"])
            or state.get("left", np.zeros(self._shape)).shape != self._shape
        ):
            raise ValueError("another run's state")
        self.round = round
        servers = tree_map(lambda t: t.to(self.task.device), state["servers"])
        self.servers = [servers[str(run)] for run in range(len(self.seeds))]
        self.left = state["left"].numpy() if "left" in state else None
        self._diverged = {(run, client): n for run, client, n in state["diverged"].tolist()}
        self._explained = {(run, client) for run, client in state["explained"].tolist()}

    # --- one round -------------------------------------------------------------------------------------------------

    def step(
        self, round: int, *, train: bool, on_model: Callable[[PersonalModel], None] | None = None
    ) -> list[Row]:
        """Round `round`, counted from 1: its evaluation is number `round − 1`, after that many aggregations.

        If the device's memory does not suffice, the round begins anew with half as many lanes.
        """
        while True:
            try:
                return self._step(round, train, on_model)
            except torch.OutOfMemoryError as error:
                shortage = str(error).split(". ")[0]
            self._begin_anew(shortage)

    def _begin_anew(self, shortage: str) -> None:
        widest = min(
            self.lanes or len(self.seeds) * self.population, len(self.seeds) * self.population
        )
        if widest == 1:
            raise RunError(f"A single client does not fit into the device's memory: {shortage}.")
        self.clients.undo()
        self._unsettled = []
        self.lanes = widest // 2
        self.task.forget()
        gc.collect()
        if self.task.device.type == "cuda":
            torch.cuda.empty_cache()
        self.say(
            f"The device's memory does not suffice for {widest} clients side by side: going on with {self.lanes}."
        )

    def _step(
        self, round: int, train: bool, on_model: Callable[[PersonalModel], None] | None
    ) -> list[Row]:
        began = time.perf_counter()
        evaluates = not train or (round - 1) % self.eval_every == 0
        every = self.record_weights
        records = every > 0 and evaluates and (not train or (round - 1) % every < self.eval_every)
        joined = [self.participants(seed, round) for seed in self.seeds]
        sent = [
            self.method.send(server, clients)
            for server, clients in zip(self.servers, joined, strict=True)
        ]
        table = self._scores_left().copy() if self._looks_back else np.zeros(self._shape)
        left = self._scores_left() if self._looks_back and train else None
        uploads: list[tuple[Sequence[Lane], Params]] = []
        noted: list[tuple[Sequence[Lane], dict[str, torch.Tensor]]] = []
        learned: list[tuple[Sequence[Lane], list[str], torch.Tensor]] = []
        diverged: set[Lane] = set()
        asked = RoundRequest(round, train, evaluates, left is not None, records)
        for done in self._work(asked, sent, joined):
            noted.append((done.lanes, done.notes))
            if done.weights:
                learned.append((done.lanes, list(done.weights), summarize_weights(done.weights)))
            self._note(done.lanes, done.scores, table)
            if left is not None:
                self._note(done.lanes, done.left, left)
            if train:
                bad = self._heed(done, round, sent, joined)
                diverged |= bad
                self.clients.scatter(done.lanes, done.state)
                good = [place for place, lane in enumerate(done.lanes) if lane not in bad]
                uploads.append(
                    ([done.lanes[i] for i in good], take(done.upload, good) if bad else done.upload)
                )
            elif on_model and self.method.personal:
                for i, (run, client) in enumerate(done.lanes):
                    on_model(
                        PersonalModel(
                            self.seeds[run], client, take(done.evaluated, slice(i, i + 1))
                        )
                    )
        if evaluates and self.eval_clients == "all":
            self._score_others(round, sent, joined, table)
        servers, uploaded = self._aggregate(uploads) if train else (self.servers, 0)
        self._settle(diverged)
        notes: dict[str, dict[Lane, float]] = {}
        for lanes, values in noted:
            for name, figures in values.items():
                notes.setdefault(name, {}).update(zip(lanes, figures.tolist(), strict=True))
        for lane in diverged:
            self._diverged[lane] = self._diverged.get(lane, 0) + 1
        rows = [
            self._row(run, round, joined[run], table, notes, sent[run])
            for run in range(len(self.seeds))
        ]
        if learned:
            self._record(learned, rows)
        if train:
            rows = [{**row, "uploaded": uploaded} for row in rows]
            self.servers, self.round = servers, round
            self.clients.settle()
        elif on_model:
            self._last_models(joined, on_model)
        if evaluates:
            self._diverged = {}
        seconds = time.perf_counter() - began
        return [{**row, "seconds": seconds} for row in rows] if evaluates else []

    def _work(
        self, asked: RoundRequest, sent: list[Params], joined: list[list[int]]
    ) -> Iterator[CohortResult]:
        """What the round's participants have done: here, cohort by cohort."""

        def work(lanes: list[Lane]) -> CohortResult:
            cohort = self._cohort(lanes, asked.round, sent, joined)
            state = self.clients.gather(
                lanes, lambda lane: self.method.fresh(cohort.task, self.start[lane[0]])
            )
            done = take_part(self.method, cohort, lanes, state, asked, self.parts)
            if asked.train and self.join_ratio == 1:
                cohort.look_ahead()
            return done

        everybody = [(run, client) for run, clients in enumerate(joined) for client in clients]
        return self._side_by_side(work, self._cohorts(everybody), asked.round)

    def _side_by_side(
        self,
        work: Callable[[list[Lane]], "CohortResult"],
        cohorts: Iterator[list[Lane]],
        round: int,
    ) -> Iterator["CohortResult"]:
        """What each cohort has done, in order; with `threads`, so many cohorts at a time."""
        if self.threads == 1:
            for lanes in cohorts:
                run, client = lanes[0]
                torch.manual_seed(torch_seed(self.seeds[run], "torch", client=client, round=round))
                yield work(lanes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self.threads, initializer=torch.set_num_threads, initargs=(1,)
            )
        yield from self._pool.map(work, cohorts)

    def _own_task(self) -> Task:
        """The task, or this thread's own twin of it: a module cannot run with two sets of weights at once."""
        if self.threads == 1 or threading.current_thread() is threading.main_thread():
            return self.task
        if not hasattr(self._twins, "task"):
            self._twins.task = self.task.twin()
        task: Task = self._twins.task
        return task

    def participants(self, seed: int, round: int) -> list[int]:
        """`round(ρ·clients)` clients without replacement, at least one."""
        size = max(1, int(np.floor(self.join_ratio * self.population + 0.5)))
        if size >= self.population:
            return list(range(self.population))
        chosen = draw(seed, "participants", round=round).choice(
            self.population, size, replace=False
        )
        return sorted(chosen.tolist())

    def _cohorts(self, lanes: Sequence[Lane]) -> Iterator[list[Lane]]:
        """Lanes by length, the longest first, as many at a time as work side by side."""
        size = self.task.size
        ordered = sorted(
            lanes, key=lambda lane: (-size(lane[1]), -size(lane[1], "test"), lane[1], lane[0])
        )
        runs = [[lane for lane in ordered if lane[0] == run] for run in range(len(self.seeds))]
        for together in runs if self.method.stacked else [ordered]:
            width = self.lanes or len(together)
            for first in range(0, len(together), width):
                yield together[first : first + width]

    def _cohort(
        self, lanes: Sequence[Lane], round: int, sent: list[Params], joined: list[list[int]]
    ) -> Cohort:
        """The lanes of a cohort with what the server sent them: lanes of one run share one model, or each has its own."""
        models, source, offset = [], {}, 0
        for run in sorted({run for run, _ in lanes}):
            params = sent[run]
            width = len(next(iter(params.values()))) if params else 0
            for place, client in enumerate(joined[run]):
                source[run, client] = offset + (place if width > 1 else 0)
            models.append(params)
            offset += width
        index = [source[lane] for lane in lanes]
        if offset == 1:
            received = tree_map(lambda value: value.expand(len(lanes), *value.shape[1:]), models[0])
        else:
            received = take(join(models), index) if offset else {}
        clients, seeds = [client for _, client in lanes], [self.seeds[run] for run, _ in lanes]
        return Cohort(self._own_task(), clients, seeds, round, self.rounds, received, index)

    def _aggregate(self, uploads: list[tuple[Sequence[Lane], Params]]) -> tuple[list[State], int]:
        """Every run's server after it has taken in what its clients uploaded, in their order; how much one of them uploaded."""
        place = {lane: i for i, lane in enumerate(lane for lanes, _ in uploads for lane in lanes)}
        everything = join([params for _, params in uploads])
        servers = list(self.servers)
        for run in range(len(self.seeds)):
            clients = sorted(client for other, client in place if other == run)
            sizes = [self.task.size(client) for client in clients]
            if sum(sizes):
                own = take(
                    everything,
                    to_device(self.task.device, [place[run, client] for client in clients]),
                )
                weights = to_device(self.task.device, sizes).double()
                servers[run] = self.method.aggregate(servers[run], own, weights, clients)
        return servers, count(everything) // max(1, len(place))

    # --- clients that diverge --------------------------------------------------------------------------------------

    def _heed(
        self, done: CohortResult, round: int, sent: list[Params], joined: list[list[int]]
    ) -> set[Lane]:
        """The cohort's lanes whose training came to nothing. Their new state is not kept, whatever the policy."""
        finite = done.finite
        bad = (
            []
            if finite is None
            else [place for place, good in enumerate(finite.tolist()) if not good]
        )
        if finite is None or not bad:
            return set()
        for place in bad:
            run, client = lane = done.lanes[place]
            step = None if lane in self._explained else self._first_fault(lane, round, sent, joined)
            self._explained.add(lane)
            fault = Fault(self.seeds[run], client, round - 1, place, step)
            if self.on_divergence == "stop":
                raise RunError(f"{str(fault).capitalize()}, and on_divergence is stop.")
            self.on_fault(fault)

        def fresh(lane: Lane) -> State:
            return self.method.fresh(self._own_task(), self.start[lane[0]])

        instead = done.before
        if self.on_divergence == "reset":
            instead = {**instead, **join([fresh(lane) for lane in done.lanes])}
        done.state = tree_map(
            lambda new, old: torch.where(broadcast_lanes(finite, new), new, old),
            done.state,
            instead,
        )
        return {done.lanes[place] for place in bad}

    def _first_fault(
        self, lane: Lane, round: int, sent: list[Params], joined: list[list[int]]
    ) -> int | None:
        """The client's training once more, alone, until a step's loss or result is not finite."""
        cohort = self._cohort([lane], round, sent, joined)
        taken = 0

        def watch(losses: torch.Tensor, state: Any) -> None:
            nonlocal taken
            taken += 1
            if not all(leaf.isfinite().all() for _, leaf in leaves((losses, state))):
                raise FloatingPointError

        cohort.watch = watch
        state = self.clients.gather(
            [lane], lambda lane: self.method.fresh(cohort.task, self.start[lane[0]])
        )
        try:
            initialized, state = self.method.initialize(cohort, cohort.received, state)
            self.method.train(cohort, initialized, cohort.received, state)
        except FloatingPointError:
            return taken
        return None

    # --- evaluation ------------------------------------------------------------------------------------------------

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return len(self.seeds), self.population, len(self.parts), 3

    @property
    def _looks_back(self) -> bool:
        """Whether clients outside the round are evaluated with a personal model that an earlier round left them."""
        return self.join_ratio < 1 and self.eval_clients == "all" and self.method.personal

    def _scores_left(self) -> np.ndarray:
        """What every client's left model scores; before its first participation that is Θ⁰."""
        if self.left is None:
            self.left = np.zeros(self._shape)
            self._score_sent(
                0, self.start, [list(range(self.population))] * len(self.seeds), self.left
            )
            self._settle()
        return self.left

    def _score_others(
        self, round: int, sent: list[Params], joined: list[list[int]], table: np.ndarray
    ) -> None:
        """Clients outside the round, where the model is the global one."""
        if self.method.personal or self.join_ratio == 1:
            return
        others = [sorted(set(range(self.population)) - set(clients)) for clients in joined]
        self._score_sent(round, sent, others, table)

    def _score_sent(
        self, round: int, sent: list[Params], whom: list[list[int]], table: np.ndarray
    ) -> None:
        """Clients that are tested with what is sent to them, as it is."""
        for lanes in self._cohorts(
            [(run, client) for run, clients in enumerate(whom) for client in clients]
        ):
            cohort = self._cohort(lanes, round, sent, whom)
            self._note(lanes, scores(cohort, cohort.received, self.parts), table)

    def _note(self, lanes: Sequence[Lane], scores: list[torch.Tensor], table: np.ndarray) -> None:
        """Scores get into the table when all of them are settled."""
        self._unsettled += [(table, place, lanes, score) for place, score in enumerate(scores)]

    def _settle(self, diverged: Collection[Lane] = ()) -> None:
        """The figures come back, all at once. A client whose round did not count is left with what it had before."""
        if self._unsettled:
            figures = iter(torch.cat([score for *_, score in self._unsettled]).cpu().numpy())
            for table, place, lanes, _ in self._unsettled:
                for run, client in lanes:
                    figure = next(figures)
                    if not (table is self.left and (run, client) in diverged):
                        table[run, client, place] = figure
        self._unsettled = []

    def _row(
        self,
        run: int,
        round: int,
        joined: list[int],
        table: np.ndarray,
        notes: dict[str, dict[Lane, float]],
        sent: Params,
    ) -> Row:
        def shares(clients: Any, part: int) -> tuple[float, float]:
            correct, loss, samples = table[run, clients, part].sum(0)
            return (
                (float(correct / samples), float(loss / samples))
                if samples
                else (float("nan"), float("nan"))
            )

        evaluated = slice(None) if self.eval_clients == "all" else joined
        accuracy, loss = shares(evaluated, 0)
        row: Row = {"seed": self.seeds[run], "round": round - 1, "accuracy": accuracy, "loss": loss}
        row["accuracy_joined"] = shares(joined, 0)[0]
        if "validation" in self.parts:
            row["accuracy_validation"] = shares(evaluated, 1)[0]
        for name, values in notes.items():
            own = [
                value for lane, value in values.items() if lane[0] == run and not np.isnan(value)
            ]
            row[name] = float(np.mean(own)) if own else float("nan")
        row["sent"] = count(sent) // max(1, len(next(iter(sent.values())))) if sent else 0
        row["uploaded"] = 0
        row["diverged"] = sum(rounds for lane, rounds in self._diverged.items() if lane[0] == run)
        row["clients"] = table[run, :, 0]
        return row

    @staticmethod
    def _record(
        learned: list[tuple[Sequence[Lane], list[str], torch.Tensor]], rows: list[Row]
    ) -> None:
        """Puts how W is spread, by client and parameter, into the rows of its runs."""
        figures = iter(torch.cat([figures for *_, figures in learned]).tolist())
        found: dict[Lane, list[tuple[int, str, list[float]]]] = {}
        for lanes, names, _ in learned:
            for lane in lanes:
                found[lane] = [(lane[1], *own) for own in zip(names, next(figures), strict=True)]
        for run, row in enumerate(rows):
            row["weights"] = [
                line for lane in sorted(found) if lane[0] == run for line in found[lane]
            ]

    def _last_models(
        self, joined: list[list[int]], on_model: Callable[[PersonalModel], None]
    ) -> None:
        """The global models, and the personal models of clients outside the last round."""
        for run, seed in enumerate(self.seeds):
            if "global" in self.servers[run] and self.method.send(self.servers[run], joined[run]):
                on_model(PersonalModel(seed, None, self.servers[run]["global"]))
            for client in (
                sorted(set(range(self.population)) - set(joined[run]))
                if self.method.personal
                else ()
            ):
                state = self.clients.get((run, client))
                known = (
                    self.start[run]
                    if state is None
                    else self.method.left(state.get("local", {}), state)
                )
                if known:
                    on_model(PersonalModel(seed, client, known, is_initial=state is None))


def _finite(cohort: Cohort, upload: Params, state: State) -> torch.Tensor:
    """Which lanes have trained to something: finite models and, where there was anything to train on, a finite loss."""
    whole = [
        leaf.reshape(len(cohort), -1).isfinite().all(1)
        for _, leaf in leaves((upload, state))
        if leaf.is_floating_point()
    ]
    loss = cohort.notes.get("train_loss")
    if loss is not None:
        whole.append(loss.isfinite() | (to_device(cohort.task.device, cohort.sizes()) == 0))
    if not whole:
        return torch.ones(len(cohort), dtype=torch.bool)
    return torch.stack(whole).all(0)
