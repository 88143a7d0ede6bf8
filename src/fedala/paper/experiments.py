"""The paper's experiments as data: settings, tables, cells, and the printed numbers.

They are read from experiments.toml, printed.csv and printed_cost.csv in this folder.
"""

import csv
import io
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from fedala.cells.cell import Cell, Setting
from fedala.cells.collection import Collection
from fedala.cells.results import SeedResult
from fedala.errors import UserError
from fedala.io.files import read_packaged
from fedala.methods import catalogue, make
from fedala.models import cnn, fasttext, resnet18
from fedala.options import suggest

#: The models whose parameters the paper counts: ten classes, small images. It trains others, too.
COUNTED_MODELS = {
    "cnn": lambda: cnn((1, 28, 28), 10),
    "resnet18": lambda: resnet18((3, 64, 64), 10),
    "fasttext": lambda: fasttext(98_635, 4),
}


@dataclass(frozen=True)
class PrintedNumber:
    """What the paper prints in a cell of a table, in percent."""

    accuracy: float
    std: float | None = None
    improvement: float | None = None
    """By ALA, over the method without it."""


@dataclass(frozen=True)
class Cost:
    """What the paper prints about a method's cost, as printed."""

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
        """Return the cell of a row in this column."""
        if self.with_ala:
            method = "fedala" if method == "fedavg" else f"{method}+ala"
        hyperparameters = tuple(self._list_changes().items())
        return Cell(self.setting, method, hyperparameters, shuffle).with_rounds(rounds)

    def _list_changes(self) -> dict[str, Any]:
        """Return what differs from the defaults; without the rest, tables can share cells."""
        changed = {}
        for key, value in self.set.items():
            owner, _, name = key.partition(".")
            if catalogue()[owner].defaults()[name][0] != value:
                changed[key] = value
        return changed

    def count_ala_parameters(self) -> int:
        """Count the parameters that ALA has here, on the model that the paper counts."""
        layers = int(self.set.get("fedala.layers", 1))
        return count_ala_parameters(COUNTED_MODELS[self.setting.model], layers)


@dataclass(frozen=True)
class Table:
    """A table of the paper: rows are methods."""

    name: str
    label: str
    title: str
    columns: tuple[Column, ...]
    cost: bool = False
    """Whether it shows cost instead of accuracies."""
    parameters_in: int = 1
    """The unit of the printed numbers of parameters."""

    def printed(self, column: Column, method: str) -> PrintedNumber | None:
        """Return what the paper prints in a cell; None if there is no such cell."""
        return _accuracies().get((self.name, column.name, method))

    def cost_of(self, method: str) -> Cost:
        return _costs()[method]

    def has(self, column: Column, method: str) -> bool:
        return method in _costs() if self.cost else self.printed(column, method) is not None

    @property
    def groups(self) -> list[list[str]]:
        """Return the rows; there is a rule between groups."""
        groups = []
        for group in _data()["order"]:
            rows = [m for m in group if any(self.has(column, m) for column in self.columns)]
            if rows:
                groups.append(rows)
        return groups

    @property
    def methods(self) -> list[str]:
        return [method for group in self.groups for method in group]

    def entries(self) -> Iterator[tuple[Column, str]]:
        """Yield the column and method of every cell, column by column."""
        for column in self.columns:
            for method in self.methods:
                if self.has(column, method):
                    yield column, method

    def parameters(self, column: Column) -> str:
        """Return the number of ALA's parameters, in the unit that the paper prints."""
        count = column.count_ala_parameters()
        return str(count) if self.parameters_in == 1 else f"{count / self.parameters_in:.3f}"


