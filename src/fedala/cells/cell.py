"""Settings, and cells: one method in one setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedala.data import KnownDataset, known_datasets
from fedala.methods import catalogue, make
from fedala.runs.config import Config


@dataclass(frozen=True)
class Setting:
    """A dataset, divided among clients, and a model."""

    name: str
    dataset: str
    model: str
    lr: float
    partition: str
    clients: int
    join_ratio: float
    preset: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    """Further options of a run, with `rounds` and `seeds`, which a command may change."""
    title: str = ""

    @property
    def data(self) -> KnownDataset:
        return next(row for row in known_datasets() if row.name == self.dataset)

    @property
    def rounds(self) -> int:
        return int(self.preset["rounds"])

    @property
    def seeds(self) -> int:
        return int(self.preset["seeds"])

    @classmethod
    def build(cls, name: str, preset: Mapping[str, Any], values: Mapping[str, Any]) -> "Setting":
        """Make a setting of its own values, and of those that it shares with others."""
        own = {**preset, **values}
        names = ("dataset", "model", "lr", "partition", "clients", "join_ratio")
        fields = {key: own.pop(key) for key in names}
        return cls(name, **fields, title=own.pop("title", ""), preset=own)


@dataclass(frozen=True)
class Cell:
    """One method in one setting. It is run once, even if several tables show it."""

    setting: Setting
    method: str
    set: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters that are not the defaults."""
    shuffle: bool = False
    rounds: int = 0
    """The rounds, if the schedule depends on them and they are not the setting's; otherwise 0."""

    @property
    def name(self) -> str:
        """Return its folder's name: `fedala`, `fedala,layers=2` or `fedavg,shuffled`."""
        parts = [self.method]
        parts += [f"{key.partition('.')[2]}={format_value(value)}" for key, value in self.set]
        parts += [f"rounds={self.rounds}"] * bool(self.rounds) + ["shuffled"] * self.shuffle
        return ",".join(parts)

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """Return setting, method, hyperparameters and shuffling, as results name the cell."""
        hyperparameters = " ".join(f"{key}={format_value(value)}" for key, value in self.set)
        return self.setting.name, self.method, hyperparameters, self.shuffle

    def __str__(self) -> str:
        return f"{self.setting.name}/{self.name}"

    def config(self, **options: Any) -> Config:
        """Return the config with the setting's values; `options` replace them."""
        names = ("dataset", "model", "lr", "partition", "clients", "join_ratio")
        values = {**self.setting.preset} | {name: getattr(self.setting, name) for name in names}
        values |= {"shuffle": self.shuffle, **options}
        values |= {"method": self.method, "set": dict(self.set), "save_models": False}
        return Config.from_values(values)

    @property
    def has_schedule(self) -> bool:
        """Tell whether the number of rounds changes what the method does in a round."""
        return make(self.method, dict(self.set)).schedule_depends_on_rounds

    def with_rounds(self, rounds: int | None) -> "Cell":
        """Return the cell with another number of rounds: another cell if it has a schedule."""
        if not rounds or rounds == self.setting.rounds or not self.has_schedule:
            return self
        return replace(self, rounds=rounds)


def is_known(method: str) -> bool:
    """Tell whether a method is registered here, with or without ALA."""
    return method.removesuffix("+ala") in catalogue()


def format_value(value: Any) -> str:
    """Return a value as names and tables show it; empty if it is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
