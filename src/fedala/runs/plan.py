"""Check a run from end to end before it starts: a `Plan` is a run that has been accepted."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedala.data import Dataset, Federation, federate, known_datasets, load
from fedala.errors import UserError, byte_size, first_line
from fedala.io.untrusted import free_memory
from fedala.lanes.task import Task, model_state
from fedala.lanes.trees import count_bytes
from fedala.methods import Method, ServerRound, catalogue, make, setting_prefixes
from fedala.methods.server_optimizer import ServerOptimizer, default_lr, with_server_optimizer
from fedala.models import build_model
from fedala.options import suggest
from fedala.runs.config import Config
from fedala.runs.folder import nearest_existing_parent

MakeModel = Callable[[], nn.Module]

#: How much memory the models of the best evaluation may take, unless `client_memory` says so.
_BEST_MODELS_BYTES = 2**31


@dataclass(frozen=True)
class Plan:
    """A run that has been checked, with every value of its config resolved."""

    config: Config
    federation: Federation
    make_model: MakeModel
    methods: tuple[Method, ...]
    device: torch.device
    state_bytes: Mapping[str, int]
    """By method: the bytes that a client keeps between rounds."""
    has_local_clients: bool = True
    """Whether the clients, and what they keep between rounds, are on this machine."""

    @property
    def local_clients(self) -> int:
        """The number of clients on this machine, over all runs."""
        return int(self.config.clients or 0) * self.config.seeds * self.has_local_clients

    def make_skeleton(self) -> nn.Module:
        """Make a model for its structure alone."""
        return _make_skeleton(self.make_model, is_own=self.config.model == "own")

    @property
    def model_bytes(self) -> int:
        return count_bytes(model_state(self.make_skeleton()))

    @property
    def fits_best_models(self) -> bool:
        """Whether the models of the best evaluation may stay in memory until they are written."""
        if not any(method.has_personal_models for method in self.methods):
            return True
        budget = _BEST_MODELS_BYTES
        if self.device.type == "cuda":
            budget = min(budget, torch.cuda.get_device_properties(self.device).total_memory // 16)
        if self.config.client_memory is not None:
            budget = int(self.config.client_memory * 2**30)
        return self.local_clients * self.model_bytes <= budget


def plan(
    config: Config, dataset: Dataset | Federation | None = None, model: MakeModel | None = None
) -> Plan:
    """Check a config, load its data, and resolve every value. Nothing is written."""
    _check_settings(config)
    methods = _make_methods(config)
    device = _choose_device(config.device)
    if isinstance(dataset, Federation):
        federation = dataset
        # The federation is used as it is: options of the partition do not apply to it.
        config = replace(config, partition="own", validation=0.0)
    else:
        federation = _federate(config, dataset)
    config = _resolve(config, federation)
    if model is not None:
        config = replace(config, model="own")
    name = str(config.model)
    make_model = model or (lambda: build_model(name, federation.dataset))
    skeleton = _make_skeleton(make_model, is_own=model is not None)
    for method in methods:
        method.check_model(skeleton)
    if model is not None:
        _try_model(skeleton, federation.dataset)
    state_bytes = _rehearse(methods, make_model(), federation)
    checked = Plan(config, federation, make_model, methods, device, state_bytes)
    _check_memory(checked)
    return checked


def _check_settings(config: Config) -> None:
    """Refuse a hyperparameter that no method of this run has."""
    prefixes = {prefix for name in config.methods for prefix in setting_prefixes(name)}
    known_prefixes = [*catalogue(), "ala"]
    for key in config.set:
        prefix, dot, name = key.partition(".")
        if prefix not in known_prefixes:
            hint = suggest(prefix, known_prefixes)
            raise UserError(f"set {key}: there is no method {prefix!r}{hint}.")
        if not dot or not name:
            raise UserError(f"set {key}: write it as method.option=value, such as fedala.eta=0.5.")
        if prefix not in prefixes:
            raise UserError(
                f"set {key}: {prefix} is not among the methods of this run "
                f"({', '.join(config.methods)})."
            )


def _make_methods(config: Config) -> tuple[Method, ...]:
    methods = tuple(make(name, config.set) for name in config.methods)
    optimizer = _make_server_optimizer(config)
    if optimizer:
        methods = tuple(with_server_optimizer(method, optimizer) for method in methods)
    for method in methods:
        if sum(other.name == method.name for other in methods) > 1:
            raise UserError(f"method names {method.title} twice: {config.method}.")
        if method.requires_all_clients and config.join_ratio < 1:
            raise UserError(
                f"{method.title} needs every client in every round: "
                "it cannot run with join_ratio < 1."
            )
    return methods


def _make_server_optimizer(config: Config) -> ServerOptimizer | None:
    kind = config.server_optimizer
    if kind != "none":
        lr = config.server_lr or default_lr(kind)
        momentum, beta2, tau = config.server_momentum, config.server_beta2, config.server_tau
        return ServerOptimizer(kind, lr, momentum, beta2, tau)
    without = Config()
    for name in ("server_lr", "server_momentum", "server_beta2", "server_tau"):
        if getattr(config, name) != getattr(without, name):
            raise UserError(
                f"{name} is given, but server_optimizer is none: "
                "choose avgm, adam, yogi or adagrad, or leave it out."
            )
    return None


def _choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device is cuda, and there is no CUDA device here: use --device cpu or auto."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _federate(config: Config, dataset: Dataset | None) -> Federation:
    folder = Path(config.data_dir) if config.data_dir else None
    return federate(
        dataset or load(config.dataset, folder),
        config.partition,
        config.clients,
        config.partition_seed,
        config.validation,
    )


def _resolve(config: Config, federation: Federation) -> Config:
    """Return the config with the paper's values for its dataset and model where it has None."""
    values: dict[str, Any] = {"rounds": 2000, "lr": 0.005, "model": "cnn"}
    named = [entry for entry in known_datasets() if entry.name == config.dataset]
    if named:
        values |= {"rounds": named[0].rounds, "lr": named[0].lr, "model": named[0].model}
    elif federation.dataset.vocabulary is not None:
        values |= {"model": "fasttext", "lr": 0.1}
    if config.model in ("resnet18", "fasttext"):
        values["lr"] = 0.1
    if config.server_optimizer != "none":
        values["server_lr"] = default_lr(config.server_optimizer)
    rounds = int(config.rounds or values["rounds"])
    values["record_weights"] = -(-rounds // 20)  # about 20 times
    missing = {name: value for name, value in values.items() if getattr(config, name) is None}
    return replace(config, clients=len(federation.train), **missing)


def _make_skeleton(make_model: MakeModel, *, is_own: bool) -> nn.Module:
    """Make a model without memory; a user's own model may need real tensors to be made or run."""
    if is_own:
        return make_model()
    with torch.device("meta"):
        return make_model()


def first_output(model: nn.Module, data: Dataset) -> Any:
    """Return the output of a model, in evaluation mode, for the first two samples."""
    task = Task(model, data.x[:2], data.y[:2], [np.arange(2)])
    with torch.no_grad(), task.use_mode(training=False):
        return model(task.inputs(torch.arange(len(data.y[:2]))))


def _try_model(model: nn.Module, data: Dataset) -> None:
    """Refuse a model that does not turn samples into a score for each class."""
    try:
        output = first_output(model, data)
    except Exception as error:  # whatever the user's own code may raise
        samples = f"samples of shape {tuple(data.x.shape[1:])}"
        raise UserError(f"The model cannot be run on {samples}: {first_line(error)}.") from error
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or shape[1] < data.classes:
        kind = type(output).__name__
        actual = f"a {kind}" if shape is None else f"a tensor of shape {tuple(shape)}"
        count = len(data.y[:2])
        raise UserError(
            f"The model turns {count} samples into {actual}; it must give a score for each "
            f"of the {data.classes} classes: ({count}, {data.classes})."
        )


def _rehearse(
    methods: tuple[Method, ...], model: nn.Module, federation: Federation
) -> dict[str, int]:
    """Make server and client once, with two samples, so that a method can refuse the model.

    Returns the bytes of a client's state, by method.
    """
    data, rows = federation.dataset, [np.arange(2)]
    start = model_state(model)
    task = Task(model, data.x[:2], data.y[:2], rows, rows)
    state_bytes = {}
    for method in methods:
        method.init_server(task, method.shared_part(task, start), ServerRound(0, 0, 1, [0], [2]))
        state_bytes[method.name] = count_bytes(method.init_client(task, start))
    return state_bytes


def _check_memory(plan: Plan) -> None:
    """Refuse a run if not even one client at a time fits into memory."""
    data = plan.federation.dataset.x
    # A client that trains holds its model, the received one, its state, gradients and buffers.
    needed = 6 * plan.model_bytes
    if plan.device.type == "cuda":
        needed += data.numel() * data.element_size()
        room, where = torch.cuda.get_device_properties(plan.device).total_memory, "the GPU has"
    else:
        room, where = free_memory(), "there is free memory of"
    if needed > room:
        raise UserError(
            f"One client at a time takes about {needed / 2**30:.1f} GiB with this model and data, "
            f"and {where} {room / 2**30:.1f}: use a smaller model, or a larger machine."
        )


def choose_best_models(plan: Plan, out: Path | None, before: bool | None = None) -> Plan:
    """Decide whether the best models are saved, for a config that leaves it open.

    They are, along with the last ones, if they fit into memory and onto the disk. A run that is
    resumed does as it did `before`.
    """
    config = plan.config
    with_best = replace(plan, config=replace(config, save_best=True))
    if before is not None:
        return with_best if before else replace(plan, config=replace(config, save_best=False))
    if config.save_models and plan.fits_best_models:
        with suppress(UserError):
            check_room(with_best, out)
            return with_best
    return replace(plan, config=replace(config, save_best=False))


def check_room(plan: Plan, out: Path | None, present: int = 0) -> None:
    """Refuse a run whose models and checkpoints do not fit on the disk, or in memory without `out`.

    `present`: the bytes of them that are on the disk already.
    """
    config, clients = plan.config, plan.local_clients
    personal = clients * sum(method.has_personal_models for method in plan.methods)
    models = personal * (config.save_models + bool(config.save_best))
    needed, what = models * plan.model_bytes, f"Keeping {models} models takes"
    advice = "use --no-save-models, or save_models=False"
    if config.save_best:
        advice = (
            "use --no-save-best to keep only the models of the last evaluation, or --no-save-models"
        )
    if out is None:
        room, where = free_memory() // 2, "memory"
    else:
        room, where = shutil.disk_usage(nearest_existing_parent(out)).free, "disk"
        if config.checkpoint_every != 0:
            # While a third checkpoint is written, two are kept. They share the files of clients
            # that took no part between them.
            changed = min(1.0, config.join_ratio * (config.checkpoint_every or 10))
            states = [clients * plan.state_bytes[method.name] for method in plan.methods]
            needed += int(sum(states) + 2 * changed * max(states))
            if personal and config.save_best:
                needed += 2 * clients * plan.model_bytes
            what = f"Keeping {models} models and the state of {clients} clients takes"
            advice += ", or --checkpoint-every 0 to do without checkpoints"
    needed = max(0, needed - present)
    if needed > room:
        more = "another " if present else ""
        raise UserError(
            f"{what} {more}{byte_size(needed)} of {where}, and there is room for "
            f"{byte_size(room)}: {advice}."
        )
