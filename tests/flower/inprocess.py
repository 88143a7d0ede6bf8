"""Flower without its processes: a grid that hands messages to a client app right here, one node after another."""

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # who is sending, which Flower sets elsewhere


class Here(Grid):
    """Nodes 100, 101, … with partition-id 0, 1, …; what `meddle` makes of a reply is what the server gets (None: nothing)."""

    def __init__(self, app: ClientApp, nodes: int, state_dir: Any, run_config: dict[str, Any] | None = None) -> None:
        self.app, self.run_config, self.state_dir = app, run_config or {}, state_dir
        self.node_configs = {
            100 + i: {"partition-id": i, "num-partitions": nodes, "state-dir": str(state_dir)} for i in range(nodes)
        }
        self.meddle: Callable[[Message, Message], Message | None] = lambda sent, reply: reply
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.node_configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        answers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.sent.append(message)
            # Every message comes to a process of its own, with nothing of the rounds before.
            node = message.metadata.dst_node_id
            context = Context(1, node, dict(self.node_configs[node]), RecordDict(), dict(self.run_config))
            try:
                reply = self.app(message, context)
            except Exception as error:
                reply = Message(Error(0, str(error)), reply_to=message)
            self.replies.append(reply)
            if (meddled := self.meddle(message, reply)) is not None:
                answers.append(meddled)
        return answers
