"""Options for images in a whole run: they are checked first, act, and survive a resume."""

import numpy as np
import pytest
import torch
from runs.test_resume import interrupted, planned, same
from small import Net, assert_close

import fedala
from fedala.data import Dataset, Federation
from fedala.errors import UserError
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.plan import plan

Y = torch.arange(60) % 3
BYTES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (60, 1, 6, 6), np.uint8))
OPTIONS = {
    "method": "fedala",
    "rounds": 2,
    "clients": 3,
    "partition": "iid",
    "batch_size": 4,
    "lr": 0.1,
    "device": "cpu",
}


def go(x=BYTES, **options):
    data = Dataset("own", x, Y, 3)
    return fedala.run(dataset=data, model=Net, **{**OPTIONS, **options})


def losses_of(result):
    """Return the test losses of evaluations 0 to 2."""
    return [row.loss for row in result.history]


@pytest.mark.parametrize(("method", "lanes"), [("fedrep+ala", "1"), ("per-fedavg", "all")])
def test_resumed_is_uninterrupted(method, lanes, tmp_path):
    options = {"augment": "flip,crop:2", "normalize": "0.4/0.3", "lanes": lanes}
    execute(planned(method, **options), tmp_path / "whole")
    interrupted(tmp_path / "parts", 2, method, **options)
    same(tmp_path / "whole", tmp_path / "parts")


def test_the_same_seed_repeats_and_each_option_counts():
    plain = losses_of(go())
    assert losses_of(go(augment="none", normalize="0.5/0.5", resize=6)) == plain
    flipped = losses_of(go(augment="flip"))
    assert flipped == losses_of(go(augment="flip"))
    assert flipped[0] == plain[0]  # before any training
    assert flipped[1] != plain[1]
    assert losses_of(go(augment="flip,crop:1"))[1] != flipped[1]
    assert losses_of(go(normalize="0.4/0.2"))[0] != plain[0]


def test_normalised_bytes_are_normalised_floats():
    """A program that normalises by itself, in float32, gets the same results."""
    by_hand = BYTES.float().div(255).sub(0.4).div(0.2)
    models = [r.models for r in (go(normalize="0.4/0.2"), go(by_hand))]
    for key in models[1]:
        assert_close(models[0][key], models[1][key], 0)


def test_data_from_python_is_resized_too():
    large = BYTES.repeat_interleave(2, 2).repeat_interleave(2, 3)
    config = Config.from_values({**OPTIONS, "resize": 6})
    assert plan(config, Dataset("own", large, Y, 3), Net).federation.dataset.x.shape[2:] == (6, 6)
    whole = (np.arange(60),)
    federation = Federation(Dataset("own", large, Y, 3), whole, whole, (np.arange(0),))
    assert plan(config, federation, Net).federation.dataset.x.shape[2:] == (6, 6)


TEXTS = torch.zeros(60, 200, dtype=torch.int32)
COLOUR = torch.zeros(60, 3, 6, 6, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("x", "options", "says"),
    [
        (TEXTS, {"augment": "flip"}, "augment is for images .*, and the samples of own are int32"),
        (TEXTS, {"normalize": "mnist"}, "normalize is for images"),
        (TEXTS, {"resize": 8}, "resize is for images of bytes"),
        (torch.zeros(60, 7), {"augment": "crop:4"}, "float32 of shape 7"),
        (BYTES, {"augment": "crop:6"}, "have 6×6 pixels: a crop must be less than 6"),
        (BYTES, {"augment": "rotate"}, "augment must be none, flip"),
        (BYTES, {"normalize": "cifar10"}, "has 3 means, and the images of own have 1 channel: "),
        (COLOUR, {"normalize": "0.5/1,1"}, "2 standard deviations, .* have 3 channels"),
        (BYTES, {"normalize": "0.5/0"}, "must be greater than 0"),
        (BYTES, {"resize": 0}, "resize must be at least 1"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_in_a_sentence(x, options, says):
    data = Dataset("own", x, Y, 3, vocabulary=9 if x is TEXTS else None)
    with pytest.raises(UserError, match=says):
        plan(Config.from_values({**OPTIONS, **options}), data, Net)
