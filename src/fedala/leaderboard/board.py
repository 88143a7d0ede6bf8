"""The settings of the leaderboard, read from board.toml in this folder, and the cells in them."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from fedala.cells.cell import Cell, Setting
from fedala.cells.collection import Collection
from fedala.cells.results import SeedResult
from fedala.errors import UserError
from fedala.io.files import read_packaged
from fedala.leaderboard.published import Published, from_elsewhere, from_paper
from fedala.leaderboard.results import (
    BoardResult,
    is_known,
    read_curve,
    summarize_models,
    write_curve,
)
from fedala.methods import list_methods, make
from fedala.methods.registry import ALIASES
from fedala.options import suggest
from fedala.paper import experiments
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder

_METHOD = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}(\+ala)?", re.ASCII)


class Leaderboard(Collection):
    """Every method in every setting."""

    command = "leaderboard"
    title = "the leaderboard"
    result_type = BoardResult

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

    def check_result(self, result: SeedResult) -> None:
        """Refuse a setting that is not here, a name that no method has, and damaged curves."""
        own = cast(BoardResult, result)
        if own.setting not in settings():
            raise UserError(f"there is no setting {own.setting}{suggest(own.setting, settings())}.")
        if not _METHOD.fullmatch(own.method) or own.cell[2]:
            raise UserError(f"the leaderboard has no cell of {own.method} {own.set}".strip() + ".")
        for text in (own.curve, own.trained_curve):
            curve = read_curve(text)
            if curve and curve[-1][0] > own.rounds:
                raise UserError(
                    f"a curve ends in round {curve[-1][0]}, and there are {own.rounds} rounds."
                )

    def summarize(
        self, folder: Path, config: Config, seed: int, rows: list[HistoryRow]
    ) -> dict[str, Any]:
        """Return the columns of a result, with those of both kinds of models."""
        values = super().summarize(folder, config, seed, rows)
        lines = RunFolder(folder).rows("metrics.csv")
        curve = write_curve((row.round, row.accuracy) for row in rows)
        return {**values, "curve": curve, **summarize_models(lines, seed, values["best_round"])}


BOARD = Leaderboard()


@cache
def settings() -> dict[str, Setting]:
    """Return every setting by name."""
    data, found = _data(), {}
    for name, row in data["settings"].items():
        own = {**row}
        paper = own.pop("paper", None)
        if paper:
            like = experiments.settings()[paper]
            names = ("dataset", "model", "lr", "partition", "clients", "join_ratio")
            own = {key: getattr(like, key) for key in names} | own
        preset = experiments.preset() | data["preset"]
        found[name] = Setting.build(name, preset, own)
    return found


def list_published(setting: str) -> dict[str, Published]:
    """Return the published numbers for a setting, by method."""
    paper = _data()["settings"][setting].get("paper")
    return from_elsewhere(setting) | (from_paper(paper) if paper else {})


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
