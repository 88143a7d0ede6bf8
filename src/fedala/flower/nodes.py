"""Who is there: which node is which client, and what the clients answer."""

import time
from collections.abc import Mapping
from logging import getLogger

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedala.errors import UserError
from fedala.flower.experiment import PARTS

log = getLogger("flwr")

#: Seconds between two looks at who is there.
PAUSE = 1.0


class Nodes:
    """The clients of a federation behind a grid. Node ids come and go; a client's number is its own."""

    def __init__(self, grid: Grid, clients: int, least: int) -> None:
        """`least` of the clients must be there to begin a round."""
        self.grid, self.clients, self.least = grid, clients, least
        #: The node of each client that has introduced itself, and how many samples it said it has.
        self.node: dict[int, int] = {}
        self.sizes: dict[int, dict[str, int]] = {}
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
                raise UserError(f"After {seconds:g} s there are {there} clients, and {self.least} are needed to go on.")
            if there != said:
                log.info("Waiting for clients: %d of at least %d are there.", there, self.least)
                said = there
            time.sleep(PAUSE)

    def _meet(self, seconds: float) -> None:
        """Asks nodes that have not been seen yet who they are."""
        there = set(self.grid.get_node_ids())
        self._refused &= there  # who goes and comes back may have been mended
        strangers = sorted(there - set(self.node.values()) - self._refused)
        messages = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in strangers]
        for reply in self.grid.send_and_receive(messages, timeout=seconds) if messages else ():
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("Node %d is not taken in: %s", node, reason(reply))
                self._refused.add(node)
                continue
            try:
                [said] = reply.content.metric_records.values()
                client = whole(said["client"], self.clients)
                sizes = {part: whole(said[part], 2**53) for part in PARTS}
            except (KeyError, TypeError, ValueError) as error:
                log.warning("Node %d is not taken in: what it says of itself makes no sense (%s).", node, error)
                self._refused.add(node)
                continue
            if client in self.node and self.node[client] in there:
                log.warning(
                    "Node %d is not taken in: it says that it is client %d, which is node %d.",
                    node, client, self.node[client],
                )  # fmt: skip
                self._refused.add(node)
                continue
            log.info("Node %d is client %d, with %d training samples.", node, client, sizes["train"])
            self.node[client], self.sizes[client] = node, sizes

    def exchange(self, kind: str, contents: Mapping[int, RecordDict], round: int, seconds: float) -> dict[int, Message]:
        """What the clients that are there answer, by client, within so many seconds. Who does not answer is named."""
        there = self.online()
        for client in sorted(contents.keys() - there.keys()):
            log.warning("Round %d: client %d is not there.", round, client)
        messages = {
            client: Message(
                content, dst_node_id=there[client], message_type=kind, group_id=str(round), ttl=seconds + 60
            )
            for client, content in contents.items()
            if client in there
        }
        replies = list(self.grid.send_and_receive(messages.values(), timeout=seconds)) if messages else []
        # Of a node that is gone, it is the SuperLink that answers: what tells is which message is answered.
        waiting = {message.metadata.message_id: client for client, message in messages.items()}
        answers = {}
        for reply in replies:
            client = waiting.pop(reply.metadata.reply_to_message_id, -1)
            if reply.has_error():
                node = there.get(client, -1)
                log.warning("Round %d: client %d (node %d) failed: %s", round, client, node, reason(reply))
            elif client < 0 or reply.metadata.src_node_id != there[client]:
                log.warning("Round %d: node %d answers what it was not asked.", round, reply.metadata.src_node_id)
            else:
                answers[client] = reply
        for client in sorted(waiting.values()):
            node = there[client]
            log.warning("Round %d: client %d (node %d) has not answered within %g s.", round, client, node, seconds)
        return answers


def reason(reply: Message) -> str:
    return f"{reply.error.reason or 'no reason given'} (code {reply.error.code})"


def whole(value: object, end: int) -> int:
    """A whole number from 0 to `end` − 1."""
    if not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a whole number from 0 to {end - 1}")
    return value
