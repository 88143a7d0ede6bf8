"""Tables of scores, which stay on the device until a round is over."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedala.lanes import Params
from fedala.lanes.local_aggregation import summarize_weights
from fedala.records import WeightSummary
from fedala.simulation.client_states import Lane


@dataclass
class ScoreTable:
    """[run, client, part, (summed score, summed loss, samples)]."""

    values: np.ndarray
    _pending: list[tuple[int, Sequence[Lane], Tensor]] = field(default_factory=list)

    def copy(self) -> "ScoreTable":
        """Return a table with the same values and nothing pending."""
        return ScoreTable(self.values.copy())

    def add(self, lanes: Sequence[Lane], scores: Sequence[Tensor]) -> None:
        """Note the scores of some lanes, by part: [lane, 3]. `settle` writes them."""
        self._pending += [(part, lanes, score) for part, score in enumerate(scores)]

    def add_part(self, part: int, lanes: Sequence[Lane], scores: Tensor) -> None:
        """Note the scores of some lanes in one part: [lane, 3]."""
        self._pending.append((part, lanes, scores))

    def share(self, run: int, clients: Any, part: int) -> tuple[float, float]:
        """Return mean score and loss over the samples of some clients; NaN without samples."""
        score, loss, samples = self.values[run, clients, part].sum(0)
        if not samples:
            return float("nan"), float("nan")
        return float(score / samples), float(loss / samples)


def settle(tables: Sequence[ScoreTable], *, skip: Collection[Lane] = ()) -> None:
    """Write pending scores into their tables, in one transfer from the device.

    The last table skips some lanes.
    """
    pending = [(table, *entry) for table in tables for entry in table._pending]
    if pending:
        figures = iter(torch.cat([scores for *_, scores in pending]).cpu().numpy())
        for table, part, lanes, _ in pending:
            for run, client in lanes:
                figure = next(figures)
                if table is not tables[-1] or (run, client) not in skip:
                    table.values[run, client, part] = figure
    for table in tables:
        table._pending = []


@dataclass
class WeightLog:
    """How ALA's W is spread, for every participant of a round."""

    _pending: list[tuple[Sequence[Lane], list[str], Tensor]] = field(default_factory=list)

    def add(self, lanes: Sequence[Lane], weights: Params) -> None:
        """Note the weights of some lanes."""
        if weights:
            self._pending.append((lanes, list(weights), summarize_weights(weights)))

    def collect(self, runs: int) -> list[list[WeightSummary]]:
        """Return the summaries of each run, by client and parameter."""
        found: dict[Lane, list[WeightSummary]] = {}
        if self._pending:
            figures = iter(torch.cat([spread for *_, spread in self._pending]).tolist())
            for lanes, names, _ in self._pending:
                for lane in lanes:
                    found[lane] = [
                        WeightSummary(lane[1], name, mean, shares)
                        for name, (mean, *shares) in zip(names, next(figures), strict=True)
                    ]
        return [
            [summary for lane in sorted(found) if lane[0] == run for summary in found[lane]]
            for run in range(runs)
        ]
