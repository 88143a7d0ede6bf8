"""What the clients of all ranks uploaded: it stays there until somebody asks for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import Message, Uploads
from fedala.lanes.trees import join, take, tree_map
from fedala.ranks.group import Blank

Tell = Callable[..., Any]


@dataclass(frozen=True, repr=False)
class RankUploads(Uploads):
    """The uploads of one run. A sum is added up on every rank, and then over the ranks."""

    run: int
    clients_by_rank: Sequence[Sequence[int]]
    tell: Tell
    """Gives a command to all ranks, and returns what this rank's own worker returns."""
    receive: Callable[[Any, int], Any]
    """Returns the tensors of a template that a rank sends."""

    def __iter__(self) -> Iterator[tuple[int, Message]]:
        stacked = self.stack()
        for lane, client in enumerate(self.clients):
            yield client, take(stacked, slice(lane, lane + 1))

    def sum(self, shares: Tensor) -> Message:
        template = self._describe(1)
        added: Message = self.tell("add_uploads", self.run, self.clients, shares.tolist(), template)
        return added

    def stack(self) -> Message:
        """Return all uploads as one message, a lane for each client, in this rank's memory."""
        own = self.tell("send_uploads", self.run, self.clients)
        parts: list[Message] = []
        clients: list[int] = []
        for rank, names in enumerate(self.clients_by_rank):
            if names:
                parts.append(self.receive(self._describe(len(names)), rank) if rank else own)
                clients += names
        order = torch.tensor(sorted(range(len(clients)), key=lambda i: clients[i]))
        stacked: Message = take(join(parts), order.to(self.weights.device))
        return stacked

    def _describe(self, lanes: int) -> Any:
        """Return the shapes of so many uploads."""
        message = self.pieces[0].message
        return tree_map(lambda value: Blank.of(value).with_lanes(lanes), message)
