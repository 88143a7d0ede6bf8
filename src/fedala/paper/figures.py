"""The paper's figures: run what they need, and write them with their numbers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fedala.cells.cell import Cell, Setting
from fedala.cells.running import DataCache
from fedala.errors import UserError, spreadsheet_safe
from fedala.io import files
from fedala.lanes import Cohort, Message, Params, State
from fedala.lanes.layers import call
from fedala.lanes.local_aggregation import Outcome
from fedala.methods import Method
from fedala.methods.fedala import FedALA
from fedala.paper.experiments import Drawing
from fedala.paper.figure_plots import (
    Rows,
    draw_convergence,
    draw_trajectory,
    draw_weight_learning,
)
from fedala.report import plots
from fedala.runs.build import build_simulation
from fedala.runs.devices import use_device
from fedala.runs.observer import Stopped
from fedala.runs.plan import Plan, plan
from fedala.runs.tables import csv_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GRID = 21  # points along each side of a loss surface
_MOST_SAMPLES = 400  # of the client, for a loss surface


@dataclass(frozen=True)
class Request:
    """A figure to draw, its data, and how to run it."""

    drawing: Drawing
    cache: DataCache
    options: Mapping[str, Any]
    """Options of a run that replace the paper's, such as `rounds` and `device`."""
    should_stop: Callable[[], bool]

    @property
    def rounds(self) -> int:
        return int(self.options.get("rounds", self.drawing.rounds))

    def plan(self, method: str, setting: Setting) -> Plan:
        """Return the plan of a run that is observed, so its accuracy is evaluated only once."""
        hyperparameters = tuple(self.drawing.set.items()) if method == "fedala" else ()
        values = {"seeds": 1, **self.options, "rounds": self.rounds, "eval_every": self.rounds}
        config = Cell(setting, method, hyperparameters).config(**values)
        return plan(config, self.cache.load(setting))

    def run(self, checked: Plan, method: Any) -> None:
        """Run a method, and raise `Stopped` between two rounds if it should stop."""
        rounds = int(checked.config.rounds or 1)

        def check_time(round: int) -> None:
            if round < rounds and self.should_stop():
                raise Stopped(f"{round} of {rounds} rounds of {method.title}")

        check_time(0)
        with use_device(checked.device):
            for _ in build_simulation(checked, cast(Method, method)).run(after_round=check_time):
                pass


NamedFigures = Iterator[tuple[str, "Figure", Rows]]


