"""Draw the paper's figures from rows: weight learning, trajectories, convergence."""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedala.report import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
#: The paper's red circles and green squares, and FedALA's path.
_BEGIN, _END, _BLUE = "#c1121f", "#2b9348", "#1d4e89"
_MODELS = (
    ("initialised", "o", _BEGIN, "at the beginning of an iteration"),
    ("trained", "s", _END, "at its end"),
)


def draw_weight_learning(rows: Rows, client: int) -> "Figure":
    """Draw the loss over the epochs of weight learning, side by side for each dataset."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = plots.new_figure(5.2 * len(datasets), 3.4)
    for i, dataset in enumerate(datasets, 1):
        axes = figure.add_subplot(1, len(datasets), i)
        own = [row for row in rows if row["dataset"] == dataset]
        epochs = _draw_iterations(axes, own)
        top = 1.25 * max(row["loss"] for row in own)
        axes.set(xlim=(0.5, epochs + 0.5), ylim=(0, top))
        axes.set(xlabel="epochs of weight learning", ylabel="local loss")
        _finish(axes, f"{dataset}, client {client}")
    return figure


def _draw_iterations(axes: "Axes", rows: Rows) -> int:
    """Draw the losses one iteration after the other; return the number of epochs."""
    end = 0
    iterations = list(dict.fromkeys(row["iteration"] for row in rows))
    for iteration in iterations:
        losses = [row["loss"] for row in rows if row["iteration"] == iteration]
        start, end = end, end + len(losses)
        is_first = iteration == iterations[0]
        colour = _BEGIN if is_first else _BLUE
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.2}
        axes.plot(np.arange(start + 1, end + 1), losses, **style)
        band = "#f3f4f6" if iteration % 2 == 0 else "#ffffff"
        axes.axvspan(start + 0.5, end + 0.5, color=band, zorder=0)
        axes.text(
            (start + 1 + end) / 2,
            0.98,
            f"iteration {iteration}:\nthe initial stage" if is_first else str(iteration),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=7,
            color=colour,
        )
    return end


def draw_trajectory(rows: Rows, surface: tuple[Any, Any, Any], title: str) -> "Figure":
    """Draw the models of a client in a plane, over its training loss.

    `surface`: the coordinates of a grid, and the loss on it.
    """
    figure = plots.new_figure(7.2, 5.6)
    axes = figure.add_subplot()
    _draw_surface(figure, axes, *surface)
    _draw_path(axes, [row for row in rows if row["method"] == "fedavg"], "#111111", "FedAvg")
    _draw_path(axes, [row for row in rows if row["method"] == "fedala"], _BLUE, "FedALA")
    for model, marker, colour, label in _MODELS:
        own = [row for row in rows if row["model"] == model]
        edge: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4}
        x, y = [row["c1"] for row in own], [row["c2"] for row in own]
        axes.scatter(x, y, s=16, marker=marker, color=colour, label=label, zorder=3, **edge)
    axes.set(xlabel="C1", ylabel="C2")
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, loc="best")
    _finish(axes, title)
    axes.grid(False)
    return figure


def _draw_surface(figure: "Figure", axes: "Axes", x: Any, y: Any, losses: Any) -> None:
    levels = np.geomspace(max(float(losses.min()), 1e-8), max(float(losses.max()), 2e-8), 14)
    filled = axes.contourf(x, y, losses, levels, norm="log", cmap="Greys", alpha=0.35)
    axes.contour(x, y, losses, levels, norm="log", colors="#9aa0a6", linewidths=0.5)
    bar = figure.colorbar(filled, ax=axes, shrink=0.8, pad=0.02, ticks=levels[::3], format="%.2g")
    bar.set_label("local training loss", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.ax.minorticks_off()


def _draw_path(axes: "Axes", rows: Rows, colour: str, title: str) -> None:
    """Draw arrows from each model to the next, and the title at the last one."""
    rows = sorted(rows, key=lambda row: (row["iteration"], row["model"]))
    path = np.array([[row["c1"], row["c2"]] for row in rows])
    scale: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1}
    shape: dict[str, Any] = {"width": 0.0022, "headwidth": 4.5, "headlength": 6}
    steps = np.diff(path, axis=0)
    axes.quiver(*path[:-1].T, *steps.T, color=colour, alpha=0.75, zorder=2, **scale, **shape)
    axes.plot([], [], color=colour, label=title)
    leads_up = path[-1, 1] > path[0, 1]
    axes.annotate(
        title,
        path[-1],
        xytext=(0, 7 if leads_up else -7),
        textcoords="offset points",
        ha="center",
        va="bottom" if leads_up else "top",
        fontsize=9,
        fontweight="bold",
        color=colour,
        zorder=4,
    )


def draw_convergence(rows: Rows, title: str) -> "Figure":
    """Draw the training loss of initialised and of trained models over the iterations."""
    figure = plots.new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    for model, marker, colour, _ in _MODELS:
        own = [row for row in rows if row["model"] == model]
        style: dict[str, Any] = {"marker": marker, "markersize": 4, "linewidth": 0.8}
        x, y = [row["iteration"] for row in own], [row["loss"] for row in own]
        axes.plot(x, y, color=colour, label=f"{model} models", **style)
    axes.set(xlabel="iteration", ylabel="training loss, all clients", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    _finish(axes, title)
    return figure


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    plots.style_axes(axes, "both")
