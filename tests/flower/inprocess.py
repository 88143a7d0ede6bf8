"""Flower without its processes: a grid that passes messages to a client app in this process."""

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
from fedala.flower import CustomApp, client_app
from fedala.flower.server import serve


class InProcessGrid(Grid):
    """Nodes 100, 101, … with partition-id 0, 1, …

    The server gets what `alter_reply` returns for a message and its reply: a message, several,
    none, or an error, which is raised when the server asks for the reply. A message that
    `delivers` denies gets lost.
    """

    def __init__(
        self, app: ClientApp, nodes: int, state_dir: Any, run_config: dict[str, Any] | None = None
    ) -> None:
        # Flower demands to know the sender.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.run_config, self.state_dir = app, run_config or {}, state_dir
        self.node_configs = {
            100 + i: {"partition-id": i, "num-partitions": nodes, "state-dir": str(state_dir)}
            for i in range(nodes)
        }
        self.alter_reply: Callable[[Message, Message], Any] = lambda sent, reply: reply
        self.delivers: Callable[[Message], bool] = lambda message: True
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        #: Replies that the server has not asked for yet, by message id.
        self.waiting: dict[str, list[Any]] = {}

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
            if not self.delivers(message):
                continue
            self.sent.append(message)
            reply = self._handle(message)
            self.replies.append(reply)
            altered = self.alter_reply(message, reply)
            if altered is not None:
                self.waiting[ids[-1]] = altered if isinstance(altered, list) else [altered]
        return ids

    def _handle(self, message: Message) -> Message:
        """Run the app as in a new process, which knows nothing of earlier rounds."""
        node = message.metadata.dst_node_id
        config = dict(self.node_configs[node])
        context = Context(1, node, config, RecordDict(), dict(self.run_config))
        try:
            return self.app(message, context)
        except Exception as error:  # as Flower does
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            replies += self.waiting.pop(message_id, [])
        for error in replies:
            if isinstance(error, Exception):  # as Flower's own decoder does
                raise error
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


SIZES = [40, 23, 31]
RUN = {"rounds": 3, "batch_size": 4, "lr": 0.1, "seed": 5}


def make_samples(client):
    """Make a client's own learnable 6×6 images of three classes."""
    random = np.random.default_rng(client)
    y = torch.from_numpy(random.integers(0, 3, SIZES[client]))
    x = torch.from_numpy(random.normal(size=(len(y), 1, 6, 6))).float() + y.view(-1, 1, 1, 1) * 0.5
    return Dataset("own", x, y, 3)


def build_federation(clients=3):
    """Put the same clients into one federation on one machine."""
    divided = [federate(make_samples(client), "iid", 1, 1) for client in range(clients)]
    offsets = np.cumsum([0, *SIZES])
    parts = {
        part: tuple(
            getattr(alone, part)[0] + offset
            for alone, offset in zip(divided, offsets, strict=False)
        )
        for part in ("train", "test", "validation")
    }
    data = [alone.dataset for alone in divided]
    joint = Dataset("own", torch.cat([d.x for d in data]), torch.cat([d.y for d in data]), 3)
    return Federation(joint, **parts)


CUSTOM = CustomApp(
    Net, lambda context: make_samples(context.node_config["partition-id"]), (1, 6, 6), 3
)


def flatten_options(options):
    return {key: value for key, value in options.items() if key != "set"} | {
        f"set.{key}": value for key, value in options.get("set", {}).items()
    }


def run_in_process(tmp_path, custom=CUSTOM, nodes=3, **options):
    run_config = {"clients": nodes, "min_nodes": nodes, "out": str(tmp_path / "runs")}
    run_config |= {**RUN, **flatten_options(options)}
    grid = InProcessGrid(client_app(custom), nodes, tmp_path / "state", run_config)
    return grid, serve(grid, run_config, custom)
