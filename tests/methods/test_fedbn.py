"""FedBN: normalisation stays with the client, with its statistics. All else is averaged."""

import plain
import pytest
import torch
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.layer_units import layers_of
from fedala.methods import make
from fedala.models import cnn, resnet18
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 0]


def is_norm(name):
    return name.startswith("norm.")


@pytest.mark.parametrize(
    ("name", "layers", "blended"),
    [
        ("fedbn", None, ()),
        ("fedbn+ala", 1, ("out.weight", "out.bias")),
        ("fedbn+ala", 3, ("conv.weight", "conv.bias", "hidden.weight", "hidden.bias", "out.weight",
                          "out.bias")),
    ],
)  # fmt: skip
def test_against_a_plain_loop(name, layers, blended):
    """With `+ala`, layers count without the normalisation, which ALA leaves as it is."""
    task = ragged_task(SIZES)
    settings = {**plain.PlainALA.SETTINGS, "ala.layers": layers} if blended else {}
    simulation, rows, models = simulate(name, task, rounds=3, settings=settings)
    server, start, _ = plain.share_a_part(task, simulation.initial[0], is_norm, 3, blended=blended)
    shared = [n for n in simulation.initial[0] if not is_norm(n)]
    assert_close(models[0, None], plain.lane(server, shared), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(start[client]), 1e-9)
    assert rows[-1].loss == pytest.approx(plain.mean_loss(task, start), abs=1e-9)


def test_parameters_statistics_and_counter_stay():
    _, _, models = simulate("fedbn", ragged_task(SIZES), rounds=2)
    own = models[0, 1].keys() - models[0, None].keys()
    assert own == {
        f"norm.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    for name, value in models[0, 1].items():
        assert torch.equal(value, models[0, 2][name]) == (name not in own)


class Norms(nn.Module):
    """A layer of every kind of normalisation, also inside others, and one that has no tensors."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.kinds = nn.ModuleList([
            nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8), nn.SyncBatchNorm(8),
            nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.RMSNorm(8),
            nn.BatchNorm1d(8, affine=False, track_running_stats=False),
        ])  # fmt: skip
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8)
        self.out = nn.Linear(8, 3)


def test_every_kind_of_normalisation_stays():
    model = Norms()
    own = set(make("fedbn").own_part(model, layers_of(model)))
    prefixes = ("kinds.", "encoder.norm1.", "encoder.norm2.")
    assert own == {name for name in model.state_dict() if name.startswith(prefixes)}
    assert "kinds.7.running_var" in own


def test_with_resnet18_the_convolutions_are_shared():
    model = resnet18((3, 32, 32), 10)
    own = set(make("fedbn").own_part(model, layers_of(model)))
    shared = model.state_dict().keys() - own
    assert len(own) == 5 * 20
    assert all(model.get_parameter(n).dim() == 4 or n.startswith("fc.") for n in shared)
    blended = make("fedbn+ala").ala_parameters(model, 2)
    assert all(name in shared for name in blended)
    assert any("conv" in name for name in blended)


@pytest.mark.parametrize("model", [cnn(), nn.Sequential(nn.Linear(6, 3))])
def test_a_model_without_normalisation_is_refused(model):
    for name in ("fedbn", "fedbn+ala"):
        with pytest.raises(UserError, match="this model has none: choose a model with some"):
            make(name).check_model(model)


class StatisticsOnly(Net):
    """A normalisation that learns nothing has statistics all the same."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)


def test_statistics_alone_make_a_layer_personal():
    task = ragged_task(SIZES, model=StatisticsOnly())
    simulation = Simulation(make("fedbn"), task, start_of(task, StatisticsOnly), rounds=1)
    simulation.step(1, train=True)
    assert simulation.servers[0]["global"].keys() == {
        name for name in task.model.state_dict() if not is_norm(name)
    }
    means = [simulation.clients[0, client]["local"]["norm.running_mean"] for client in (0, 1)]
    assert not torch.equal(*means)
