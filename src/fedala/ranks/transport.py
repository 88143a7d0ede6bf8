"""Rank 0's side of the work: who does what, and what comes back."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Uploads
from fedala.lanes.trees import tree_map
from fedala.lanes.uploads import Piece
from fedala.methods import Method
from fedala.ranks.assignment import assign_lanes
from fedala.ranks.delivery import Delivery, prepare
from fedala.ranks.failures import collect_replies
from fedala.ranks.group import Blank, RankGroup
from fedala.ranks.states import RankStates
from fedala.ranks.uploads import RankUploads
from fedala.ranks.worker import Key, Report, Worker
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.client_states import Lane
from fedala.simulation.evaluated_models import ClientModels, ModelStack
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.participation import list_lanes
from fedala.simulation.transport import Transport

T = TypeVar("T")


class RankTransport(Transport):
    """Lets all ranks work, each with its share of the clients."""

    client_states: RankStates

    def __init__(self, group: RankGroup, local: LocalTransport, policy: str) -> None:
        """`local` has rank 0's own clients; `policy`: what a diverged client keeps."""
        self.group, self.setup = group, local.setup
        self.lanes, self.threads = local.lanes, local.threads
        self.worker = Worker(group, local, policy)
        self.client_states = RankStates(group.size, self._count_steps, self._call)
        #: Models on other ranks that nobody asks for any more.
        self.released: list[tuple[int, Key]] = []
        self._places: dict[Lane, int] = {}  # of this round
        self._with_state: set[Lane] = set()

    # --- commands ------------------------------------------------------------------------------

    def _send(
        self, name: str, arguments: tuple[Any, ...], *, wants_reply: bool
    ) -> Callable[[], Any]:
        """Give a command to the other ranks; return rank 0's part of it."""
        released = []
        while self.released:
            released.append(self.released.pop())
        self.group.share((released, name, arguments, wants_reply))
        self.worker.drop_models(released)
        return partial(getattr(self.worker, name), *arguments)

    def _tell(self, name: str, *arguments: Any) -> Any:
        """Give a command to all ranks that exchanges tensors; return what rank 0 gets of it."""
        command = self._send(name, arguments, wants_reply=False)
        with self.group.exchange():
            return command()

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Give a command to all ranks; return the reply of each. An error of any is raised."""
        return collect_replies(self.group, self._send(name, arguments, wants_reply=True))

    def _deliver(
        self,
        sent: Sequence[Message],
        joined: Sequence[Sequence[int]],
        load: Callable[[Lane], int],
        owners: Mapping[Lane, int],
    ) -> Delivery:
        """Spread the lanes over the ranks, and prepare what they get."""
        shares = assign_lanes(list_lanes(joined), self.group.size, load, owners)
        delivery, self.worker.outbox = prepare(sent, joined, shares)
        return delivery

    def _count_steps(self, lane: Lane) -> int:
        """Return how long a client trains, in steps."""
        task = self.setup.task
        steps = task.training_length(None).count_steps(task.size(lane[1]), task.batch_size)
        return max(1, steps)

    def _count_tests(self, lane: Lane) -> int:
        return 1 + self.setup.task.size(lane[1], "test")

    # --- a round -------------------------------------------------------------------------------

    def run_round(
        self, request: RoundRequest, sent: Sequence[Message], joined: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        owners = self.client_states.owners
        delivery = self._deliver(sent, joined, self._count_steps, owners)
        self._places = {lane: rank for rank, own in enumerate(delivery.lanes) for lane in own}
        self._with_state = set()
        for rank, reports in enumerate(self._call("run_round", request, delivery)):
            for report in reports:
                yield self._read(rank, report)

    def _read(self, rank: int, report: Report) -> CohortResult:
        """Return a report as the result of a cohort: figures here, and tensors elsewhere."""
        result = self._to_device(report.result)
        result.upload = tree_map(lambda blank: blank.make("meta"), report.upload)
        if report.keeps_state:
            self._with_state |= set(result.lanes)
        if not report.evaluated:
            self.released.append((rank, report.key))
        elif rank:
            stack = RemoteModels(self, rank, report.key, report.evaluated)
            result.evaluated_elsewhere = stack
        else:
            result.evaluated_elsewhere = self.worker.get_models(report.key)
            self.worker.drop_models([(0, report.key)])
        return result

    def _to_device(self, figures: T) -> T:
        """Bring the figures of another rank to where this rank's are."""
        device = self.setup.task.device
        for name, value in vars(figures).items():
            if name != "lanes":
                moved = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value)
                setattr(figures, name, moved)
        return figures

    def keep_states(self, result: CohortResult, policy: str) -> None:
        pass  # the ranks do it

    def find_first_bad_step(
        self,
        lane: Lane,
        request: RoundRequest,
        sent: Sequence[Message],
        joined: Sequence[Sequence[int]],
    ) -> int | None:
        found: list[int | None] = self._call("find_first_bad_step", lane)
        return found[self._places[lane]]

    def collect_uploads(
        self, run: int, clients: Sequence[int], weights: Tensor, pieces: Sequence[Piece]
    ) -> Uploads:
        by_rank: list[list[int]] = [[] for _ in range(self.group.size)]
        for client in clients:
            by_rank[self._places[run, client]].append(client)
        return RankUploads(clients, weights, pieces, run, by_rank, self._tell, self._receive)

    def _receive(self, template: Any, rank: int) -> Any:
        return self.group.receive_tree(template, rank, self.setup.task.device)

    def finish_round(self, round: int, counted: Collection[Lane]) -> None:
        self._call("finish_round", round)
        self.client_states.note(self._places, self._with_state)

    def undo_round(self) -> None:
        if not self.group.is_broken:
            self._call("undo_round")

    def reduce_lanes(self) -> tuple[int, int] | None:
        found = [reply for reply in self._call("reduce_lanes") if reply]
        if not found:
            return None
        before, after = (max(numbers) for numbers in zip(*found, strict=True))
        self.lanes = after
        return before, after

    def set_width(self, lanes: int | None, threads: int) -> None:
        super().set_width(lanes, threads)
        self._call("set_width", lanes, threads)

    # --- tests ---------------------------------------------------------------------------------

    def score_models(
        self,
        round: int,
        models: Sequence[Params],
        clients: Sequence[Sequence[int]],
        *,
        predicts: bool = False,
    ) -> Iterator[CohortResult]:
        sent = [Message(model) for model in models]
        delivery = self._deliver(sent, clients, self._count_tests, {})
        for results in self._call("test_models", round, delivery, predicts):
            yield from map(self._to_device, results)

    def predict_absent(
        self, round: int, clients: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        places = self.client_states.places
        shares = assign_lanes(list_lanes(clients), self.group.size, self._count_tests, places)
        for results in self._call("predict_absent", round, shares, len(clients)):
            yield from results

    def run_newcomers(
        self,
        work: Callable[[Method, Cohort, Sequence[Lane], State], T],
        round: int,
        sent: Sequence[Message],
        clients: Sequence[Sequence[int]],
    ) -> Iterator[T]:
        delivery = self._deliver(sent, clients, self._count_steps, {})
        for arrivals in self._call("run_newcomers", work, round, delivery):
            yield from map(self._to_device, arrivals)

    # --- models --------------------------------------------------------------------------------

    def list_absent_models(self, run: int, clients: Sequence[int]) -> Iterator[ClientModels]:
        if not clients:
            return
        for rank, found in enumerate(self._call("keep_absent", run, clients)):
            for client, key, blanks in found:
                if self.client_states.places.get((run, client)) == rank:
                    yield [client], RemoteModels(self, rank, key, blanks)
                else:  # it was there once, and has no state that stays
                    self.released.append((rank, key))

    def fetch_model(self, rank: int, key: Key, lane: int, blanks: Any) -> Params:
        """Return a model that a rank keeps."""
        if rank == 0:
            return self.worker.get_models(key).get(lane)
        self._tell("send_model", rank, key, lane)
        model: Params = self._receive(blanks, rank)
        return model

    def select_models(self, rank: int, key: Key, lanes: Sequence[int]) -> Key:
        """Let a rank keep some lanes of its models by themselves."""
        found: Key = self._call("select_models", rank, key, lanes)[rank]
        return found


class RemoteModels(ModelStack):
    """Models that a rank keeps until nobody asks for them any more."""

    def __init__(self, transport: RankTransport, rank: int, key: Key, blanks: Params) -> None:
        """`blanks`: the shapes of the stack."""
        self.transport, self.rank, self.key, self.blanks = transport, rank, key, blanks
        weakref.finalize(self, transport.released.append, (rank, key))

    def select(self, lanes: Sequence[int]) -> ModelStack:
        first: Blank = next(iter(self.blanks.values()))  # type: ignore[assignment]
        if len(lanes) == first.shape[0]:
            return self
        key = self.transport.select_models(self.rank, self.key, lanes)
        blanks = tree_map(lambda blank: blank.with_lanes(len(lanes)), self.blanks)
        return RemoteModels(self.transport, self.rank, key, blanks)

    def get(self, lane: int) -> Params:
        one = tree_map(lambda blank: blank.with_lanes(1), self.blanks)
        return self.transport.fetch_model(self.rank, self.key, lane, one)
