"""The settings of the leaderboard, read from board.toml in this folder, and the cells in them."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fedala.cells.cell import Cell, Setting, is_known
from fedala.cells.collection import Collection
from fedala.cells.results import SeedResult
from fedala.errors import UserError
from fedala.io.files import read_packaged
from fedala.leaderboard.published import Published, from_elsewhere, from_paper
from fedala.methods import list_methods, make
from fedala.methods.registry import ALIASES
from fedala.options import suggest
from fedala.paper import experiments

_METHOD = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}(\+ala)?", re.ASCII)


class Leaderboard(Collection):
    """Every method in every setting."""

    command = "leaderboard"

    @property
    def settings(self) -> dict[str, Setting]:
        return settings()

    def find_cell(self, setting: str, name: str, rounds: int | None) -> Cell | None:
        """Return the cell of a folder. Its method need not be installed here."""
        method, *rest = name.split(",")
        if not _METHOD.fullmatch(method):
            return None
        cell = Cell(settings()[setting], method, shuffle="shuffled" in rest)
        if is_known(method):
            cell = cell.with_rounds(rounds)
        elif rounds and f"rounds={rounds}" in rest:
            cell = replace(cell, rounds=rounds)
        return cell if cell.name == name else None

    def has(self, result: SeedResult) -> bool:
        """Tell whether it is a method in a setting, which need not be installed here."""
        setting, method, hyperparameters, _ = result.cell
        return setting in settings() and bool(_METHOD.fullmatch(method)) and not hyperparameters


BOARD = Leaderboard()


@cache
def settings() -> dict[str, Setting]:
    """Return every setting by name."""
    found = {}
    for name, values in _data()["settings"].items():
        if values.keys() == {"title"}:
            found[name] = replace(experiments.settings()[name], title=values["title"])
        else:
            found[name] = Setting.build(name, experiments.preset(), values)
    return found


def list_published(setting: str) -> dict[str, Published]:
    """Return the published numbers for a setting, by method."""
    return from_elsewhere(setting) | from_paper(setting)


def choose_settings(names: Sequence[str]) -> list[Setting]:
    """Return settings by name; `all` stands for all of them."""
    known = settings()
    for name in names:
        if name != "all" and name not in known:
            raise UserError(f"There is no setting {name}{suggest(name, [*known, 'all'])}.")
    return list(known.values()) if "all" in names else [known[name] for name in names]


def choose_cells(
    chosen: Sequence[Setting], methods: Sequence[str], *, shuffle: bool, rounds: int | None
) -> dict[Cell, float | None]:
    """Return a cell for each setting and method, with the accuracy that is published for it.

    Without `methods`, every method is chosen, with and without ALA.
    """
    names = [ALIASES.get(name.lower(), name.lower()) for name in methods or list_methods()]
    cells: dict[Cell, float | None] = {}
    for setting in chosen:
        published = list_published(setting.name)
        for name in names:
            make(name)  # refuses an unknown method with a suggestion
            cell = Cell(setting, name, shuffle=shuffle).with_rounds(rounds)
            cells[cell] = published[name].accuracy if name in published else None
    return cells


@cache
def _data() -> Any:
    return tomllib.loads(read_packaged(__package__, "board.toml"))
