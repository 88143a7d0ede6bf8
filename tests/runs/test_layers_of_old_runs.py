"""Runs of first versions, which counted layers as they are registered, keep them."""

import numpy as np
import pytest
import torch
from torch import nn

import fedala
from fedala.data import Dataset
from fedala.lanes.layer_units import layers_of, list_registered_layers
from fedala.runs import plan, provenance


class HeadFirst(nn.Module):
    """A model whose head is registered first."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(6, 3), nn.Linear(5, 6)

    def forward(self, x):
        return self.head(self.body(x).relu())


RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 5)).astype("f4"), RANDOM.integers(0, 3, 60)
DATA = Dataset("own", torch.from_numpy(X), torch.from_numpy(Y), 3)
OPTIONS = {
    "method": "fedala,fedrep,partialfed", "clients": 3, "partition": "iid", "device": "cpu",
    "lr": 0.1, "checkpoint_every": 1,
}  # fmt: skip


def run(out, rounds):
    return fedala.run(dataset=DATA, model=HeadFirst, rounds=rounds, out=out, **OPTIONS)


def resume(folder):
    return fedala.run(dataset=DATA, model=HeadFirst, rounds=3, resume=folder)


def rows(folder):
    history = fedala.runs.folder.RunFolder.open(folder).history()
    return {name: [(row.score, row.loss) for row in own] for name, own in history.items()}


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Make two runs as first versions did: one of two rounds, one of three."""
    with monkeypatch.context() as patch:
        patch.setattr(plan, "learn_order", lambda model, x: list_registered_layers(model))
        patch.setattr(provenance, "LAYERS", {})
        for rounds in (2, 3):
            run(tmp_path / str(rounds), rounds)
    return tmp_path


def test_an_old_run_is_resumed_with_the_layers_that_it_began_with(old, tmp_path):
    whole, resumed = rows(old / "3"), old / "2"
    assert layers_of(HeadFirst())[0] == ("body.weight", "body.bias")
    resume(resumed)
    assert rows(resumed) == whole
    fedala.run(dataset=DATA, model=HeadFirst, resume=resumed, rounds=4)  # it stays an old run
    assert len(rows(resumed)["fedala"]) == 5
    run(tmp_path / "new", 3)
    assert rows(tmp_path / "new") != whole


def test_a_newcomer_of_an_old_run_gets_what_its_server_has(old):
    found = fedala.onboard(old / "3", DATA, method="fedrep", model=HeadFirst, epochs="0")
    saved = fedala.load(old / "3", "fedrep", model=HeadFirst).personal(0).state_dict()
    assert torch.equal(found.clients[0].model["head.weight"], saved["head.weight"])
