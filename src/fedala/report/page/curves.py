"""The section on learning curves."""

from collections.abc import Sequence

import numpy as np

from fedala.metrics import SHARES
from fedala.records import HistoryRow
from fedala.report.arrays import mean_std, pick_evenly
from fedala.report.curves import TITLES, collect_curves, list_columns, list_seeds
from fedala.report.page.views import MOST_ROWS, Chart, Row, Select, Table
from fedala.report.series import Series, list_metrics


def view_curves(series: Sequence[Series]) -> list[Chart]:
    """Return charts of the score, of loss, and of the method's own figures."""
    metrics = list_metrics(series)
    names: dict[str, None] = {}
    for one in series:
        names |= dict.fromkeys(list_columns(one.result))
    if all(_counts_everybody(one.result.history) for one in series):
        for metric in metrics:
            names.pop(metric.columns["score_joined"], None)
    # Further models have columns of their own, such as accuracy_trained.
    own = tuple(f"{metric.name}_" for metric in metrics)
    scores = [name for name in names if f"{name}_".startswith(own)]
    losses = [name for name in names if name.endswith("loss") and name not in scores]
    others = [name for name in names if name not in scores + losses]
    seeds = sorted({seed for one in series for seed in list_seeds(one.result)})
    has_band = any(len(list_seeds(one.result)) > 1 for one in series)
    band = " Bands are one standard deviation over the runs." if has_band else ""
    axes = _select_axes("curves-accuracy", seeds)
    title = " and ".join(metric.title for metric in metrics)
    caption = f"{title.capitalize()} over the rounds.{band}"
    charts = [
        _make_chart("accuracy", scores, series, caption, axes),
        _make_chart("loss", losses, series, f"Loss over the rounds.{band}"),
    ]
    if others:
        caption = "Other figures that the methods record."
        charts.append(_make_chart("notes", others, series, caption))
    return charts


def _counts_everybody(rows: Sequence[HistoryRow]) -> bool:
    """Tell whether the score of the participants is that of all clients; NaN equals anything."""
    return all(row.score == row.score_joined or row.score != row.score for row in rows)


def _select_axes(identifier: str, seeds: Sequence[int]) -> list[Select]:
    """Return the controls of the first chart, which hold for all charts of curves."""
    controls = []
    if len(seeds) > 1:
        each = [(str(seed), f"seed {seed}") for seed in seeds]
        runs = [("band", "mean ± std"), ("each", "each run"), *each]
        controls.append(Select(f"{identifier}-seeds", "Runs", runs, "seeds"))
    units = [("rounds", "rounds"), ("seconds", "seconds")]
    controls.append(Select(f"{identifier}-x", "Over", units, "x"))
    parts = [("all", "everything"), ("late", "the later half")]
    controls.append(Select(f"{identifier}-zoom", "Axis", parts, "zoom"))
    return controls


def _make_chart(
    kind: str,
    names: Sequence[str],
    series: Sequence[Series],
    caption: str,
    axes: Sequence[Select] = (),
) -> Chart:
    identifier = f"curves-{kind}"
    controls = list(axes)
    if len(names) > 1:
        titles = [(name, TITLES.get(name, name)) for name in names]
        controls.insert(0, Select(f"{identifier}-column", "Show", titles, "column"))
    table = _make_table(names[0], series)
    return Chart(identifier, "curves", caption, [table], controls, names)


def _make_table(column: str, series: Sequence[Series]) -> Table:
    """Return a column of the history in some of the rounds, with the first and the last."""
    scale = 100 if column.startswith(SHARES) else 1
    digits = ".4g" if scale == 1 and not column.endswith("loss") else ".2f"
    texts: dict[str, dict[int, str]] = {}
    for one in series:
        if column in list_columns(one.result):
            rounds, values = collect_curves(one.result, column)
            mean, deviation = (scale * part for part in mean_std(values))
            own = texts[one.label] = {}
            for i, round in enumerate(rounds):
                own[round] = f"{mean[i]:{digits}}"
                if len(values) > 1 and np.isfinite(deviation[i]):
                    own[round] += f" ± {deviation[i]:{digits}}"
    every = sorted({round for own in texts.values() for round in own})
    chosen = [every[index] for index in pick_evenly(len(every), MOST_ROWS)]
    rows: list[Row] = []
    for round in chosen:
        rows.append([round, *(own.get(round, "–") for own in texts.values())])
    caption = TITLES.get(column, column).capitalize() + (" in %" if scale == 100 else "")
    if len(chosen) < len(every):
        caption += f"; {len(chosen)} of {len(every)} rounds, all of them in history.csv"
    return Table(caption, ["Round", *texts], rows)
