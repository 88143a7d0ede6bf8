"""The headline of a method: which figure a table shows, how it is written, and which is better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedala.errors import printable
from fedala.metrics import ACCURACY, Metric, describe_majority
from fedala.options import name_option
from fedala.runs.results import RunResult


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
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


def join_few(words: Sequence[str]) -> str:
    """Return words as in a sentence, the first three of more than four."""
    return join_words([*words[:3], f"{len(words) - 3} more"] if len(words) > 4 else words)


class AgainstMajority(NamedTuple):
    """A method's best score, and what always answering with the most frequent class scores."""

    title: str
    best: float
    share: float

    @property
    def is_better(self) -> bool:
        """Whether the method is better, as the scores are shown."""
        return float(ACCURACY.format(self.best)) > float(ACCURACY.format(self.share))


def describe_against_majority(
    methods: Sequence[AgainstMajority], *, has_newcomers: bool = False
) -> str:
    """Say what always answering with one class scores, and which methods are no better."""
    whose = " of the clients in training" if has_newcomers else ""
    said = f"{describe_majority([one.share for one in methods], whose)}."
    titles = [one.title for one in methods if not one.is_better]
    if titles:
        said += (
            f" {join_few(titles)} {'is' if len(titles) == 1 else 'are'} no better in the best "
            "round: balanced_accuracy and auc in metrics.csv say whether the classes are told "
            "apart."
        )
    return said


def compare_with_majority(result: RunResult) -> list[str]:
    """Say it of a run's result; nothing if its score is not an accuracy."""
    share, is_held_out = result.majority_share, result.config.holdout_clients is not None
    methods = [
        AgainstMajority(printable(one.title, 40), one.best_score, share)
        for one in result.methods.values()
        if one.history and share is not None
    ]
    text = describe_against_majority(methods, has_newcomers=is_held_out) if methods else ""
    return [f"For comparison, {text}"] if text else []


def describe_divergence(result: RunResult) -> str:
    """Say in how many client rounds of each method a client diverged; nothing if none did."""
    counts = [
        f"{printable(one.title, 40)}: {count_things(f'{one.diverged:,}', 'client round')}"
        for one in result.methods.values()
        if one.diverged
    ]
    if not counts:
        return ""
    shown = [*counts[:3], f"and {len(counts) - 3} more methods"] if len(counts) > 4 else counts
    where = " See faults.csv." if result.folder else ""
    return (
        f"Some clients diverged ({', '.join(shown)}): their updates in these rounds do not count "
        f"({name_option('on_divergence', result.config.on_divergence)}).{where}"
    )


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
