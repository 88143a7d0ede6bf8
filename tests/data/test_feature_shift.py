"""Feature shift: each client's samples are changed once, as its option says."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

import fedala
from fedala.data import Dataset, Federation, federate
from fedala.data.feature_shift import parse_feature_shift, rotate_images, shift_features
from fedala.errors import UserError
from fedala.lanes.randomness import draw
from fedala.runs.config import Config
from fedala.runs.plan import plan
from fedala.runs.resumable_options import CHANGEABLE, identify

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (90, 1, 8, 8), dtype=np.uint8))
LABELS = torch.arange(90) % 3


def make(x=IMAGES, clients=5, **options):
    return federate(Dataset("own", x, LABELS, 3), "iid", clients, **options)


def make_model(side=8):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(side**2, 3))


def list_rows(federation, client):
    parts = (federation.train, federation.validation, federation.test)
    return np.concatenate([part[client] for part in parts])


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("rotate:90", [0, 1, 2, 3, 0]),
        ("rotate:0,90,180,270", [0, 1, 2, 3, 0]),
        ("rotate:180,-90", [2, 3, 2, 3, 2]),
        ("rotate:-180", [0, 2, 0, 2, 0]),
    ],
)
def test_multiples_of_90_degrees_are_exact_and_clients_take_turns(text, turns):
    federation = make(validation=0.2)
    shifted = shift_features(federation, parse_feature_shift(text), seed=1)
    for client, turn in enumerate(turns):
        rows = list_rows(federation, client)
        expected = IMAGES[rows].rot90(turn, (2, 3))
        assert torch.equal(shifted.dataset.x[rows], expected)
    assert shifted.train == federation.train
    assert torch.equal(federation.dataset.x, IMAGES)  # the original stays as it was


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("height", "width"), [(30, 30), (30, 40)])
def test_other_angles_agree_with_pillow(kind, height, width):
    """Pillow and torch round differently, by one step; the corners are left out."""
    small = np.random.default_rng(1).integers(0, 256, (6, 6), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.array(image)).to(kind)[None, None]
    turned = rotate_images(x.expand(300, 1, height, width), 30)[299, 0]
    assert turned.dtype == kind
    expected = np.array(image.rotate(30, Image.Resampling.BILINEAR)).astype(float)
    middle = np.s_[height // 2 - 7 : height // 2 + 7, width // 2 - 7 : width // 2 + 7]
    assert np.abs(turned.numpy().astype(float) - expected)[middle].max() <= 1.5
    assert np.abs(x[0, 0].numpy().astype(float) - expected)[middle].max() > 10


def test_a_quarter_turn_in_small_steps_is_a_quarter_turn():
    x = torch.randn(3, 2, 7, 7)
    torch.testing.assert_close(rotate_images(x, 90.00001), x.rot90(1, (2, 3)), atol=1e-4, rtol=0)


def test_noise_grows_with_the_clients_number_and_is_keyed():
    """Client i of 5 has σ·i/5; the draw is that of (seed, client), over its samples in order."""
    x = torch.zeros(90, 4)
    federation = make(x)
    shifted = shift_features(federation, parse_feature_shift("noise:0.5"), seed=3).dataset.x
    for client in range(5):
        rows = np.sort(list_rows(federation, client))
        noise = draw(3, "feature shift", client=client).standard_normal((18, 4), dtype=np.float32)
        np.testing.assert_allclose(shifted[rows], 0.5 * client / 5 * noise, rtol=1e-6)
    other = shift_features(federation, parse_feature_shift("noise:0.5"), seed=4).dataset.x
    assert not torch.equal(other, shifted)


def test_the_same_client_alone_gets_the_same_noise():
    """As on a node of a federation, which has other clients' places without their samples."""
    shift, federation = parse_feature_shift("noise:0.5"), make()
    everything = shift_features(federation, shift, seed=1).dataset.x
    rows = list_rows(federation, 3)
    nothing = (rows[:0],) * 3
    alone = Federation(federation.dataset, (*nothing, rows), (*nothing, rows[:0]), (rows[:0],) * 4)
    own = shift_features(alone, shift, seed=1, clients=5).dataset.x
    assert torch.equal(own[rows], everything[rows])
    assert not torch.equal(own[rows], IMAGES[rows])


