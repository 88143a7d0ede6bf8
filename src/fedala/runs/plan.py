"""Check a run from end to end before it starts: a `Plan` is a run that has been accepted."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedala.data import Dataset, Federation, federate, hold_out_clients, load, resize_images
from fedala.data.feature_shift import parse_feature_shift, shift_features
from fedala.data.holdout import check_tested
from fedala.data.standardization import fit_normalization
from fedala.errors import Caution, UserError, printable
from fedala.io.untrusted import free_memory
from fedala.io.user_code import is_reference
from fedala.lanes.augmentation import parse_augmentation
from fedala.lanes.heads import Head, extend_model
from fedala.lanes.layer_order import learn_order
from fedala.lanes.layer_units import Layers, note_layers
from fedala.lanes.losses import CrossEntropy, Loss, LossFunction
from fedala.lanes.normalization import (
    STANDARD_LAST,
    Normalization,
    is_standard,
    parse_normalization,
)
from fedala.lanes.parameters import model_state
from fedala.lanes.trees import count_bytes
from fedala.methods import Method, import_methods
from fedala.metrics import ACCURACY
from fedala.models import build_model
from fedala.options import name_option
from fedala.runs.all_methods import keep_possible, names_all
from fedala.runs.changed_defaults import name_present_defaults
from fedala.runs.config import Config
from fedala.runs.defaults import resolve
from fedala.runs.devices import choose_device
from fedala.runs.early_stopping import check_criterion
from fedala.runs.holdout import check_options
from fedala.runs.losses import (
    REGRESSIONS,
    describe_large_targets,
    make_loss,
    refuse_single_samples,
)
from fedala.runs.members import (
    Group,
    Member,
    check_effects,
    check_optimizers,
    check_schedule,
    check_settings,
    group_members,
    make_members,
)
from fedala.runs.model_trial import (
    MakeModel,
    first_inputs,
    make_skeleton,
    make_two,
    try_batch_of_one,
    try_loss,
    try_model,
)
from fedala.runs.own_code import fit_model, load_model_function
from fedala.runs.rehearsal import Rehearsal, describe_blended, rehearse
from fedala.runs.sweep import SWEPT_OPTIONS
from fedala.simulation.metrics import share_of_majority

#: How much memory the models of the best evaluation may take, unless `client_memory` says so.
_BEST_MODELS_BYTES = 2**31


@dataclass(frozen=True, repr=False)
class Plan:
    """A run that has been checked, with every value of its config resolved."""

    config: Config
    federation: Federation
    make_model: MakeModel
    groups: tuple[Group, ...]
    device: torch.device
    state_bytes: Mapping[str, int]
    """By label: the bytes that a client keeps between rounds."""
    has_local_clients: bool = True
    """Whether the clients, and what they keep between rounds, are on this machine."""
    loss: Loss = field(default_factory=CrossEntropy)
    layers: Layers | None = None
    """The model's layers, output first, as one forward pass has shown them."""
    normalization: Normalization | None = None
    """What scales the samples on their way to the model; None: bytes as usual, floats as is."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: which methods were left out, and why."""
    blended: tuple[str, ...] = ()
    """Sentences: what ALA blends."""
    ranks: int = 1
    """The number of processes that share the work."""

    def __repr__(self) -> str:
        config = self.config
        methods = printable(config.method, 200)
        return (
            f"<Plan {methods} on {self.federation.describe()}, {config.clients} clients; "
            f"{config.model}, {config.rounds} rounds, on {self.device}>"
        )

    @property
    def members(self) -> list[Member]:
        """All methods, or all points of their sweeps."""
        return [member for group in self.groups for member in group.members]

    @property
    def methods(self) -> list[Method]:
        return [member.method for member in self.members]

    @property
    def majority_share(self) -> float | None:
        """The share of the most frequent class among the clients' test samples.

        None if the score is not an accuracy, or if the samples are not here.
        """
        rows = np.concatenate(self.federation.known.test)
        if self.loss.metric != ACCURACY or not len(rows):
            return None
        return share_of_majority(self.federation.dataset.y.numpy()[rows])

    def describe_rate(self, *, is_default: bool) -> str:
        """Name the learning rate, or that of each optimiser, for a sentence."""
        if "lr" in self.config.sweep:
            return "lr: several"
        rates = {own.optimizer: f"{own.lr:g}" for own in (member.config for member in self.members)}
        if len(set(rates.values())) > 1:
            rate = ", ".join(f"{rate} for {optimizer}" for optimizer, rate in rates.items())
        else:
            rate = next(iter(rates.values()))
        where = "here" if "sgd" in rates else f"of {' and '.join(rates)}"
        note = f" (the default {where}; {name_option('lr')} changes it)" if is_default else ""
        return f"lr {rate}{note}"

    def for_group(self, group: Group) -> "Plan":
        """Return the plan of one group alone. It has the swept options of the first member."""
        own = group.members[0].config
        options = {name: getattr(own, name) for name in ("method", "set", "sweep", *SWEPT_OPTIONS)}
        config = replace(self.config, **options)
        loss = self.loss
        if config.label_smoothing != self.config.label_smoothing:
            loss = make_loss(config, self.federation)
        return replace(self, config=config, groups=(group,), loss=loss)

    @property
    def local_clients(self) -> int:
        """The number of clients on this machine, over all runs."""
        return int(self.config.clients or 0) * self.config.seeds * self.has_local_clients

    def count_state_bytes(self, group: Group) -> int:
        """Return the bytes that a client keeps between rounds, over all members of a group."""
        return sum(self.state_bytes[member.label] for member in group.members)

    def make_skeleton(self) -> nn.Module:
        """Make a model for its structure alone."""
        skeleton = make_skeleton(self.make_model, is_own=self.config.has_own_model)
        if self.layers is not None:
            note_layers(skeleton, self.layers)
        return skeleton

    @property
    def model_bytes(self) -> int:
        """The bytes of the largest model of any method."""
        sizes: dict[type[Head] | None, int] = {None: count_bytes(model_state(self.make_skeleton()))}
        for method in self.methods:
            if method.head and method.head not in sizes:
                extended = extend_model(self.make_skeleton(), method.head, method.title)
                sizes[method.head] = count_bytes(model_state(extended))
        return max(sizes.values())

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
        return self.count_best_models() * self.model_bytes <= budget

    def count_best_models(self) -> int:
        """Return the number of personal models that a group keeps of its best evaluations."""
        return self.local_clients * max(len(group.members) for group in self.groups)