@dataclass(frozen=True)
class Drawing:
    """A figure of the paper: the settings that are run for it, and what it shows."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    client: int = 0
    rounds: int = 0
    first: int = 0
    """The first round that is shown."""
    every: int = 1
    """Rounds between two dots."""
    set: Mapping[str, Any] = field(default_factory=dict)


def drawings(*, digits: bool = False) -> dict[str, Drawing]:
    """Return every figure by name; with `digits`, on the embedded data, which takes seconds."""
    figures = {}
    for name, row in _data()["figures"].items():
        small = dict(row["digits"]) if digits else {}
        rate = small.pop("lr", None)
        values = {**{key: value for key, value in row.items() if key != "digits"}, **small}
        own = [settings()[setting] for setting in values["settings"]]
        if digits:  # one setting of each partition: the others would be the same
            by_partition = {
                setting.partition: replace(setting, dataset="digits", lr=rate) for setting in own
            }
            own = list(by_partition.values())
        figures[name] = Drawing(name, **{**values, "settings": tuple(own)})
    return figures


@cache
def tables() -> dict[str, Table]:
    """Return every table by name."""
    by_name = {}
    for row in _data()["tables"]:
        columns = [
            Column(**{**column, "setting": settings()[column.get("setting", column["name"])]})
            for column in row["columns"]
        ]
        by_name[row["name"]] = Table(**{**row, "columns": tuple(columns)})
    return by_name


@cache
def settings() -> dict[str, Setting]:
    """Return every setting by name."""
    return {
        name: Setting.build(name, preset(), values) for name, values in _data()["settings"].items()
    }


class PaperCollection(Collection):
    """The cells of all tables of the paper."""

    command = "paper"

    @property
    def settings(self) -> dict[str, Setting]:
        return settings()

    def find_cell(self, setting: str, name: str, rounds: int | None) -> Cell | None:
        """Return the cell of a folder; its name may contain the number of rounds."""
        for cell in _cells().values():
            if cell.setting.name == setting and cell.with_rounds(rounds).name == name:
                return cell.with_rounds(rounds)
        return None

    def has(self, result: SeedResult) -> bool:
        """Tell whether a table has the cell of a result."""
        return result.cell in _cells()


PAPER = PaperCollection()


@cache
def _cells() -> dict[tuple[str, str, str, bool], Cell]:
    """Return every cell of the tables, with and without shuffling, by its key."""
    cells = {}
    for table in tables().values():
        for column, method in table.entries():
            for shuffle in (False, True):
                cell = column.cell(method, shuffle=shuffle)
                cells[cell.key] = cell
    return cells


def preset() -> dict[str, Any]:
    """Return the options that all experiments of the paper share."""
    return dict(_data()["preset"])


def choose(
    names: Sequence[str], columns: Sequence[str], methods: Sequence[str]
) -> list[tuple[Table, Column, str]]:
    """Return the cells of some tables, or only those of some columns and methods, in their order.

    Refuse unknown names.
    """
    for name in names:
        if name not in tables():
            known_names = [*tables(), *drawings()]
            raise UserError(f"There is no table or figure {name}{suggest(name, known_names)}.")
    entries = [(tables()[name], *entry) for name in names for entry in tables()[name].entries()]
    where = " and ".join(names)
    spellings: dict[str, None] = {}
    for _, column, method in entries:
        spellings |= dict.fromkeys((method, column.cell(method).method))
    _check_names("column", columns, dict.fromkeys(column.name for _, column, _ in entries), where)
    _check_names("method", methods, spellings, where)

    def rank(entry: tuple[Table, Column, str]) -> tuple[int, int] | None:
        """Return the positions of column and method in the options; None if one is not there."""
        _, column, method = entry
        spelling = method if method in methods else column.cell(method).method
        if (columns and column.name not in columns) or (methods and spelling not in methods):
            return None
        return (
            columns.index(column.name) if columns else 0,
            methods.index(spelling) if methods else 0,
        )

    ranked = [(rank(entry), entry) for entry in entries]
    chosen = [(position, entry) for position, entry in ranked if position is not None]
    if not chosen and names:
        raise UserError(f"{where} has no cell of {', '.join(methods)} in {', '.join(columns)}.")
    return [entry for _, entry in sorted(chosen, key=lambda pair: pair[0])]


def _check_names(
    kind: str, names: Sequence[str], known_names: Mapping[str, None], where: str
) -> None:
    for name in names:
        if name not in known_names:
            raise UserError(f"There is no {kind} {name} in {where}{suggest(name, known_names)}.")


def count_ala_parameters(build: Callable[[], nn.Module], layers: int) -> int:
    """Count the parameters that ALA has on the upper layers of a model, as FedALA uses it."""
    model = _skeleton(build)
    names = make("fedala", {"fedala.layers": layers}).ala_parameters(model, layers)
    return sum(model.get_parameter(name).numel() for name in names)


@cache
def _skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@cache
def _data() -> Any:
    return tomllib.loads(read_packaged(__package__, "experiments.toml"))


@cache
def _accuracies() -> dict[tuple[str, str, str], PrintedNumber]:
    numbers_by_cell = {}
    text = read_packaged(__package__, "printed.csv")
    for row in csv.DictReader(io.StringIO(text)):
        numbers = [float(row[key]) if row[key] else None for key in ("std", "improvement")]
        numbers_by_cell[row["table"], row["column"], row["method"]] = PrintedNumber(
            float(row["accuracy"]), *numbers
        )
    return numbers_by_cell


@cache
def _costs() -> dict[str, Cost]:
    text = read_packaged(__package__, "printed_cost.csv")
    rows = csv.DictReader(io.StringIO(text))
    return {
        row["method"]: Cost(
            row["total_minutes"], float(row["minutes_per_iteration"]), row["parameters"]
        )
        for row in rows
    }