def test_noise_of_bytes_is_on_their_scale_from_0_to_1_and_is_clipped():
    x = torch.full((90, 1, 8, 8), 128, dtype=torch.uint8)
    federation = make(x, clients=2)
    pixels = shift_features(federation, parse_feature_shift("noise:0.1"), 1).dataset.x
    assert (pixels[list_rows(federation, 0)] == 128).all()
    own = pixels[list_rows(federation, 1)].float()
    assert own.std().item() == pytest.approx(0.05 * 255, rel=0.05)
    assert own.mean().item() == pytest.approx(128, abs=1)
    loud = shift_features(federation, parse_feature_shift("noise:100"), 1).dataset.x
    assert {0, 255} <= set(loud[list_rows(federation, 1)].flatten().tolist())


def test_a_run_sees_the_changed_samples_and_records_the_option():
    options = {"rounds": 1, "method": "fedavg", "clients": 3, "partition": "iid"}
    data = Dataset("own", IMAGES.float(), LABELS, 3)
    config = Config.from_values({**options, "feature_shift": "rotate:90"})
    checked = plan(config, data, make_model)
    plain = plan(Config.from_values(options), data, make_model)
    by_hand = shift_features(plain.federation, parse_feature_shift("rotate:90"), 1)
    assert checked.federation.digest() == by_hand.digest() != plain.federation.digest()
    assert identify(checked.config)["feature_shift"] == "rotate:90"
    assert "feature_shift" not in identify(plain.config)
    assert "feature_shift" not in CHANGEABLE


def test_a_federation_of_ones_own_is_shifted_too_and_after_resizing():
    own, options = make(clients=2), {"resize": 4, "rounds": 1}
    config = Config.from_values({**options, "feature_shift": "rotate:0,90"})
    checked = plan(config, own, lambda: make_model(4))
    plain = plan(Config.from_values(options), own, lambda: make_model(4))
    rows = list_rows(own, 1)
    small = plain.federation.dataset.x[rows]
    assert torch.equal(checked.federation.dataset.x[rows], small.rot90(1, (2, 3)))


@pytest.mark.parametrize(
    "text",
    [
        "rotate", "rotate:", "rotate:0", "rotate:360", "rotate:1e9", "rotate:a", "rotate:1,,2",
        "rotate:90,400", "noise:0", "noise:-1", "noise:nan", "noise:1,2", "noise:1e30", "blur:3",
        "rotate:1.2.3", "",
    ],
)  # fmt: skip
def test_a_shift_that_does_not_exist(text):
    with pytest.raises(UserError, match=r"feature_shift must be rotate:30 .*, rotate:0,90,180"):
        parse_feature_shift(text)


@pytest.mark.parametrize(
    ("x", "text", "says"),
    [
        (torch.zeros(90, 4), "rotate:90", "feature_shift is for images"),
        (torch.zeros(90, 1, 4, 6), "rotate:90", "6×4 pixels: only a square"),
        (torch.zeros(90, 5, dtype=torch.int32), "noise:1", "int32 samples, which are tokens"),
        (torch.zeros(90, 5, dtype=torch.int32), "rotate:90", "is for images"),
    ],
)
def test_samples_that_do_not_fit(x, text, says):
    with pytest.raises(UserError, match=says):
        fedala.run(dataset=Dataset("own", x, LABELS, 3), feature_shift=text, partition="iid")


def test_images_that_are_not_square_may_be_turned_by_other_angles():
    x = torch.rand(90, 1, 4, 6)
    shifted = shift_features(make(x), parse_feature_shift("rotate:0,180,45"), 1).dataset.x
    assert shifted.shape == x.shape
    assert math.isfinite(shifted.sum().item())
