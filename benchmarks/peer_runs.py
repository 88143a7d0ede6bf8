"""One framework on the data of a job, its rounds timed from outside: `peers.py` starts this.

    python benchmarks/peer_runs.py job.json

The framework's own code runs as it is, from a copy of its source. What is replaced from outside
are functions that are timed, wrapped by a clock, and packages that are missing
(`stand_ins.py`). Every round is a line of the job's output file as soon as it is over.
"""

import itertools
import json
import os
import runpy
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stand_ins import stand_in
from torch import Tensor, nn

_NEVER = 1_000_000  # rounds between evaluations


class Finished(BaseException):
    """The job has its rounds: leave the framework's loop."""


@dataclass
class Job:
    """What to run, and where to write what was measured."""

    framework: str
    method: str
    source: str  # the framework's files; empty for fedala
    data: str  # an .npz of x (uint8), y, client, is_test
    folder: str  # for this job alone
    device: str
    joined: int
    lr: float
    rounds: int
    evaluates: bool  # in every round; else once, at the end
    batch: int = 10
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with np.load(self.data) as found:
            self.arrays = {name: found[name] for name in found.files}

    @property
    def clients(self) -> int:
        return int(self.arrays["client"].max()) + 1

    @property
    def eval_every(self) -> int:
        return 1 if self.evaluates else self.rounds

    @property
    def is_small(self) -> bool:
        """Whether the images are MNIST's, 1×28×28, and not CIFAR's."""
        return self.arrays["x"].shape[1] == 1

    def rows(self, client: int, is_test: bool) -> Any:
        own = (self.arrays["client"] == client) & (self.arrays["is_test"] == is_test)
        return np.flatnonzero(own)

    def samples(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return pixels from −1 to 1, and labels."""
        x = torch.from_numpy(self.arrays["x"][rows]).float()
        return (x / 255 - 0.5) / 0.5, torch.from_numpy(self.arrays["y"][rows])

    def test_samples(self) -> tuple[Tensor, Tensor]:
        return self.samples(np.flatnonzero(self.arrays["is_test"]))

    def write(self, **record: Any) -> None:
        with (Path(self.folder) / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


class Clock:
    """The seconds of rounds, and of the evaluations inside them."""

    def __init__(self, job: Job) -> None:
        self.job, self.rounds = job, 0
        self.began = self.evaluation = 0.0

    def now(self) -> float:
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        self.began, self.evaluation = self.now(), 0.0

    def end(self) -> None:
        self.rounds += 1
        seconds, evaluation = self.now() - self.began, self.evaluation
        if not self.job.evaluates:  # the only evaluation may be inside the first or last round
            seconds, evaluation = seconds - evaluation, 0.0
        self.job.write(round=self.rounds, seconds=seconds, evaluation=evaluation)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; its time counts as evaluation."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = self.now()
            result = function(*arguments, **options)
            self.evaluation += self.now() - began
            return result

        return timed


def make_cnn(is_small: bool) -> nn.Sequential:
    """Make the paper's CNN, for frameworks that have no such model."""
    channels, features = (1, 1024) if is_small else (3, 1600)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


@torch.no_grad()
def measure_accuracy(job: Job, model: nn.Module) -> float:
    """Return the accuracy of one model on all test samples, in the same way for everybody."""
    x, y = job.test_samples()
    model = model.to(job.device).eval()
    parts = zip(x.split(1000), y.split(1000), strict=True)
    right = sum(int((model(a.to(job.device)).argmax(1).cpu() == b).sum()) for a, b in parts)
    return right / len(y)


def copy_source(job: Job, *names: str) -> Path:
    """Copy what is needed of a framework, so that its own folder stays as it is."""
    target = Path(job.folder) / "source"
    for name in names:
        shutil.copytree(Path(job.source) / name, target / name)
    return target


def run_fedala(job: Job) -> None:
    from fedala.data import Dataset, Federation
    from fedala.runs.build import build_simulation
    from fedala.runs.config import Config
    from fedala.runs.plan import plan
    from fedala.version import __version__

    job.write(stand_ins=[], version=__version__)
    x, y = (torch.from_numpy(job.arrays[name]) for name in "xy")
    parts = [tuple(job.rows(k, part) for k in range(job.clients)) for part in (False, True)]
    empty = tuple(np.arange(0) for _ in range(job.clients))
    options = {
        "method": job.method.lower(), "model": "cnn", "lr": job.lr, "batch_size": job.batch,
        "rounds": job.rounds, "eval_every": job.eval_every, "device": job.device,
        "join_ratio": job.joined / job.clients,
    }  # fmt: skip
    federation = Federation(Dataset("peers", x, y, 10), *parts, empty)
    checked = plan(Config.from_values(options), federation)
    [group] = checked.groups
    simulation = build_simulation(checked.for_group(group), group.members[0].method)
    clock = Clock(job)
    for round in range(1, job.rounds + 1):
        clock.begin()
        simulation.step(round, train=True)
        clock.end()
    [last] = simulation.step(job.rounds + 1, train=False)
    job.write(accuracy=last.row.accuracy)


def run_pfllib(job: Job) -> None:
    """Run its main.py; a round is from `select_clients` to the end of `aggregate_parameters`."""
    names = stand_in(("torchvision", "h5py", "cvxpy", "calmsize"))
    job.write(stand_ins=names, version="")
    source = copy_source(job, "system")
    dataset = "MNIST" if job.is_small else "Cifar10"
    _write_pfllib_files(job, source / "dataset" / dataset)
    os.chdir(source / "system")
    sys.path.insert(0, os.getcwd())
    from flcore.servers.serverbase import Server

    clock = Clock(job)
    select, aggregate, evaluate = (
        Server.select_clients, Server.aggregate_parameters, clock.wrap(Server.evaluate)
    )  # fmt: skip

    def select_clients(server: Any) -> Any:
        clock.begin()
        return select(server)

    def aggregate_parameters(server: Any) -> None:
        aggregate(server)
        clock.end()

    def evaluate_all(server: Any) -> None:
        if job.evaluates:
            evaluate(server)
        if clock.rounds == job.rounds:
            accuracies = server.rs_test_acc or [measure_accuracy(job, server.global_model)]
            job.write(accuracy=accuracies[-1])
            raise Finished

    Server.select_clients = select_clients
    Server.aggregate_parameters = aggregate_parameters
    Server.evaluate = evaluate_all
    sys.argv = [
        "main.py", "-data", dataset, "-m", "CNN", "-algo", job.method, "-gr", str(job.rounds),
        "-dev", job.device, "-lbs", str(job.batch), "-lr", str(job.lr), "-ls", "1",
        "-nc", str(job.clients), "-jr", str(job.joined / job.clients), "-eg", str(job.eval_every),
    ]  # fmt: skip
    runpy.run_path("main.py", run_name="__main__")


def _write_pfllib_files(job: Job, folder: Path) -> None:
    def write(client: int, part: str) -> None:
        x, y = job.samples(job.rows(client, part == "test"))
        file = folder / part / f"{client}.npz"
        np.savez_compressed(file, data={"x": x.numpy(), "y": y.numpy()})

    with ThreadPoolExecutor() as pool:
        for part in ("train", "test"):
            (folder / part).mkdir(parents=True)
            list(pool.map(write, range(job.clients), itertools.repeat(part)))


def run_fl_bench(job: Job) -> None:
    """Run its FedAvgServer in serial mode; a round is `train_one_round` and the test after it."""
    names = stand_in(("torchvision", "hydra", "omegaconf", "ray", "pynvml", "rich"))
    job.write(stand_ins=names, version="")
    source = copy_source(job, "src", "data")
    sys.path.insert(0, str(source))
    import data.utils.datasets as datasets
    import src.server.fedavg as fedavg
    from omegaconf import DictConfig
    from src.utils.functional import parse_args

    name = "mnist" if job.is_small else "cifar10"
    _write_fl_bench_partition(job, source / "data" / name)
    pixels = torch.from_numpy(job.arrays["x"]).float() / 255
    labels = torch.from_numpy(job.arrays["y"])

    def make_dataset(root: Any, args: Any, **transforms: Any) -> Any:
        return datasets.BaseDataset(pixels, labels, list(range(10)), **transforms)

    fedavg.DATASETS[name] = make_dataset
    channels = pixels.shape[1]
    fedavg.DATA_MEAN[name] = fedavg.DATA_STD[name] = [0.5] * channels
    output = types.SimpleNamespace(output_dir=job.folder)
    fedavg.HydraConfig = types.SimpleNamespace(get=lambda: types.SimpleNamespace(runtime=output))
    every = 1 if job.evaluates else _NEVER
    test = {"client": {"interval": every, "train": False, "val": False, "test": True}}
    config = {
        "method": "fedavg", "mode": "serial", "dataset": {"name": name},
        "model": {"name": "avgcnn"}, "optimizer": {"name": "sgd", "lr": job.lr},
        "common": {
            "join_ratio": job.joined / job.clients, "global_epoch": job.rounds, "local_epoch": 1,
            "batch_size": job.batch, "client_side_evaluation": False, "test": test,
            "use_cuda": job.device == "cuda", "verbose_gap": _NEVER,
        },
    }  # fmt: skip
    server = fedavg.FedAvgServer(args=parse_args(DictConfig(config), "fedavg", None))
    clock = Clock(job)
    train, show = server.train_one_round, server.display_metrics
    server.test_client_models = clock.wrap(server.test_client_models)

    def train_one_round() -> None:
        clock.begin()
        train()

    def display_metrics() -> None:
        clock.end()
        show()

    server.train_one_round, server.display_metrics = train_one_round, display_metrics
    server.train()
    if job.evaluates:
        found = server.test_results[job.rounds]["all_clients"]["before"]["test"]
        job.write(accuracy=found.accuracy / 100)
    else:
        server.model.load_state_dict(server.public_model_params)
        job.write(accuracy=measure_accuracy(job, server.model))


def _write_fl_bench_partition(job: Job, folder: Path) -> None:
    import pickle

    everybody = list(range(job.clients))
    indices = [
        {"train": job.rows(k, False), "test": job.rows(k, True), "val": np.arange(0)}
        for k in everybody
    ]
    separation = {"train": everybody, "test": everybody, "val": everybody, "total": job.clients}
    folder.mkdir(exist_ok=True)
    partition = {"separation": separation, "data_indices": indices}
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    (folder / "args.json").write_text(json.dumps({"client_num": job.clients, "split": "sample"}))


def run_fluke(job: Job) -> None:
    """Run its FedAVG; a round is from its event `start_round` to `end_round`."""
    names = stand_in(
        ("torchvision", "torchmetrics", "omegaconf", "hydra", "cerberus", "diskcache", "datasets",
         "psutil", "rich", "seaborn", "wandb", "clearml", "torch.utils.tensorboard")
    )  # fmt: skip
    sys.path.insert(0, job.source)
    import fluke
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval

    job.write(stand_ins=names, version=fluke.__version__)
    metrics = {"accuracy": _Accuracy()} if "torchmetrics" in names else {}
    environment = fluke.FlukeENV()
    environment.set_seed(0)
    environment.set_device(job.device)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10, **metrics))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=job.evaluates)

    def make_loader(samples: tuple[Tensor, Tensor], **options: Any) -> Any:
        return FastDataLoader(*samples, num_labels=10, **options)

    def assign(clients: int, batch: int) -> Any:
        """Do what its DataSplitter does, with the clients of the job."""
        train = [
            make_loader(job.samples(job.rows(k, False)), batch_size=batch, shuffle=True)
            for k in range(clients)
        ]
        return (train, [None] * clients), make_loader(job.test_samples(), batch_size=128)

    options = {
        "client": {
            "batch_size": job.batch, "local_epochs": 1, "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": job.lr}, "scheduler": {"gamma": 1, "step_size": 1},
        },
        "server": {"weighted": True},
        "model": make_cnn(job.is_small),
    }  # fmt: skip
    splitter = types.SimpleNamespace(assign=assign)
    algorithm = FedAVG(job.clients, splitter, fluke.DDict(options))
    clock = Clock(job)
    server, last = algorithm.server, {}
    evaluate = clock.wrap(server.evaluate)

    def evaluate_server(*arguments: Any, **more: Any) -> Any:
        last.update(evaluate(*arguments, **more))
        return last

    def end_round(**_: Any) -> None:
        clock.end()
        if clock.rounds == job.rounds:
            raise Finished

    server.evaluate = evaluate_server
    algorithm.attach(
        types.SimpleNamespace(start_round=lambda **_: clock.begin(), end_round=end_round)
    )
    try:
        algorithm.run(job.rounds, job.joined / job.clients)
    finally:
        job.write(accuracy=last.get("accuracy") or measure_accuracy(job, server.model))


