"""The server's conversation with its clients: requests, and checked replies."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from torch import Tensor

from fedala.errors import UserError
from fedala.flower.arrays import Tree, check_distance, pack_tree, unpack_tree
from fedala.flower.experiment import Deployment
from fedala.flower.messages import EVALUATE_RECEIVED, MAX_LOSS, Reply, Request, clean_text
from fedala.flower.nodes import Nodes
from fedala.lanes.trees import take
from fedala.simulation.rounds import CohortResult, RoundRequest

log = getLogger("flwr")


class FlowerTransport:
    """Ask the clients of a federation to work, and yield the results that pass every check.

    Each client keeps its own state. The transport remembers which round each client continues from
    and which node owns each number. `state` and `restore` carry both over a restart.
    """

    def __init__(
        self,
        nodes: Nodes,
        deployment: Deployment,
        template: Tree,
        parts: Sequence[str],
        notes: Collection[str],
    ) -> None:
        """`template` is an upload of one lane; replies may hold scores of `parts`, and `notes`."""
        self.nodes, self.deployment = nodes, deployment
        self.template, self.parts, self.notes = template, parts, notes
        #: The last round of each client whose update was counted, from 1.
        self.counted: dict[int, int] = {}

    def wait_until_ready(self) -> None:
        """Wait until enough clients for a round are online."""
        self.nodes.wait_until_ready(self.deployment.start_timeout)

    def exchange(
        self, request: RoundRequest, models: Mapping[int, Tree], *, scores_received: bool = False
    ) -> Iterator[CohortResult]:
        """Send each client its model; yield the result of each good reply, in client order.

        With `scores_received`, clients score the received model as it is. A bad reply costs only
        that client's update, and one line of the log says why.
        """
        kind = MessageType.TRAIN if request.train else MessageType.EVALUATE
        kind = EVALUATE_RECEIVED if scores_received else kind
        packed: dict[int, ArrayRecord] = {}  # clients that share a model share its record
        contents = {}
        for client, model in models.items():
            if id(model) not in packed:
                packed[id(model)] = pack_tree(model)
            since = self.counted.get(client, 0)
            contents[client] = Request(request, packed[id(model)], self.parts, since).pack()
        seconds = self.deployment.round_timeout
        answers = self.nodes.exchange(kind, contents, request.round, seconds)
        for client, answer in sorted(answers.items()):
            result = self._read_answer(client, answer, request, models[client])
            if result is not None:
                yield result

    def confirm(self, round: int, clients: Iterable[int]) -> None:
        """Let these clients continue from the state of this round, which was counted."""
        self.counted |= dict.fromkeys(clients, round)

    def reset(self, client: int) -> None:
        """Let this client start over in its next round."""
        self.counted.pop(client, None)

    def state(self) -> dict[str, Tensor]:
        """Return what a restart needs, as tensors [client, (client, round or node id)]."""
        counted = torch.tensor(sorted(self.counted.items()), dtype=torch.int64)
        # Node ids are unsigned 64-bit numbers, which the file format does not have.
        owners = np.array(sorted(self.nodes.owners.items()), dtype=np.uint64)
        bound = torch.from_numpy(owners.reshape(-1, 2).view(np.int64))
        return {"counted": counted.view(-1, 2), "bound": bound}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned after this many rounds."""
        counted = dict(state["counted"].tolist())
        # Checkpoints of early versions do not have owners.
        owners = dict(state["bound"].numpy().view(np.uint64).tolist()) if "bound" in state else {}
        clients = range(self.nodes.population)
        are_known = all(client in clients for client in (*counted, *owners))
        if not are_known or not all(0 < last <= round for last in counted.values()):
            raise ValueError("the state of another federation")
        self.counted = counted
        self.nodes.restore_owners(owners)

    def _read_answer(
        self, client: int, answer: Message, request: RoundRequest, sent: Tree
    ) -> CohortResult | None:
        """Return the checked result of an answer, or None after a warning that it is dropped."""
        round, node = request.round, answer.metadata.src_node_id
        try:
            reply = Reply.unpack(answer.content, self.notes)
            result = self._check_reply(client, reply, request, sent)
        except Exception as error:  # any problem with a reply costs this update alone
            log.warning(
                "Round %d: the update of client %d (node %d) is dropped: %s.",
                round, client, node, clean_text(error),
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

    def _check_reply(
        self, client: int, reply: Reply, request: RoundRequest, sent: Tree
    ) -> CohortResult:
        """Check a reply, and return it as the result of a cohort of this one client."""
        if reply.client != client:
            raise UserError(f"it says that it is client {reply.client}")
        tests_trained = request.train and request.looks_back
        result = CohortResult(
            [(0, client)],
            {n: torch.tensor([value], dtype=torch.float64) for n, value in reply.notes.items()},
            upload=take(self.template, slice(0)),
            finite=torch.tensor([reply.is_finite]),
            scores=self._check_scores(reply.scores, request.evaluates, "scores"),
            left=self._check_scores(reply.trained_scores, tests_trained, "scores after training"),
        )
        self._check_sizes(client, reply, result)
        if request.train and reply.is_finite:
            result.upload = unpack_tree(reply.arrays, self.template)
            if self.deployment.max_norm:
                check_distance(result.upload, sent, self.deployment.max_norm)
        elif reply.arrays:
            raise UserError("it sends arrays, but should not send any")
        elif not request.train and not reply.is_finite:
            raise UserError("it says that it diverged, but it did not train")
        return result

    def _check_sizes(self, client: int, reply: Reply, result: CohortResult) -> None:
        """Refuse numbers of samples that differ from the client's introduction."""
        sizes = self.nodes.sizes[client]
        tables = [table for table in (result.scores, result.left) if table]
        reported = [reply.examples]
        expected = [sizes["train"]]
        for table in tables:
            reported += [int(score[0, 2]) for score in table]
            expected += [sizes[part] for part in self.parts]
        if reported != expected:
            self.nodes.forget_introduction(client)  # its data may have changed: query it again
            raise UserError("its numbers of samples differ from those of its introduction")

    def _check_scores(self, values: list[float], is_requested: bool, name: str) -> list[Tensor]:
        """Return scores as [lane, (correct, loss, samples)] for each part.

        Correct answers are a whole number, at most the number of samples. A loss may be infinite
        or NaN: an honest client's model may have become too large.
        """
        expected = 3 * len(self.parts) if is_requested else 0
        if len(values) != expected:
            raise UserError(f"its {name} are {len(values)} numbers, but should be {expected}")
        table = torch.tensor(values, dtype=torch.float64).view(-1, 1, 3)
        for correct, loss, samples in table[:, 0].tolist():
            is_count = correct.is_integer() and samples.is_integer() and 0 <= correct <= samples
            if not is_count or loss < 0 or MAX_LOSS < loss < math.inf:
                raise UserError(
                    f"its {name} are not possible: {correct:g} of {samples:g} correct, "
                    f"a loss of {loss:g}"
                )
        return list(table)
