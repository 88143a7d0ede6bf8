"""Plots, as image files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedala.data.dataset import need
from fedala.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = (".png", ".pdf", ".svg")
_COLOUR = "#2a6f97"


def check(path: Path) -> None:
    """Refuses what could not be plotted or written, before any work is done."""
    need("matplotlib", "matplotlib", "plots", "Plotting")
    if path.suffix.lower() not in _KINDS:
        raise UserError(f"A plot is a .png, .pdf or .svg file, not {path}.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"The plot {path} cannot be written: there is no folder {path.absolute().parent}.")


def save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"The plot cannot be written to {path} ({error.strerror}).") from None


def bubbles(counts: "np.ndarray[Any, Any]", class_names: Sequence[str] = (), title: str = "") -> "Figure":
    """Who holds what, as the paper draws it: clients × classes, circles whose area is the number of samples."""
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    # In points. Up to about thirty clients or classes each has room of its own; more of them move closer together.
    width, height = float(np.clip(24 * clients, 240, 760)), float(np.clip(24 * classes, 120, 640))
    largest = max(12.0, 1.2 * min(24.0, float(np.sqrt(width / clients * height / classes))))
    figure = Figure(figsize=((width + 130) / 72, (height + 70) / 72), layout="constrained")
    axes = figure.add_subplot()
    client, label = np.nonzero(counts)
    held = counts[client, label]

    def circles(x: Any, y: Any, samples: Any) -> Any:
        size = largest**2 * np.asarray(samples) / held.max()  # matplotlib's size is an area
        return axes.scatter(x, y, s=size, color=_COLOUR, alpha=0.75, linewidths=0, clip_on=False)

    circles(client, label, held)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.set_axisbelow(True)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xticks(range(0, clients, _step(clients)))
    axes.set_yticks(range(0, classes, _step(classes)))
    if class_names and _step(classes) == 1:
        axes.set_yticklabels([name if len(name) <= 14 else f"{name[:13]}…" for name in class_names], parse_math=False)
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
    from matplotlib.figure import Figure

    shown = list(reversed(figures))
    figure = Figure(figsize=(8, 1 + 0.45 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    axes.barh(places + 0.2, [f.steady for f in shown], 0.38, color=_COLOUR, label="fedala")
    axes.barh(places - 0.2, [f.plain or 0 for f in shown], 0.38, color="#c9c9c9", label="plain loop")
    for place, f in zip(places, shown, strict=True):
        text = f" {f.steady:.3g} s" + (f", {f.speedup:.0f} × faster" if f.speedup else "")
        axes.text(f.steady, place + 0.2, text, va="center", fontsize=8)
    axes.set_yticks(places, [f.case for f in shown], fontsize=8)
    axes.set(xscale="log", xlabel=f"seconds per round, {figures[0].device}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure
