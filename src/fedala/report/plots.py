"""Plots, as image files."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedala.errors import UserError, import_optional
from fedala.report.page import COLUMNS, lines
from fedala.report.runs import Array, Run, curves, distinct_splits, mean_std
from fedala.runs.folder import nearest_existing_parent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = (".png", ".pdf", ".svg")
_COLOUR = "#2a6f97"
#: Of one method after the other; they can be told apart by everybody, and in grey by their dashes.
_COLOURS = ("#0a63c2", "#c2470f", "#14784a", "#7c46c2", "#b4307c", "#876200", "#0b737d", "#515a65")
_DASHES = ("-", "--", ":")


def check(path: Path) -> None:
    """Refuses what could not be plotted or written, before any work is done."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    if path.suffix.lower() not in _KINDS:
        raise UserError(f"A plot is a .png, .pdf or .svg file, not {path}.")
    if path.is_dir():
        raise UserError(f"The plot {path} cannot be written: it is a folder.")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"The plot {path} cannot be written: there is no folder {path.absolute().parent}."
        )


def save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"The plot cannot be written to {path} ({error.strerror}).") from None


def bubbles(
    counts: "np.ndarray[Any, Any]", class_names: Sequence[str] = (), title: str = ""
) -> "Figure":
    """Who holds what, as the paper draws it: clients × classes, circles whose area is the number of samples."""
    clients, classes = counts.shape
    # In points. Up to about thirty clients or classes each has room of its own; more of them move closer together.
    width, height = float(np.clip(24 * clients, 240, 760)), float(np.clip(24 * classes, 120, 640))
    largest = max(12.0, 1.2 * min(24.0, float(np.sqrt(width / clients * height / classes))))
    figure = blank((width + 130) / 72, (height + 70) / 72)
    axes = figure.add_subplot()
    client, label = np.nonzero(counts)
    held = counts[client, label]

    def circles(x: Any, y: Any, samples: Any) -> Any:
        size = largest**2 * np.asarray(samples) / held.max()  # matplotlib's size is an area
        return axes.scatter(x, y, s=size, color=_COLOUR, alpha=0.75, linewidths=0, clip_on=False)

    circles(client, label, held)
    axes.set(
        xlabel="client", ylabel="class", xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2)
    )
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    quiet(axes, "both")
    axes.tick_params(length=0)
    axes.set_xticks(range(0, clients, _step(clients)))
    axes.set_yticks(range(0, classes, _step(classes)))
    if class_names and _step(classes) == 1:
        axes.set_yticklabels(
            [name if len(name) <= 14 else f"{name[:13]}…" for name in class_names], parse_math=False
        )
    legend = sorted({_round_down(share * held.max()) for share in (0.1, 0.4, 1.0)})
    figure.legend(
        [circles([], [], [size]) for size in legend],
        [f"{size:,}" for size in legend],
        title="samples",
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=max(0.8, largest / 16),
        borderpad=1.2,
    )
    return figure


def _step(size: int) -> int:
    """Between two labels of an axis."""
    return next(step for step in (1, 10, 20, 50, 100, 200, 500, size) if size <= 30 * step)


