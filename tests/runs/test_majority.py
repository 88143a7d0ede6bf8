"""The share of the most frequent class, beside which an accuracy is read."""

import json

import pytest
import torch
from torch import nn

import fedala
from fedala.data import Dataset, federate, hold_out_clients

RARE = torch.arange(200) % 15 == 0
OPTIONS = {"method": "fedavg", "clients": 4, "rounds": 4, "lr": 0.5, "device": "cpu"}


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))


def test_a_model_that_cannot_tell_the_classes_apart_scores_the_share(tmp_path):
    """Of samples that are all the same, a model learns which class is the most frequent.

    The test samples of a client that is held out do not count.
    """
    data = Dataset("same", torch.zeros(200, 3), 1 - RARE.long(), 2)
    options = {**OPTIONS, "partition": "dir:0.5", "holdout_clients": "1"}
    result = fedala.run(dataset=data, model=make_model, out=tmp_path / "run", **options)
    known = hold_out_clients(federate(data, "dir:0.5", 4), "1").known
    frequent, rare = known.counts("test").sum(0)[::-1].tolist()
    assert result.majority_share == frequent / (frequent + rare)
    assert 0.5 < result.majority_share < 1
    assert result.best_accuracy == pytest.approx(result.majority_share)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["majority_share"] == result.majority_share
    share = f"{100 * result.majority_share:.2f} %."
    sentence = f"class of the clients in training: {share} FedAvg is no better in the best round:"
    assert repr(result).count(sentence) == 1
    page = result.report().read_text()
    assert page.count(sentence) == 2  # the caption, and the label of its frame
    assert "of unseen clients (3)." in page


def test_only_accuracies_have_one(tmp_path):
    numbers = Dataset("numbers", torch.randn(80, 3), torch.randn(80), 1)
    options = {**OPTIONS, "partition": "iid", "rounds": 1, "lr": 0.01}
    result = fedala.run(dataset=numbers, model="mlp", out=tmp_path / "run", **options)
    assert result.majority_share is None
    assert "majority_share" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "most frequent" not in result.report().read_text() + repr(result)
