"""Measure Flower's seconds per round without training: fedala's FedAvg and a bare Flower FedAvg.

    python benchmarks/flower_overhead.py --nodes 2 10 --rounds 4 --repeats 2

SuperLink and SuperNodes run on this machine with TLS and node authentication. Both apps train the
same CNN (582,026 parameters, 2.3 MB) on ten samples, which takes almost no time, so the seconds are
those of everything else between the server's start and end of a round. The two take turns in one
federation, so other load on the machine affects both.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from fedala.flower.demo import follow_run
from fedala.flower.local import LocalFederation
from fedala.runs.folder import RunFolder

MODEL = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )

def samples(client):
    generator = torch.Generator().manual_seed(client)
    x = torch.rand(14, 1, 28, 28, generator=generator)
    return x, torch.arange(14) % 10
"""

BARE = """
import json
import time
from pathlib import Path
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    cross_entropy(model(x[:10]), y[:10]).backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": 10})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)

class Timed(FedAvg):
    seconds = []
    def configure_train(self, *args):
        self.began = time.perf_counter()
        return super().configure_train(*args)
    def aggregate_train(self, *args):
        result = super().aggregate_train(*args)
        self.seconds.append(time.perf_counter() - self.began)
        return result

@server.main()
def main(grid, context):
    nodes = int(context.run_config["clients"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    arrays = ArrayRecord(make_model().state_dict())
    strategy.start(grid, arrays, num_rounds=int(context.run_config["rounds"]))
    out = Path(context.run_config["out"]) / context.run_config["experiment"]
    out.mkdir(parents=True)
    (out / "seconds.json").write_text(json.dumps(strategy.seconds))
"""

OURS = """
from fedala.data import Dataset
from fedala.flower import CustomApp, client_app, server_app

def data(context):
    return Dataset("noise", *samples(int(context.node_config["partition-id"])), classes=10)

own = CustomApp(make_model, data, (1, 28, 28), 10)
client = client_app(own)
server = server_app(own)
"""

PROJECT = """
[project]
name = "{name}"
version = "1.0.0"
description = "Measured by flower_overhead.py"
dependencies = []
[tool.flwr.app]
publisher = "fedala"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
clients = 2
rounds = 1
experiment = "x"
out = "x"
"""


def measure(nodes: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every round but the first of each run, in which nodes register."""
    found: dict[str, list[float]] = {"bare": [], "fedala": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        extra = {"bare": "", "fedala": f"method = 'fedavg'\nmin_nodes = {nodes}\n"}
        for name, code in (("bare", BARE), ("fedala", OURS)):
            (folder / name).mkdir()
            (folder / name / "app.py").write_text(MODEL + code)
            (folder / name / "pyproject.toml").write_text(PROJECT.format(name=name) + extra[name])
        with LocalFederation(
            folder / "federation", environment={"OMP_NUM_THREADS": "1"}
        ) as federation:
            for client in range(nodes):
                federation.start_node(client)
            for repeat in range(repeats):
                for name in found:
                    options = {"clients": nodes, "rounds": rounds, "out": str(folder / "runs")}
                    experiment = f"{name}-{repeat}"
                    run = federation.submit(folder / name, experiment=experiment, **options)
                    out = folder / "runs" / experiment
                    if name == "fedala":
                        rows = follow_run(federation, run, RunFolder(out), seconds=1800).history()
                        seconds = [row["seconds"] for row in rows[:-1]]
                    else:
                        while not (out / "seconds.json").exists():
                            time.sleep(0.5)
                        seconds = json.loads((out / "seconds.json").read_text())
                    found[name] += seconds[1:]
                    print(
                        f"{nodes} nodes, {name}: {', '.join(f'{s:.1f}' for s in seconds)} s",
                        flush=True,
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    print("| SuperNodes | bare Flower FedAvg, s/round | fedala, s/round | difference |")
    print("|---|---|---|---|")
    for nodes in options.nodes:
        found = measure(nodes, options.rounds, options.repeats)
        bare, ours = (statistics.median(found[name]) for name in ("bare", "fedala"))
        print(f"| {nodes} | {bare:.2f} | {ours:.2f} | {ours / bare - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
