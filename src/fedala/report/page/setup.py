"""The section on the set-up: the command, the versions, and every option."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedala.report.runs import Run


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


def view_setup(runs: Sequence[Run]) -> list[RunSetup]:
    """Return the set-up of every run folder."""
    return [
        RunSetup(
            run.name if len(runs) > 1 else "",
            run.summary.get("command"),
            _list_facts(run),
            run.config_text,
            _list_hyperparameters(run),
        )
        for run in runs
    ]


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
