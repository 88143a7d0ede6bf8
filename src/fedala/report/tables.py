"""Tables for the terminal: results, clients, methods, datasets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedala.data import Federation, KnownDataset
from fedala.methods import Entry
from fedala.metrics import Metric, find_metric
from fedala.report.headline import SCORES, format_figure
from fedala.runs.onboarding import Onboarding
from fedala.runs.sweep_results import Sweep
from fedala.trained.scores import Scores

#: The least columns of a text that may wrap.
WRAPPED = 24


def console() -> Console:
    """Return a console; if it is not a terminal, tables may be as wide as they need."""
    console = Console()
    if not console.is_terminal:
        console.width = 240
    return console


def show(table: Table) -> None:
    """Print a table. Only columns with a `min_width` wrap; the others are never cut.

    If the terminal is too narrow for that, each row is printed as lines, one for each cell.
    """
    screen = console()
    if _find_least_width(table, screen) <= screen.width:
        for column in table.columns:
            column.no_wrap = column.min_width is None
        screen.print(table)
        return
    screen.print(Text(f"{table.columns[0].header}:"))
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, row, strict=True):
            text, heading = Text.from_markup(str(cell)), str(column.header).replace("\n", " ")
            if column is table.columns[0]:
                screen.print(text)
            elif text.plain:
                label = f"  {heading}: " if heading else "  "
                screen.print(Text(label).append_text(text))
    screen.print()


def _find_least_width(table: Table, screen: Console) -> int:
    """Return the columns that a table needs if those with a `min_width` wrap."""
    width = Measurement.get(screen, screen.options.update_width(10_000), table).maximum
    for column in table.columns:
        if column.min_width is not None:
            texts = [
                Text.from_markup(str(cell)).cell_len for cell in (column.header, *column.cells)
            ]
            width -= max(0, max(texts) - column.min_width)
    return width


def results(methods: Mapping[str, Any], validation: Mapping[str, str] | None = None) -> Table:
    """Show the `methods` of a run's summary.

    Scores are mean ± standard deviation over the runs, in percent if they are shares. `validation`
    has the figures by which points of a sweep are picked.
    """
    metric = find_metric(next(iter(methods.values()), {}))
    known = {key for method in methods.values() for key in method[metric.name]}
    shown = [key for key in SCORES if key in known]
    table = _table(metric.heading)
    for key in shown:
        table.add_column(SCORES[key], justify="right", no_wrap=True)
    if validation:
        table.add_column("validation\nsamples, which\npick the point", justify="right")
    epochs = list_newcomer_epochs(metric, methods.values())
    for count in epochs:
        unit = "epoch" if count == "1" else "epochs"
        table.add_column(f"unseen clients,\n{count} {unit}", justify="right", no_wrap=True)
    table.add_column("seconds\nper round", justify="right")
    table.add_column("parameters\nper client\nand round", justify="right")
    diverged = any(method.get("client_rounds_that_diverged") for method in methods.values())
    if diverged:
        table.add_column("client rounds\nthat diverged", justify="right")
    for label, method in methods.items():
        scores = [format_figure(metric, method[metric.name].get(key)) for key in shown]
        if validation:
            scores.append(validation.get(label, "–"))
        unseen = method.get("newcomers", {}).get(metric.name, {})
        scores += [format_figure(metric, unseen.get(count)) for count in epochs]
        parameters = f"{method['parameters_per_client_and_round']['together']:,}"
        faults = [f"{method.get('client_rounds_that_diverged', 0):,}"] if diverged else []
        table.add_row(
            escape(method["title"]),
            *scores,
            f"{method['seconds_per_round']:.3g}",
            parameters,
            *faults,
        )
    return table


def list_newcomer_epochs(metric: Metric, methods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the local epochs after which held-out clients were tested, as summaries name them."""
    known = {
        epochs
        for method in methods
        for epochs in method.get("newcomers", {}).get(metric.name, {})
        if epochs.isdecimal()
    }
    return sorted(known, key=int)


