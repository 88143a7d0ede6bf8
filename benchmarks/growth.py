"""How the seconds of a round grow with lanes, clients, seeds and parameters.

    python benchmarks/growth.py --out growth                        # the fastest device there is
    python benchmarks/growth.py --out growth --thin --minutes 2     # every second point
    python benchmarks/growth.py --out growth --device cpu --quick   # two minutes

One axis grows at a time; the others stay at 20 clients, all of them joining, one seed and the
paper's CNN (a quarter of its width with --quick). Of 20 to 100,000 clients, always 20 join. All
samples are random images of MNIST's shape, and every client has as many. Each round is evaluated
on the test samples of its participants.

A point is a row of growth.csv, written when it is measured. The same command again measures what
is missing. growth.md has the points and the fits, growth.png the four panels.
"""

import argparse
import csv
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedala.data import Dataset, Federation
from fedala.errors import UserError
from fedala.models.cnn import CNN
from fedala.report.plots import new_figure, save, style_axes
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.devices import choose_device
from fedala.runs.plan import plan

JOINED = 20  # clients that take part, unless lanes grow
WARM_UP = 3  # rounds: the start, ALA's initial stage, and one more
POOL = 20_000  # random images that the clients share; sharing saves no time
AXES = {
    "lanes": (1, 2, 5, 10, 20, 50, 100, 200, 400),
    "clients": (20, 100, 1_000, 10_000, 100_000),
    "seeds": (1, 2, 5, 10, 20),
    "parameters": (0.25, 0.5, 1.0, 2.0, 4.0),  # as widths
}
QUICK_AXES = {
    "lanes": (1, 2, 4, 8, 16),
    "clients": (20, 200, 2_000, 20_000),
    "seeds": (1, 2, 4),
    "parameters": (0.125, 0.25, 0.5, 1.0),
}
WIDTH, QUICK_WIDTH = 1.0, 0.25  # of the CNN, unless parameters grow
LABELS = {
    "lanes": "clients that train side by side",
    "clients": f"clients, {JOINED} of them joining",
    "seeds": f"seeds of {JOINED} clients",
    "parameters": "parameters of the model",
}


@dataclass(frozen=True)
class Row:
    """What was measured at one point, in seconds; `n` is the number on its axis."""

    axis: str
    n: int
    seconds: float
    fastest: float
    slowest: float
    rounds: int
    start: float  # until the first round is done
    gigabytes: float  # the most memory of a GPU; 0 on a CPU
    clients: int
    joined: int
    seeds: int
    parameters: int
    samples: int  # of a client, three quarters of them for training
    method: str
    device: str
    torch: str


@dataclass(frozen=True)
class Point:
    """One run: what its axis makes of 20 clients, one seed and the paper's CNN."""

    axis: str
    clients: int = JOINED
    joined: int = JOINED
    seeds: int = 1
    width: float = WIDTH

    def build_model(self) -> nn.Module:
        return WideCNN(self.width)

    @property
    def n(self) -> int:
        if self.axis == "parameters":
            return sum(parameter.numel() for parameter in self.build_model().parameters())
        return {"lanes": self.joined, "clients": self.clients, "seeds": self.seeds}[self.axis]


class WideCNN(CNN):
    """The paper's CNN for MNIST with `width` times as many channels and hidden units."""

    def __init__(self, width: float) -> None:
        super().__init__((1, 28, 28), 10)
        first, second, hidden = (round(width * units) for units in (32, 64, 512))
        self.conv1 = nn.Conv2d(1, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(16 * second, hidden)
        self.fc2 = nn.Linear(hidden, 10)


def make_point(axis: str, value: float, width: float) -> Point:
    if axis == "lanes":
        return Point(axis, clients=int(value), joined=int(value), width=width)
    if axis == "clients":
        return Point(axis, clients=int(value), width=width)
    if axis == "seeds":
        return Point(axis, seeds=int(value), width=width)
    return Point(axis, width=value)


def list_points(is_quick: bool, every: int) -> Iterator[Point]:
    """Yield the points, the small ones of every axis first: time may run out."""
    axes, width = (QUICK_AXES, QUICK_WIDTH) if is_quick else (AXES, WIDTH)
    for step in itertools.zip_longest(*([(axis, n) for n in axes[axis][::every]] for axis in axes)):
        for axis, value in filter(None, step):
            yield make_point(axis, value, width)


def make_dataset() -> Dataset:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (POOL, 1, 28, 28), dtype=np.uint8)
    y = torch.from_numpy(np.resize(np.arange(10), POOL))
    return Dataset("random images", torch.from_numpy(pixels), y, 10)


