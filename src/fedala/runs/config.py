"""The options of a run. Long because every option is here, in one list.

A field is an option of `fedala run`, a key of the config file, and an argument of `run`.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedala.errors import UserError, printable
from fedala.io.untrusted import read_file
from fedala.io.user_code import is_reference
from fedala.lanes.recipe import OPTIMIZERS, SCHEDULES, Optimizer, Recipe, Schedule
from fedala.options import build, option, split_names, suggest
from fedala.runs.config_values import (
    describe_value,
    flatten_settings,
    flatten_sweep,
    join_list,
    toml,
)
from fedala.runs.devices import NAMES, check_device_name

LARGEST = 2**20  # bytes of a config file
#: Options of the clients' optimiser and schedule.
RECIPE_OPTIONS = (
    "lr", "optimizer", "momentum", "nesterov", "weight_decay", "beta2", "clip", "schedule",
    "warmup", "decay", "decay_every",
)  # fmt: skip
SERVER_NUMBERS = ("server_lr", "server_momentum", "server_beta2", "server_tau")
MOST_SEEDS = 10_000
PRECISIONS = ("float32", "tf32", "bf16", "float64")


@dataclass(frozen=True, repr=False)
class Config:
    """A run, or a comparison of methods. `None`: the paper's value for the dataset and model."""

    method: str = option(
        "fedala,fedavg",
        "methods, separated by commas; x+ala adds ALA to x; all: every method with and without ALA",
    )
    imports: str | None = option(
        None,
        "Python files or modules with methods of your own, such as my/fedsim.py, separated by "
        "commas; their code is executed",
    )
    set: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "a hyperparameter, such as fedala.eta=0.5 or ala.layers=2"},
    )
    sweep: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "an option or hyperparameter with several values, such as lr=0.1,0.01 or "
            "fedprox.mu=log:0.001..1; every combination is run"
        },
    )
    trials: int = option(
        16, "how many points of a sweep are drawn if it has a random range", least=1, most=1000
    )
    dataset: str = option(
        "digits",
        "a dataset's name, a file (.npz, .csv, .parquet, LEAF's .json), an image folder, or "
        "hub:owner/name",
    )
    data_dir: str | None = option(None, "folder with a copy of the dataset; without it, the hub")
    clients_by: str | None = option(
        None,
        "the column (of an .npz file, the array) that names a sample's client; for an image tree, "
        "folder: root/[train|test]/client/class/image",
    )
    label_column: str | None = option(
        None, "the column that holds the labels; without it, label, class, target or y"
    )
    drop_columns: str | None = option(
        None, "columns of a table that are not features, separated by commas: they are not read"
    )
    resize: int | None = option(
        None, "side in pixels to which images are resized on loading", least=1, most=4096
    )
    normalize: str | None = option(
        None,
        "mean/std of pixels from 0 to 1 or of features, one number or one per channel, as in "
        "0.1307/0.3081; mnist, fashion-mnist, cifar10, cifar100, imagenet; standard (fitted on "
        "training samples); none; without it, 0.5/0.5 for bytes, and standard for mlp, cnn1d, lstm",
    )
    model: str | None = option(
        None,
        "cnn or resnet18 (images), fasttext (texts), mlp (features), cnn1d (windows), lstm "
        "(sequences, texts), or a function of your own that makes a model, as in net.py:make; "
        "without it, the usual model of the dataset",
    )
    partition: str | None = option(
        None,
        "natural (the clients of the data), dir:β, pathological:classes, iid, quantity:β, "
        "extdir:classes:β, cluster:clusters, or a partition file (.json); without it, natural if "
        "the data name their clients, otherwise dir:0.1",
    )
    split: str = option(
        "given",
        "parts for training and testing that the data have: keep them as given, or pool them and "
        "split each client's samples 75/25",
        choices=("given", "pooled"),
    )
    partition_seed: int = option(
        1, "seed of the partition, the same for all runs", least=0, most=2**32 - 1
    )
    clients: int | None = option(
        None,
        "number of clients; without it, 20, or as many as the data or the partition file have",
        least=1,
    )
    feature_shift: str | None = option(
        None,
        "samples that differ between clients: rotate:30 (images of client i turned by i·30 "
        "degrees), rotate:0,90,180 (clients take turns), noise:σ (more for each client, up to σ); "
        "without it, none",
    )
    join_ratio: float = option(
        1.0, "ρ: share of the clients that take part in a round", above=0, most=1
    )
    rounds: int | None = option(
        None,
        "T: number of rounds; without it, 30 for digits, the paper's 2000 for its datasets, and "
        "100 for others",
        least=1,
    )
    batch_size: int = option(
        10, "B: samples per local step; full (or 0): all of a client's samples", least=0
    )
    lr: float | None = option(
        None,
        "local learning rate; without it, the paper's, or the usual one of the model; 0.001 for "
        "adam and adamw",
        above=0,
        most=1e9,
    )
    optimizer: str = option(
        "sgd", "the clients' optimiser, as torch.optim has it", choices=OPTIMIZERS
    )
    momentum: float | None = option(
        None, "momentum of sgd, by default 0; β₁ of adam and adamw, by default 0.9", least=0, most=1
    )
    nesterov: bool = option(False, "Nesterov's momentum, for sgd")
    weight_decay: float | None = option(
        None,
        "weight decay; without it, 0.01 for adamw and 0 for the others",
        least=0,
        most=1e9,
    )
    beta2: float = option(0.999, "β₂ of adam and adamw", least=0, most=0.999999)
    clip: float | None = option(
        None, "the largest norm of a client's gradient; a longer one is scaled down", above=0
    )
    keep_optimizer: bool = option(
        False,
        "keep momentum and the like from round to round; without it, every round starts afresh",
    )
    schedule: str = option(
        "constant",
        "how the learning rate changes over the rounds, after the warm-up",
        choices=SCHEDULES,
    )
    warmup: int = option(0, "rounds in which the learning rate rises linearly", least=0)
    decay: float | None = option(
        None,
        "factor of the learning rate: after every round of the exponential schedule (0.99), "
        "or at every step of the step schedule (0.1)",
        above=0,
        most=1,
    )
    decay_every: int | None = option(
        None, "rounds between two steps of the step schedule; without it, a third of all", least=1
    )
    loss: str | None = option(
        None,
        "cross_entropy, multilabel (binary cross-entropy of each label), mse, mae or huber; "
        "without it, what the targets of the dataset ask for",
    )
    label_smoothing: float = option(
        0.0, "ε: share of a label that is spread over all classes", least=0, most=1
    )
    class_weights: str = option(
        "none",
        "weights of the classes in the loss: none, balanced (inverse to their training samples), "
        "or a number for each class, separated by commas",
    )
    local_epochs: int = option(1, "local epochs per round", least=1)
    local_steps: int | None = option(
        None, "local steps per round and client, instead of local epochs", least=1
    )
    shuffle: bool = option(
        True, "reshuffle the batches every epoch; the paper's presets keep a fixed order"
    )
    augment: str = option(
        "none", "random changes of training images: none, flip, crop:4, or flip,crop:4"
    )
    server_optimizer: str = option(
        "none",
        "optimiser at the server, along the clients' mean change: none (the mean itself), "
        "avgm (momentum), adam, yogi or adagrad",
        choices=("none", "avgm", "adam", "yogi", "adagrad"),
    )
    server_lr: float | None = option(
        None,
        "η: learning rate of the server's optimiser; without it, 1 for avgm, otherwise 0.01",
        above=0,
        most=1e9,
    )
    server_momentum: float = option(
        0.9, "β, or β₁: decay of the server's first moment", least=0, most=0.9999
    )
    server_beta2: float = option(
        0.99, "β₂: decay of the second moment of adam and yogi", least=0, most=0.9999
    )
    server_tau: float = option(
        0.001, "τ: how far adam, yogi and adagrad adapt; the smaller, the more", above=0, most=1e9
    )
    seeds: int = option(1, "number of runs, each with its own seed", least=1, most=MOST_SEEDS)
    seed: int = option(0, "seed of the first run; each further run adds 1", least=0, most=2**32 - 1)
    eval_every: int = option(
        1, "rounds between evaluations; the last round is always evaluated", least=1
    )
    eval_clients: str = option(
        "all",
        "which clients to evaluate if not all join: all, or joined",
        choices=("all", "joined"),
    )
    evaluate: str = option(
        "initialized",
        "models to evaluate, separated by commas: initialized (the paper's, always), trained, "
        "received, global",
    )
    metrics_every: int = option(
        0,
        "rounds between detailed metrics (metrics.csv); 0: only at the last evaluation",
        least=0,
    )
    holdout_clients: str | None = option(
        None,
        "clients that take no part in training and are tested as newcomers: a share such as 0.2, "
        "a number, or the last ones, such as last:5",
    )
    holdout_epochs: str = option(
        "0,1,5", "local epochs after which newcomers are tested, separated by commas"
    )
    holdout_every: int = option(
        1, "rounds between tests of newcomers; the last evaluation always has one", least=1
    )
    validation: float = option(
        0.0, "share of the training data to hold out for picking the best round", least=0, most=0.9
    )
    pick_by: str = option(
        "score",
        "what of the validation samples picks the best round, the point of a sweep, and the end "
        "of a run with patience: the score (such as the accuracy) or the loss",
        choices=("score", "loss"),
    )
    patience: int | None = option(
        None,
        "stop a run after so many evaluations without a better one, by the validation samples if "
        "there are any, otherwise by the test samples; without it, all rounds are run",
        least=1,
    )
    device: str = option("auto", f"device to compute on: {NAMES}")
    lanes: str = option(
        "auto", "clients to train in parallel: auto, all, or a number (1: one after another)"
    )
    precision: str = option(
        "float32",
        "number format; tf32 and bf16 are faster on a GPU, and less exact",
        choices=PRECISIONS,
    )
    client_memory: float | None = option(
        None,
        "GiB of memory for the states of clients outside the round; the rest goes to files",
        least=0,
    )
    feature_memory: float | None = option(
        None,
        "GiB for the inputs of the upper layers, which ALA and evaluation reuse if they fit; "
        "without it, 1, or an eighth of a GPU's memory",
        least=0,
    )
    on_divergence: str = option(
        "skip",
        "if a client's loss or model is no longer finite: skip its round and keep its last good "
        "model (skip), restart it from the initial model (reset), or end the run (stop)",
        choices=("skip", "reset", "stop"),
    )
    record_weights: int | None = option(
        None,
        "rounds between records of the distribution of ALA's W; 0: none; "
        "without it, about 20 records in a run",
        least=0,
    )
    save_models: bool = option(
        True, "save the global model and every client's personal model at the end"
    )
    save_best: bool | None = option(
        None,
        "also save the models of the best evaluation, by the validation samples if there are any; "
        "without it, if save_models is on and they take at most 2 GiB, or client_memory",
    )
    checkpoint_every: int | None = option(
        None,
        "rounds between checkpoints; 0: none; "
        "without it, as often as costs less than 1 % of the time",
        least=0,
    )
    keep_checkpoint: bool = option(
        True, "keep the last checkpoint of a finished run, to resume it with more rounds"
    )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Config":
        """Return a checked config of names and values from a file, a command line or a program."""
        plain = {
            name: join_list(name, value)
            for name, value in values.items()
            if name not in ("set", "sweep")
        }
        if plain.get("method") == "all":
            from fedala.methods import list_methods

            plain["method"] = ",".join(list_methods())
        if isinstance(plain.get("holdout_clients"), float):
            plain["holdout_clients"] = repr(plain["holdout_clients"])
        if plain.get("batch_size") == "full":
            plain["batch_size"] = 0
        config = replace(
            build(cls, plain),
            set=flatten_settings(values.get("set", {})),
            sweep=flatten_sweep(values.get("sweep", {})),
        )
        check_device_name(config.device)
        if not re.fullmatch("auto|all|[1-9][0-9]{0,8}", config.lanes):
            raise UserError(f"lanes must be auto, all or a number from 1 on, not {config.lanes!r}.")
        if not config.methods or len(set(config.methods)) < len(config.methods):
            raise UserError(
                f"method must name different methods, separated by commas, not {config.method!r}."
            )
        return config

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """Return the values of a config file, not yet checked. Hyperparameters: `fedala.eta`."""
        try:
            data = read_file(path, LARGEST)
        except OSError as error:
            raise UserError(f"The config file {path} cannot be read: {error}.") from error
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> dict[str, Any]:
        """Return the values of a config file's content. `path` is for messages."""
        if len(data) > LARGEST:
            raise UserError(f"The config file {path} is larger than 1 MiB.")
        try:
            values = tomllib.loads(data.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"The config file {path} cannot be read: {error}.") from error
        except (ValueError, RecursionError) as error:  # not only TOMLDecodeError
            raise UserError(f"The config file {path} is not TOML: {error}.") from error
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(
                    f"The config file {path} has an unknown option {name}{suggest(name, known)}."
                )
        if "sweep" in values:
            values["sweep"] = flatten_sweep(values["sweep"])
        return {**values, "set": flatten_settings(values.get("set", {}))}

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(name.strip().lower() for name in self.method.split(",") if name.strip())

    @property
    def import_names(self) -> tuple[str, ...]:
        return split_names(self.imports)

    @property
    def dropped_columns(self) -> tuple[str, ...]:
        return split_names(self.drop_columns)

    @property
    def has_own_model(self) -> bool:
        """Whether a user's function makes the model, given in Python or by its name."""
        return self.model == "own" or is_reference(self.model)

    def recipe(self) -> Recipe:
        """Return how the clients train, with the usual values of each optimiser and schedule."""
        is_adam = self.optimizer != "sgd"
        momentum = self.momentum if self.momentum is not None else 0.9 * is_adam
        decay = self.weight_decay
        if decay is None:
            decay = 0.01 if self.optimizer == "adamw" else 0.0
        optimizer = Optimizer(
            self.optimizer,
            momentum,
            self.nesterov,
            decay,
            self.beta2,
            clip=math.inf if self.clip is None else self.clip,
        )
        usual = {"step": 0.1, "exponential": 0.99}.get(self.schedule, 1.0)
        every = self.decay_every or max(1, (self.rounds or 0) // 3)
        schedule = Schedule(self.schedule, self.warmup, self.decay or usual, every)
        return Recipe(float(self.lr or 0), optimizer, schedule)

    @property
    def evaluated_models(self) -> tuple[str, ...]:
        """The kinds of models to evaluate, in the order of tables; the initialised one is first."""
        from fedala.records import INITIALIZED, MODEL_KINDS

        names = [name.strip().lower() for name in self.evaluate.split(",") if name.strip()]
        for name in names:
            if name not in MODEL_KINDS:
                raise UserError(
                    f"evaluate: there is no model {name!r}{suggest(name, MODEL_KINDS)}."
                )
        return tuple(kind for kind in MODEL_KINDS if kind in {INITIALIZED, *names})

    def __repr__(self) -> str:
        """Show the options that are not at their defaults."""
        own = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        shown = (f"{name}={value!r}" for name, value in own.items() if value != {})
        return printable(f"Config({', '.join(shown)})", 900)

    def values(self) -> dict[str, Any]:
        """Return every option and its value."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def differences(self, other: "Config") -> dict[str, str]:
        """Return what the other config changes, by option: `0.1 → 0.2`."""
        changes = {}
        for name, value in self.values().items():
            new = getattr(other, name)
            if new != value:
                changes[name] = f"{describe_value(value)} → {describe_value(new)}"
        return changes

    def text(self) -> str:
        """Return the config as TOML, as `--config` reads it."""
        values = self.values()
        tables = {name: values.pop(name) for name in ("set", "sweep")}
        if not tables["sweep"]:
            del tables["sweep"]
        lines = [f"{name} = {toml(value)}" for name, value in values.items() if value is not None]
        for name, table in tables.items():
            lines += ["", f"[{name}]"]
            lines += [f"{toml(key)} = {toml(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"
