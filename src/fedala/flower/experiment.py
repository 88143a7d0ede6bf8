"""What server and clients have in common: the run config, and the task, the method and Θ⁰ that follow from it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from fedala.data import Dataset, Federation, federate, known_datasets, load
from fedala.errors import UserError
from fedala.flower.client_store import check_name
from fedala.lanes.task import Task
from fedala.lanes.trees import Params
from fedala.methods import Method
from fedala.options import build, option, suggest
from fedala.runs.build import build_task
from fedala.runs.config import Config
from fedala.runs.plan import Plan, plan


@dataclass(frozen=True)
class Deployment:
    """How a federation behaves, besides what it computes. A field is a key of the app's run config."""

    experiment: str = option(
        "fedala", "name of the experiment: what server and clients keep is kept under it"
    )
    out: str = option(
        "runs",
        "the server's folder of run folders; a run that stands there unfinished is gone on with",
    )
    min_nodes: int = option(2, "nodes that must be there before a round begins", least=1)
    min_updates: int = option(
        1, "good updates that a round needs; with fewer, the global model stays", least=1
    )
    start_timeout: float = option(600.0, "seconds to wait for nodes", above=0)
    round_timeout: float = option(3600.0, "seconds to wait for the updates of a round", above=0)
    max_norm: float = option(
        0.0,
        "an update that is further than this from what was sent is dropped; 0: no bound",
        least=0,
    )
    max_samples: int = option(
        10_000_000,
        "a node that says it has more samples than this is refused: samples are its weight",
        least=1,
    )
    rebind: bool = option(
        False, "let a client that is not there come back as another node: with another key"
    )


@dataclass(frozen=True)
class Own:
    """Data and a model of one's own: what the server must know to make the model, and each node's samples."""

    model: Callable[[], nn.Module]
    data: Callable[[Context], Dataset]
    #: Of one sample, as the model gets it; and how many classes there are, whoever has seen which.
    shape: tuple[int, ...]
    classes: int


#: The parts of a client's samples, as `Federation` has them.
PARTS = ("train", "test", "validation")

#: Options of `fedala run` that have no meaning where every client is a machine of its own.
LOCAL = ("seeds", "lanes", "client_memory", "checkpoint_every", "keep_checkpoint")


def read(run_config: Mapping[str, Any]) -> tuple[Config, Deployment]:
    """The options that stand in a Flower run config, checked; `set.fedala.eta` is a hyperparameter."""
    known = {f.name for f in fields(Config)} - {"set", *LOCAL}
    own = {f.name for f in fields(Deployment)}
    values: dict[str, Any] = {"set": {}}
    deployment: dict[str, Any] = {}
    for key, value in run_config.items():
        if key.startswith("set."):
            values["set"][key.removeprefix("set.")] = value
        elif key in own:
            deployment[key] = value
        elif key in known:
            values[key] = value
        else:
            raise UserError(
                f"The run config has an unknown option {key}{suggest(key, [*known, *own])}."
            )
    config = Config.from_values({"method": "fedala", "checkpoint_every": 1, **values})
    if len(config.methods) > 1:
        raise UserError(f"A federation runs one method at a time, not {config.method}.")
    options = build(Deployment, deployment)
    check_name(options.experiment)
    return config, options


@dataclass(frozen=True)
class Experiment:
    """One method, ready to be worked on: by the server, or by one client."""

    plan: Plan
    method: Method
    task: Task
    start: Callable[[int], Params]
    validates: bool = False
    """Whether some samples are held out to pick a round by."""

    @classmethod
    def of(
        cls, config: Config, own: Own | None = None, samples: Federation | None = None
    ) -> "Experiment":
        planned = plan(config, samples, own.model if own else None)
        # Samples that are handed over are divided already; what is noted is how, so that it can be asked for again.
        planned = replace(
            planned,
            config=replace(
                planned.config, partition=config.partition, validation=config.validation
            ),
        )
        task, start = build_task(planned)
        return cls(planned, planned.methods[0], task, start)


