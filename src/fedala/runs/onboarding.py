"""What onboarding gives: scores and personal models, as a table without the weights."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from fedala.metrics import Metric


@dataclass(frozen=True)
class OnboardedClient:
    """One newcomer: what its models score on its test samples, and its personal model."""

    number: int
    name: str
    train_samples: int
    test_samples: int
    received: float | None
    """The score of the received model; None if the server sends no whole model."""
    scores: dict[int, float]
    """By local epochs; 0 is the initialised model. NaN without test samples."""
    losses: dict[int, float] = field(repr=False)
    model: dict[str, Tensor] = field(repr=False)
    """The personal model after the most epochs, by name."""
    file: Path | None = None


@dataclass(frozen=True, repr=False)
class Onboarding:
    """Clients that were onboarded to one method and seed of a run."""

    title: str
    seed: int
    round: int
    """How many rounds the server had been trained for."""
    metric: Metric
    clients: list[OnboardedClient]
    notes: tuple[str, ...] = ()
    """Sentences: what was made of the data."""

    def describe(self) -> str:
        """Say in a line what the scores are."""
        rounds = f"{self.round} round{'' if self.round == 1 else 's'}"
        return (
            f"{self.title}, seed {self.seed}, after {rounds}: {self.metric.title} on the new "
            "clients' own test samples."
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads of the columns, and a row for each client."""
        counts = sorted({count for client in self.clients for count in client.scores})
        epochs = [f"after {count} epoch{'' if count == 1 else 's'}" for count in counts if count]
        heads = [f"client ({self.metric.heading})", "train", "test", "received", "initialised"]
        return [*heads, *epochs], [self._row(client, counts) for client in self.clients]

    def _row(self, client: OnboardedClient, counts: Sequence[int]) -> list[str]:
        scores = [client.received, *(client.scores.get(count) for count in counts)]
        figures = ("–" if score is None else self.metric.format(score) for score in scores)
        return [client.name, f"{client.train_samples:,}", f"{client.test_samples:,}", *figures]

    def __repr__(self) -> str:
        heads, rows = self.table()
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (heads, *rows)
        ]
        return "\n".join([self.describe(), *lines])

    def _repr_html_(self) -> str:
        heads, rows = self.table()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        title = html.escape(self.describe())
        return f"<p>{title}</p><table><tr>{head}</tr>{body}</table>"
