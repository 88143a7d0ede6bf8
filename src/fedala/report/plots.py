"""Plots as image files, for print."""

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedala.errors import UserError, import_optional
from fedala.io.files import write_output
from fedala.metrics import ACCURACY, Metric
from fedala.report.arrays import Array, mean_std
from fedala.report.curves import TITLES, collect_curves
from fedala.report.runs import Run, distinct_splits
from fedala.report.series import Series, list_metrics, list_series
from fedala.runs.folder import nearest_existing_parent
from fedala.runs.outputs import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most curves whose legend is inside the axes; that of more is below them.
_MOST_INSIDE = 5
_SUFFIXES = (".png", ".pdf", ".svg")
_COLOUR = "#2a6f97"
#: The methods in turn: colours that colour-blind people can tell apart, and dashes for grey print.
_COLOURS = ("#0a63c2", "#c2470f", "#14784a", "#7c46c2", "#b4307c", "#876200", "#0b737d", "#515a65")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", ">", "<", "X")


def check(path: Path, reads: Iterable[Any] = ()) -> None:
    """Refuse a file that could not be plotted or written, before any work is done."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    check_output(path, _SUFFIXES, reads)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the file's suffix."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, picture.getvalue())


def draw_split(
    counts: "np.ndarray[Any, Any]", class_names: Sequence[str] = (), title: str = ""
) -> "Figure":
    """Draw the samples of clients × classes as in the paper: circles whose area is the number."""
    clients, classes = counts.shape
    # In points. Up to about thirty clients or classes have 24 each; more of them move closer.
    width, height = float(np.clip(24 * clients, 240, 760)), float(np.clip(24 * classes, 120, 640))
    largest = max(12.0, 1.2 * min(24.0, float(np.sqrt(width / clients * height / classes))))
    figure = new_figure((width + 130) / 72, (height + 70) / 72)
    axes = figure.add_subplot()
    client, label = np.nonzero(counts)
    samples = counts[client, label]

    def draw_circles(x: Any, y: Any, numbers: Any) -> Any:
        size = largest**2 * np.asarray(numbers) / samples.max()  # matplotlib's size is an area
        return axes.scatter(x, y, s=size, color=_COLOUR, alpha=0.75, linewidths=0, clip_on=False)

    draw_circles(client, label, samples)
    _label_split(axes, clients, classes, class_names)
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    sizes = sorted({_round_down(share * samples.max()) for share in (0.1, 0.4, 1.0)})
    figure.legend(
        [draw_circles([], [], [size]) for size in sizes],
        [f"{size:,}" for size in sizes],
        title="samples",
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=max(0.8, largest / 16),
        borderpad=1.2,
    )
    return figure


def _label_split(axes: Any, clients: int, classes: int, class_names: Sequence[str]) -> None:
    axes.set(xlabel="client", xlim=(-0.8, clients - 0.2))
    axes.set(ylabel="class", ylim=(-0.8, classes - 0.2))
    style_axes(axes, "both")
    axes.tick_params(length=0)
    axes.set_xticks(range(0, clients, _step(clients)))
    axes.set_yticks(range(0, classes, _step(classes)))
    if class_names and _step(classes) == 1:
        names = [name if len(name) <= 14 else f"{name[:13]}…" for name in class_names]
        axes.set_yticklabels(names, parse_math=False)


def _step(size: int) -> int:
    """Return the distance between two labels of an axis."""
    return next(step for step in (1, 10, 20, 50, 100, 200, 500, size) if size <= 30 * step)


def _round_down(number: float) -> int:
    """Round to one significant digit, and to at least 1."""
    unit = 10 ** int(np.log10(max(1, number)))
    return max(1, int(number // unit * unit))


def draw_bench(figures: Sequence[Any]) -> "Figure":
    """Draw the seconds per round and those of the plain loop, on a logarithmic scale."""
    shown = list(reversed(figures))
    figure = new_figure(8, 1 + 0.45 * len(shown))
    axes = figure.add_subplot()
    y = np.arange(len(shown))
    plain = [one.plain or 0 for one in shown]
    axes.barh(y + 0.2, [one.steady for one in shown], 0.38, color=_COLOUR, label="fedala")
    axes.barh(y - 0.2, plain, 0.38, color="#c9c9c9", label="plain loop")
    for i, one in enumerate(shown):
        text = f" {one.steady:.3g} s"
        if one.speedup:
            text += f", {one.speedup:.0f} × faster"
        axes.text(one.steady, i + 0.2, text, va="center", fontsize=8)
    axes.set_yticks(y, [one.case for one in shown], fontsize=8)
    axes.set(xscale="log", xlabel=f"seconds per round, {figures[0].device}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_curves(curves: Mapping[str, tuple[Sequence[int], Array]], ylabel: str) -> "Figure":
    """Draw the mean over the seeds, and a band of one standard deviation.

    `curves`: rounds and [seed, round] by label.
    """
    from matplotlib.ticker import MaxNLocator

    rows = (len(curves) + 2) // 3 if len(curves) > _MOST_INSIDE else 0
    figure = new_figure(6, 3.6 + 0.18 * rows)
    axes = figure.add_subplot()
    for i, (label, (rounds, values)) in enumerate(curves.items()):
        mean, deviation = mean_std(values)
        colour, gap = _COLOURS[i % 8], max(1, len(rounds) // 6)
        style: dict[str, Any] = {"color": colour, "linestyle": _DASHES[(i + i // 8) % 4]}
        if len(curves) > 1 or len(rounds) == 1:
            style |= {"marker": _MARKERS[i % 9], "markersize": 4, "markevery": (i % gap, gap)}
        axes.plot(rounds, mean, label=label, linewidth=1.6, **style)
        if len(values) > 1:
            low, high = mean - deviation, mean + deviation
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_axes(axes)
    if rows:
        figure.legend(loc="outside lower center", frameon=False, fontsize=7, ncols=3)
    else:
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw_client_scores(
    values: Mapping[str, Array], metric: Metric = ACCURACY, names: Mapping[int, str] | None = None
) -> "Figure":
    """Draw every client's score by label, client by client; `names` of clients by number."""
    clients = max(len(own) for own in values.values())
    figure = new_figure(float(np.clip(0.32 * clients, 6, 14)), 3.4)
    axes = figure.add_subplot()
    scores = np.full((len(values), clients), np.nan)
    for i, own in enumerate(values.values()):
        scores[i, : len(own)] = metric.scale * own
    known = np.flatnonzero(np.isfinite(scores).any(0))
    low, high = np.nanmin(scores[:, known], 0), np.nanmax(scores[:, known], 0)
    axes.vlines(known, low, high, color="#d5d9de", linewidth=1.5, zorder=1)
    for i, label in enumerate(values):
        offset = (i - (len(values) - 1) / 2) * min(0.16, 0.8 / len(values))
        style: dict[str, Any] = {"color": _COLOURS[i % 8], "zorder": 2, "linewidths": 0}
        style["marker"] = _MARKERS[i % 9]
        axes.scatter(np.arange(clients) + offset, scores[i], s=18, label=label, **style)
    axes.set(xlabel="client", ylabel=f"test {metric.title}{_unit(metric)}")
    ticks = range(0, clients, _step(clients))
    axes.set_xticks(ticks)
    if names:
        texts = [names.get(client, str(client)) for client in ticks]
        axes.set_xticklabels(texts, rotation=90, parse_math=False)
    style_axes(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_heat_map(
    values: Array,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    xlabel: str,
    ylabel: str,
    label: str,
    limits: tuple[float, float],
    has_root_scale: bool = False,
) -> "Figure":
    """Draw `values[row, column]` as colours."""
    from matplotlib.colors import Normalize, PowerNorm

    height = float(np.clip(0.24 * len(rows), 1.0, 12)) + 0.9
    width = float(np.clip(0.26 * len(columns), 4, 12)) + 1.6
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    scale = PowerNorm(0.5, *limits) if has_root_scale else Normalize(*limits)
    picture = axes.imshow(values, aspect="auto", cmap="Blues", norm=scale, interpolation="nearest")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = _step(len(names))
        axis.set_ticks(range(0, len(names), step), [_shorten(str(name)) for name in names[::step]])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    figure.colorbar(picture, ax=axes, label=label, pad=0.02).outline.set_visible(False)
    return figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from fedala.report.shown_figure import ShownFigure

    return ShownFigure(figsize=(width, height), layout="constrained")


def style_axes(axes: Any, grid: Literal["both", "x", "y"] = "y") -> None:
    """Give axes a light grid, two spines and small labels."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _shorten(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def draw_runs(runs: Sequence[Run]) -> dict[str, "Figure"]:
    """Draw what the page of these runs shows, as figures by file name."""
    series = list_series(runs)
    figures = {}
    metrics = list_metrics(series)
    for metric in metrics:
        own = [one for one in series if one.metric == metric]
        figures[metric.name] = _draw_column(own, metric.name, metric.scale, _unit(metric))
    figures["loss"] = _draw_column(series, "loss")
    for metric in metrics:
        scores = {one.label: one.client_scores for one in series if one.metric == metric}
        scores = {label: values for label, values in scores.items() if len(values)}
        if scores:
            name = "clients" if len(metrics) == 1 else f"clients-{metric.name}"
            owners = next(one.run.client_names for one in series if one.metric == metric)
            figures[name] = draw_client_scores(scores, metric, owners)
    splits = distinct_splits(runs)
    for run in splits:
        counts, _, names = run.count_samples()
        name = _make_file_name("split", run.name) if len(splits) > 1 else "split"
        figures[name] = draw_split(counts.astype(int), names)
    for one in series:
        if one.weights is not None:
            for name, figure in _draw_weights(*one.weights).items():
                figures[_make_file_name(f"weights-{name}", one.label)] = figure
    return figures


def _draw_column(series: Sequence[Series], column: str, scale: int = 1, unit: str = "") -> "Figure":
    """Draw a column of the history for each method."""
    curves = {}
    for one in series:
        rounds, values = collect_curves(one.result, column)
        curves[one.label] = rounds, scale * values
    return draw_curves(curves, TITLES[column] + unit)


def _unit(metric: Metric) -> str:
    return ", %" if metric.is_share else ""


def _draw_weights(array: Array, keys: list[list[Any]]) -> dict[str, "Figure"]:
    """Draw W by client and parameter in the last recorded round.

    For the first eight parameters, also by client and round, and as a histogram over the rounds.
    """
    _, rounds, clients, parameters = keys
    means = mean_std(array[..., 0])[0]  # round, client, parameter
    shares = mean_std(mean_std(array[..., 1:], axis=2)[0])[0]  # round, parameter, bin
    figures = {
        "parameters": draw_heat_map(
            means[-1],
            clients,
            parameters,
            xlabel=f"parameter, round {rounds[-1]}",
            ylabel="client",
            label="mean of W",
            limits=(_floor(means), 1),
        )
    }
    tenths = [f"{k / 10:.1f}–{(k + 1) / 10:.1f}" for k in reversed(range(10))]
    for i, parameter in enumerate(parameters[:8]):
        own = means[..., i].T
        figures[f"rounds-{parameter}"] = draw_heat_map(
            own,
            clients,
            rounds,
            xlabel="round",
            ylabel="client",
            label=f"mean of W, {_shorten(parameter)}",
            limits=(_floor(own), 1),
        )
        figures[f"histogram-{parameter}"] = draw_heat_map(
            100 * shares[:, i, ::-1].T,
            tenths,
            rounds,
            xlabel="round",
            ylabel="W",
            label=f"% of {_shorten(parameter)}",
            limits=(0, 100),
            has_root_scale=True,
        )
    return figures


def _floor(values: Array) -> float:
    """Return the tenth below the smallest value, at most 0.9.

    W mostly stays near one: a scale from zero would show nothing.
    """
    return min(0.9, float(np.floor(10 * np.min(values, initial=1, where=np.isfinite(values))) / 10))


def _make_file_name(kind: str, label: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", f"{kind}-{label}", flags=re.ASCII).strip("-.")[:80]


def write_all(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every figure of these runs into a folder, which is made if it does not exist."""
    make_folder(folder)
    return write(draw_runs(runs), folder)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, before anything is written."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    blocking = folder if os.path.lexists(folder) else nearest_existing_parent(folder)
    if not blocking.is_dir():
        raise UserError(
            f"The folder {folder} for the plots cannot be made: {blocking} is not a folder."
        )


def make_folder(folder: Path) -> None:
    """Make the folder for plots, after a check that there is matplotlib."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {folder} for the plots cannot be made: {error.strerror}."
        ) from None


def write(figures: Mapping[str, "Figure"], folder: Path) -> list[Path]:
    """Write figures by name, each as .png for the screen and as .pdf for print."""
    written = []
    for name, figure in figures.items():
        for suffix in ("png", "pdf"):
            written.append(folder / f"{name}.{suffix}")
            save(figure, written[-1])
    return written
