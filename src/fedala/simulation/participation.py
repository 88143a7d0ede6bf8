"""Who takes part in a round, and who works side by side."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedala.lanes import Task
from fedala.lanes.randomness import draw
from fedala.simulation.client_states import Lane


def draw_participants(seed: int, round: int, population: int, join_ratio: float) -> list[int]:
    """Draw `round(ρ·population)` clients without replacement, at least one, in order."""
    size = max(1, int(np.floor(join_ratio * population + 0.5)))
    if size >= population:
        return list(range(population))
    chosen = draw(seed, "participants", round=round).choice(population, size, replace=False)
    return sorted(chosen.tolist())


def list_absent(population: int, joined: Sequence[int]) -> list[int]:
    """Return the clients that do not take part, in order."""
    return sorted(set(range(population)) - set(joined))


def list_lanes(clients: Sequence[Sequence[int]]) -> list[Lane]:
    """Return the lanes of some clients of each run."""
    return [(run, client) for run, own in enumerate(clients) for client in own]


def list_clients(lanes: Sequence[Lane], runs: int) -> list[list[int]]:
    """Return the clients of some lanes, by run: the reverse of `list_lanes`."""
    return [[client for other, client in lanes if other == run] for run in range(runs)]


def form_cohorts(
    task: Task, lanes: Sequence[Lane], width: int | None, *, by_run: bool
) -> Iterator[list[Lane]]:
    """Yield lanes in cohorts of `width`, the longest first; without `width`, all together.

    With `by_run`, the lanes of each run form cohorts of their own.
    """

    def key(lane: Lane) -> tuple[int, int, int, int]:
        run, client = lane
        return -task.size(client), -task.size(client, "test"), client, run

    ordered = sorted(lanes, key=key)
    groups = [ordered]
    if by_run:
        runs = sorted({run for run, _ in lanes})
        groups = [[lane for lane in ordered if lane[0] == run] for run in runs]
    for group in groups:
        size = width or len(group)
        for first in range(0, len(group), size):
            yield group[first : first + size]