def plan(
    config: Config,
    dataset: Dataset | Federation | None = None,
    model: MakeModel | None = None,
    loss: LossFunction | None = None,
    *,
    is_rehearsed: bool = False,
) -> Plan:
    """Check a config, load its data, and resolve every value. Nothing is written.

    The code that the config names is executed. With `is_rehearsed`, the process that leads the run
    has rehearsed the rounds of a user's own methods, and this one does not.
    """
    import_methods(config.import_names)
    own_function = None
    if model is None and is_reference(config.model):
        own_function = load_model_function(str(config.model))
    check_settings(config)
    _ = config.evaluated_models  # raises if there is no such model
    is_all, notes = names_all(config), tuple[str, ...]()
    if is_all:
        config, notes = keep_possible(config, _check_options)
    _check_options(config)  # refuse what is wrong before data is loaded
    device = choose_device(config.device)
    # Read them before the data is loaded, which can take long.
    augmentation = parse_augmentation(config.augment)
    parse_normalization(config.normalize)
    shift = parse_feature_shift(config.feature_shift)
    if isinstance(dataset, Federation):
        federation = dataset
        # The federation is used as it is: options of the partition do not apply to it.
        config = replace(config, partition="own", validation=0.0)
    else:
        federation = _federate(config, dataset, has_own_loss=loss is not None)
    if config.holdout_clients is not None:
        federation = hold_out_clients(federation, config.holdout_clients, config.partition_seed)
    if not isinstance(dataset, Federation):  # on Flower, the tests are elsewhere
        check_tested(federation)
    check_criterion(config, federation)
    if config.resize is not None:  # without effect on data that was loaded with it
        images = resize_images(federation.dataset, config.resize)
        federation = replace(federation, dataset=images)
    if shift is not None:
        federation = shift_features(federation, shift, config.partition_seed, config.clients)
    if augmentation:
        augmentation.check(federation.dataset.x, federation.dataset.name)
    chosen_loss = make_loss(config, federation, loss)
    config = name_present_defaults(config)
    if loss is not None:
        config = replace(config, loss="own")
    if model is not None:
        config = replace(config, model="own")
    elif own_function:
        model = fit_model(own_function, federation.dataset)
    config = resolve(config, federation)
    normalization = _make_normalization(config, federation)
    name = str(config.model)
    make_model = model or (lambda: build_model(name, federation.dataset))
    if model is not None:
        skeleton, rehearsed = make_two(model)
        notes += try_model(skeleton, federation.dataset, chosen_loss)
    else:
        skeleton, rehearsed = make_skeleton(make_model, is_own=False), make_model()
    layers = learn_order(skeleton, first_inputs(skeleton, federation.dataset))
    note_layers(rehearsed, layers)
    try_batch_of_one(rehearsed, federation, config.batch_size)
    rehearsals: dict[str, Rehearsal] = {}

    def check_methods(own: Config) -> None:
        members = _check_methods(own, skeleton, federation.dataset)
        rehearsals.update(
            rehearse(members, rehearsed, federation, chosen_loss, is_rehearsed=is_rehearsed)
        )

    if is_all:
        config, more = keep_possible(config, check_methods)
        notes += more
    if loss is not None:
        try_loss(chosen_loss, rehearsed, federation.dataset)
    if not is_all:
        check_methods(config)
    notes += describe_large_targets(chosen_loss, federation)
    checked = Plan(
        config,
        federation,
        make_model,
        group_members(make_members(config, federation.dataset)),
        device,
        {label: rehearsal.state_bytes for label, rehearsal in rehearsals.items()},
        loss=chosen_loss,
        layers=layers,
        normalization=normalization,
        notes=notes,
        blended=describe_blended(rehearsals),
    )
    _check_memory(checked)
    return checked


