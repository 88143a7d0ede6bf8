"""The section on ALA's weights W: 1 takes the received model's element, 0 the client's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedala.report.arrays import Array, mean_std, pick_evenly
from fedala.report.page.views import MOST_CLIENTS, MOST_COLUMNS, Chart, Select, Table
from fedala.report.series import Series


@dataclass(frozen=True)
class Weights:
    """The section on W."""

    controls: list[Select]
    rounds: Chart
    histogram: Chart
    parameters: Chart
    last_index: int
    last_round: int


def view_weights(series: Sequence[Series]) -> Weights | None:
    """Return charts of the recorded W; None if no method has recorded any."""
    known = [one for one in series if one.weights is not None]
    if not known or known[0].weights is None:
        return None
    _, (seeds, rounds, _, parameters) = known[0].weights
    methods = [(str(index), one.label) for index, one in enumerate(known)]
    names = [(str(index), name) for index, name in enumerate(parameters)]
    runs = [("mean", "mean")]
    if len(seeds) > 1:
        runs += [(str(index), f"seed {seed}") for index, seed in enumerate(seeds)]
    histogram = "Distribution of the elements of W over [0, 1], all clients together. "
    histogram += "The colour scale is a square root."
    return Weights(
        [
            Select("w-method", "Method", methods, "method"),
            Select("w-parameter", "Parameter", names, "parameter"),
            Select("w-seed", "Runs", runs, "seed"),
        ],
        Chart(
            "w-rounds",
            "w-rounds",
            "Mean of W, client by client, over the rounds.",
            [_make_round_table(one) for one in known],
        ),
        Chart("w-histogram", "w-histogram", histogram, [_make_bin_table(one) for one in known]),
        Chart(
            "w-parameters",
            "w-parameters",
            "Mean of W by client and parameter.",
            [_make_parameter_table(one) for one in known],
        ),
        len(rounds) - 1,
        rounds[-1],
    )


def _make_round_table(one: Series) -> Table:
    assert one.weights is not None
    array, (_, rounds, clients, parameters) = one.weights
    chosen = pick_evenly(len(rounds), MOST_COLUMNS)
    mean = mean_std(array[..., 0, 0])[0]
    rows = []
    for i, client in enumerate(clients[:MOST_CLIENTS]):
        rows.append([one.run.name_client(client), *(f"{mean[index, i]:.3f}" for index in chosen)])
    heads = ["Client", *(f"round {rounds[index]}" for index in chosen)]
    return Table(f"{one.label}, mean of W, {parameters[0]}", heads, rows)


def _make_bin_table(one: Series) -> Table:
    assert one.weights is not None
    array, (_, rounds, _, parameters) = one.weights
    chosen = pick_evenly(len(rounds), MOST_COLUMNS)
    shares = 100 * mean_over_clients(array)[:, :, 0, 1:].mean(0)
    rows = []
    for k in range(10):
        name = f"{k / 10:.1f} to {(k + 1) / 10:.1f}"
        rows.append([name, *(f"{shares[index, k]:.2f}" for index in chosen)])
    heads = ["W", *(f"round {rounds[index]}" for index in chosen)]
    return Table(f"{one.label}, share of W's elements in %, {parameters[0]}", heads, rows)


def _make_parameter_table(one: Series) -> Table:
    assert one.weights is not None
    array, (_, rounds, clients, parameters) = one.weights
    mean = mean_std(array[..., 0])[0][-1]
    rows = []
    for i, client in enumerate(clients[:MOST_CLIENTS]):
        rows.append([one.run.name_client(client), *(f"{value:.3f}" for value in mean[i])])
    caption = f"{one.label}, mean of W in round {rounds[-1]}"
    return Table(caption, ["Client", *parameters], rows)


def mean_over_clients(array: Array) -> Array:
    """Return [seed, round, parameter, …] of recorded W: the mean over the participants."""
    return mean_std(array, axis=2)[0]
