"""Sweeps: the points of a grid or a random search, each a run of its own with its own label."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedala.errors import UserError
from fedala.lanes.randomness import draw
from fedala.methods import setting_prefixes
from fedala.options import suggest
from fedala.runs.config import RECIPE_OPTIONS, SERVER_NUMBERS, Config

#: Options of a run that a sweep may vary besides the methods' hyperparameters.
SWEPT_OPTIONS = (
    *RECIPE_OPTIONS, "batch_size", "local_epochs", "local_steps", "label_smoothing",
    "server_optimizer", *SERVER_NUMBERS,
)  # fmt: skip
MOST_POINTS = 1000
_LABEL = re.compile(r"(?P<method>[^][]+)\[(?P<point>[^][=,]+=[^][=,]*(,[^][=,]+=[^][=,]*)*)\]")

Point = dict[str, str]
"""A value for each dimension of a sweep, as text: it is the same in labels, files and options."""


@dataclass(frozen=True)
class Dimension:
    """One swept option: its values, or the range from which random values are drawn."""

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False

    @property
    def is_random(self) -> bool:
        return not self.values

    def draw(self, seed: int, number: int, trial: int) -> str:
        """Draw the value of one trial; `number` is the dimension's position in the sweep."""
        random = draw(seed, "sweep", client=number, round=trial)
        if not self.is_random:
            return self.values[int(random.integers(len(self.values)))]
        if self.is_log:
            value = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = random.uniform(self.low, self.high)
        return f"{value:.3g}"

    def find_end(self, value: str) -> str:
        """Return "smallest" or "largest" if the value is at an end of a grid of numbers."""
        try:
            numbers, own = sorted(float(one) for one in self.values), float(value)
        except ValueError:
            return ""
        if len(numbers) < 2:
            return ""
        return {numbers[0]: "smallest", numbers[-1]: "largest"}.get(own, "")


def read_dimensions(sweep: Mapping[str, str]) -> list[Dimension]:
    """Return the dimensions of a sweep: `0.1,0.01`, `log:1e-4..1` or `uniform:0..1` by option."""
    return [_read_dimension(name, text) for name, text in sweep.items()]


def _read_dimension(name: str, text: str) -> Dimension:
    if "." not in name and name not in SWEPT_OPTIONS:
        raise UserError(
            f"sweep {name}: there is no such option to sweep{suggest(name, SWEPT_OPTIONS)}; "
            "a hyperparameter is written as in fedprox.mu."
        )
    if match := re.fullmatch(r"(log|uniform):([^,]+)\.\.([^,]+)", text.strip()):
        kind, low, high = match.groups()
        try:
            bounds = float(low), float(high)
        except ValueError:
            bounds = math.nan, math.nan
        is_log = kind == "log"
        if not (math.isfinite(bounds[0]) and bounds[0] < bounds[1] < math.inf) or (
            is_log and bounds[0] <= 0
        ):
            raise UserError(
                f"sweep {name}: {text!r} is not a range, such as log:0.0001..0.1 or uniform:0..1."
            )
        return Dimension(name, (), *bounds, is_log)
    values = tuple(value.strip() for value in text.split(","))
    if not all(values) or len(set(map(_to_number, values))) < len(values):
        raise UserError(f"sweep {name}: give different values, separated by commas, not {text!r}.")
    if any(character in text for character in "[]="):
        raise UserError(
            f"sweep {name}: the values name the points in tables and files, so they cannot have "
            f"[, ] or = in them, as {text!r} has."
        )
    return Dimension(name, values)


def _to_number(text: str) -> float | str:
    """Return the number that a text is, if any: 0.1 and 1e-1 are the same value."""
    try:
        return float(text)
    except ValueError:
        return text


def has_random_range(config: Config) -> bool:
    """Tell whether some values of a sweep are drawn from a range."""
    return any(one.is_random for one in read_dimensions(config.sweep))


def list_points(config: Config, method: str) -> list[Point]:
    """Return the points of one method; one point without values if nothing of it is swept."""
    dimensions = [
        one
        for one in read_dimensions(config.sweep)
        if "." not in one.name or one.name.partition(".")[0] in setting_prefixes(method)
    ]
    if not any(one.is_random for one in dimensions):
        combinations = product(*(one.values for one in dimensions))
        points = [
            dict(zip((one.name for one in dimensions), values, strict=True))
            for values in combinations
        ]
    else:
        points = list(_draw_points(config, dimensions))
    if len(points) > MOST_POINTS:
        raise UserError(
            f"The sweep of {method} has {len(points)} points, and the most is {MOST_POINTS}."
        )
    return points


def _draw_points(config: Config, dimensions: Sequence[Dimension]) -> Iterator[Point]:
    """Draw different points for a random search; a grid's values are drawn from their list."""
    seen = set()
    for trial in range(config.trials):
        point = {one.name: one.draw(config.seed, i, trial) for i, one in enumerate(dimensions)}
        if (key := tuple(point.values())) not in seen:
            seen.add(key)
            yield point


def label_of(method: str, point: Mapping[str, str]) -> str:
    """Return the name of a method at a point: `fedprox[lr=0.1,fedprox.mu=0.01]`."""
    if not point:
        return method
    return f"{method}[{','.join(f'{name}={value}' for name, value in point.items())}]"


def split_label(label: str) -> tuple[str, Point]:
    """Return the method and the point of a label."""
    match = _LABEL.fullmatch(label)
    if not match:
        return label, {}
    parts = [part.partition("=") for part in match["point"].split(",")]
    return match["method"], {name: value for name, _, value in parts}


def list_labels(config: Config) -> list[str]:
    """Return the labels of all runs of a config: its methods, or their points."""
    return [
        label_of(method, point)
        for method in config.methods
        for point in list_points(config, method)
    ]


def config_at(config: Config, method: str, point: Mapping[str, str]) -> Config:
    """Return the config of one method at one point, as if it were run alone."""
    options: dict[str, Any] = {name: value for name, value in point.items() if "." not in name}
    settings = {name: value for name, value in point.items() if "." in name}
    return Config.from_values(
        {
            **config.values(),
            **options,
            "method": method,
            "sweep": {},
            "set": {**config.set, **settings},
        }
    )