class _Accuracy:
    """The accuracy, as torchmetrics counts it, for a machine without torchmetrics."""

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.right += int((scores.argmax(1) == labels).sum())
        self.count += len(labels)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.count)


def run_pfl(job: Job) -> None:
    """Run its FederatedAveraging in one process; callbacks tell when a round is over."""
    names = stand_in(("multiprocess", "dp_accounting", "prv_accountant"))
    job.write(stand_ins=names, version="")
    sys.path.insert(0, job.source)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import get_default_device
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    device = get_default_device()
    users = {}
    for client in range(job.clients):
        x, y = job.samples(job.rows(client, False))
        users[client] = x.to(device), y.to(device)
    kind = "minimize_reuse" if job.joined == job.clients else "random"
    sampler = get_user_sampler(kind, list(range(job.clients)))
    clock = Clock(job)

    class Timer(TrainingProcessCallback[Any]):
        def on_train_begin(self, *, model: Any) -> Any:
            clock.begin()
            return Metrics()

        def after_central_iteration(self, *_: Any, **__: Any) -> Any:
            clock.end()
            clock.begin()
            return False, Metrics()

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_cnn(job.is_small)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x)
            return result

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
            self.train(not eval)
            right = (self(x).argmax(1) == y).sum().item()
            return {"accuracy": Weighted(right, len(y))}

    network = Network().to(device)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    backend = SimulatedBackend(
        training_data=FederatedDataset.from_slices(users, sampler),
        val_data=None,
        postprocessors=[WeightByDatapoints()],
    )
    callbacks: list[Any] = []
    if job.evaluates:
        x, y = (part.to(device) for part in job.test_samples())
        evaluation = CentralEvaluationCallback(
            Dataset(raw_data=[x, y]), NNEvalHyperParams(local_batch_size=10_000)
        )
        evaluation.after_central_iteration = clock.wrap(evaluation.after_central_iteration)
        callbacks.append(evaluation)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=_NEVER,
            train_cohort_size=job.joined,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch
        ),
        callbacks=[*callbacks, Timer()],
    )
    job.write(accuracy=measure_accuracy(job, network))


RUNS = {
    "fedala": run_fedala,
    "PFLlib": run_pfllib,
    "FL-bench": run_fl_bench,
    "fluke": run_fluke,
    "pfl-research": run_pfl,
}


def main(arguments: Sequence[str]) -> None:
    job = Job(**json.loads(Path(arguments[0]).read_text()))
    try:
        RUNS[job.framework](job)
    except Finished:
        pass
    except Exception as error:
        lines = str(error).splitlines()
        job.write(reason=f"{type(error).__name__}: {lines[0] if lines else ''}")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
