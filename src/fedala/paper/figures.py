"""The paper's figures: what ALA learns, where it leads a client, how the loss falls, and who holds what."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fedala.errors import UserError, spreadsheet_safe
from fedala.io import files
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import call
from fedala.lanes.local_aggregation import Outcome
from fedala.lanes.trees import Params
from fedala.methods import Method, WithALA
from fedala.methods.base import State
from fedala.paper.experiments import Cell, Drawing, Setting
from fedala.paper.running import Shelf
from fedala.report import plots
from fedala.runs.build import build_simulation
from fedala.runs.observer import Stopped
from fedala.runs.plan import Plan, plan
from fedala.runs.tables import csv_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Figures = Iterator[tuple[str, "Figure", Rows]]
_BEGIN, _END, _BLUE = (
    "#c1121f",
    "#2b9348",
    "#1d4e89",
)  # the paper's red circles and green squares, and FedALA's way
_GRID = 21  # points along each side of a loss surface
_SAMPLES = 400  # of a client, at most, that a loss surface is computed on


def draw(
    drawing: Drawing,
    shelf: Shelf,
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[Path]:
    """Runs what a figure needs and writes it as .png, .pdf and .csv. Settings whose data there is not are left out.

    `stop` is asked before every round; if it says so, the figure ends as `Stopped`, and nothing of it is written.
    """
    plots.ready(folder)
    there = [setting for setting in drawing.settings if _is_there(setting, shelf)]
    if not there:
        raise UserError(" ".join(shelf.missing.values()))
    written = []
    for name, figure, rows in _MAKERS[drawing.name](
        replace(drawing, settings=tuple(there)), shelf, options, stop
    ):
        table = folder / f"{name}.csv"
        written += [*plots.write({name: figure}, folder), table]
        lines = [{key: spreadsheet_safe(value) for key, value in row.items()} for row in rows]
        files.write_file(table, csv_text(list(rows[0]), lines, header=True).encode())
    return written


def _is_there(setting: Setting, shelf: Shelf) -> bool:
    try:
        shelf.federated(setting)
    except UserError:
        return False  # `Shelf.missing` keeps why
    return True


# --- watching a run ------------------------------------------------------------------------------------------------


class Watched:
    """A method, and somebody who sees every model that it initialises and trains."""

    def __init__(self, method: Method, see: Callable[[Cohort, str, Params], None]) -> None:
        self.method, self.see = method, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        initialized, state = self.method.initialize(cohort, received, state)
        self.see(cohort, "initialised", initialized)
        return initialized, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        upload, state = self.method.train(cohort, initialized, received, state)
        self.see(cohort, "trained", upload)
        return upload, state


@dataclass(frozen=True)
class Learning(WithALA):
    """FedALA, with the losses of a client's weight-learning epochs, by round."""

    client: int = 0
    losses: dict[int, list[float]] = field(default_factory=dict)

    def note(self, cohort: Cohort, outcome: Outcome) -> None:
        super().note(cohort, outcome)
        if self.client in cohort.clients:
            lane = list(cohort.clients).index(self.client)
            self.losses[cohort.round] = outcome.losses[lane, : int(outcome.epochs[lane])].tolist()


def _plan(
    method: str, drawing: Drawing, setting: Setting, shelf: Shelf, options: Mapping[str, Any]
) -> Plan:
    hyperparameters = tuple(drawing.set.items()) if method == "fedala" else ()
    values = {"rounds": drawing.rounds, "seeds": 1, **options}
    # What is to be seen is watched: the accuracy is of no interest.
    config = Cell(setting, method, hyperparameters).config(**values, eval_every=values["rounds"])
    return plan(config, shelf.federated(setting))


