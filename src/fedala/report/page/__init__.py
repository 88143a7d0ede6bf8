"""The HTML page of one or several run folders: results, curves, clients, weights and set-up."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from fedala.errors import UserError
from fedala.io.files import write_output
from fedala.report import html
from fedala.report.page import clients, head, results, weights
from fedala.report.page.chart_data import collect_chart_data
from fedala.report.page.curves import view_curves
from fedala.report.page.models import view_models
from fedala.report.page.newcomers import view_newcomers
from fedala.report.page.setup import view_setup
from fedala.report.page.sweep import view_sweeps
from fedala.report.page.views import Section
from fedala.report.runs import Run, find_runs
from fedala.report.series import list_series
from fedala.runs.outputs import check_output
from fedala.runs.run_files import REPORT

__all__ = ["render_page", "write", "write_after_run"]


def write(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    say: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Write the page of these folders; without `out`, as report.html into the only one.

    `say` gets a sentence about everything that is unverified.
    """
    if out is None and len(paths) != 1:
        raise UserError("Several folders make one page: name its file, such as --out report.html.")
    if out:
        check_output(out, [".html", ".htm"])
    runs = find_runs(paths)
    for run in runs:
        for sentence in run.unverified:
            say(sentence)
    target = out or paths[0] / REPORT
    write_output(target, render_page(runs).encode())
    return target


def write_after_run(
    folder: Path, say: Callable[[str], None], announce: Callable[[str], None]
) -> None:
    """Write the page of a finished run, and announce it. A fault of it must not fail the run."""
    try:
        announce(f"Report: {write([folder], say=say)}")
    except Exception as error:
        say(
            f"The report could not be written ({error}); "
            f"try again with: fedala report {shlex.quote(str(folder))}"
        )


def render_page(runs: Sequence[Run]) -> str:
    """Return the page as text."""
    series = list_series(runs)
    sections = [
        Section("results", "Results", results.view_results(series)),
        Section("sweep", "Sweep", view_sweeps(runs)),
        Section("models", "Which accuracy?", view_models(series)),
        Section("curves", "Learning curves", view_curves(series)),
        Section("clients", "Clients", clients.view_clients(series)),
        Section("newcomers", "Unseen clients", view_newcomers(series)),
        Section("split", "Split", clients.view_split(runs)),
        Section("weights", "Weights W", weights.view_weights(series)),
        Section("cost", "Cost", results.view_cost(series)),
        Section("setup", "Set-up", view_setup(runs)),
    ]
    return html.render(
        "fedala.report",
        "run_report.html.j2",
        styles=["page.css"],
        scripts=["page.js"],
        data=collect_chart_data(runs, series),
        title=head.make_title(runs),
        facts=head.list_facts(runs),
        warnings=head.list_warnings(runs),
        best=head.view_best(runs, series),
        sections=[section for section in sections if section.view is not None],
    )
