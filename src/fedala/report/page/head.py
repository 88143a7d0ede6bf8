"""The head of the page: its title, the facts about the runs, warnings, and the best score."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedala.report.headline import HEADLINES, count_things, join_words
from fedala.report.page.results import SCORES, task_of
from fedala.report.page.views import Cell, label_cell, score_cell
from fedala.report.runs import Run
from fedala.report.series import Series, list_metrics
from fedala.runs.leaders import find_leaders
from fedala.runs.sweep import split_label


@dataclass(frozen=True)
class Best:
    """The method with the best score."""

    heading: str
    method: Cell
    scores: list[tuple[str, Cell]]
    """By what they are."""
    unit: str
    equal: str = ""
    """The other methods that score the same."""


def make_title(runs: Sequence[Run]) -> str:
    """Return the methods and the data, such as `FedALA and FedAvg on digits`."""
    titles: dict[str, None] = {}
    for run in runs:
        titles |= dict.fromkeys(result.title for result in run.results.values())
    points = sum(1 for title in titles if split_label(title)[1])
    if len(titles) > 4 and points:
        names = list(dict.fromkeys(split_label(title)[0] for title in titles))
        methods = f"{names[0] if len(names) == 1 else f'{len(names)} methods'}, {points} points"
    else:
        methods = join_words(list(titles)) if len(titles) <= 4 else f"{len(titles)} methods"
    datasets = [Path(str(run.config.get("dataset", "unknown data"))).name for run in runs]
    return f"{methods} on {', '.join(dict.fromkeys(datasets))}"


def view_best(runs: Sequence[Run], series: Sequence[Series]) -> Best | None:
    """Return the best scores; None if they are not finite, or of different tasks."""
    if len(list_metrics(series)) > 1 or len(set(map(task_of, runs))) > 1:
        return None
    metric = series[0].metric
    rule, leaders = find_leaders([one.result for one in series])
    leading = [one for one in series if any(one.result is other for other in leaders)]
    best = leading[0] if leading else series[0]
    if not np.isfinite(best.scores[rule]["runs"]).all():
        return None
    scores = [
        (title, score_cell(metric, best.scores[key]))
        for key, (title, _) in SCORES.items()
        if key in best.scores
    ]
    meaning = next(one.meaning for one in HEADLINES.values() if one.key == rule)
    heading = f"{metric.superlative.capitalize()} test {metric.title} {meaning}"
    if any(run.sweeps for run in runs):
        by = "validation" if rule == "validation_picked" else "test"
        heading += f" (of each sweep, the point that its {by} samples pick)"
    others = [one.label for one in leading[1:]]
    equal = f"equal: {join_words(others)}" if others else ""
    return Best(heading, label_cell(best), scores, metric.unit, equal)


def list_facts(runs: Sequence[Run]) -> list[str]:
    """Return a line about the set-up of the runs, or one for each set-up."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(_describe(run), []).append(run.name)
    if len(names) == 1:
        return list(names)
    return [f"{', '.join(own)}: {fact}" for fact, own in names.items()]


def _describe(run: Run) -> str:
    config = run.config
    ratio = config.get("join_ratio", 1)
    evaluated = "all clients"
    if config.get("eval_clients") == "joined":
        evaluated = "only the participants of a round"
    parts = [
        count_things(config.get("clients", "?"), "client"),
        str(config.get("partition", "")),
        str(config.get("model", "")),
        count_things(run.rounds, "round"),
        count_things(config.get("seeds", 1), "run") + " of each method",
        f"ρ = {ratio:g}, {evaluated} evaluated" if isinstance(ratio, float) and ratio < 1 else "",
        "" if config.get("shuffle", True) else "fixed order of the samples",
    ]
    return " · ".join(filter(None, parts))


def list_warnings(runs: Sequence[Run]) -> list[str]:
    """Return what to know before trusting the figures."""
    return [warning for run in runs for warning in _warn(run)]


def _warn(run: Run) -> list[str]:
    warnings = []
    unfinished = [
        f"{result.title} {run.find_missing_rounds(name)}"
        for name, result in run.results.items()
        if run.find_missing_rounds(name) is not None
    ]
    if unfinished:
        warnings.append(
            f"{run.name} is unfinished: {', '.join(unfinished)} of {run.rounds} rounds."
        )
    missing = [
        f"{result.title} {len(result.seeds)} of {run.config['seeds']} seeds"
        for name, result in run.results.items()
        if run.missing_seeds(name)
    ]
    if missing:
        warnings.append(f"{run.name} has not begun with all seeds: {', '.join(missing)}.")
    if note := run.summary.get("data"):
        warnings.append(f"The data of {run.name}: {note}.")
    for result in run.results.values():
        if result.diverged:
            count = count_things(result.diverged, "client round")
            warnings.append(f"{result.title} in {run.name}: {count} diverged and did not count.")
    if run.pending_methods:
        warnings.append(f"{run.name} has not begun with {', '.join(run.pending_methods)}.")
    # The page may be published: it names the run, not its path.
    return warnings + [sentence.replace(str(run.path), run.name) for sentence in run.unverified]
