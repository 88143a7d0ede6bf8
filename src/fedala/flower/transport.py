"""The server's conversation with its clients: requests, and checked replies."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MessageType
from flwr.app import Message as FlowerMessage
from torch import Tensor

from fedala.errors import RunError
from fedala.flower.arrays import pack_message
from fedala.flower.experiment import Deployment
from fedala.flower.messages import EVALUATE_RECEIVED, PARTS, Reply, Request, clean_text
from fedala.flower.nodes import Nodes
from fedala.flower.reply_checks import OtherSamples, check_reply
from fedala.lanes import Message, Params
from fedala.lanes.messages import drop_transient
from fedala.lanes.trees import count_lanes, take
from fedala.simulation.client_round import CohortResult, RoundRequest
from fedala.simulation.client_states import ClientStates, Lane
from fedala.simulation.transport import Setup, Transport

log = getLogger("flwr")


class FlowerTransport(Transport):
    """Asks the nodes of a federation to work, and yields the results that pass every check.

    Each client keeps its own state and its personal model. The transport remembers which round each
    client continues from and which node owns each number.
    """

    can_grow = True

    def __init__(self, setup: Setup, nodes: Nodes, deployment: Deployment) -> None:
        self.setup, self.nodes, self.deployment = setup, nodes, deployment
        self.client_states = ClientStates(setup.task.device, everybody=True)
        method, task, initial = setup.method, setup.task, setup.initial[0]
        shared = drop_transient(task, method.shared_part(task, initial))
        #: An upload of one lane: names, types and shapes.
        self.template = Message(shared, method.extra_template(task, initial))
        #: The last round of each client whose update was counted, from 1.
        self.counted: dict[int, int] = {}
        self._reset: set[int] = set()  # clients that start over after this round
        self._round = 0  # the last one that is over
        self._failed_rounds = 0  # those since the last counted update
        self._has_counted = False  # whether an update has ever counted
        self._asked: set[int] = set()  # clients that got a message in this round
        self._missing: set[int] = set()  # those of them that did not answer, or not as they should
        empty: list[Any] = [range(0)] * nodes.population
        task.parts = {part: list(empty) for part in PARTS}
        self._update_sizes()

    def begin_round(self) -> bool:
        self._check_progress()
        self.nodes.wait_until_ready(self.deployment.start_timeout)
        self._update_sizes()
        self._asked, self._missing = set(), set()
        return True

    def _check_progress(self) -> None:
        """End a run that has learned nothing, or not for as many rounds as the options allow."""
        limit = self.deployment.max_failed_rounds
        if self._round >= self.setup.rounds and not self._has_counted:
            raise RunError(
                f"No update has counted in {self._round} rounds, so that nothing was learned"
                f"{self._explain_problems()}. Start again under another experiment name."
            )
        if limit and self._failed_rounds >= limit:
            raise RunError(
                f"No update has counted in {self._failed_rounds} rounds in a row, and "
                f"max_failed_rounds is {limit}{self._explain_problems()}. To continue after round "
                f"{self._round}, start the run again."
            )

    def _explain_problems(self) -> str:
        """Return the commonest reason why updates did not count, as the end of a sentence."""
        if not self.nodes.problems:
            return "; the log says why"
        [(reason, _)] = self.nodes.problems.most_common(1)
        return f"; the commonest reason is: {reason}"

    def list_members(self, population: int = 0) -> list[int]:
        """Return the clients of the start, and those that have joined since."""
        joined = self.nodes.owners.keys() | self.counted.keys()
        return sorted({*range(self.nodes.population), *joined})

    def count_answers(self) -> dict[str, int]:
        asked = len(self._asked)
        return {"asked": asked, "answered": asked - len(self._missing)}

    def _update_sizes(self) -> None:
        """Give the task the numbers of samples that the clients reported.

        Its lists end with the last client that has joined. A number that nobody has, has none.
        """
        parts: Any = self.setup.task.parts
        members = self.list_members()
        if members[-1] >= self.setup.population:
            joined = ", ".join(str(c) for c in members if c >= self.setup.population)
            log.info("Joined: client %s. The federation has %d clients.", joined, len(members))
        for part in PARTS:
            parts[part] = [
                range(self.nodes.sizes.get(client, {}).get(part, 0))
                for client in range(members[-1] + 1)
            ]

    def run_round(
        self, request: RoundRequest, sent: Sequence[Message], joined: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        kind = MessageType.TRAIN if request.train else MessageType.EVALUATE
        return self._exchange(kind, request, _split_lanes(sent[0], joined[0]))

    def score_models(
        self,
        round: int,
        models: Sequence[Params],
        clients: Sequence[Sequence[int]],
        *,
        predicts: bool = False,
    ) -> Iterator[CohortResult]:
        """Test one model. In round 0 it is the initial model, which clients make themselves."""
        request = RoundRequest(round, train=False, evaluate=True)
        sent = Message(models[0]) if round else Message()
        return self._exchange(EVALUATE_RECEIVED, request, dict.fromkeys(clients[0], sent))

    def _exchange(
        self, kind: str, request: RoundRequest, messages: Mapping[int, Message]
    ) -> Iterator[CohortResult]:
        """Send each client its message; yield the result of each good reply, in client order.

        A bad reply costs only that client's update, and one line of the log says why.
        """
        members = set(self.list_members())
        messages = {client: sent for client, sent in messages.items() if client in members}
        packed: dict[int, ArrayRecord] = {}  # clients that share a message share its record
        contents = {}
        for client, message in messages.items():
            if id(message) not in packed:
                travelling = message._replace(model=drop_transient(self.setup.task, message.model))
                packed[id(message)] = pack_message(travelling)
            since = self.counted.get(client, 0)
            bound = self.deployment.clipping_norm if request.train else 0.0
            work = Request(request, packed[id(message)], self.setup.parts, since, bound)
            contents[client] = work.pack()
        seconds = self.deployment.round_timeout
        answers = self.nodes.exchange(kind, contents, request.round, seconds)
        self._asked |= messages.keys()
        self._missing |= messages.keys() - answers.keys()
        for client in sorted(answers):
            # Forget each answer once it is decoded: the server holds every upload only once.
            result = self._read_answer(client, answers.pop(client), request, messages[client])
            if result is None:
                self._missing.add(client)
            else:
                yield result

    def keep_states(self, result: CohortResult, policy: str) -> None:
        """Let a diverged client start over if that is the policy. Its node has saved nothing."""
        for _ in result.diverged:
            self.nodes.note_problem("its training diverged")
        if policy == "reset":
            self._reset |= {result.lanes[position][1] for position in result.diverged}

    def finish_round(self, round: int, counted: Collection[Lane]) -> None:
        """Let these clients continue from the state of this round."""
        super().finish_round(round, counted)
        for client in self._reset:
            self.counted.pop(client, None)
        self._reset = set()
        self.counted |= {client: round for _, client in counted}
        self._round = round
        if counted:
            self._failed_rounds, self._has_counted = 0, True
            self.nodes.problems.clear()
        else:
            self._failed_rounds += 1

    def undo_round(self) -> None:
        super().undo_round()
        self._reset = set()

    def updates_needed(self) -> int:
        if self.setup.method.requires_all_clients:
            return self.setup.population
        return self.deployment.min_updates

    def keeps_models(self) -> bool:
        return False

    def state(self) -> dict[str, Tensor]:
        """Return what a restart needs, as tensors [client, (client, round or node id)]."""
        counted = torch.tensor(sorted(self.counted.items()), dtype=torch.int64)
        # Node ids are unsigned 64-bit numbers, which the file format does not have.
        owners = np.array(sorted(self.nodes.owners.items()), dtype=np.uint64)
        bound = torch.from_numpy(owners.reshape(-1, 2).view(np.int64))
        seats = torch.tensor(self.nodes.seats)
        return {"counted": counted.view(-1, 2), "bound": bound, "seats": seats}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        counted = dict(state["counted"].tolist())
        # Checkpoints of early versions do not have owners.
        owners = dict(state["bound"].numpy().view(np.uint64).tolist()) if "bound" in state else {}
        clients = range(int(state.get("seats", self.nodes.seats)))
        are_known = all(client in clients for client in (*counted, *owners))
        if not are_known or not all(0 < last <= round for last in counted.values()):
            raise ValueError("the state of another federation")
        self.counted = counted
        self._round, self._has_counted = round, bool(counted)
        self.nodes.keep_seats({*counted, *owners})
        self.nodes.restore_owners(owners)
        self._update_sizes()

    def _read_answer(
        self, client: int, answer: FlowerMessage, request: RoundRequest, sent: Message
    ) -> CohortResult | None:
        """Return the checked result of an answer, or None after a warning that it is dropped."""
        round, node = request.round, answer.metadata.src_node_id
        try:
            reply = Reply.unpack(answer.content, self.setup.method.metrics)
            result = self._check(client, reply, request, sent)
        except Exception as error:  # any problem with a reply costs this update alone
            problem = clean_text(error)
            self.nodes.note_problem(problem)
            log.warning(
                "Round %d: the update of client %d (node %d) is dropped: %s.",
                round, client, node, problem,
            )  # fmt: skip
            return None
        if reply.has_lost_state:
            log.warning("Round %d: client %d had LOST its state and started over.", round, client)
        if reply.is_finite and not all(map(math.isfinite, reply.scores + reply.trained_scores)):
            log.warning(
                "Round %d: the loss of client %d (node %d) on its test samples is not finite. "
                "Its update still counts.",
                round, client, node,
            )  # fmt: skip
        return result

    def _check(
        self, client: int, reply: Reply, request: RoundRequest, sent: Message
    ) -> CohortResult:
        """Return a checked reply as the result of a cohort of this one client."""
        try:
            return check_reply(
                reply,
                client,
                request,
                sent,
                template=self.template,
                parts=self.setup.parts,
                sizes=self.nodes.sizes[client],
                metric=self.setup.task.loss.metric,
                max_norm=self.deployment.max_norm,
            )
        except OtherSamples:
            self.nodes.forget_introduction(client)  # its data may have changed: query it again
            raise


def _split_lanes(sent: Message, clients: Sequence[int]) -> dict[int, Message]:
    """Return each client's message: a lane of its own, or the one that all clients share."""
    if count_lanes(sent) <= 1:
        return dict.fromkeys(clients, sent)
    return {client: take(sent, slice(i, i + 1)) for i, client in enumerate(clients)}