def _round_down(number: float) -> int:
    """To one significant digit, and at least 1."""
    unit = 10 ** int(np.log10(max(1, number)))
    return max(1, int(number // unit * unit))


def bench(figures: Sequence[Any]) -> "Figure":
    """Seconds per round beside the plain loop's, on a logarithmic scale."""
    shown = list(reversed(figures))
    figure = blank(8, 1 + 0.45 * len(shown))
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    axes.barh(places + 0.2, [f.steady for f in shown], 0.38, color=_COLOUR, label="fedala")
    axes.barh(
        places - 0.2, [f.plain or 0 for f in shown], 0.38, color="#c9c9c9", label="plain loop"
    )
    for place, f in zip(places, shown, strict=True):
        text = f" {f.steady:.3g} s" + (f", {f.speedup:.0f} × faster" if f.speedup else "")
        axes.text(f.steady, place + 0.2, text, va="center", fontsize=8)
    axes.set_yticks(places, [f.case for f in shown], fontsize=8)
    axes.set(xscale="log", xlabel=f"seconds per round, {figures[0].device}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def learning(found: Mapping[str, tuple[Sequence[int], Array]], ylabel: str) -> "Figure":
    """Curves over the rounds by label: (rounds, seeds × rounds); the mean, with a band of one standard deviation."""
    from matplotlib.ticker import MaxNLocator

    figure = blank(6, 3.6)
    axes = figure.add_subplot()
    for place, (label, (rounds, values)) in enumerate(found.items()):
        mean, deviation = mean_std(values)
        style: dict[str, Any] = {"color": _COLOURS[place % 8], "linestyle": _DASHES[place // 8 % 3]}
        axes.plot(
            rounds,
            mean,
            label=label,
            linewidth=1.6,
            **style,
            marker="o" if len(rounds) == 1 else None,
        )
        if len(values) > 1:
            axes.fill_between(
                rounds,
                mean - deviation,
                mean + deviation,
                color=style["color"],
                alpha=0.15,
                linewidth=0,
            )
    axes.set(xlabel="round", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    quiet(axes)
    axes.legend(frameon=False, fontsize=8, ncols=1 + len(found) // 9)
    return figure


def client_accuracies(values: Mapping[str, Array]) -> "Figure":
    """Every client's accuracy by label, client by client."""
    clients = max(len(own) for own in values.values())
    figure = blank(float(np.clip(0.32 * clients, 6, 14)), 3.4)
    axes = figure.add_subplot()
    every = np.full((len(values), clients), np.nan)
    for place, own in enumerate(values.values()):
        every[place, : len(own)] = 100 * own
    there = np.flatnonzero(np.isfinite(every).any(0))
    axes.vlines(
        there,
        np.nanmin(every[:, there], 0),
        np.nanmax(every[:, there], 0),
        color="#d5d9de",
        linewidth=1.5,
        zorder=1,
    )
    for place, label in enumerate(values):
        aside = (place - (len(values) - 1) / 2) * min(0.16, 0.8 / len(values))
        axes.scatter(
            np.arange(clients) + aside,
            every[place],
            s=18,
            label=label,
            color=_COLOURS[place % 8],
            zorder=2,
            linewidths=0,
        )
    axes.set(xlabel="client", ylabel="test accuracy, %")
    axes.set_xticks(range(0, clients, _step(clients)))
    quiet(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def heat(
    values: Array,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    xlabel: str,
    ylabel: str,
    label: str,
    limits: tuple[float, float],
    norm: str = "linear",
) -> "Figure":
    """A heat map of `values[row, column]`."""
    from matplotlib.colors import Normalize, PowerNorm

    height = float(np.clip(0.24 * len(rows), 1.0, 12)) + 0.9
    width = float(np.clip(0.26 * len(columns), 4, 12)) + 1.6
    figure = blank(width, height)
    axes = figure.add_subplot()
    scale = PowerNorm(0.5, *limits) if norm == "root" else Normalize(*limits)
    picture = axes.imshow(values, aspect="auto", cmap="Blues", norm=scale, interpolation="nearest")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = _step(len(names))
        axis.set_ticks(range(0, len(names), step), [_short(str(name)) for name in names[::step]])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    figure.colorbar(picture, ax=axes, label=label, pad=0.02).outline.set_visible(False)
    return figure


def blank(width: float, height: float) -> "Figure":
    """In inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def quiet(axes: Any, grid: Literal["both", "x", "y"] = "y") -> None:
    """No more lines than one needs."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def of_runs(runs: Sequence[Run]) -> dict[str, "Figure"]:
    """What the page of these runs shows, as figures for print, by file name."""
    series = lines(runs)
    figures = {}
    for name, column, factor in (("accuracy", "accuracy", 100), ("loss", "loss", 1)):
        found = {one.label: curves(one.result, column) for one in series}
        unit = ", %" if factor == 100 else ""
        scaled = {label: (rounds, factor * values) for label, (rounds, values) in found.items()}
        figures[name] = learning(scaled, COLUMNS[column] + unit)
    accuracies = {one.label: one.of_clients for one in series}
    if any(len(own) for own in accuracies.values()):
        figures["clients"] = client_accuracies(
            {label: own for label, own in accuracies.items() if len(own)}
        )
    splits = distinct_splits(runs)
    for run in splits:
        counts, _, names = run.counts()
        figures[_file("split", run.name, len(splits) > 1)] = bubbles(counts.astype(int), names)
    for one in series:
        if one.spread is not None:
            for name, figure in _weights(*one.spread).items():
                figures[_file(f"weights-{name}", one.label, True)] = figure
    return figures


def _weights(cube: Array, along: list[list[Any]]) -> dict[str, "Figure"]:
    """W by client and parameter in the last recorded round; of the first eight parameters, also by client and round, and as a
    histogram over the rounds."""
    _, rounds, clients, parameters = along
    means = mean_std(cube[..., 0])[0]  # round, client, parameter
    shares = mean_std(mean_std(cube[..., 1:], axis=2)[0])[0]  # round, parameter, bin
    figures = {
        "parameters": heat(
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
    for place, parameter in enumerate(parameters[:8]):
        own = means[..., place].T
        figures[f"rounds-{parameter}"] = heat(
            own,
            clients,
            rounds,
            xlabel="round",
            ylabel="client",
            label=f"mean of W, {_short(parameter)}",
            limits=(_floor(own), 1),
        )
        figures[f"histogram-{parameter}"] = heat(
            100 * shares[:, place, ::-1].T, tenths, rounds, xlabel="round", ylabel="W", label=f"% of {_short(parameter)}",
            limits=(0, 100), norm="root",
        )  # fmt: skip
    return figures


def _floor(values: Array) -> float:
    """The tenth under the smallest of them: W mostly stays near one, and a scale from zero would show nothing."""
    return min(0.9, float(np.floor(10 * np.min(values, initial=1, where=np.isfinite(values))) / 10))


def _file(kind: str, label: str, several: bool) -> str:
    return re.sub(r"[^\w.+-]+", "-", f"{kind}-{label}" if several else kind, flags=re.ASCII).strip(
        "-."
    )[:80]


def write_all(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Every figure of these runs, in a folder that is made if need be."""
    ready(folder)
    return write(of_runs(runs), folder)


def check_folder(folder: Path) -> None:
    """Refuse a place where no folder of plots can be, before anything is written."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    blocking = folder if os.path.lexists(folder) else nearest_existing_parent(folder)
    if not blocking.is_dir():
        raise UserError(
            f"The folder {folder} for the plots cannot be made: {blocking} is not a folder."
        )


def ready(folder: Path) -> None:
    """Refuses to begin where nothing could be plotted, or where there can be no such folder."""
    import_optional("matplotlib", "matplotlib", "plots", "Plotting")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {folder} for the plots cannot be made: {error.strerror}."
        ) from None


def write(figures: Mapping[str, "Figure"], folder: Path) -> list[Path]:
    """Figures by name, each as .png to look at and as .pdf to print."""
    written = []
    for name, figure in figures.items():
        for kind in ("png", "pdf"):
            written.append(folder / f"{name}.{kind}")
            save(figure, written[-1])
    return written
