"""FedPer: the base is averaged, the upper layers stay, and both train together."""

import plain
import pytest
import torch
from small import assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.losses import Regression
from fedala.methods import Method, make
from fedala.methods.fedper import FedPer
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 0]


@pytest.mark.parametrize(
    ("name", "layers", "personal", "blended"),
    [
        ("fedper", 1, ("out.",), ()),
        ("fedper", 2, ("out.", "hidden."), ()),
        ("fedper+ala", 1, ("out.",), ("hidden.weight", "hidden.bias")),
        ("fedper+ala", 2, ("out.", "hidden."), ("norm.weight", "norm.bias")),
    ],
)
def test_against_a_plain_loop(name, layers, personal, blended):
    """With `+ala`, the uppermost layer of the base is ALA(g, w), with the own layers above it."""
    task = ragged_task(SIZES)
    settings = {"fedper.layers": layers} | (plain.PlainALA.SETTINGS if blended else {})
    simulation, rows, models = simulate(name, task, rounds=3, settings=settings)
    server, start, _ = plain.share_a_part(
        task, simulation.initial[0], lambda n: n.startswith(personal), 3, blended=blended
    )
    base = [n for n in simulation.initial[0] if not n.startswith(personal)]
    assert_close(models[0, None], plain.lane(server, base), 1e-9)
    for client in range(len(SIZES)):
        assert_close(models[0, client], plain.lane(start[client]), 1e-9)
    assert rows[-1].loss == pytest.approx(plain.mean_loss(task, start), abs=1e-9)


def test_ala_counts_layers_among_the_received_ones_by_itself(monkeypatch):
    """A method that says nothing of ALA gets what FedPer asks for."""
    options = {"rounds": 3, "settings": plain.PlainALA.SETTINGS}
    *_, asked = simulate("fedper+ala", ragged_task(SIZES), **options)
    monkeypatch.setattr(FedPer, "ala_parameters", Method.ala_parameters)
    *_, silent = simulate("fedper+ala", ragged_task(SIZES), **options)
    for key in asked:
        assert_close(asked[key], silent[key], 0)


def test_personal_layers_differ_and_the_base_is_everybodys():
    _, _, models = simulate("fedper", ragged_task(SIZES), rounds=2)
    personal = {name for name in models[0, 1] if name.startswith("out.")}
    assert models[0, 1].keys() - models[0, None].keys() == personal
    for name, value in models[0, 1].items():
        assert torch.equal(value, models[0, 2][name]) == (name not in personal)


def test_a_single_client_is_fedavg():
    """Its own layers are those that the server would send back."""
    fedper, fedavg = (
        simulate(name, ragged_task([9]), rounds=3)[2] for name in ("fedper", "fedavg")
    )
    assert_close(fedper[0, 0], fedavg[0, None], 0)


def test_a_step_by_hand():
    """y = v·(u·x), squared error; two clients with one sample each, lr 0.1, from u = v = 1.

    Client 1 has (1, 2): residual −1, ∂u = ∂v = −2, so u₁ = v₁ = 1.2. Client 2 has (1, 0): residual
    1, ∂u = ∂v = 2, so u₂ = v₂ = 0.8. The base is the mean u = 1; v₁ = 1.2 and v₂ = 0.8 stay.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    task = ragged_task([1, 1], model=model, loss=Regression(), batch_size=1)
    task.x, task.y = torch.ones(4, 1).double(), torch.tensor([2.0, 0.0, 1.0, 1.0]).double()
    ones = {"0.weight": torch.ones(1, 1, 1).double(), "1.weight": torch.ones(1, 1, 1).double()}
    simulation = Simulation(make("fedper"), task, lambda seed: dict(ones), rounds=1)
    models = {}
    for _ in simulation.run(lambda p: models.update({p.client: p.model})):
        pass
    found = {client: [v.item() for v in own.values()] for client, own in models.items()}
    assert found[None] == pytest.approx([1.0])
    assert found[0] == pytest.approx([1.0, 1.2])
    assert found[1] == pytest.approx([1.0, 0.8])


def test_what_ala_governs_is_below_the_personal_layers():
    method = make("fedper+ala", {"fedper.layers": 2})
    assert method.ala_parameters(cnn(), 1) == ("conv2.weight", "conv2.bias")
    assert method.ala_parameters(cnn(), "fc1,conv1") == ("conv1.weight", "conv1.bias")
    with pytest.raises(UserError, match="layers=fc takes nothing that FedPer shares"):
        method.ala_parameters(cnn(), "fc")
    with pytest.raises(UserError, match="between 0 and 2, the number of layers that learn and are"):
        method.ala_parameters(cnn(), 3)


def test_a_model_without_a_base_is_refused():
    task = ragged_task([5])
    with pytest.raises(UserError, match="FedPer needs a model of at least 5 layers"):
        Simulation(make("fedper", {"fedper.layers": 4}), task, start_of(task))
