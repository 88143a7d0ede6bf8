"""Own data and models on a GPU, against the CPU. Without a GPU, these tests are skipped."""

import numpy as np
import pytest
import torch
from torch import nn

import fedala
from fedala.data import Dataset

pytestmark = pytest.mark.gpu

OPTIONS = {"method": "fedala,ditto", "rounds": 2, "batch_size": 5, "lr": 0.1, "progress": False}


def make_data(*shape):
    """Return ninety samples of three classes, of five clients."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (90,), generator=draw)
    x = torch.randn(90, *shape, generator=draw) + y.view(-1, *[1] * len(shape))
    owners = torch.arange(90) % 5
    return Dataset("own", x, y, 3, clients=owners, client_names=tuple("abcde"))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 3)

    def forward(self, x):
        padding = x[:, :, 0] < -1
        return self.head(
            self.body(x, src_key_padding_mask=padding & (x.cumsum(1)[:, :, 0] != 0))[:, 0]
        )


@pytest.mark.parametrize(
    ("shape", "model"),
    [((7,), "mlp"), ((3, 20), "cnn1d"), ((8, 4), "lstm"), ((8, 4), Recurrent), ((8, 4), Masked)],
    ids=["mlp", "cnn1d", "lstm", "nn.LSTM", "nn.TransformerEncoder"],
)
def test_models_for_other_data_give_the_same_on_both_devices(shape, model):
    data = make_data(*shape)
    on_gpu = fedala.run(dataset=data, model=model, device="cuda", **OPTIONS)
    plain = fedala.run(
        dataset=data, model=model, device="cpu", precision="float64", lanes="1", **OPTIONS
    )
    for name, method in plain.methods.items():
        own = on_gpu.methods[name]
        assert own.history[-1].loss == pytest.approx(method.history[-1].loss, rel=2e-3)
        for key, state in method.models.items():
            for tensor, value in state.items():
                difference = (own.models[key][tensor].double() - value).abs().max()
                assert difference < 2e-3 * (1 + value.abs().max()), (name, key, tensor)


@pytest.mark.parametrize("method", ["fedala", "fedrep", "apple", "per-fedavg"])
def test_newcomers_score_the_same_on_both_devices(method):
    options = {**OPTIONS, "method": method, "lr": 0.02}
    options |= {"holdout_clients": "last:2", "holdout_epochs": "0,2"}
    data = make_data(7)
    found = fedala.run(dataset=data, device="cuda", **options).methods[method].newcomers
    plain = fedala.run(dataset=data, device="cpu", precision="float64", lanes="1", **options)
    expected = plain.methods[method].newcomers
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=5e-3)


def test_a_newcomer_is_onboarded_on_the_gpu(tmp_path):
    data = make_data(7)
    fedala.run(dataset=data, out=tmp_path / "r", device="cuda", **{**OPTIONS, "method": "fedala"})
    own = data.clients == 3
    np.savez(tmp_path / "new.npz", x=data.x[own].numpy(), y=data.y[own].numpy())
    both = [
        fedala.onboard(tmp_path / "r", tmp_path / "new.npz", epochs="0,2", device=device)
        for device in ("cuda", "cpu")
    ]
    first, second = (one.clients[0].losses for one in both)
    assert first[2] == pytest.approx(second[2], rel=5e-3)
