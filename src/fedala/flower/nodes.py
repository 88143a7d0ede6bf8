"""Who is there: which node is which client, and what the clients answer."""

import time
from collections.abc import Collection, Iterator, Mapping
from logging import getLogger

from flwr.app import Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedala.errors import UserError
from fedala.flower.experiment import PARTS
from fedala.flower.records import quote, read_metrics, read_records, whole

log = getLogger("flwr")

#: Seconds between two looks at who is there, and at what has come back.
PAUSE = 1.0

REMEDY = "if that has changed for a good reason, start the run once with rebind=true"


class Nodes:
    """The clients of a federation behind a grid.

    A client is known by its number. The first node that introduces itself under a number keeps it:
    Flower gives a registered key one node id for good, so another id is another key.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        least: int,
        *,
        max_samples: int = 2**53,
        validates: bool = True,
        rebind: bool = False,
    ) -> None:
        """`least` of the clients must be there to begin a round.

        A node that says it has more than `max_samples` is refused, and so is one that has
        validation samples in a run that does not use any. With `rebind`, a client that is not there
        may come back as another node.
        """
        self.grid, self.clients, self.least = grid, clients, least
        self.most = {
            part: max_samples if part != "validation" or validates else 0 for part in PARTS
        }
        self.rebind = rebind
        #: The node of each client that has introduced itself, and how many samples it said it has.
        self.node: dict[int, int] = {}
        self.sizes: dict[int, dict[str, int]] = {}
        #: The node that each number belongs to, also while it is not there.
        self.bound: dict[int, int] = {}
        self._refused: set[int] = set()

    def online(self) -> dict[int, int]:
        """The clients that are there now, and their nodes."""
        there = set(self.grid.get_node_ids())
        return {client: node for client, node in self.node.items() if node in there}

    def wait(self, seconds: float) -> None:
        """Waits until enough clients are there."""
        end = time.monotonic() + seconds
        said = -1
        while True:
            self._meet(max(1.0, end - time.monotonic()))
            there = len(self.online())
            if there >= self.least:
                return
            if time.monotonic() >= end:
                raise UserError(
                    f"After {seconds:g} s there are {there} clients, and {self.least} are needed to go on."
                )
            if there != said:
                log.info("Waiting for clients: %d of at least %d are there.", there, self.least)
                said = there
            time.sleep(PAUSE)

    def bind(self, bound: Mapping[int, int]) -> None:
        """Remember whose number is whose, as an earlier run of this experiment had it.

        Nodes that contradict it are refused.
        """
        if self.rebind:
            return
        self.bound |= bound
        for client, node in list(self.node.items()):
            if node != self.bound[client]:
                self.forget(client)
                self._refuse(node, _taken(client, self.bound[client]))

    def forget(self, client: int) -> None:
        """Forget what a client said of itself: it is asked again before the next round."""
        self.node.pop(client, None)
        self.sizes.pop(client, None)

    def _meet(self, seconds: float) -> None:
        """Asks nodes that have not been seen yet who they are."""
        there = set(self.grid.get_node_ids())
        self._refused &= there  # who goes and comes back may have been mended
        strangers = sorted(there - set(self.node.values()) - self._refused)
        messages = {
            node: Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in strangers
        }
        for node, answer in self._collect(messages, seconds):
            try:
                if isinstance(answer, UserError):
                    raise answer
                metrics = read_metrics(
                    read_records(answer.content, {"metrics": MetricRecord})["metrics"],
                    {"client", *PARTS},
                )
                client = whole(metrics, "client", self.clients - 1)
                sizes = {part: whole(metrics, part, self.most[part]) for part in PARTS}
                self._claim(client, node, there)
            except Exception as error:  # whatever its answer does, it is this node that is refused
                self._refuse(node, quote(error))
                continue
            log.info(
                "Node %d is client %d, with %d training samples.", node, client, sizes["train"]
            )
            self.node[client], self.sizes[client] = node, sizes

    def _claim(self, client: int, node: int, there: Collection[int]) -> None:
        """Give the number to the node, unless it is another's, or the node has another."""
        owner = self.bound.get(client, node)
        if owner in there and owner != node:
            raise UserError(f"it says that it is client {client}, which is node {owner}")
        others = {c: n for c, n in self.bound.items() if c != client and n == node}
        if not self.rebind and owner != node:
            raise UserError(_taken(client, owner))
        if not self.rebind and others:
            raise UserError(
                f"it says that it is client {client}, and it is client {min(others)}; {REMEDY}"
            )
        self.bound = {c: n for c, n in self.bound.items() if c not in others} | {client: node}

    def _refuse(self, node: int, why: str) -> None:
        log.warning("Node %d is not taken in: %s.", node, why)
        self._refused.add(node)

    def exchange(
        self, kind: str, contents: Mapping[int, RecordDict], round: int, seconds: float
    ) -> dict[int, Message]:
        """What the clients that are there answer, by client, within so many seconds. Who does not answer is named."""
        there = self.online()
        for client in sorted(contents.keys() - there.keys()):
            log.warning("Round %d: client %d is not there.", round, client)
        messages = {
            client: Message(
                content,
                dst_node_id=there[client],
                message_type=kind,
                group_id=str(round),
                ttl=seconds + 60,
            )
            for client, content in contents.items()
            if client in there
        }
        answers = {}
        for client, answer in self._collect(messages, seconds):
            if isinstance(answer, UserError):
                log.warning(
                    "Round %d: client %d (node %d) failed: %s.",
                    round,
                    client,
                    there[client],
                    quote(answer),
                )
            else:
                answers[client] = answer
        return answers

    def _collect(
        self, messages: Mapping[int, Message], seconds: float
    ) -> Iterator[tuple[int, Message | UserError]]:
        """Send messages and yield what comes back, with the key of its message.

        That is an answer, or a sentence that says why there is none. Answers are fetched one at a
        time: fetched together, one that Flower cannot decode would take the others with it. And so
        the SuperLink says which message an answer belongs to, not the answer itself.
        """
        sent = set(self.grid.push_messages(messages.values())) if messages else set()
        waiting = {message.metadata.message_id: key for key, message in messages.items()}
        for message_id in waiting.keys() - sent:
            yield (
                waiting.pop(message_id),
                UserError("the SuperLink did not take the message for it"),
            )
        end = time.monotonic() + seconds
        while waiting:
            began = time.monotonic()
            for message_id, key in list(waiting.items()):
                try:
                    answers = list(self.grid.pull_messages([message_id]))
                    answer = _checked(messages[key], answers) if answers else None
                except (
                    Exception
                ) as error:  # also in Flower's decoder: it concerns this answer alone
                    answer = UserError(f"its answer cannot be read ({quote(error)})")
                if answer is not None:
                    del waiting[message_id]
                    yield key, answer
            now = time.monotonic()
            if waiting and now >= end:
                break
            if waiting:
                time.sleep(min(max(PAUSE, now - began), end - now))
        for key in sorted(waiting.values()):
            yield key, UserError(f"it has not answered within {seconds:g} s")


def _checked(message: Message, answers: list[Message]) -> Message | UserError:
    """The answer to a message, if that is what has come."""
    [answer, *others] = answers
    if answer.has_error():
        # Of a node that is gone, it is the SuperLink that answers.
        return UserError(
            f"{quote(answer.error.reason or 'no reason given')} (code {answer.error.code})"
        )
    asked, said = message.metadata, answer.metadata
    if (said.reply_to_message_id, said.src_node_id) != (asked.message_id, asked.dst_node_id):
        return UserError("it answers what it was not asked")
    if said.message_type != asked.message_type:
        return UserError("its answer is of another type than the message")
    if not answer.has_content():
        return UserError("its answer is empty")
    if others:
        return UserError(f"it has answered {len(answers)} times")
    return answer


def _taken(client: int, node: int) -> str:
    return f"it says that it is client {client}, a number that belongs to node {node}; {REMEDY}"
