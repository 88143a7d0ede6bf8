"""The parts that server and clients share: the run config, the task, the method and Θ⁰."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from fedala.data import Dataset, Federation, default_partition, federate, known_datasets
from fedala.data.dataset import PARTS
from fedala.errors import UserError
from fedala.flower.client_store import check_experiment_name
from fedala.io.user_code import is_reference
from fedala.lanes.heads import extend_task
from fedala.lanes.normalization import is_standard
from fedala.lanes.task import Task
from fedala.lanes.trees import Params
from fedala.methods import Method
from fedala.options import build, option, suggest
from fedala.runs.build import build_task
from fedala.runs.config import Config
from fedala.runs.plan import Plan, load_dataset, plan

#: Options of `fedala run` that do not apply if every client has its own machine.
SIMULATION_OPTIONS = (
    "seeds", "lanes", "client_memory", "checkpoint_every", "keep_checkpoint", "sweep", "trials",
)  # fmt: skip
#: Options of the evaluation that a federation does not offer.
EVALUATION_OPTIONS = (
    "evaluate", "metrics_every", "holdout_clients", "holdout_epochs", "holdout_every",
)  # fmt: skip
NO_STANDARD = (
    "On Flower, nobody has the samples of all clients to standardise them by: give the figures, "
    "as normalize = mean/std with a number for each feature, or none. The figures of a simulation "
    "are in the preprocessing.json of its run folder."
)


@dataclass(frozen=True)
class Deployment:
    """How a federation behaves. Each field is a key of the app's run config."""

    experiment: str = option(
        "fedala", "name of the experiment, under which server and clients store their files"
    )
    out: str = option(
        "runs",
        "the server's folder of run folders, under $FEDALA_RUNS or where the SuperLink was "
        "started; an unfinished run there is resumed",
    )
    min_nodes: int = option(2, "nodes that must be online before a round begins", least=1)
    max_clients: int = option(
        0,
        "clients that there may be in time, with those that join later; 0: no more than clients",
        least=0,
    )
    min_updates: int = option(
        1, "good updates that a round needs; with fewer, the global model does not change", least=1
    )
    start_timeout: float = option(600.0, "seconds to wait for nodes", above=0)
    round_timeout: float = option(3600.0, "seconds to wait for the updates of a round", above=0)
    max_norm: float = option(
        0.0, "drop updates further than this from the model that was sent; 0: no bound", least=0
    )
    clipping_norm: float = option(
        0.0,
        "the norm to which fixedclipping_mod clips updates; 0: no such mod",
        least=0,
    )
    max_failed_rounds: int = option(
        0, "end the run after so many rounds in a row without a counted update; 0: never", least=0
    )
    max_samples: int = option(
        10_000_000,
        "refuse nodes that report more samples than this: samples are a client's weight",
        least=1,
    )
    rebind: bool = option(
        False, "let a client that is offline return as another node, with another key"
    )


@dataclass(frozen=True)
class CustomApp:
    """Your own data and model, for `client_app` and `server_app`."""

    model: Callable[[], nn.Module]
    """Makes the model, on the server and on each node."""
    data: Callable[[Context], Dataset]
    """Reads the samples of one node."""
    shape: tuple[int, ...]
    """The shape of one sample, as the model gets it."""
    classes: int
    """The number of classes over all nodes, or of a sample's labels or float targets."""


def check_evaluation(options: Mapping[str, Any]) -> None:
    """Refuse options of the evaluation that are not the default."""
    defaults = {field.name: str(field.default) for field in fields(Config)}
    for name in EVALUATION_OPTIONS:
        if str(options.get(name, defaults[name])) != defaults[name]:
            raise UserError(
                f"On Flower, clients evaluate the initialised personal model only, without "
                f"detailed metrics or held-out clients: leave out {name}."
            )


def check_code(options: Mapping[str, Any]) -> None:
    """Refuse to execute code that a run config names: a node runs its app, and nothing else."""
    if options.get("imports"):
        raise UserError(
            "A run config cannot import code: import it in app.py, as fedala flower new --import "
            "writes it, so that it is a part of the app."
        )
    if is_reference(str(options.get("model") or "")):
        raise UserError(
            f"On Flower, a model of your own such as {options['model']} is a part of the app: "
            "give its function to client_app and server_app in app.py, as "
            "CustomApp(model=…, data=…)."
        )


