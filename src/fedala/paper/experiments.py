"""The paper's experiments, read from the data files beside this one: settings, tables, cells, and the printed numbers."""

import csv
import io
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from fedala.data import KnownDataset, known_datasets
from fedala.errors import UserError
from fedala.methods import Method, catalogue, make
from fedala.models import cnn, fasttext, resnet18
from fedala.options import suggest
from fedala.runs.config import Config

#: The models whose parameters the paper counts, which are not always those that it trains: ten classes, small images.
COUNTED = {
    "cnn": lambda: cnn((1, 28, 28), 10),
    "resnet18": lambda: resnet18((3, 64, 64), 10),
    "fasttext": lambda: fasttext(98_635, 4),
}


@dataclass(frozen=True)
class Setting:
    """What is learned on what: a dataset, divided among clients, and a model."""

    name: str
    dataset: str
    model: str
    lr: float
    partition: str
    clients: int
    join_ratio: float

    @property
    def data(self) -> KnownDataset:
        return next(row for row in known_datasets() if row.name == self.dataset)


@dataclass(frozen=True)
class Cell:
    """One method in one setting: what is run, once, whichever tables show it."""

    setting: Setting
    method: str
    set: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters that are not the defaults."""
    shuffle: bool = False
    rounds: int = 0
    """The number of rounds, where it is part of what the method does in a round and is not the paper's; otherwise 0."""

    @property
    def name(self) -> str:
        """Its folder's name under that of the setting: `fedala`, `fedala,layers=2`, `fedavg,shuffled`."""
        hyperparameters = [f"{key.partition('.')[2]}={text(value)}" for key, value in self.set]
        rounds = [f"rounds={self.rounds}"] if self.rounds else []
        return ",".join(
            [self.method, *hyperparameters, *rounds, *(["shuffled"] if self.shuffle else [])]
        )

    def __str__(self) -> str:
        return f"{self.setting.name}/{self.name}"

    def config(self, **options: Any) -> Config:
        """The run of this cell with the paper's presets; `options` (rounds, seeds, device, …) win over them."""
        where = {
            key: getattr(self.setting, key)
            for key in ("dataset", "model", "lr", "partition", "clients")
        }
        values = {
            **preset(),
            **where,
            "join_ratio": self.setting.join_ratio,
            "shuffle": self.shuffle,
            **options,
        }
        return Config.from_values(
            {**values, "method": self.method, "set": dict(self.set), "save_models": False}
        )

    def made(self) -> Method:
        return make(self.method, dict(self.set))


@dataclass(frozen=True)
class Printed:
    """What the paper prints in a cell of a table: percent."""

    accuracy: float
    std: float | None = None
    improvement: float | None = None
    """By ALA, over the method without it."""


@dataclass(frozen=True)
class Cost:
    """What the paper prints about a method's cost, as it prints it."""

    total_minutes: str
    minutes_per_iteration: float
    parameters: str


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    title: str
    group: str
    setting: Setting
    set: Mapping[str, Any] = field(default_factory=dict)
    with_ala: bool = False
    parameters: str = ""
    """How many parameters ALA has here, as printed."""

    def cell(self, method: str, *, shuffle: bool = False, rounds: int | None = None) -> Cell:
        """What is run for a row of this column."""
        if self.with_ala:
            method = "fedala" if method == "fedavg" else f"{method}+ala"
        cell = Cell(self.setting, method, tuple(self._changed().items()), shuffle)
        other = (
            rounds is not None
            and rounds != preset()["rounds"]
            and cell.made().schedule_depends_on_rounds
        )
        return Cell(cell.setting, cell.method, cell.set, shuffle, rounds or 0) if other else cell

    def _changed(self) -> dict[str, Any]:
        """What it sets, less what is the default anyway: then the cell is the same as that of another table."""
        changed = {}
        for key, value in self.set.items():
            owner, _, name = key.partition(".")
            if catalogue()[owner].defaults()[name][0] != value:
                changed[key] = value
        return changed

    def governed(self) -> int:
        """How many parameters ALA has here, counted on the model that the paper counts on."""
        return governed(COUNTED[self.setting.model], int(self.set.get("fedala.layers", 1)))


@dataclass(frozen=True)
class Table:
    """A table of the paper: rows are methods."""

    name: str
    label: str
    title: str
    columns: tuple[Column, ...]
    cost: bool = False
    """Whether it shows what methods cost, instead of accuracies."""
    parameters_in: int = 1
    """The unit of the printed numbers of parameters."""

    def printed(self, column: Column, method: str) -> Printed | None:
        """What stands in a cell; None where the paper has none."""
        return _accuracies().get((self.name, column.name, method))

    def cost_of(self, method: str) -> Cost:
        return _costs()[method]

    def has(self, column: Column, method: str) -> bool:
        return method in _costs() if self.cost else self.printed(column, method) is not None

    @property
    def groups(self) -> list[list[str]]:
        """The rows, with a rule between the groups."""
        groups = [
            [m for m in group if any(self.has(c, m) for c in self.columns)]
            for group in _data()["order"]
        ]
        return [group for group in groups if group]

    @property
    def methods(self) -> list[str]:
        return [method for group in self.groups for method in group]

    def entries(self) -> Iterator[tuple[Column, str]]:
        """Every column and row that meet in a cell, column by column."""
        return (
            (column, method)
            for column in self.columns
            for method in self.methods
            if self.has(column, method)
        )

    def parameters(self, column: Column) -> str:
        """The number of ALA's parameters, counted, in the form in which the paper prints it."""
        count = column.governed()
        return str(count) if self.parameters_in == 1 else f"{count / self.parameters_in:.3f}"


