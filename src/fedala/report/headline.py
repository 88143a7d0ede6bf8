"""The headline of a method: which figure a table shows, how it is written, and which is better."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedala.metrics import ACCURACY, Metric


@dataclass(frozen=True)
class Headline:
    """A figure by which methods are compared."""

    key: str
    """Its name in a summary."""
    meaning: str
    """How its round was chosen, as the end of a sentence."""


#: The scores of a summary, and their headings in a table as text.
SCORES = {
    "best": "best round",
    "best_joined": "best round,\nparticipants",
    "final": "last round",
    "validation_picked": "round picked by\nvalidation",
}

#: By the name that `--figure` takes.
HEADLINES = {
    "validation": Headline("validation_picked", "in the round that the validation samples pick"),
    "best": Headline("best", "in the best round, which is picked on test data"),
    "final": Headline("final", "after the last round"),
}


def format_spread(mean: float, std: float | None) -> str:
    """Return mean ± standard deviation, both in percent already."""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def format_figure(metric: Metric, figure: Mapping[str, Any] | None) -> str:
    """Return a figure of a summary: mean ± standard deviation; a single run has no deviation."""
    if figure is None or not has_number(figure):
        return "–"
    deviation = f" ± {metric.format(figure['std'])}" if has_deviation(figure) else ""
    return metric.format(figure["mean"]) + deviation


def join_words(words: Sequence[str]) -> str:
    """Return words as in a sentence: `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def count_things(number: object, noun: str) -> str:
    """Return a number with its noun in the singular or the plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_majority(shares: Collection[float]) -> str:
    """Return what a model scores that always answers with one class: the least and the most."""
    texts = dict.fromkeys(map(ACCURACY.format, (min(shares), max(shares))))
    return f"always the most frequent class: {' to '.join(texts)}{ACCURACY.unit}"


def has_number(figure: Mapping[str, Any]) -> bool:
    """Tell whether a figure is a number: in summary.json, null stands for NaN."""
    return figure["mean"] is not None and not math.isnan(figure["mean"])


def has_deviation(figure: Mapping[str, Any]) -> bool:
    """Tell whether a figure has a standard deviation: not a single run, nor an infinite mean."""
    return len(figure["runs"]) > 1 and figure["std"] is not None and math.isfinite(figure["std"])


def rank_means(metric: Metric, means: Iterable[float]) -> dict[float, int]:
    """Return the rank of every mean: 1 for the best, 2 for the second, …

    Means that look the same share their rank.
    """
    shown = {mean: metric.format(mean) for mean in means}
    ranking = sorted(set(shown.values()), key=float, reverse=metric.higher_is_better)
    return {mean: ranking.index(text) + 1 for mean, text in shown.items()}
