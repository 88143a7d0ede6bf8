"""Published numbers: those of the paper's tables, and those of published.csv in this folder."""

import csv
import io
from dataclasses import dataclass
from functools import cache

from fedala.io.files import read_packaged
from fedala.paper.comparison import title_of
from fedala.paper.experiments import tables

_PAPER = "FedALA (Zhang et al., AAAI 2023), {table}"
_PAPER_NOTE = (
    "best of 2000 rounds, mean of 5 runs; the models that a round starts with, before training"
)


@dataclass(frozen=True)
class Published:
    """What a publication prints for a method in a setting, in percent."""

    method: str
    """As on the command line."""
    title: str
    accuracy: float
    source: str
    note: str
    """What was measured."""


@cache
def from_paper(setting: str) -> dict[str, Published]:
    """Return what the paper prints for one of its settings, by method."""
    found: dict[str, Published] = {}
    for table in tables().values():
        for column, row in table.entries():
            printed, cell = table.printed(column, row), column.cell(row)
            if printed is None or cell.setting.name != setting or cell.set:
                continue
            number = table.name.replace("table", "table ")
            source = _PAPER.format(table=number)
            published = Published(
                cell.method, title_of(cell.method), printed.accuracy, source, _PAPER_NOTE
            )
            found.setdefault(cell.method, published)
    return found


@cache
def from_elsewhere(setting: str) -> dict[str, Published]:
    """Return what published.csv has for a setting of the leaderboard, by method."""
    text = read_packaged(__package__, "published.csv")
    found = {}
    for row in csv.DictReader(io.StringIO(text)):
        if row["setting"] == setting:
            method, accuracy = row["method"].lower(), float(row["accuracy"])
            found[method] = Published(method, row["method"], accuracy, row["source"], row["note"])
    return found