def _run(checked: Plan, method: Any, stop: Callable[[], bool]) -> None:
    rounds = int(checked.config.rounds or 1)

    def after(round: int) -> None:
        if round < rounds and stop():
            raise Stopped(f"{round} of {rounds} rounds of {method.title}")

    after(0)
    with torch.random.fork_rng(devices=[checked.device] if checked.device.type == "cuda" else []):
        for _ in build_simulation(checked, cast(Method, method)).run(after=after):
            pass


# --- the figures ---------------------------------------------------------------------------------------------------


def _weight_learning(
    drawing: Drawing, shelf: Shelf, options: Mapping[str, Any], stop: Callable[[], bool]
) -> Figures:
    rows: Rows = []
    for setting in drawing.settings:
        checked = _plan("fedala", drawing, setting, shelf, options)
        base = cast(WithALA, checked.methods[0])
        learning = Learning(base.base, base.ala, drawing.client)
        _run(checked, learning, stop)
        for round, losses in learning.losses.items():
            rows += [
                {"dataset": setting.dataset, "iteration": round, "epoch": epoch, "loss": loss}
                for epoch, loss in enumerate(losses, 1)
            ]
    yield drawing.name, _weight_learning_plot(rows, drawing.client), rows


def _weight_learning_plot(rows: Rows, client: int) -> "Figure":
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = plots.blank(5.2 * len(datasets), 3.4)
    for place, dataset in enumerate(datasets, 1):
        axes = figure.add_subplot(1, len(datasets), place)
        own = [row for row in rows if row["dataset"] == dataset]
        iterations = list(dict.fromkeys(row["iteration"] for row in own))
        seen = 0
        for iteration in iterations:
            losses = [row["loss"] for row in own if row["iteration"] == iteration]
            epochs = np.arange(seen + 1, seen + len(losses) + 1)
            first = iteration == iterations[0]
            axes.plot(
                epochs,
                losses,
                color=_BEGIN if first else _BLUE,
                marker="o",
                markersize=3,
                linewidth=1.2,
            )
            axes.axvspan(
                seen + 0.5,
                epochs[-1] + 0.5,
                color="#f3f4f6" if iteration % 2 == 0 else "#ffffff",
                zorder=0,
            )
            label = f"iteration {iteration}:\nthe initial stage" if first else str(iteration)
            axes.text(
                (seen + 1 + epochs[-1]) / 2, 0.98, label, transform=axes.get_xaxis_transform(),
                ha="center", va="top", fontsize=7, color=_BEGIN if first else _BLUE,
            )  # fmt: skip
            seen = int(epochs[-1])
        top = max(row["loss"] for row in own)
        axes.set(
            xlim=(0.5, seen + 0.5),
            ylim=(0, 1.25 * top),
            xlabel="epochs of weight learning",
            ylabel="local loss",
        )
        _tidy(axes, f"{dataset}, client {client}")
    return figure


def _trajectory(
    drawing: Drawing, shelf: Shelf, options: Mapping[str, Any], stop: Callable[[], bool]
) -> Figures:
    [setting] = drawing.settings
    seen: dict[tuple[str, int, str], Tensor] = {}
    names: dict[str, torch.Size] = {}
    last = int(options.get("rounds", drawing.rounds))
    if last <= drawing.first:
        raise UserError(
            f"{drawing.name} shows iterations {drawing.first} to the last: it needs more than {last} rounds."
        )
    for method in ("fedavg", "fedala"):
        checked = _plan(method, drawing, setting, shelf, options)

        def see(cohort: Cohort, when: str, model: Params, method: str = method) -> None:
            if drawing.first <= cohort.round <= last and drawing.client in cohort.clients:
                lane = list(cohort.clients).index(drawing.client)
                names.update({name: value.shape[1:] for name, value in model.items()})
                seen[method, cohort.round, when] = torch.cat(
                    [v[lane].detach().flatten().float() for v in model.values()]
                )

        _run(checked, Watched(checked.methods[0], see), stop)
    keys = sorted(seen, key=lambda key: (key[0], key[1], key[2]))
    mean, axes, places = _principal(torch.stack([seen[key] for key in keys]))
    rows: Rows = [
        {"method": method, "iteration": round, "model": when, "c1": float(c1), "c2": float(c2)}
        for (method, round, when), (c1, c2) in zip(keys, places.tolist(), strict=True)
    ]
    surface = _surface(checked, drawing.client, names, mean, axes, places)
    switched = int(drawing.set["fedala.start_round"])
    name = f"{setting.dataset}, client {drawing.client}, iterations {drawing.first} to {last}; ALA from {switched} on"
    yield drawing.name, _trajectory_plot(rows, surface, name), rows


