"""The section on clients that took no part in training."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedala.data.natural import list_clients
from fedala.report.page.views import Row, Table, label_cell, score_cell
from fedala.report.series import Series, list_metrics
from fedala.runs.results import describe_spread


@dataclass(frozen=True)
class NewcomerTables:
    """The section on newcomers."""

    tables: list[Table]


def view_newcomers(series: Sequence[Series]) -> NewcomerTables | None:
    """Return what held-out clients score at their last test; None if there are none."""
    tables = []
    for metric in list_metrics(series):
        found = {one.index: one.result.newcomer_scores() for one in series if one.metric == metric}
        counts = sorted({count for scores in found.values() for count in scores})
        rows: list[Row] = []
        for one in series:
            if scores := found.get(one.index):
                cells = [
                    score_cell(metric, describe_spread(scores[count]) if count in scores else None)
                    for count in counts
                ]
                last = one.result.newcomers[-1]
                rows.append([label_cell(one), last["clients"], last["round"], *cells])
        if rows:
            heads = ["Method", "Clients", "Round"]
            heads += [f"{count} epoch{'' if count == 1 else 's'}" for count in counts]
            caption = f"{metric.heading} of unseen clients{_name_clients(series)}."
            tables.append(Table(caption, heads, rows, "figures"))
    return NewcomerTables(tables) if tables else None


def _name_clients(series: Sequence[Series]) -> str:
    """Name the clients that were held out, if they are the same in all folders."""
    held_out = {
        tuple(one.run.name_client(number) for number in one.result.held_out)
        for one in series
        if one.result.held_out
    }
    return f" ({list_clients(held_out.pop())})" if len(held_out) == 1 else ""