def read_run_config(run_config: Mapping[str, Any]) -> tuple[Config, Deployment]:
    """Read and check the options of a Flower run config. `set.fedala.eta` is a hyperparameter."""
    config_keys = {field.name for field in fields(Config)} - {"set", "imports", *SIMULATION_OPTIONS}
    deployment_keys = {field.name for field in fields(Deployment)}
    check_evaluation(run_config)
    check_code(run_config)
    values: dict[str, Any] = {"set": {}}
    deployment: dict[str, Any] = {}
    for key, value in run_config.items():
        if key.startswith("set."):
            values["set"][key.removeprefix("set.")] = value
        elif key in deployment_keys:
            deployment[key] = value
        elif key in config_keys:
            values[key] = value
        else:
            hint = suggest(key, [*config_keys, *deployment_keys])
            raise UserError(f"The run config has an unknown option {key}{hint}.")
    config = Config.from_values({"method": "fedala", "checkpoint_every": 1, **values})
    if len(config.methods) > 1:
        raise UserError(f"A federation runs one method at a time, not {config.method}.")
    if config.patience is not None:
        raise UserError(
            "patience is not for federations: their clients save their personal models after the "
            "last of the planned rounds, so leave it out."
        )
    if config.pick_by != Config().pick_by:
        raise UserError("In a federation, the score picks the best round: leave out pick_by.")
    options = build(Deployment, deployment)
    check_experiment_name(options.experiment)
    return config, options


@dataclass(frozen=True)
class Experiment:
    """One method, ready for the server or for one client."""

    plan: Plan
    method: Method
    task: Task
    start: Callable[[int], Params]
    """Makes Θ⁰ for a seed."""
    validates: bool = False
    """Whether some samples are held out to choose a round by."""

    @cached_property
    def initial(self) -> Params:
        """Return Θ⁰ of the run's seed, as one lane. It is made once, and never changed."""
        return self.start(self.plan.config.seed)

    @property
    def population(self) -> int:
        """Return the number of clients that are expected at the start."""
        return len(self.task.parts["train"])

    @classmethod
    def build(
        cls, config: Config, samples: Federation, custom: CustomApp | None, is_client: bool = False
    ) -> "Experiment":
        """Plan the run on samples that are already divided among clients."""
        # A client leaves the rehearsal to the server: it may plan the run for every message.
        planned = plan(config, samples, custom.model if custom else None, is_rehearsed=is_client)
        if is_standard(planned.config.normalize):
            # A node would fit figures to the samples that it can read, which may be its own alone.
            raise UserError(NO_STANDARD)
        # The run folder records how the samples were divided, so that a restart does the same.
        partition = config.partition or default_partition(samples.dataset)
        recorded = replace(planned.config, partition=partition, validation=config.validation)
        planned = replace(planned, config=recorded)
        method = planned.methods[0]
        task, start = extend_task(*build_task(planned), method.head, method.title)
        return cls(planned, method, task, start)


def prepare_server(config: Config, custom: CustomApp | None) -> Experiment:
    """Prepare the server: it has the model, and no samples of its clients."""
    validates = config.validation > 0
    names, notes = tuple[str, ...](), tuple[str, ...]()
    if custom:
        if config.clients is None:
            raise UserError(
                "The run config must say how many clients there are, as in clients = 10."
            )
        samples = _make_up_samples(config, custom)
        clients = config.clients
    else:
        samples = load_dataset(config)
        divided = federate(
            samples, config.partition, config.clients, config.partition_seed, split=config.split
        )
        clients = len(divided.train)
        validates |= any(len(rows) for rows in divided.validation)
        names, notes = divided.client_names, divided.notes
    nothing = (np.arange(0),) * clients
    empty = Federation(samples, nothing, nothing, nothing, names, notes)
    return replace(Experiment.build(config, empty, custom), validates=validates)


def _make_up_samples(config: Config, custom: CustomApp) -> Dataset:
    """Make two samples in place of the nodes' own, which the server does not have."""
    if config.class_weights == "balanced":
        raise UserError(
            "class_weights = balanced counts the samples of all clients, and here nobody has them: "
            "give a number for each class, separated by commas."
        )
    targets = torch.tensor([0, 1])
    if config.loss == "multilabel":
        targets = targets.float().unsqueeze(1).expand(2, custom.classes)
    elif config.loss not in (None, "cross_entropy"):
        targets = torch.full((2, custom.classes), 0.5)
    return Dataset("own", torch.zeros(2, *custom.shape), targets, custom.classes)


def _read_own_samples(config: Config, custom: CustomApp, context: Context) -> Dataset:
    data = custom.data(context)
    if config.loss is None and data.kind != "classes":
        raise UserError(
            f"The samples of this node have {data.targets}: name the loss in the run config, such "
            'as loss = "mse", so that the server knows it too.'
        )
    return data


