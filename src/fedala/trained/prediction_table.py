"""Predictions as the rows of a table, for the screen and for a csv file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from fedala.errors import printable, spreadsheet_safe
from fedala.runs.tables import csv_text
from fedala.trained.answers import Answers


@dataclass(frozen=True)
class PredictionTable:
    """What a model says of each sample."""

    answers: Answers
    samples: Sequence[str]
    """Their names."""
    has_all_probabilities: bool = False

    @property
    def columns(self) -> list[str]:
        answers, names = self.answers, [printable(name, 100) for name in self.answers.names]
        chances = [f"p({name})" for name in names] if self.has_all_probabilities else []
        if answers.kind == "classes":
            return ["sample", "prediction", "probability", *chances]
        if answers.kind == "numbers" and not answers.class_names:
            return ["sample", *(["prediction"] if len(names) == 1 else names)]
        return ["sample", *names, *chances]

    def rows(self) -> Iterator[list[str]]:
        answers = self.answers
        found = answers.predictions()
        chances = answers.probabilities() if answers.kind != "numbers" else None
        for i, sample in enumerate(self.samples):
            values = found[i] if found.ndim > 1 else [found[i]]
            row = [printable(sample, 1000), *(_format(value) for value in values)]
            if chances is not None and answers.kind == "classes":
                row.append(_format(chances[i].max()))
            if chances is not None and self.has_all_probabilities:
                row += map(_format, chances[i])
            yield row

    def first_rows(self, count: int) -> list[list[str]]:
        return list(islice(self.rows(), count))

    def csv(self) -> str:
        """Return the table as the text of a csv file."""
        columns = [spreadsheet_safe(name) for name in self.columns]
        lines = (dict(zip(columns, map(spreadsheet_safe, row), strict=True)) for row in self.rows())
        return csv_text(columns, lines, header=True)

    def count(self) -> dict[str, int]:
        """Count how often each class, or each label, is predicted; nothing for numbers."""
        found = self.answers.predictions()
        if self.answers.kind == "classes":
            return dict(Counter(map(str, found.tolist())).most_common())
        if self.answers.kind == "labels":
            return dict(zip(self.answers.names, found.sum(0).tolist(), strict=True))
        return {}


def _format(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)
