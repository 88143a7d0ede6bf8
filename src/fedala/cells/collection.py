"""A collection of experiments: the paper's tables, or the leaderboard."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from fedala.cells.cell import Cell, Setting
from fedala.cells.results import SeedResult


class Collection(ABC):
    """Settings, and the cells in them. Collections may share cells: these are run once."""

    command: ClassVar[str]
    """The command that runs it, behind `fedala`."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Setting]:
        """The settings by name."""

    @abstractmethod
    def find_cell(self, setting: str, name: str, rounds: int | None) -> Cell | None:
        """Return the cell of a folder; its name may contain the number of rounds."""

    @abstractmethod
    def has(self, result: SeedResult) -> bool:
        """Tell whether a result is that of a cell in this collection."""