def _principal(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, the two principal components (2 × d), and the points' coordinates in their plane."""
    mean = points.mean(0)
    centred = points - mean
    # The points are few and long: the eigenvectors of their Gram matrix give the components.
    _, vectors = torch.linalg.eigh((centred @ centred.T).double())
    components = vectors[:, -2:].flip(1).T.to(centred) @ centred
    components = components / components.norm(dim=1, keepdim=True)
    return mean, components, centred @ components.T


def _surface(
    checked: Plan,
    client: int,
    names: Mapping[str, torch.Size],
    mean: Tensor,
    components: Tensor,
    places: Tensor,
) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """The client's training loss over the plane of the components."""
    task = build_simulation(checked, checked.methods[0]).task
    rows = torch.from_numpy(task.parts["train"][client][:_SAMPLES]).to(task.device)
    x, y = task.inputs(rows), task.targets(rows)
    low, high = places.amin(0), places.amax(0)
    margin = 0.15 * (high - low)
    sides = [
        torch.linspace(float(a), float(b), _GRID)
        for a, b in zip(low - margin, high + margin, strict=True)
    ]
    losses = np.zeros((_GRID, _GRID))
    sizes = [shape.numel() for shape in names.values()]
    with task.use_mode(training=False), torch.no_grad():
        for i, c1 in enumerate(sides[0]):
            for j, c2 in enumerate(sides[1]):
                flat = mean + c1.to(mean) * components[0] + c2.to(mean) * components[1]
                parts = zip(names.items(), flat.split(sizes), strict=True)
                state = {name: part.view(shape) for (name, shape), part in parts}
                losses[j, i] = float(task.loss(call(task.model, state, x), y))
    return sides[0].numpy(), sides[1].numpy(), losses


def _trajectory_plot(rows: Rows, surface: tuple[Any, Any, Any], name: str) -> "Figure":
    figure = plots.blank(7.2, 5.6)
    axes = figure.add_subplot()
    c1, c2, losses = surface
    levels = np.geomspace(max(float(losses.min()), 1e-8), max(float(losses.max()), 2e-8), 14)
    filled = axes.contourf(c1, c2, losses, levels, norm="log", cmap="Greys", alpha=0.35)
    axes.contour(c1, c2, losses, levels, norm="log", colors="#9aa0a6", linewidths=0.5)
    bar = figure.colorbar(filled, ax=axes, shrink=0.8, pad=0.02, ticks=levels[::3], format="%.2g")
    bar.set_label("local training loss", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.ax.minorticks_off()
    for method, colour, title in (("fedavg", "#111111", "FedAvg"), ("fedala", _BLUE, "FedALA")):
        own = sorted(
            (r for r in rows if r["method"] == method), key=lambda r: (r["iteration"], r["model"])
        )
        way = np.array([[row["c1"], row["c2"]] for row in own])
        steps = np.diff(way, axis=0)
        axes.quiver(
            way[:-1, 0], way[:-1, 1], steps[:, 0], steps[:, 1], angles="xy", scale_units="xy", scale=1,
            color=colour, width=0.0022, headwidth=4.5, headlength=6, alpha=0.75, zorder=2,
        )  # fmt: skip
        axes.plot([], [], color=colour, label=title)
        up = way[-1, 1] > way[0, 1]
        axes.annotate(
            title, way[-1], xytext=(0, 7 if up else -7), textcoords="offset points", ha="center",
            va="bottom" if up else "top", fontsize=9, fontweight="bold", color=colour, zorder=4,
        )  # fmt: skip
    for when, marker, colour, title in (
        ("initialised", "o", _BEGIN, "at the beginning of an iteration"),
        ("trained", "s", _END, "at its end"),
    ):
        own = [row for row in rows if row["model"] == when]
        points = [row["c1"] for row in own], [row["c2"] for row in own]
        axes.scatter(
            *points,
            marker=marker,
            s=16,
            color=colour,
            edgecolors="white",
            linewidths=0.4,
            label=title,
            zorder=3,
        )
    axes.set(xlabel="C1", ylabel="C2")
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, loc="best")
    _tidy(axes, name)
    axes.grid(False)
    return figure


def _convergence(
    drawing: Drawing, shelf: Shelf, options: Mapping[str, Any], stop: Callable[[], bool]
) -> Figures:
    [setting] = drawing.settings
    sums: dict[tuple[int, str], list[Tensor]] = {}
    checked = _plan("fedala", drawing, setting, shelf, options)
    last = int(checked.config.rounds or 0)

    def see(cohort: Cohort, when: str, model: Params) -> None:
        if (cohort.round == 1 or cohort.round % drawing.every == 0) and cohort.round <= last:
            score = cohort.evaluate(model, "train")
            sums.setdefault((cohort.round, when), []).append(
                torch.stack([score.loss.sum(), score.samples.sum()])
            )

    _run(checked, Watched(checked.methods[0], see), stop)
    rows: Rows = []
    for (round, when), parts in sorted(sums.items()):
        loss, samples = torch.stack([part.double().cpu() for part in parts]).sum(0).tolist()
        rows.append({"iteration": round, "model": when, "loss": loss / samples})
    yield (
        drawing.name,
        _convergence_plot(rows, f"FedALA on {setting.dataset}, {setting.partition}"),
        rows,
    )


def _convergence_plot(rows: Rows, name: str) -> "Figure":
    figure = plots.blank(6.4, 3.6)
    axes = figure.add_subplot()
    for when, marker, colour in (("initialised", "o", _BEGIN), ("trained", "s", _END)):
        own = [row for row in rows if row["model"] == when]
        points = [row["iteration"] for row in own], [row["loss"] for row in own]
        axes.plot(
            *points,
            marker=marker,
            markersize=4,
            linewidth=0.8,
            color=colour,
            label=f"{when} models",
        )
    axes.set(xlabel="iteration", ylabel="training loss, all clients", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes, name)
    return figure


def _splits(
    drawing: Drawing, shelf: Shelf, options: Mapping[str, Any], stop: Callable[[], bool]
) -> Figures:
    for setting in sorted(drawing.settings, key=lambda setting: setting.dataset):
        federation = shelf.federated(setting)
        counts, data = federation.counts(), federation.dataset
        name = (
            f"{drawing.name}-{setting.name}"
            if setting.dataset != "digits"
            else f"{drawing.name}-{setting.partition}"
        )
        rows: Rows = [
            {"client": client, "class": label, "samples": int(counts[client, label])}
            for client, label in np.argwhere(counts).tolist()
        ]
        note = f" ({data.note})" if data.note else ""
        title = f"{setting.dataset}{note}, {setting.partition}, {setting.clients} clients"
        yield name.replace(":", "-"), plots.bubbles(counts, data.class_names, title), rows


_MAKERS: dict[str, Callable[[Drawing, Shelf, Mapping[str, Any], Callable[[], bool]], Figures]] = {
    "figure-wl": _weight_learning,
    "figure-traj": _trajectory,
    "figure-con": _convergence,
    "figure-splits": _splits,
}


def _tidy(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    plots.quiet(axes, "both")
