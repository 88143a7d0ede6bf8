"""The section on the set-up: the command, the versions, and every option."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedala.data.preprocessing import PREPROCESSING
from fedala.errors import printable
from fedala.report.page.views import Row, Table
from fedala.report.runs import Run

_MOST_FEATURES = 30


@dataclass(frozen=True)
class RunSetup:
    """How a run folder was made."""

    heading: str
    """Empty if it is the only one on the page."""
    command: object
    facts: list[tuple[str, Any]]
    config: str
    hyperparameters: list[str]
    """A line for each method, or point of a sweep."""
    scaling: Table | None = None
    """The mean and standard deviation of every feature or channel."""


def view_setup(runs: Sequence[Run]) -> list[RunSetup]:
    """Return the set-up of every run folder."""
    return [
        RunSetup(
            run.name if len(runs) > 1 else "",
            run.summary.get("command"),
            _list_facts(run),
            run.config_text,
            _list_hyperparameters(run),
            _make_scaling_table(run),
        )
        for run in runs
    ]


def _make_scaling_table(run: Run) -> Table | None:
    """Return what scales each feature on its way to the model; None if nothing does."""
    fed = run.preprocessing
    if fed is None or fed.normalization is None:
        return None
    means, stds = fed.normalization.mean, fed.normalization.std
    names = fed.feature_names if len(fed.feature_names) == len(means) else range(len(means))
    rows: list[Row] = []
    for name, mean, std in list(zip(names, means, stds, strict=True))[:_MOST_FEATURES]:
        rows.append([printable(str(name), 60), f"{mean:.6g}", f"{std:.6g}"])
    noun = "feature" if fed.feature_names else "channel"
    caption = f"The model is fed (x − mean) / std of each {noun}"
    if len(means) > len(rows):
        caption += f"; the first {len(rows)} of {len(means)}, all of them in {PREPROCESSING}"
    return Table(caption, [noun.capitalize(), "Mean", "Std"], rows, style="figures")


def _list_hyperparameters(run: Run) -> list[str]:
    """Return the hyperparameters of each method, as far as the summary has them."""
    methods, lines = run.summary.get("methods"), []
    for name, method in methods.items() if isinstance(methods, dict) else ():
        values = method.get("hyperparameters") if isinstance(method, dict) else None
        if isinstance(values, dict) and values:
            listed = ", ".join(f"{key} = {value}" for key, value in values.items())
            lines.append(f"{name}: {listed}")
    return lines


def _list_facts(run: Run) -> list[tuple[str, Any]]:
    facts = {"folder": run.name, "seconds": run.summary.get("seconds")}
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        facts |= versions
    resumed = []
    for row in run.resumed:
        resumed.append(f"{row['time']} ({row['changed']})" if row["changed"] else row["time"])
    facts["resumed"] = "; ".join(resumed)
    return [
        (key, f"{value:,.0f}" if isinstance(value, float) else value)
        for key, value in facts.items()
        if value
    ]