def prepare_client(context: Context, custom: CustomApp | None) -> tuple[Experiment, int]:
    """Prepare a node's client with its samples; return the client's number, too."""
    config, _ = read_run_config(context.run_config)
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise UserError(
            "This node does not say which client it is: "
            "start it with --node-config 'partition-id=0'."
        )
    if custom:
        data = _read_own_samples(config, custom, context)
        alone = federate(data, "iid", 1, config.partition_seed, config.validation)
        others = (np.arange(0),) * number  # the samples of other clients are on other machines
        parts = {part: others + getattr(alone, part) for part in PARTS}
        own = Federation(alone.dataset, **parts)
        return Experiment.build(config, own, custom, is_client=True), number
    experiment = _prepare_node(config, context.node_config)
    if number >= experiment.population:
        last = experiment.population - 1
        raise UserError(
            f"This node says that it is client {number}, but the clients are 0 to {last}."
        )
    return experiment, number


#: In the simulation engine: the run of this process, and what all its nodes share.
_simulated: list[tuple[Config, Experiment]] = []


def _prepare_node(config: Config, node_config: Mapping[str, Any]) -> Experiment:
    """Read a node's dataset and plan its run.

    A worker of the simulation engine works for many nodes. They read the same files, whatever their
    numbers, so it does that once.
    """
    if is_simulated():
        if not _simulated or _simulated[0][0] != config:
            _simulated[:] = [(config, _plan_node(config, node_config))]
        return _simulated[0][1]
    return _plan_node(config, node_config)


def _plan_node(config: Config, node_config: Mapping[str, Any]) -> Experiment:
    samples = read_node_samples(config, node_config)
    return Experiment.build(replace(config, data_dir=None), samples, None, is_client=True)


def set_threads(node_config: Mapping[str, Any]) -> None:
    """Let torch use as many threads as the node config says, if it does."""
    threads = node_config.get("threads")
    if threads is None:
        return
    if type(threads) is not int or threads < 1:
        raise UserError(
            f"threads in the node config must be a whole number from 1, not {threads!r}."
        )
    torch.set_num_threads(threads)


def read_node_samples(config: Config, node_config: Mapping[str, Any]) -> Federation:
    """Read the samples that the node config names.

    The run config comes from the server and does not choose files. It may name the digits, which
    are a part of scikit-learn, and a known dataset if the node says where a copy of it is.
    """
    if is_simulated():
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
            f"The run config asks for {name!r}, but this node reads only what its own config "
            "names: start it with --node-config \"dataset='…'\", or with data-dir='…' for a copy "
            "of a dataset known by name."
        )
    partition = config.partition
    if _is_file(partition):
        if "partition" not in node_config:
            raise UserError(
                f"The run config asks for the partition file {partition!r}, but this node reads "
                "only what its own config names: start it with "
                "--node-config \"partition='….json'\"."
            )
        partition = str(node_config["partition"])
    data = load_dataset(replace(config, dataset=name, data_dir=str(folder) if folder else None))
    return federate(
        data, partition, config.clients, config.partition_seed, config.validation, config.split
    )


def build_node_config(config: Config) -> dict[str, Any]:
    """Return the node config with which nodes read the same files as the server."""
    node_config: dict[str, Any] = {}
    if config.dataset != "digits":
        node_config["dataset"] = config.dataset
    if config.data_dir:
        node_config["data-dir"] = config.data_dir
    if _is_file(config.partition):
        node_config["partition"] = config.partition
    return node_config


def give_figures(planned: Plan) -> Plan:
    """Return a plan whose config has the fitted figures themselves, for nodes that cannot fit them.

    They are those of all clients' training samples, as in the simulation.
    """
    if planned.normalization is None or not is_standard(planned.config.normalize):
        return planned
    config = replace(planned.config, normalize=planned.normalization.text)
    return replace(planned, config=config)


def make_paths_absolute(config: Config) -> Config:
    """Return the same config for processes that work in other folders."""
    is_known = any(row.name == config.dataset for row in known_datasets())
    is_path = not is_known and not config.dataset.startswith("hub:")
    return replace(
        config,
        dataset=_make_absolute(config.dataset) if is_path else config.dataset,
        data_dir=_make_absolute(config.data_dir) if config.data_dir else None,
        partition=(
            _make_absolute(config.partition) if _is_file(config.partition) else config.partition
        ),
    )


def _make_absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _is_file(partition: str | None) -> TypeGuard[str]:
    return partition is not None and partition.endswith(".json")


def is_simulated() -> bool:
    """Tell whether this is a worker of Flower's simulation engine.

    Then the nodes belong to the user who wrote the run config.
    """
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
