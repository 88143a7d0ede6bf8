"""LG-FedAvg: each client learns its own lower layers, and the upper ones are averaged."""

import plain
import pytest
import torch
from small import assert_close, ragged_task, simulate, start_of

from fedala.errors import UserError
from fedala.methods import make
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 0]


@pytest.mark.parametrize(
    ("name", "layers", "shared", "blended"),
    [
        ("lg-fedavg", 1, ("out.",), ()),
        ("lg-fedavg", 2, ("out.", "hidden."), ()),
        ("lg-fedavg+ala", 2, ("out.", "hidden."), ("out.weight", "out.bias")),
    ],
)
def test_against_a_plain_loop(name, layers, shared, blended):
    """With `+ala`, the last layer is ALA(g, w), on the client's own representation."""
    task = ragged_task(SIZES)
    settings = {"lg-fedavg.layers": layers} | (plain.PlainALA.SETTINGS if blended else {})
    simulation, rows, models = simulate(name, task, rounds=3, settings=settings)
    server, start, _ = plain.share_a_part(
        task, simulation.initial[0], lambda n: not n.startswith(shared), 3, blended=blended
    )
    upper = [n for n in simulation.initial[0] if n.startswith(shared)]
    assert_close(models[0, None], plain.lane(server, upper), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(start[client]), 1e-9)
    assert rows[-1].loss == pytest.approx(plain.mean_loss(task, start), abs=1e-9)


def test_what_lg_fedavg_shares_fedper_keeps():
    """In round 1, both train the same. The mean of what one keeps is what the other shares."""
    lg, fedper = (
        simulate(name, ragged_task(SIZES), rounds=1, settings={f"{name}.layers": 2})[2]
        for name in ("lg-fedavg", "fedper")
    )
    assert lg[0, None].keys() | fedper[0, None].keys() == lg[0, 0].keys()
    for keeper, other in ((lg, fedper), (fedper, lg)):
        kept = keeper[0, 0].keys() - keeper[0, None].keys()
        assert kept == other[0, None].keys()
        for name in kept - {"norm.num_batches_tracked"}:
            shares = [size / sum(SIZES) * keeper[0, i][name] for i, size in enumerate(SIZES)]
            assert torch.allclose(sum(shares), other[0, None][name], atol=1e-12)
            assert name == "conv.bias" or not torch.equal(keeper[0, 0][name], keeper[0, 1][name])


def test_what_ala_governs_is_received():
    method = make("lg-fedavg+ala", {"lg-fedavg.layers": 2})
    assert method.ala_parameters(cnn(), 1) == ("fc2.weight", "fc2.bias")
    assert method.ala_parameters(cnn(), "fc,conv1") == (
        "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"
    )  # fmt: skip
    with pytest.raises(UserError, match="between 0 and 2, the number of layers that learn and are"):
        method.ala_parameters(cnn(), 3)


def test_a_model_without_a_local_part_is_refused():
    task = ragged_task([5])
    with pytest.raises(UserError, match="LG-FedAvg needs a model of at least 5 layers"):
        Simulation(make("lg-fedavg", {"lg-fedavg.layers": 4}), task, start_of(task))
