"""Rounds of one client of an app with `ala_mod`, without a server."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

RUN = 12345678901234567890  # Flower draws run ids from 64 bits


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def setup(context):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(30, 3, generator=draws)
    return make_model(), (x, (x[:, 0] > 0).long())


def make_global(seed):
    """Make the arrays that the server sends."""
    torch.manual_seed(seed)
    return make_model().state_dict()


def make_context(folder=None, run=RUN, node=7, run_config=None, **node_config):
    """Make a node's context; without a folder, the node config has no state-dir."""
    # Flower demands to know the sender of a message.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    config = {"partition-id": 0, **node_config}
    if folder is not None:
        config["state-dir"] = str(folder)
    config = {key: value for key, value in config.items() if value is not None}
    return Context(run, node, config, RecordDict(), run_config or {})


class App:
    """An app whose training adds noise, and that remembers the arrays that it was given."""

    def __init__(self, *mods):
        self.seen = []
        self.app = ClientApp(mods=list(mods))
        self.app.train()(self._train)
        self.app.evaluate()(self._evaluate)

    def _train(self, message, context):
        arrays = message.content["arrays"].to_torch_state_dict()
        self.seen.append(arrays)
        moved = {name: value + torch.rand(value.shape) for name, value in arrays.items()}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    def _evaluate(self, message, context):
        self.seen.append(message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def call(self, kind, arrays, context):
        """Send arrays; return the reply's content and its metrics."""
        content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({})})
        reply = self.app(Message(content, dst_node_id=7, message_type=kind), context).content
        return reply, dict(reply["metrics"])


class LegacyApp:
    """The same with a `NumPyClient`: its arrays have numbers instead of names."""

    def __init__(self, *mods):
        self.seen = []

        class Client(NumPyClient):
            def fit(client, parameters, config):
                self.seen.append(parameters)
                return [array + np.float32(0.5) for array in parameters], 1, {}

            def evaluate(client, parameters, config):
                self.seen.append(parameters)
                return 0.5, 1, {"accuracy": 0.25}

        self.app = ClientApp(client_fn=lambda context: Client().to_client(), mods=list(mods))

    def call(self, kind, arrays, context):
        """Send arrays; return the result."""
        parameters = ndarrays_to_parameters([value.numpy() for value in arrays.values()])
        if kind == "train":
            content = compat.fitins_to_recorddict(FitIns(parameters, {}), keep_input=True)
            unpack = compat.recorddict_to_fitres
        else:
            content = compat.evaluateins_to_recorddict(EvaluateIns(parameters, {}), True)
            unpack = compat.recorddict_to_evaluateres
        reply = self.app(Message(content, dst_node_id=7, message_type=kind), context)
        return unpack(reply.content, True) if kind == "train" else unpack(reply.content)


def read_files(folder):
    """Return every file and folder below, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
