"""Normalised images against the formula, and the option's text."""

import numpy as np
import pytest
import torch
from small import Net

from fedala.errors import UserError
from fedala.lanes.backend import Backend
from fedala.lanes.normalization import KNOWN, Normalization, parse_normalization
from fedala.lanes.task import Task

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), np.uint8))
LABELS = torch.arange(6)
COLOUR = Normalization((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def inputs_of(x, **options):
    task = Task(Net(), x, LABELS, [np.arange(6)], **options)
    return task.inputs(LABELS.view(2, 3)).flatten(0, 1)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("has_room", [False, True])
def test_every_channel_has_its_figures(precision, is_float, has_room, monkeypatch):
    """Images are normalised once, whether they are converted on loading or at each use."""
    monkeypatch.setattr(Backend, "has_room_for_floats", lambda *_: has_room)
    x = (IMAGES / 255) if is_float else IMAGES
    found = inputs_of(x, precision=precision, normalization=COLOUR)
    assert found.dtype == getattr(torch, precision)
    exact = IMAGES.double() / 255
    for channel, (mean, std) in enumerate(zip(COLOUR.mean, COLOUR.std, strict=True)):
        wanted = (exact[:, channel] - mean) / std
        tolerance = 1e-12 if precision == "float64" and not is_float else 1e-6
        assert (found[:, channel].double() - wanted).abs().max() < tolerance


def test_one_number_is_for_all_channels():
    one, three = Normalization((0.4,), (0.2,)), Normalization((0.4,) * 3, (0.2,) * 3)
    first, second = (inputs_of(IMAGES, normalization=n) for n in (one, three))
    assert torch.allclose(first, second, rtol=0, atol=1e-6)


def test_without_the_option_bytes_are_from_minus_one_to_one_and_floats_as_they_are():
    by_hand = IMAGES.to(torch.float32).div_(255).sub_(0.5).div_(0.5)
    assert torch.equal(inputs_of(IMAGES), by_hand)
    floats = torch.randn(6, 3, 4, 5)
    assert torch.equal(inputs_of(floats), floats)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ("0.1307/0.3081", Normalization((0.1307,), (0.3081,))),
        (" 0.1, 0.2,3e-1 / .5", Normalization((0.1, 0.2, 0.3), (0.5,))),
        ("mnist", Normalization((0.1307,), (0.3081,))),
    ],
)
def test_the_option_is_mean_and_std(text, wanted):
    assert parse_normalization(text) == wanted


@pytest.mark.parametrize("name", KNOWN)
def test_known_figures_are_sound(name):
    found = parse_normalization(name.upper())
    assert len(found.mean) == len(found.std) == (1 if "mnist" in name else 3)


@pytest.mark.parametrize(
    "text",
    ["", "0.5", "cifar", "0.5/", "/0.5", "a/b", "nan/1", "inf/1", "1/2/3", "1,,2/1", "1e13/1"],
)
def test_another_text_is_refused(text):
    with pytest.raises(UserError, match="normalize must be mean/std"):
        parse_normalization(text)


@pytest.mark.parametrize("std", ["0", "-0.5", "0.5,0,0.5", "1e-30"])
def test_a_standard_deviation_must_be_positive(std):
    with pytest.raises(UserError, match="must be greater than 0"):
        parse_normalization(f"0.5/{std}")
