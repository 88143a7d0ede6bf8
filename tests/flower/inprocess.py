"""Flower without its processes: a grid that hands messages to a client app right here, one node after another."""

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from small import Net

from fedala.data import Dataset, Federation, federate
from fedala.flower import Own, client_app
from fedala.flower.server import serve


class Here(Grid):
    """Nodes 100, 101, … with partition-id 0, 1, …

    What `meddle` makes of a reply is what the server gets: a message, several, none, or an error when it asks for it.
    """

    def __init__(
        self, app: ClientApp, nodes: int, state_dir: Any, run_config: dict[str, Any] | None = None
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
            1,
            1,
            1,
        )  # who sends: else, Flower says so
        self.app, self.run_config, self.state_dir = app, run_config or {}, state_dir
        self.node_configs = {
            100 + i: {"partition-id": i, "num-partitions": nodes, "state-dir": str(state_dir)}
            for i in range(nodes)
        }
        self.meddle: Callable[[Message, Message], Any] = lambda sent, reply: reply
        self.asks: Callable[[Message], bool] = lambda message: True
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self.waiting: dict[
            str, list[Any]
        ] = {}  # answers that the server has not asked for yet, by message

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.node_configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            if not self.asks(message):
                continue
            self.sent.append(message)
            # Every message comes to a process of its own, with nothing of the rounds before.
            node = message.metadata.dst_node_id
            context = Context(
                1, node, dict(self.node_configs[node]), RecordDict(), dict(self.run_config)
            )
            try:
                reply = self.app(message, context)
            except Exception as error:  # what Flower does
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            self.replies.append(reply)
            meddled = self.meddle(message, reply)
            if meddled is not None:
                self.waiting[ids[-1]] = meddled if isinstance(meddled, list) else [meddled]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [
            reply for message_id in message_ids for reply in self.waiting.pop(message_id, [])
        ]
        for error in replies:
            if isinstance(error, Exception):  # what Flower's own decoder raises
                raise error
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


SIZES = [40, 23, 31]
RUN = {"rounds": 3, "batch_size": 4, "lr": 0.1, "seed": 5}


def samples(client):
    """A client's own learnable 6×6 images of three classes."""
    random = np.random.default_rng(client)
    y = torch.from_numpy(random.integers(0, 3, SIZES[client]))
    x = torch.from_numpy(random.normal(size=(len(y), 1, 6, 6))).float() + y.view(-1, 1, 1, 1) * 0.5
    return Dataset("own", x, y, 3)


def together(clients=3):
    """The same clients as one federation on one machine."""
    parts = [federate(samples(client), "iid", 1, 1) for client in range(clients)]
    offsets = np.cumsum([0, *SIZES])
    held = {
        part: tuple(
            getattr(alone, part)[0] + offset for alone, offset in zip(parts, offsets, strict=False)
        )
        for part in ("train", "test", "validation")
    }
    data = [alone.dataset for alone in parts]
    joint = Dataset("own", torch.cat([d.x for d in data]), torch.cat([d.y for d in data]), 3)
    return Federation(joint, **held)


OWN = Own(Net, lambda context: samples(context.node_config["partition-id"]), (1, 6, 6), 3)


def flat(options):
    return {key: value for key, value in options.items() if key != "set"} | {
        f"set.{key}": value for key, value in options.get("set", {}).items()
    }


def in_process(tmp_path, own=OWN, nodes=3, **options):
    run_config = {
        "clients": nodes,
        "min_nodes": nodes,
        "out": str(tmp_path / "runs"),
        **RUN,
        **flat(options),
    }
    grid = Here(client_app(own), nodes, tmp_path / "state", run_config)
    return grid, serve(grid, run_config, own)
