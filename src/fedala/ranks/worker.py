"""A rank's share of the clients, and all that rank 0 may ask of it.

Each public method is a command. Rank 0 gives it to all ranks, and to its own worker. If it has a
reply, an error travels in it. If it exchanges tensors instead, an error ends the process, and
rank 0 sees that.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import Message, Params, State, Uploads
from fedala.lanes.trees import leaves, tree_map
from fedala.ranks.delivery import Delivery, Sent, deliver
from fedala.ranks.group import RankGroup, describe_tree
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.client_states import File, Lane
from fedala.simulation.evaluated_models import ModelStack, StackHere
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.newcomers import Arrival
from fedala.simulation.participation import list_clients
from fedala.simulation.round_results import pick_pieces

Key = int
"""The number under which a rank keeps some models."""


@dataclass(frozen=True)
class Report:
    """What a rank tells of one cohort: figures, and the shapes of what it keeps."""

    result: CohortResult
    upload: Message
    """As blanks."""
    evaluated: Params
    """As blanks."""
    key: Key
    """The evaluated models."""
    keeps_state: bool


class Worker:
    """One rank's clients."""

    def __init__(self, group: RankGroup, local: LocalTransport, policy: str) -> None:
        """`policy` says what a client keeps whose training diverged."""
        self.group, self.local, self.policy = group, local, policy
        #: On rank 0: the tensors of the delivery that comes next.
        self.outbox: Sent | None = None
        self._models: dict[Key, ModelStack] = {}
        self._next_key = 0
        self._most_lanes = 0
        self._forget_round()

    def _forget_round(self) -> None:
        self._uploads: list[tuple[Sequence[Lane], Message]] = []
        self._diverged: list[CohortResult] = []
        self._round_keys: list[Key] = []
        self._round: tuple[RoundRequest, list[Message], list[list[int]]] | None = None

    @property
    def _device(self) -> torch.device:
        return self.local.setup.task.device

    def _receive(self, delivery: Delivery) -> tuple[list[Message], list[list[int]]]:
        sent, self.outbox = self.outbox, None
        with self.group.exchange():
            return deliver(self.group, delivery, sent, self.local.setup)

    # --- a round -------------------------------------------------------------------------------

    def run_round(self, request: RoundRequest, delivery: Delivery) -> list[Report]:
        """Do this rank's part of a round."""
        sent, clients = self._receive(delivery)
        self._forget_round()
        self._round = request, sent, clients
        self._most_lanes = max(self._most_lanes, sum(map(len, clients)))
        if not any(clients):
            return []
        return [self._take(result) for result in self.local.run_round(request, sent, clients)]

    def _take(self, result: CohortResult) -> Report:
        """Keep what a cohort did, and make a report of it."""
        if result.is_finite is not None:
            self._uploads.append((result.lanes, result.upload))
            if result.diverged:  # rank 0 asks for the step before the states are replaced
                self._diverged.append(result)
            else:
                self.local.keep_states(result, self.policy)
        key = self._keep_models(StackHere(result.evaluated, len(result.lanes)))
        self._round_keys.append(key)
        keeps_state = any(True for _ in leaves(result.state))
        upload, evaluated = describe_tree(result.upload), describe_tree(result.evaluated)
        figures = replace(result, upload=Message(), evaluated={}, state={}, state_before={})
        return Report(figures, upload, evaluated, key, keeps_state)

    def find_first_bad_step(self, lane: Lane) -> int | None:
        """Return the step in which a client of this round diverged, if it is this rank's."""
        if self._round is None or lane[1] not in self._round[2][lane[0]]:
            return None
        request, sent, clients = self._round
        return self.local.find_first_bad_step(lane, request, sent, clients)

    def finish_round(self, round: int) -> None:
        """Make the round count."""
        for result in self._diverged:
            self.local.keep_states(result, self.policy)
        self.local.finish_round(round, ())
        self._forget_round()

    def undo_round(self) -> None:
        """Forget the round. Rank 0 may not know the models that were kept until it failed."""
        self.drop_models([(self.group.rank, key) for key in self._round_keys])
        self.local.undo_round()
        self._forget_round()

    def reduce_lanes(self) -> tuple[int, int] | None:
        """Halve the lanes after an out-of-memory error on any rank."""
        if self.local.lanes is None:
            self.local.lanes = max(1, self._most_lanes)
        return self.local.reduce_lanes()

    def set_width(self, lanes: int | None, threads: int) -> None:
        """Work with so many lanes and threads from now on."""
        self.local.set_width(lanes, threads)

    # --- uploads -------------------------------------------------------------------------------

    def add_uploads(
        self, run: int, clients: Sequence[int], shares: Sequence[float], template: Message
    ) -> Message:
        """Return, on rank 0, Σ share·upload over all ranks; `template`: its blanks."""
        own = self._find_uploads(run, clients)
        if own.clients:
            share = dict(zip(clients, shares, strict=True))
            numbers = torch.tensor([share[client] for client in own.clients], dtype=torch.float64)
            added = own.sum(numbers.to(self._device))
        else:
            added = tree_map(lambda blank: blank.make(self._device), template)
        if clients[0] not in own.clients:  # integer counters are the first client's

            def drop_counter(value: Tensor) -> Tensor:
                return value if value.is_floating_point() else torch.zeros_like(value)

            added = tree_map(drop_counter, added)
        total: Message = self.group.add_trees(added)
        return total

    def send_uploads(self, run: int, clients: Sequence[int]) -> Message:
        """Send the uploads of this rank's clients to rank 0, stacked; there, return its own."""
        own = self._find_uploads(run, clients)
        stacked = own.stack() if own.clients else Message()
        if self.group.rank:
            self.group.send_tree(stacked, 0)
        return stacked

    def _find_uploads(self, run: int, clients: Collection[int]) -> Uploads:
        """Return the uploads of those of some clients that are this rank's."""
        wanted = {(run, client) for client in clients}
        complete = partial(self.local.setup.reset_transient, run)
        pieces = pick_pieces(self._uploads, wanted, run, complete)
        found = sorted(client for piece in pieces for client in piece.clients)
        return Uploads(found, torch.ones(len(found), device=self._device), pieces)

    # --- tests ---------------------------------------------------------------------------------

    def test_models(self, round: int, delivery: Delivery, predicts: bool) -> list[CohortResult]:
        """Test one model per run, as it is, on this rank's samples."""
        sent, clients = self._receive(delivery)
        if not any(clients):
            return []
        models = [message.model for message in sent]
        return list(self.local.score_models(round, models, clients, predicts=predicts))

    def predict_absent(
        self, round: int, lanes: Sequence[Sequence[Lane]], runs: int
    ) -> list[CohortResult]:
        """Collect what the personal models of this rank's absent clients predict."""
        clients = list_clients(lanes[self.group.rank], runs)
        return list(self.local.predict_absent(round, clients))

    def run_newcomers(self, work: Any, round: int, delivery: Delivery) -> list[Arrival]:
        """Let this rank's share of the newcomers arrive."""
        sent, clients = self._receive(delivery)
        if not any(clients):
            return []
        return list(self.local.run_newcomers(work, round, sent, clients))

    # --- models --------------------------------------------------------------------------------

    def _keep_models(self, stack: ModelStack) -> Key:
        self._next_key += 1
        self._models[self._next_key] = stack
        return self._next_key

    def keep_absent(self, run: int, clients: Sequence[int]) -> list[tuple[int, Key, Params]]:
        """Keep the models of this rank's absent clients; return their keys, and blanks."""
        own = [client for client in clients if (run, client) in self.local.client_states]
        found = []
        for [client], stack in self.local.list_absent_models(run, own):
            blanks = describe_tree(stack.get(0))
            found.append((client, self._keep_models(stack), blanks))
        return found

    def select_models(self, rank: int, key: Key, lanes: Sequence[int]) -> Key | None:
        """Keep some lanes of a rank's models under a key of their own."""
        if rank != self.group.rank:
            return None
        return self._keep_models(self._models[key].select(lanes))

    def send_model(self, rank: int, key: Key, lane: int) -> None:
        """Send one model of a rank to rank 0."""
        if rank == self.group.rank:
            self.group.send_tree(self._models[key].get(lane), 0)

    def get_models(self, key: Key) -> ModelStack:
        """Return models of this rank."""
        return self._models[key]

    def drop_models(self, keys: Collection[tuple[int, Key]]) -> None:
        """Forget models that nobody asks for any more."""
        for rank, key in keys:
            if rank == self.group.rank:
                self._models.pop(key, None)

    # --- states --------------------------------------------------------------------------------

    def get_state(self, lane: Lane, rank: int) -> State | None:
        """Return a client's state, if it is with this rank."""
        if rank != self.group.rank:
            return None
        return self.local.client_states[lane]

    def write_states(self) -> dict[Lane, File]:
        """Write the states of this rank's clients; return their files."""
        return self.local.client_states.write()

    def hold_files(self, names: Sequence[Collection[str]]) -> None:
        """Keep the files of a checkpoint; `names`: by rank."""
        self.local.client_states.hold(names[self.group.rank])

    def adopt_states(self, found: Sequence[Mapping[Lane, File]], serial: int) -> None:
        """Take over states from files; `found`: by rank."""
        self.local.client_states.adopt(found[self.group.rank], serial)
