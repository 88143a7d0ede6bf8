"""A collection of experiments: the paper's tables, or the leaderboard."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fedala.cells.cell import Cell, Setting, format_value
from fedala.cells.results import SeedResult
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.results import best_row
from fedala.runs.seconds import average_seconds


class Collection(ABC):
    """Settings, the cells in them, and what is written down about each seed of a cell."""

    command: ClassVar[str]
    """The command that runs it, behind `fedala`."""
    title: ClassVar[str]
    """How a sentence names it."""
    result_type: ClassVar[type[SeedResult]] = SeedResult
    """A line of its csv files."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Setting]:
        """The settings by name."""

    @abstractmethod
    def find_cell(self, setting: str, name: str, rounds: int | None) -> Cell | None:
        """Return the cell of a folder; its name may contain the number of rounds."""

    @abstractmethod
    def check_result(self, result: SeedResult) -> None:
        """Refuse the result of a cell that is not in this collection."""

    def summarize(
        self, folder: Path, config: Config, seed: int, rows: list[HistoryRow]
    ) -> dict[str, Any]:
        """Return the columns of a result that a run folder and the history of a seed give."""
        best, joined = (best_row(rows, column) or rows[0] for column in ("score", "score_joined"))
        return {
            "seed": seed,
            "method": config.method,
            "set": " ".join(f"{key}={format_value(value)}" for key, value in config.set.items()),
            "shuffle": config.shuffle,
            "rounds": rows[-1].round,
            "planned": config.rounds,
            "eval_every": config.eval_every,
            "best": best.accuracy,
            "best_round": best.round,
            "best_joined": joined.accuracy_joined,
            "final": rows[-1].accuracy,
            "seconds_per_round": average_seconds(rows),
            "together": config.seeds,
            "diverged": sum(row.diverged > 0 for row in rows),
            "sent": max(row.sent for row in rows),
            "uploaded": max(row.uploaded for row in rows),
        }