def draw(
    drawing: Drawing,
    cache: DataCache,
    folder: Path,
    should_stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[Path]:
    """Run what a figure needs and write it as .png, .pdf and .csv.

    Settings without data are left out. `should_stop` is called before every round; if it returns
    true, `Stopped` is raised and nothing of the figure is written.
    """
    plots.make_folder(folder)
    known = tuple(setting for setting in drawing.settings if _has_data(setting, cache))
    if not known:
        raise UserError(" ".join(cache.missing.values()))
    request = Request(replace(drawing, settings=known), cache, options, should_stop)
    written = []
    for name, figure, rows in _MAKERS[drawing.name](request):
        table = folder / f"{name}.csv"
        written += [*plots.write({name: figure}, folder), table]
        lines = [{key: spreadsheet_safe(value) for key, value in row.items()} for row in rows]
        files.write_file(table, csv_text(list(rows[0]), lines, header=True).encode())
    return written


def _has_data(setting: Setting, cache: DataCache) -> bool:
    try:
        cache.load(setting)
    except UserError:
        return False  # `cache.missing` has the reason
    return True


class ObservedMethod:
    """A method that shows every model it initialises and trains to a function."""

    def __init__(self, method: Method, observe: Callable[[Cohort, str, Params], None]) -> None:
        self.method, self.observe = method, observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        initialized, state = self.method.initialize(cohort, received, state)
        self.observe(cohort, "initialised", initialized)
        return initialized, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        upload, state = self.method.train(cohort, initialized, received, state)
        self.observe(cohort, "trained", upload.model)
        return upload, state


@dataclass(frozen=True)
class ObservedALA(FedALA):
    """FedALA that records the losses of a client's weight-learning epochs, by round."""

    client: int = 0
    losses: dict[int, list[float]] = field(default_factory=dict)

    def report(self, cohort: Cohort, outcome: Outcome) -> None:
        super().report(cohort, outcome)
        if self.client in cohort.clients:
            lane = list(cohort.clients).index(self.client)
            self.losses[cohort.round] = outcome.losses[lane, : int(outcome.epochs[lane])].tolist()


def _make_weight_learning(request: Request) -> NamedFigures:
    drawing = request.drawing
    rows: Rows = []
    for setting in drawing.settings:
        checked = request.plan("fedala", setting)
        settings = vars(cast(FedALA, checked.methods[0]))
        observed = ObservedALA(**settings, client=drawing.client)
        request.run(checked, observed)
        for round, losses in observed.losses.items():
            for epoch, loss in enumerate(losses, 1):
                row = {"dataset": setting.dataset, "iteration": round, "epoch": epoch}
                rows.append({**row, "loss": loss})
    yield drawing.name, draw_weight_learning(rows, drawing.client), rows


def _make_trajectory(request: Request) -> NamedFigures:
    drawing, last = request.drawing, request.rounds
    [setting] = drawing.settings
    if last <= drawing.first:
        raise UserError(
            f"{drawing.name} shows iterations {drawing.first} to the last: "
            f"it needs more than {last} rounds."
        )
    models: dict[tuple[str, int, str], Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    for method in ("fedavg", "fedala"):
        checked = request.plan(method, setting)

        def observe(cohort: Cohort, when: str, model: Params, method: str = method) -> None:
            if drawing.first <= cohort.round <= last and drawing.client in cohort.clients:
                lane = list(cohort.clients).index(drawing.client)
                shapes.update({name: value.shape[1:] for name, value in model.items()})
                parts = [value[lane].detach().flatten().float() for value in model.values()]
                models[method, cohort.round, when] = torch.cat(parts)

        request.run(checked, ObservedMethod(checked.methods[0], observe))
    keys = sorted(models)
    plane = find_principal_plane(torch.stack([models[key] for key in keys]))
    rows: Rows = []
    for (method, round, when), (c1, c2) in zip(keys, plane.points.tolist(), strict=True):
        rows.append({"method": method, "iteration": round, "model": when, "c1": c1, "c2": c2})
    surface = _compute_surface(checked, drawing.client, shapes, plane)
    title = f"{setting.dataset}, client {drawing.client}, iterations {drawing.first} to {last}"
    title += f"; ALA from {int(drawing.set['fedala.start_round'])} on"
    yield drawing.name, draw_trajectory(rows, surface, title), rows


@dataclass(frozen=True)
class Plane:
    """The plane of the two principal components of some points."""

    mean: Tensor
    components: Tensor
    """[2, d]"""
    points: Tensor
    """The points' coordinates in the plane, [n, 2]."""


def find_principal_plane(points: Tensor) -> Plane:
    """Find the plane of the two principal components of [n, d] points."""
    mean = points.mean(0)
    centred = points - mean
    # The points are few and long: the eigenvectors of their Gram matrix give the components.
    _, vectors = torch.linalg.eigh((centred @ centred.T).double())
    components = vectors[:, -2:].flip(1).T.to(centred) @ centred
    components = components / components.norm(dim=1, keepdim=True)
    return Plane(mean, components, centred @ components.T)


def _compute_surface(
    checked: Plan, client: int, shapes: Mapping[str, torch.Size], plane: Plane
) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Compute the client's training loss on a grid in the plane; return the axes and the loss."""
    task = build_simulation(checked, checked.methods[0]).task
    samples = torch.from_numpy(task.parts["train"][client][:_MOST_SAMPLES]).to(task.device)
    x, y = task.inputs(samples), task.targets(samples)
    low, high = plane.points.amin(0), plane.points.amax(0)
    margin = 0.15 * (high - low)
    first, second = (
        torch.linspace(float(a), float(b), _GRID)
        for a, b in zip(low - margin, high + margin, strict=True)
    )
    losses = np.zeros((_GRID, _GRID))
    sizes = [shape.numel() for shape in shapes.values()]
    mean, components = plane.mean, plane.components
    with task.use_mode(training=False), torch.no_grad():
        for i, c1 in enumerate(first):
            for j, c2 in enumerate(second):
                flat = mean + c1.to(mean) * components[0] + c2.to(mean) * components[1]
                parts = zip(shapes.items(), flat.split(sizes), strict=True)
                model = {name: part.view(shape) for (name, shape), part in parts}
                losses[j, i] = float(task.loss(call(task.model, model, x), y))
    return first.numpy(), second.numpy(), losses


def _make_convergence(request: Request) -> NamedFigures:
    drawing = request.drawing
    [setting] = drawing.settings
    checked = request.plan("fedala", setting)
    last = int(checked.config.rounds or 0)
    sums: dict[tuple[int, str], list[Tensor]] = {}

    def observe(cohort: Cohort, when: str, model: Params) -> None:
        if (cohort.round == 1 or cohort.round % drawing.every == 0) and cohort.round <= last:
            score = cohort.evaluate(model, "train")
            total = torch.stack([score.loss.sum(), score.samples.sum()])
            sums.setdefault((cohort.round, when), []).append(total)

    request.run(checked, ObservedMethod(checked.methods[0], observe))
    rows: Rows = []
    for (round, when), parts in sorted(sums.items()):
        loss, samples = torch.stack([part.double().cpu() for part in parts]).sum(0).tolist()
        rows.append({"iteration": round, "model": when, "loss": loss / samples})
    title = f"FedALA on {setting.dataset}, {setting.partition}"
    yield drawing.name, draw_convergence(rows, title), rows


def _make_splits(request: Request) -> NamedFigures:
    for setting in sorted(request.drawing.settings, key=lambda setting: setting.dataset):
        federation = request.cache.load(setting)
        counts, data = federation.counts(), federation.dataset
        suffix = setting.partition if setting.dataset == "digits" else setting.name
        name = f"{request.drawing.name}-{suffix}".replace(":", "-")
        rows: Rows = []
        for client, label in np.argwhere(counts).tolist():
            samples = int(counts[client, label])
            rows.append({"client": client, "class": label, "samples": samples})
        note = f" ({data.note})" if data.note else ""
        title = f"{setting.dataset}{note}, {setting.partition}, {setting.clients} clients"
        yield name, plots.draw_split(counts, data.class_names, title), rows


_MAKERS: dict[str, Callable[[Request], NamedFigures]] = {
    "figure-wl": _make_weight_learning,
    "figure-traj": _make_trajectory,
    "figure-con": _make_convergence,
    "figure-splits": _make_splits,
}
