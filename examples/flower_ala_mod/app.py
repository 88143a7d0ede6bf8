"""ALA in an existing Flower app: `before` is the app without ALA, `after` the same app with it.

`flwr run .` runs it.
"""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedala.flower import ala_mod, order_mods


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))


def load_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Make points in the plane. Clients label the same regions differently."""
    client = int(context.node_config["partition-id"])
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(client))
    return x, ((x[:, 0] > 0).long() + client) % 2 + 2 * (x[:, 1] > 0).long()


def train(message: Message, context: Context) -> Message:
    """Train as the app always did. It knows nothing about ALA."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_data(context)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, len(x), 10):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i : i + 10]), y[i : i + 10]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "accuracy": accuracy})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


before = ClientApp()
before.train()(train)


def setup(context: Context) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return what ALA needs: the model, and the client's data."""
    return make_model(), load_data(context)


after = ClientApp(mods=order_mods(ala_mod(setup, layers=1)))  # the one line
after.train()(train)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=0.0)
    start = ArrayRecord(make_model().state_dict())
    result = strategy.start(grid, start, num_rounds=int(context.run_config["rounds"]))
    last_round, metrics = max(result.train_metrics_clientapp.items())
    print(f"accuracy before training in round {last_round}: {metrics['accuracy']:.1%}")
