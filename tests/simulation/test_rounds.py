"""What a simulation records on the way: how W is spread, without changing anything."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import evaluate, ragged_task

from fedala.lanes.local_aggregation import BINS, summarize_weights
from fedala.lanes.trees import take

SIZES = [12, 7, 9, 4]


def test_spread_is_the_mean_and_the_share_of_every_tenth():
    """0 and 0.05 are in the first tenth, 0.1 and 0.15 in the second, 0.95 and 1 in the last."""
    weights = {"w": torch.tensor([[[0.0, 0.05], [0.1, 1.0]], [[1.0, 1.0], [0.95, 0.15]]])}
    [[first], [second]] = summarize_weights(weights).tolist()
    assert first == pytest.approx([1.15 / 4, 0.5, 0.25, 0, 0, 0, 0, 0, 0, 0, 0.25])
    assert second == pytest.approx([3.1 / 4, 0, 0.25, 0, 0, 0, 0, 0, 0, 0, 0.75])


def test_spread_is_numpys_histogram_in_every_lane():
    random = torch.Generator().manual_seed(0)
    weights = {"a": torch.rand(3, 5, 7, generator=random), "b": torch.rand(3, 4, generator=random)}
    found = summarize_weights(weights).numpy()
    assert found.shape == (3, 2, 1 + BINS)
    for lane in range(3):
        for number, value in enumerate(weights.values()):
            own = value[lane].numpy().ravel()
            counts, _ = np.histogram(own, BINS, (0, 1))
            np.testing.assert_allclose(
                found[lane, number], [own.mean(), *counts / own.size], atol=1e-6
            )
    np.testing.assert_array_equal(summarize_weights(take(weights, [1])).numpy()[0], found[1])


def test_what_is_lost_in_a_division_by_zero_is_in_no_tenth():
    assert summarize_weights({"w": torch.tensor([[np.nan, 0.5]])})[0, 0, 1:].sum() == 0.5


@pytest.mark.parametrize("lanes", [1, 3, None])
def test_the_record_is_the_w_of_every_client(lanes):
    task = ragged_task(SIZES)
    simulation, found, _ = evaluate(
        "fedala", task, rounds=3, seeds=(4, 5), lanes=lanes, record_weights=1
    )
    assert [one.row.round for one in found if one.weights] == [0, 0, 1, 1, 2, 2, 3, 3]
    for one in found:
        assert [line[:2] for line in one.weights] == [
            (client, name) for client in range(4) for name in ("out.weight", "out.bias")
        ]
    # The clients' states are those after the last training round, which evaluation 2 records.
    for run, one in enumerate(one for one in found if one.row.round == 2):
        for client, name, mean, shares in one.weights:
            own = simulation.clients[run, client]["ala"]["weights"][name].numpy().ravel()
            counts, _ = np.histogram(own, BINS, (0, 1))
            np.testing.assert_allclose(
                [mean, *shares], [own.mean(), *counts / own.size], atol=1e-12
            )


@pytest.mark.parametrize("method", ["fedala", "ditto+ala", "fedavg", "fedfomo"])
def test_recording_changes_nothing(method):
    def go(every):
        _, found, models = evaluate(method, ragged_task(SIZES), rounds=3, record_weights=every)
        rows = [repr(replace(one.row, seconds=0)) for one in found]
        return rows, models, [bool(one.weights) for one in found]

    rows, models, recorded = go(2)
    without, reference, nothing = go(0)
    assert rows == without
    assert all(
        torch.equal(models[key][name], reference[key][name])
        for key in models
        for name in models[key]
    )
    assert recorded == ([True, False, True, True] if "ala" in method else [False] * 4)
    assert not any(nothing)


@pytest.mark.parametrize(
    ("every", "eval_every", "recorded"),
    [
        (1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 1, [0, 3, 6, 7]),
        (3, 2, [0, 4, 6, 7]),
        (1, 3, [0, 3, 6, 7]),
        (9, 2, [0, 7]),
    ],
)
def test_records_are_made_at_the_first_evaluation_from_a_multiple_on(every, eval_every, recorded):
    _, found, _ = evaluate(
        "fedala", ragged_task(SIZES[:2]), rounds=7, eval_every=eval_every, record_weights=every
    )
    assert [one.row.round for one in found if one.weights] == recorded


def test_only_participants_are_recorded():
    simulation, found, _ = evaluate(
        "fedala", ragged_task(SIZES), rounds=4, join_ratio=0.5, record_weights=1
    )
    for one in found:
        participants = simulation.draw_participants(0, one.row.round + 1)
        assert sorted({line.client for line in one.weights}) == participants
