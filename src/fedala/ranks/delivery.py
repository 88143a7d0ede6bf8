"""What the servers send to the clients of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedala.lanes import Message
from fedala.lanes.trees import count_lanes, take
from fedala.ranks.group import RankGroup, describe_tree
from fedala.simulation.client_states import Lane
from fedala.simulation.participation import list_clients
from fedala.simulation.transport import Setup


@dataclass(frozen=True)
class Delivery:
    """The lanes of every rank, and the shapes of what they receive."""

    lanes: Sequence[Sequence[Lane]]
    """By rank."""
    runs: int
    common: dict[int, Message]
    """By run, as blanks: the message that all of its clients get."""
    own: Sequence[dict[int, Message]]
    """By rank and run, as blanks: the messages of single clients, one lane each."""

    def clients_of(self, rank: int) -> list[list[int]]:
        """Return the clients of a rank, by run."""
        return list_clients(self.lanes[rank], self.runs)


Sent = tuple[dict[int, Message], Sequence[dict[int, Message]]]
"""The tensors of `Delivery.common` and `Delivery.own`."""


def prepare(
    sent: Sequence[Message], joined: Sequence[Sequence[int]], lanes: Sequence[Sequence[Lane]]
) -> tuple[Delivery, Sent]:
    """Sort messages by the ranks that need them; `joined`: the clients of a message's lanes."""
    common = {run: one for run, one in enumerate(sent) if count_lanes(one) == 1}
    own: list[dict[int, Message]] = []
    for share in lanes:
        parts = {}
        for run, message in enumerate(sent):
            positions = {client: position for position, client in enumerate(joined[run])}
            clients = [client for other, client in share if other == run]
            if count_lanes(message) > 1 and clients:
                parts[run] = take(message, [positions[client] for client in clients])
        own.append(parts)
    delivery = Delivery(lanes, len(sent), describe_tree(common), describe_tree(own))
    return delivery, (common, own)


def deliver(
    group: RankGroup, delivery: Delivery, sent: Sent | None, setup: Setup
) -> tuple[list[Message], list[list[int]]]:
    """Return what this rank's clients receive, by run, and who they are. Rank 0 has it to send."""
    device = setup.task.device
    common = group.share_tree(sent[0] if sent else None, delivery.common, device)
    if sent:
        for rank in range(1, group.size):
            group.send_tree(sent[1][rank], rank)
        own = sent[1][0]
    else:
        own = group.receive_tree(delivery.own[group.rank], 0, device)
    received = {**common, **own}
    messages = [received.get(run, Message()) for run in range(delivery.runs)]
    return messages, delivery.clients_of(group.rank)