def make_federation(data: Dataset, clients: int, samples: int) -> Federation:
    """Give every client so many samples of the pool, three quarters of them for training."""
    random = np.random.default_rng(0)
    rows = [random.integers(0, POOL, samples) for _ in range(clients)]
    cut = 3 * samples // 4
    train, test = tuple(row[:cut] for row in rows), tuple(row[cut:] for row in rows)
    return Federation(data, train, test, tuple(row[:0] for row in rows))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(point: Point, data: Dataset, arguments: argparse.Namespace, until: float) -> Row:
    """Run a point: some rounds to warm up, then rounds until there are enough or time is out."""
    options: dict[str, Any] = {
        "method": arguments.method, "lr": 0.005, "rounds": 1000, "seeds": point.seeds,
        "device": arguments.device, "join_ratio": point.joined / point.clients,
        "eval_clients": "joined" if point.joined < point.clients else "all",
    }  # fmt: skip
    federation = make_federation(data, point.clients, arguments.samples)
    device = choose_device(arguments.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    checked = plan(Config.from_values(options), federation, point.build_model)
    [group] = checked.groups
    simulation = build_simulation(
        checked.for_group(group), group.members[0].method, variants=group.variants
    )
    seconds = []
    for round in range(1, WARM_UP + arguments.rounds + 1):
        before = began if round == 1 else time.perf_counter()
        simulation.step(round, train=True)
        synchronize(device)
        seconds.append(time.perf_counter() - before)
        if len(seconds) >= WARM_UP + 3 and time.perf_counter() > until:
            break
    measured = seconds[WARM_UP:]
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return Row(
        axis=point.axis,
        n=point.n,
        seconds=round_figures(statistics.median(measured)),
        fastest=round_figures(min(measured)),
        slowest=round_figures(max(measured)),
        rounds=len(measured),
        start=round_figures(seconds[0]),
        gigabytes=round_figures(memory),
        clients=point.clients,
        joined=point.joined,
        seeds=point.seeds,
        parameters=sum(parameter.numel() for parameter in point.build_model().parameters()),
        samples=arguments.samples,
        method=arguments.method,
        device=describe(device),
        torch=torch.__version__,
    )


def round_figures(number: float) -> float:
    return float(f"{number:.5g}")


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"


def read_rows(path: Path) -> list[Row]:
    """Return the points that were measured before."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Row(**{field.name: field.type(row[field.name]) for field in fields(Row)})
            for row in csv.DictReader(file)
        ]


def add_row(path: Path, row: Row) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


def check_same_run(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Refuse to add points to those of another device, method or size."""
    here = describe(choose_device(arguments.device)), arguments.method, arguments.samples
    for row in rows:
        if (row.device, row.method, row.samples) != here:
            raise UserError(
                f"{arguments.out} has points of {row.method} on {row.device} with {row.samples} "
                "samples; name another folder with --out."
            )


@dataclass(frozen=True)
class Fit:
    """seconds ≈ fixed + slope · n^power; `deviation` is the largest relative error of a point."""

    fixed: float
    slope: float
    power: float
    deviation: float

    def predict(self, n: Any) -> Any:
        return self.fixed + self.slope * np.asarray(n, dtype=float) ** self.power


def fit_power(n: Sequence[float], seconds: Sequence[float], powers: Any) -> Fit:
    """Fit the fixed part and the slope for each power; return the fit with the least error.

    Errors are relative, so that small points count as much as large ones. Neither the fixed part
    nor the slope may be negative.
    """
    x, y = np.asarray(n, dtype=float), np.asarray(seconds, dtype=float)
    best, least = Fit(0, 0, 0, np.inf), np.inf
    for power in powers:
        for has_fixed, has_slope in ((True, True), (False, True), (True, False)):
            columns = np.stack([has_fixed * np.ones_like(x), has_slope * x**power], axis=1)
            found = np.linalg.lstsq(columns / y[:, None], np.ones_like(y), rcond=None)[0]
            errors = columns @ found / y - 1
            if found.min() >= 0 and (errors**2).sum() < least * (1 - 1e-9):
                least = (errors**2).sum()
                best = Fit(*map(float, found), float(power), float(np.abs(errors).max()))
    return best


def fit_line(rows: Sequence[Row]) -> Fit:
    return fit_power([row.n for row in rows], [row.seconds for row in rows], [1.0])


def fit_free(rows: Sequence[Row]) -> tuple[Fit, float, float]:
    """Fit the power as well; return also its range when any one point is left out."""
    powers = np.linspace(0.05, 2, 196)
    n, seconds = [row.n for row in rows], [row.seconds for row in rows]
    left = [
        fit_power(n[:i] + n[i + 1 :], seconds[:i] + seconds[i + 1 :], powers).power
        for i in range(len(rows))
    ]
    return fit_power(n, seconds, powers), min(left), max(left)


def group_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    grouped = {axis: [row for row in rows if row.axis == axis] for axis in LABELS}
    return {axis: sorted(own, key=lambda row: row.n) for axis, own in grouped.items() if own}


def write_table(rows: Sequence[Row], missing: Sequence[Point], path: Path) -> str:
    """Write the points and the fits as Markdown."""
    first = rows[0]
    lines = [
        f"{first.method}, {first.samples} samples a client, {first.device}, torch {first.torch}; "
        "median seconds of a round (fastest to slowest).",
        "",
    ]
    for axis, own in group_rows(rows).items():
        lines += [f"| {LABELS[axis]} | round, s | start, s | GPU, GiB |"]
        lines += ["|---|---|---|---|"]
        for row in own:
            spread = f"{row.fastest:.4g} – {row.slowest:.4g}, {row.rounds} rounds"
            lines += [
                f"| {row.n:,} | {row.seconds:.4g} ({spread}) | {row.start:.1f} | "
                f"{row.gigabytes:.1f} |"
            ]
        lines += ["", *describe_fits(own), ""]
    if missing:
        told = ", ".join(f"{point.axis} {point.n:,}" for point in missing)
        lines += [f"Not measured, because time was out: {told}.", ""]
    text = "\n".join(lines)
    path.write_text(text)
    return text


def describe_fits(rows: Sequence[Row]) -> list[str]:
    if len(rows) < 3:
        return ["Too few points for a fit."]
    line = fit_line(rows)
    told = (
        f"Fixed part and slope: {line.fixed:.4g} s + {line.slope:.4g} s · n; the worst point is "
        f"{100 * line.deviation:.0f} % off."
    )
    if len(rows) < 5:
        return [told]
    free, low, high = fit_free(rows)
    return [
        told,
        f"With a free power: {free.fixed:.4g} s + {free.slope:.4g} s · n^{free.power:.2f}; the "
        f"worst point is {100 * free.deviation:.0f} % off, and without any one point the power is "
        f"{low:.2f} to {high:.2f}.",
    ]


def shorten(number: int) -> str:
    for unit, sign in ((1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{sign}"
    return str(number)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the four axes with the line that has a fixed part and a slope."""
    from matplotlib.ticker import LogLocator

    figure = new_figure(9, 6.5)
    panels = figure.subplots(2, 2, squeeze=True).flatten()
    for axes, (axis, label) in zip(panels, LABELS.items(), strict=True):
        own = group_rows(rows).get(axis, [])
        n = [row.n for row in own]
        middle = [row.seconds for row in own]
        if own:
            errors = [[row.seconds - row.fastest for row in own],
                      [row.slowest - row.seconds for row in own]]  # fmt: skip
            axes.errorbar(n, middle, errors, fmt="o", color="#0a63c2", markersize=4, capsize=2)
        if len(own) >= 3:
            line, x = fit_line(own), np.geomspace(min(n), max(n), 100)
            told = f"{line.fixed:.3g} s + {line.slope:.3g} s · n (± {100 * line.deviation:.0f} %)"
            axes.plot(x, line.predict(x), color="#c2470f", linewidth=1.2, label=told)
            axes.legend(frameon=False, fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds a round")
        axes.set_xticks(n, [shorten(number) for number in n])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        style_axes(axes, "both")
    figure.suptitle(f"{rows[0].method}, {rows[0].device}", fontsize=9)
    save(figure, path)


def measure_missing(arguments: argparse.Namespace, path: Path) -> list[Point]:
    """Measure the points that are not in the file; return those that there was no time for."""
    rows = read_rows(path)
    check_same_run(rows, arguments)
    done = {(row.axis, row.n) for row in rows}
    end = time.perf_counter() + 60 * arguments.minutes
    took: dict[str, tuple[int, float, float]] = {}
    data, missing = make_dataset(), []
    wanted = list_points(arguments.quick, 2 if arguments.thin else 1)
    points = [point for point in wanted if (point.axis, point.n) not in done]
    for position, point in enumerate(points):
        now = time.perf_counter()
        last_n, start, rounds = took.get(point.axis, (point.n, 0.0, 0.0))
        # A larger population does not make a round longer, as far as we know.
        times = 1.0 if point.axis == "clients" else point.n / last_n
        if now + start + rounds * times > end:
            missing.append(point)
            continue
        share = (end - now) / (len(points) - position)
        row = measure(point, data, arguments, until=now + share)
        rounds = row.rounds * row.seconds
        took[point.axis] = point.n, time.perf_counter() - now - rounds, rounds
        add_row(path, row)
        print(f"{row.axis} {row.n:,}: {row.seconds:.4g} s a round", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return missing


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for csv, table and plot")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--minutes", type=float, default=9, help="start no point after these")
    parser.add_argument("--method", default="fedala")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds of a point")
    parser.add_argument("--samples", type=int, help="of each client; default 400, quick 40")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--thin", action="store_true", help="every second point of an axis")
    arguments = parser.parse_args()
    arguments.samples = arguments.samples or (40 if arguments.quick else 400)
    return arguments


def main() -> None:
    arguments = read_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "growth.csv"
    missing = measure_missing(arguments, path)
    rows = read_rows(path)
    if not rows:
        raise UserError("There was no time for a single point; give more with --minutes.")
    print(write_table(rows, missing, arguments.out / "growth.md"))
    draw(rows, arguments.out / "growth.png")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"Error: {error}") from None