@dataclass(frozen=True)
class Drawing:
    """A figure of the paper: what is run for it, and what it shows."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    client: int = 0
    rounds: int = 0
    first: int = 0
    """The first round that is shown."""
    every: int = 1
    """A dot stands for every so many rounds."""
    set: Mapping[str, Any] = field(default_factory=dict)


def drawings(*, digits: bool = False) -> dict[str, Drawing]:
    """Every figure by name; with `digits`, of the embedded data, and soon done."""
    found = {}
    for name, row in _data()["figures"].items():
        small = dict(row["digits"]) if digits else {}
        rate = small.pop("lr", None)
        values = {**{key: value for key, value in row.items() if key != "digits"}, **small}
        places = [settings()[place] for place in values["settings"]]
        if digits:  # one setting of each partition: the others would be the same
            places = list(
                {
                    place.partition: replace(place, dataset="digits", lr=rate) for place in places
                }.values()
            )
        found[name] = Drawing(name, **{**values, "settings": tuple(places)})
    return found


@cache
def tables() -> dict[str, Table]:
    """Every table by name."""
    found = {}
    for row in _data()["tables"]:
        columns = [
            Column(**{**column, "setting": settings()[column.get("setting", column["name"])]})
            for column in row["columns"]
        ]
        found[row["name"]] = Table(**{**row, "columns": tuple(columns)})
    return found


@cache
def settings() -> dict[str, Setting]:
    common = {key: preset()[key] for key in ("clients", "join_ratio")}
    return {
        name: Setting(name, **{**common, **values}) for name, values in _data()["settings"].items()
    }


def preset() -> dict[str, Any]:
    """What holds for all experiments of the paper."""
    return dict(_data()["preset"])


def choose(
    names: list[str], columns: list[str], methods: list[str]
) -> list[tuple[Table, Column, str]]:
    """The cells of some tables, all or those of some columns and methods; a name that there is not is refused."""
    picked = []
    for name in names:
        if name not in tables():
            raise UserError(
                f"There is no table or figure {name}{suggest(name, [*tables(), *drawings()])}."
            )
        picked.append(tables()[name])
    there = [(table, column, method) for table in picked for column, method in table.entries()]
    where = " and ".join(names)
    for name in columns:
        known_columns = dict.fromkeys(column.name for _, column, _ in there)
        if name not in known_columns:
            raise UserError(f"There is no column {name} in {where}{suggest(name, known_columns)}.")
    for name in methods:
        known_methods = dict.fromkeys(
            spelling for _, column, m in there for spelling in (m, column.cell(m).method)
        )
        if name not in known_methods:
            raise UserError(f"There is no method {name} in {where}{suggest(name, known_methods)}.")

    def place(entry: tuple[Table, Column, str]) -> tuple[int, int]:
        """The order in which columns and methods are named is that in which they are wanted."""
        _, column, method = entry
        spelling = method if method in methods else column.cell(method).method
        return columns.index(column.name) if columns else 0, methods.index(
            spelling
        ) if methods else 0

    chosen = [
        (table, column, method)
        for table, column, method in there
        if (not columns or column.name in columns)
        and (not methods or method in methods or column.cell(method).method in methods)
    ]
    if not chosen and names:
        raise UserError(f"{where} has no cell of {', '.join(methods)} in {', '.join(columns)}.")
    return sorted(chosen, key=place)


def governed(build: Callable[[], nn.Module], layers: int) -> int:
    """How many parameters ALA has on the upper layers of a model, as FedALA would use it."""
    model = _skeleton(build)
    names = make("fedala", {"fedala.layers": layers}).ala_parameters(model, layers)
    return sum(model.get_parameter(name).numel() for name in names)


@cache
def _skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@cache
def _data() -> Any:
    return tomllib.loads(_read("experiments.toml"))


@cache
def _accuracies() -> dict[tuple[str, str, str], Printed]:
    found = {}
    for row in csv.DictReader(io.StringIO(_read("printed.csv"))):
        numbers = [float(row[key]) if row[key] else None for key in ("std", "improvement")]
        found[row["table"], row["column"], row["method"]] = Printed(
            float(row["accuracy"]), *numbers
        )
    return found


@cache
def _costs() -> dict[str, Cost]:
    rows = csv.DictReader(io.StringIO(_read("printed_cost.csv")))
    return {
        row["method"]: Cost(
            row["total_minutes"], float(row["minutes_per_iteration"]), row["parameters"]
        )
        for row in rows
    }


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def text(value: Any) -> str:
    """A value as it stands in names and tables."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
