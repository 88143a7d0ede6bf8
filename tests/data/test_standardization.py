"""Figures fitted on training samples: NumPy's, whatever the test samples are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedala.data import Dataset, Federation, federate, standardization
from fedala.data.standardization import fit_normalization
from fedala.errors import UserError

RANDOM = np.random.default_rng(0)
LABELS = torch.arange(40) % 2


def divide(x):
    return federate(Dataset("x", torch.as_tensor(x), LABELS, 2), "iid", 3, validation=0.2)


def rows_of(federation):
    return np.sort(np.concatenate(federation.train))


@pytest.fixture(params=[2**20, 50], ids=["whole", "in pieces"], autouse=True)
def pieces(request, monkeypatch):
    monkeypatch.setattr(standardization, "_CHUNK", request.param)


@pytest.mark.parametrize(
    ("shape", "is_last", "axes"),
    [
        ((5,), False, 0),
        ((5, 7), False, (0, 2)),
        ((7, 5), True, (0, 1)),
        ((5, 4, 3), False, (0, 2, 3)),
    ],
    ids=["features", "windows", "sequences", "float images"],
)
def test_every_channel_has_mean_0_and_deviation_1(shape, is_last, axes):
    x = RANDOM.normal(1e4, 3, (40, *shape)).astype(np.float32)
    federation = divide(x)
    found = fit_normalization(federation, is_channels_last=is_last)
    own = x[rows_of(federation)].astype(np.float64)
    assert len(found.mean) == len(found.std) == 5
    np.testing.assert_allclose(found.mean, own.mean(axes), rtol=1e-13)
    np.testing.assert_allclose(found.std, own.std(axes), rtol=1e-10)
    assert found.is_channels_last == is_last


def test_bytes_are_exact():
    x = RANDOM.integers(0, 256, (40, 3, 4, 5), np.uint8)
    x[:, 2] = 77
    federation = divide(x)
    found = fit_normalization(federation)
    own = x[rows_of(federation)] / 255
    np.testing.assert_allclose(found.mean, own.mean((0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(found.std[:2], own.std((0, 2, 3))[:2], rtol=1e-14)
    assert found.mean[2] == 77 / 255
    assert found.std[2] == 1


def test_only_training_samples_count():
    x = RANDOM.normal(size=(40, 5)).astype(np.float32)
    federation = divide(x)
    found = fit_normalization(federation)
    others = np.setdiff1d(np.arange(40), rows_of(federation))
    assert {*federation.test[0], *federation.validation[0]} <= {*others}
    x = x.copy()
    x[others] = 1e6
    data = replace(federation.dataset, x=torch.from_numpy(x))
    assert fit_normalization(replace(federation, dataset=data)) == found
    x[rows_of(federation)[0]] += 1
    data = replace(federation.dataset, x=torch.from_numpy(x))
    assert fit_normalization(replace(federation, dataset=data)) != found


def test_the_figures_do_not_depend_on_who_holds_what():
    federation = divide(RANDOM.normal(size=(40, 5)).astype(np.float32))
    rows = rows_of(federation)
    nothing = (np.arange(0),)
    pooled = Federation(federation.dataset, (rows[::-1].copy(),), nothing, nothing)
    assert fit_normalization(pooled) == fit_normalization(federation)


def test_a_constant_feature_is_moved_to_0_and_not_stretched():
    x = RANDOM.normal(size=(40, 3)).astype(np.float32)
    x[:, 1] = 0.1
    x[:, 2] *= 1e-40
    found = fit_normalization(divide(x))
    assert found.mean[1] == np.float32(0.1)
    assert found.std[1:] == (1, 1)


def test_texts_and_clients_without_samples_are_refused():
    texts = torch.zeros(40, 200, dtype=torch.int32)
    data = Dataset("letters", texts, LABELS, 2, vocabulary=9)
    with pytest.raises(UserError, match="letters are int32 of shape 200"):
        fit_normalization(federate(data, "iid", 2))
    federation = divide(RANDOM.normal(size=(40, 3)).astype(np.float32))
    nothing = (np.arange(0),) * 3
    with pytest.raises(UserError, match="there are none here: give the figures"):
        fit_normalization(Federation(federation.dataset, nothing, nothing, nothing))
