"""The methods of a run, or the points of their sweeps, and which of them run side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedala.data import Dataset
from fedala.errors import UserError
from fedala.lanes import UpdateRule
from fedala.methods import Method, catalogue, list_options, make, setting_prefixes
from fedala.methods.server_optimizer import (
    ServerOptimizer,
    default_lr,
    with_server_optimizer,
)
from fedala.options import name_option, suggest
from fedala.runs.config import RECIPE_OPTIONS, SERVER_NUMBERS, Config
from fedala.runs.defaults import choose_rate
from fedala.runs.sweep import config_at, has_random_range, label_of, list_points
from fedala.simulation.variants import Variant, can_run_together


@dataclass(frozen=True)
class Member:
    """One method of a run, at one point of its sweep if there is one."""

    label: str
    """Its name in tables and files: the method's, with the values of the point."""
    title: str
    method: Method
    config: Config = field(repr=False)

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.config.recipe())


def check_optimizers(members: Sequence[Member]) -> None:
    """Refuse an optimiser that some methods cannot train with, and say which methods can."""
    refusals: dict[str, UserError] = {}
    for member in members:
        try:
            member.method.check_optimizer(UpdateRule.of([member.config.recipe().optimizer]))
        except UserError as error:
            refusals.setdefault(member.config.method, error)
    if not refusals:
        return
    first = next(iter(refusals.values()))
    names = dict.fromkeys(member.config.method for member in members)
    others = [name for name in names if name not in refusals]
    if not others:
        raise first
    raise UserError(
        f"{first} Leave out {', '.join(refusals)}, as in "
        f"{name_option('method', ','.join(others))}, or train with plain SGD."
    )


@dataclass(frozen=True, repr=False)
class Group:
    """Members that run side by side, as lanes: they differ in numbers only."""

    members: tuple[Member, ...]

    def __repr__(self) -> str:
        return f"<Group {self.title}: {len(self.members)} side by side>"

    @property
    def title(self) -> str:
        """What a sentence calls the group: its method."""
        first = self.members[0]
        return first.title if len(self.members) == 1 else first.method.title

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of the method; none if there is a single one."""
        variants = tuple(member.variant for member in self.members)
        return variants if len(variants) > 1 else ()


def check_settings(config: Config) -> None:
    """Refuse a hyperparameter that no method of this run has."""
    prefixes = {prefix for name in config.methods for prefix in setting_prefixes(name)}
    known_prefixes = [*catalogue(), "ala"]
    swept = [("sweep", name) for name in config.sweep if "." in name]
    for option, key in [*(("set", key) for key in config.set), *swept]:
        prefix, dot, name = key.partition(".")
        owners = [f"{one}.{key}" for one in sorted(prefixes) if key in list_options(one)]
        if owners:
            raise UserError(f"{option} {key}: write {' or '.join(owners)}.")
        if prefix not in known_prefixes:
            hint = suggest(prefix, known_prefixes)
            raise UserError(f"{option} {key}: there is no method {prefix!r}{hint}.")
        if not dot or not name:
            raise UserError(
                f"{option} {key}: write it as method.option=value, such as fedala.eta=0.5."
            )
        if prefix not in prefixes:
            raise UserError(
                f"{option} {key}: {prefix} is not among the methods of this run "
                f"({', '.join(config.methods)})."
            )
        if option == "sweep" and key in config.set:
            raise UserError(f"{key} is both set and swept: leave one of them out.")


def make_members(config: Config, dataset: Dataset | None = None) -> list[Member]:
    """Make all methods of a run, or all points of their sweeps.

    With the dataset, the learning rate that a sweep of optimisers leaves open is each point's own.
    """
    members: list[Member] = []
    titles: set[str] = set()
    for name in config.methods:
        for point in list_points(config, name):
            own = config_at(config, name, point)
            if dataset is not None and own.lr is None:
                own = replace(own, lr=choose_rate(own, dataset))
            method = make(name, own.set)
            if optimizer := _make_server_optimizer(own):
                method = with_server_optimizer(method, optimizer)
            title = label_of(method.title, point)
            members.append(Member(label_of(method.name, point), title, method, own))
        if method.title in titles:
            raise UserError(f"method names {method.title} twice: {config.method}.")
        titles.add(method.title)
        if method.requires_all_clients and config.join_ratio < 1:
            raise UserError(
                f"{method.title} needs every client in every round: "
                "it cannot run with join_ratio < 1."
            )
    return members


def _make_server_optimizer(config: Config) -> ServerOptimizer | None:
    kind = config.server_optimizer
    if kind != "none":
        lr = config.server_lr or default_lr(kind)
        momentum, beta2, tau = config.server_momentum, config.server_beta2, config.server_tau
        return ServerOptimizer(kind, lr, momentum, beta2, tau)
    return None


def group_members(members: Sequence[Member]) -> tuple[Group, ...]:
    """Put members together that can run side by side."""
    groups: list[list[Member]] = []
    for member in members:
        for group in groups:
            if _shares_steps(group[0].config, member.config) and can_run_together(
                group[0].variant, member.variant
            ):
                group.append(member)
                break
        else:
            groups.append([member])
    return tuple(Group(tuple(group)) for group in groups)


def _shares_steps(a: Config, b: Config) -> bool:
    """Tell whether two configs differ at most in numbers that may be [lane]."""
    return not a.differences(b).keys() - {"set", *RECIPE_OPTIONS, *SERVER_NUMBERS}


#: What each of these options needs to have an effect: an option and its values.
_NEEDS = {
    "beta2": ("optimizer", ("adam", "adamw")),
    "decay": ("schedule", ("step", "exponential")),
    "decay_every": ("schedule", ("step",)),
    "server_lr": ("server_optimizer", ("avgm", "adam", "yogi", "adagrad")),
    "server_momentum": ("server_optimizer", ("avgm", "adam", "yogi", "adagrad")),
    "server_beta2": ("server_optimizer", ("adam", "yogi")),
    "server_tau": ("server_optimizer", ("adam", "yogi", "adagrad")),
}


def check_effects(config: Config, members: Sequence[Member]) -> None:
    """Refuse an option without effect. One that is swept must have one at every point."""
    usual = Config()
    for name, (other, values) in _NEEDS.items():
        if getattr(config, name) == getattr(usual, name) and name not in config.sweep:
            continue
        uses = [getattr(member.config, other) in values for member in members]
        if not (all(uses) if name in config.sweep else any(uses)):
            raise UserError(
                f"{name} has no effect without the {other} {' or '.join(values)}: "
                "choose one, or leave it out."
            )
    rules = [UpdateRule.of([member.config.recipe().optimizer]) for member in members]
    if config.keep_optimizer and not any(rule.keeps_slots for rule in rules):
        raise UserError(
            "keep_optimizer has no effect on sgd without momentum, which has nothing to keep: "
            "choose a momentum, adam or adamw, or leave it out."
        )
    if config.trials != usual.trials and not has_random_range(config):
        raise UserError(
            "trials has no effect without a random range, such as "
            f"{name_option('sweep', {'lr': 'log:0.001..1'})}: leave it out."
        )


def check_schedule(config: Config) -> None:
    """Refuse a warm-up without an end, and two lengths of a round."""
    if config.warmup and config.warmup >= int(config.rounds or 0):
        raise UserError(
            f"A warm-up of {config.warmup} rounds needs a run of more rounds than that, "
            f"and this one has {config.rounds}."
        )
    if config.local_steps is not None and config.local_epochs != 1:
        raise UserError("Give local_steps or local_epochs, not both.")