def describe_sweep(sweep: Sweep) -> list[str]:
    """Say which point of a sweep is the best, what it scores, and whether the grid is too small."""
    winner = sweep.results[sweep.winner]
    by = "validation samples" if sweep.is_validated else "test samples, which is optimistic"
    score = format_figure(winner.metric, sweep.test_score(sweep.winner))
    sentences = [
        f"{winner.title} is the best of {len(sweep.points)} points, picked by {by}: "
        f"test {winner.metric.title} {score}{winner.metric.unit}."
    ]
    if len(equals := sweep.equals) > 1:
        others = ", ".join(one.title for one in equals[1:6]) + (", …" if len(equals) > 6 else "")
        sentences.append(
            f"Equal on these samples: {others}. The first in the order of the sweep is taken."
        )
    if edges := sweep.edges():
        sentences.append(
            f"Its place is at the edge of the grid ({', '.join(edges)}): "
            "a better point may lie beyond."
        )
    return sentences


def onboarding(found: Onboarding) -> Table:
    """Show what the models of newcomers score on their test samples, before and after training."""
    heads, rows = found.table()
    table = _table(*heads, right=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def clients(federation: Federation) -> Table:
    """Show every client's samples in each part, and its classes or labels, the largest by name."""
    names, kind = federation.count_names, federation.dataset.kind
    parts = {"train": federation.train}
    if any(map(len, federation.validation)):
        parts["validation"] = federation.validation
    parts["test"] = federation.test
    names_of_clients = federation.client_names
    shown = ["client", *(["name"] if names_of_clients else []), "samples"]
    table = _table(*shown, *parts, right=True)
    if kind != "numbers":
        table.add_column(kind, justify="right")
        table.add_column("most of", min_width=WRAPPED)
    for client, (size, counts) in enumerate(
        zip(federation.sizes(), federation.counts(), strict=True)
    ):
        sizes = [f"{len(rows[client]):,}" for rows in parts.values()]
        largest = [label for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
        most = ", ".join(f"{names[label]} ({counts[label] / size:.0%})" for label in largest)
        about = [] if kind == "numbers" else [str(np.count_nonzero(counts)), escape(most)]
        name = [escape(names_of_clients[client])] if names_of_clients else []
        table.add_row(str(client), *name, f"{size:,}", *sizes, *about)
    return table


def model_scores(scores: Scores) -> Table:
    """Show what each model scores on new data."""
    table = _table(*scores.heads, right=True)
    for row in scores.list_cells():
        table.add_row(*map(escape, row))
    return table


def predictions(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Show what a model predicts, a line for each sample."""
    table = _table(*map(escape, columns), right=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def methods(kinds: Mapping[str, Iterable[Entry]]) -> Table:
    """Show the methods, kind by kind."""
    table = _table("kind", "method", "", "with ALA", "what it does")
    for kind, entries in kinds.items():
        for number, entry in enumerate(entries):
            table.add_row(
                escape(kind) if number == 0 else "",
                entry.name,
                escape(entry.title),
                "+ala" if entry.takes_ala else "",
                escape(entry.summary),
            )
        table.add_section()
    return table


def hyperparameters(entries: Iterable[Entry]) -> Table:
    """Show what `--set` takes."""
    table = _table("hyperparameter", "default", "what it is")
    for entry in entries:
        for name, (default, text) in entry.defaults().items():
            table.add_row(f"{entry.name}.{name}", _format_default(default), escape(text))
    return table


def datasets(rows: Iterable[KnownDataset]) -> Table:
    """Show the datasets known by name, with the default settings of a run on them."""
    table = _table("dataset", "what it is")
    for name in ("classes", "samples", "shape"):
        table.add_column(name, justify="right")
    for name in ("from", "model"):
        table.add_column(name)
    for name in ("lr", "rounds"):
        table.add_column(name, justify="right")
    for row in rows:
        shape = "×".join(map(str, row.shape))
        sizes = (str(row.classes), f"{row.samples:,}", shape)
        table.add_row(
            row.name, row.description, *sizes, row.source, row.model, f"{row.lr:g}", str(row.rounds)
        )
    return table


def stored_states(rows: Iterable[Sequence[str]]) -> Table:
    """Show what clients have stored: experiment, client, last round, size, last change, note."""
    table = _table("experiment", "client")
    for name in ("round", "size", "last change"):
        table.add_column(name, justify="right")
    table.add_column("", min_width=WRAPPED)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _format_default(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "–" if value is None else str(value)


def _table(*columns: str, right: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        width = WRAPPED if column in ("what it is", "what it does") else None
        table.add_column(column, justify="right" if right else "left", min_width=width)
    return table