def _check_options(config: Config) -> None:
    """Refuse methods that do not go with the options."""
    members = make_members(config)
    check_effects(config, members)
    check_options(config, [member.method for member in members])


def _check_methods(config: Config, skeleton: nn.Module, data: Dataset) -> list[Member]:
    """Refuse methods that do not go with the model; return the members of the run."""
    members = make_members(config, data)
    check_optimizers(members)
    for member in members:
        member.method.check_model(skeleton)
        check_schedule(member.config)
    return members


def load_dataset(config: Config) -> Dataset:
    """Load the dataset that a config names."""
    folder = Path(config.data_dir) if config.data_dir else None
    return load(
        config.dataset,
        folder,
        config.resize,
        config.clients_by,
        config.label_column,
        config.dropped_columns,
        is_regression=config.loss in REGRESSIONS,
    )


def _federate(config: Config, dataset: Dataset | None, *, has_own_loss: bool) -> Federation:
    data = dataset or load_dataset(config)
    if config.loss is None and not has_own_loss:
        refuse_single_samples(data)
    federation = federate(
        data,
        config.partition,
        config.clients,
        config.partition_seed,
        config.validation,
        config.split,
    )
    if config.loss == "cross_entropy":  # the user has said that the labels are classes
        notes = (note for note in federation.notes if not isinstance(note, Caution))
        federation = replace(federation, notes=tuple(notes))
    return federation


def _make_normalization(config: Config, federation: Federation) -> Normalization | None:
    """Return the figures that scale the samples: as given, or fitted on training samples."""
    is_last = config.model == "lstm" or config.normalize == STANDARD_LAST
    if is_standard(config.normalize):
        return fit_normalization(federation.known, is_channels_last=is_last)
    given = parse_normalization(config.normalize)
    if given is None:
        return None
    given = replace(given, is_channels_last=is_last)
    given.check(federation.dataset.x, federation.dataset.name)
    return given


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
