"""An app for Flower's simulation: two clients, whose evaluation gets personal models."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn

from fedala.flower import ala_mod, order_mods


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load_part(part, client):
    """Return a half of the images. Client 1 calls a 0 a 1, and so on: no model fits both."""
    pixels, labels = load_digits(return_X_y=True)
    rows = np.arange(len(labels)) % 2 == (part == "test")
    x = torch.from_numpy(pixels[rows] / 16).float()
    y = torch.from_numpy(labels[rows]).long()
    return x, (y + int(client)) % 10


def setup(context):
    return make_model(), load_part("train", context.node_config["partition-id"])


client = ClientApp(mods=order_mods(ala_mod(setup, layers=1, evaluate=True)))


@client.train()
def train(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_part("train", context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.arange(len(x)).split(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def measure_accuracy(arrays, data):
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = data
    return (model(x).argmax(1) == y).float().mean().item()


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    x, y = load_part("test", context.node_config["partition-id"])
    accuracy = measure_accuracy(message.content["arrays"], (x, y))
    metrics = MetricRecord({"num-examples": len(x), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Write the accuracies of Flower's own history: of the clients, and of the global model."""
    torch.manual_seed(0)

    def evaluate_global(round, arrays):
        scores = [measure_accuracy(arrays, load_part("test", client)) for client in (0, 1)]
        return MetricRecord({"accuracy": sum(scores) / 2})

    result = FedAvg().start(
        grid,
        ArrayRecord(make_model().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=evaluate_global,
    )
    clients, everyone = result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp
    history = {
        "clients": {round: dict(metrics) for round, metrics in clients.items()},
        "global": {round: dict(metrics) for round, metrics in everyone.items()},
        "train": {round: dict(m) for round, m in result.train_metrics_clientapp.items()},
    }
    Path(str(context.run_config["out"])).write_text(json.dumps(history))