def at_client(context: Context, own: Own | None) -> tuple[Experiment, int]:
    """A node's view: which client it is, and that client's samples."""
    config, _ = read(context.run_config)
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise UserError(
            "This node does not say which client it is: start it with --node-config 'partition-id=0'."
        )
    if own:
        alone = federate(own.data(context), "iid", 1, config.partition_seed, config.validation)
        nobody = (np.arange(0),) * number  # the others' samples are elsewhere
        parts = [nobody + part for part in (alone.train, alone.test, alone.validation)]
        return Experiment.of(config, own, Federation(alone.dataset, *parts)), number
    samples = read_own(config, context.node_config)
    if number >= (clients := len(samples.train)):
        raise UserError(
            f"This node says that it is client {number}, and the clients are 0 to {clients - 1}."
        )
    return Experiment.of(replace(config, data_dir=None), samples=samples), number


def read_own(config: Config, node_config: Mapping[str, Any]) -> Federation:
    """Read the samples that this node's own config names.

    The run config comes from elsewhere and chooses no files. It may name the digits, which are a
    part of scikit-learn, and a known dataset if the node says where a copy of it is.
    """
    if _is_simulated():
        node_config = {
            "dataset": config.dataset,
            "data-dir": config.data_dir,
            "partition": config.partition,
        }
    name = str(node_config.get("dataset") or config.dataset)
    folder = node_config.get("data-dir")
    is_known = any(row.name == name for row in known_datasets())
    if "dataset" not in node_config and name != "digits" and not (is_known and folder):
        raise UserError(
            f"The run config asks for {name!r}, and this node reads only what its own config names: start it with "
            "--node-config \"dataset='…'\", or with data-dir='…' for a copy of a dataset known by name."
        )
    partition = config.partition
    if _is_file(partition):
        if "partition" not in node_config:
            raise UserError(
                f"The run config asks for the partition file {partition!r}, and this node reads only what its own "
                "config names: start it with --node-config \"partition='….json'\"."
            )
        partition = str(node_config["partition"])
    data = load(name, Path(str(folder)) if folder else None)
    return federate(data, partition, config.clients, config.partition_seed, config.validation)


def data_at_nodes(config: Config) -> dict[str, Any]:
    """The node config that a run needs at its nodes, if they read the same files as the server."""
    chosen: dict[str, Any] = {}
    if config.dataset != "digits":
        chosen["dataset"] = config.dataset
    if config.data_dir:
        chosen["data-dir"] = config.data_dir
    if _is_file(config.partition):
        chosen["partition"] = config.partition
    return chosen


def with_absolute_paths(config: Config) -> Config:
    """The same config for processes that work in other folders."""
    is_path = not config.dataset.startswith("hub:") and all(
        row.name != config.dataset for row in known_datasets()
    )
    return replace(
        config,
        dataset=_absolute(config.dataset) if is_path else config.dataset,
        data_dir=_absolute(config.data_dir) if config.data_dir else None,
        partition=_absolute(config.partition) if _is_file(config.partition) else config.partition,
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _is_file(partition: str) -> bool:
    return partition.endswith(".json")


def _is_simulated() -> bool:
    """Whether this is a worker of Flower's simulation engine.

    Whoever gave the run config then runs the nodes, too.
    """
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def at_server(config: Config, own: Own | None) -> Experiment:
    """The server's view: it has the model; of the clients' samples it knows the number, once they have said it."""
    validates = config.validation > 0
    if own:
        if config.clients is None:
            raise UserError(
                "The run config must say how many clients there are, as in clients = 10."
            )
        samples, clients = (
            Dataset("own", torch.zeros(2, *own.shape), torch.tensor([0, 1]), own.classes),
            config.clients,
        )
    else:
        samples = load(config.dataset, Path(config.data_dir) if config.data_dir else None)
        divided = federate(samples, config.partition, config.clients, config.partition_seed)
        clients = len(divided.train)
        validates |= any(len(rows) for rows in divided.validation)
    nothing = (np.arange(0),) * clients
    return replace(
        Experiment.of(config, own, Federation(samples, nothing, nothing, nothing)),
        validates=validates,
    )
