"""Images of different sizes become images of one size on loading."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.data import Dataset, federate, load, resize_images
from fedala.data.images import decode_images
from fedala.errors import UserError
from fedala.io.image_files import ImageSource

PIL = pytest.importorskip("PIL.Image", reason="pillow is not installed")
Y = torch.tensor([0, 1, 0, 1])


def make_photo(height, width, seed=0, channels=3):
    """Make a smooth image with some noise."""
    random = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 30, width)[None, :, None]
    return (ramp + random.integers(0, 25, (height, width, channels))).astype(np.uint8)


PHOTOS = [make_photo(*size, seed) for seed, size in enumerate([(9, 12), (20, 7), (8, 8), (5, 16)])]


@pytest.fixture
def folder(tmp_path):
    for number, photo in enumerate(PHOTOS):
        path = tmp_path / "own" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.fromarray(photo).save(path)
    return tmp_path / "own"


def shrink(photo, side):
    """Resize as Pillow does for a whole colour image."""
    small = PIL.fromarray(photo).resize((side, side), PIL.Resampling.BILINEAR)
    return np.asarray(small).transpose(2, 0, 1)


@pytest.mark.parametrize("side", [1, 8, 30])
def test_images_of_a_folder_become_squares(folder, side):
    found = load(str(folder), resize=side)
    assert found.x.dtype == torch.uint8
    assert found.y.tolist() == [0, 0, 1, 1]
    for image, number in zip(found.x, (0, 2, 1, 3), strict=True):
        np.testing.assert_array_equal(image.numpy(), shrink(PHOTOS[number], side))
    np.testing.assert_array_equal(load(str(folder), resize=8).x[1].numpy()[0], PHOTOS[2][..., 0])


def test_without_it_different_sizes_are_refused_in_a_sentence_that_names_it(folder):
    with pytest.raises(
        UserError,
        match=r"0\.png has 12×9; all images must have one size, or get one from the option resize",
    ):
        load(str(folder))


def test_a_checkerboard_becomes_grey():
    """Antialias: every pixel counts, where picking pixels would give black or white."""
    board = np.indices((32, 32)).sum(0) % 2 * 255
    x = torch.from_numpy(board.astype(np.uint8)).expand(4, 1, 32, 32).contiguous()
    small = resize_images(Dataset("own", x, Y, 2), 8).x
    assert small.shape == (4, 1, 8, 8)
    assert int((small.int() - 127).abs().max()) <= 2


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_arrays_are_resized_as_files_are(tmp_path, channels):
    images = np.stack([make_photo(10, 14, seed, channels) for seed in range(4)])
    np.savez(tmp_path / "own.npz", x=images.transpose(0, 3, 1, 2), y=Y.numpy())
    found = load(str(tmp_path / "own.npz"), resize=6)
    assert found.x.shape == (4, channels, 6, 6)
    for image, photo in zip(found.x, images, strict=True):
        for channel, plane in enumerate(image):
            wanted = PIL.fromarray(photo[..., channel]).resize((6, 6), PIL.Resampling.BILINEAR)
            np.testing.assert_array_equal(plane.numpy(), np.asarray(wanted))


def test_a_known_dataset_is_checked_first_and_then_resized():
    pytest.importorskip("sklearn")
    assert load("digits", resize=14).x.shape == (1797, 1, 14, 14)
    assert load("digits", resize=28).x.equal(load("digits").x)


def test_encoded_images_of_a_table(tmp_path):
    def encode(photo):
        path = tmp_path / "one.png"
        PIL.fromarray(photo).save(path)
        return path.read_bytes()

    contents = [encode(photo) for photo in PHOTOS]
    sources = [ImageSource(f"image {i}", None, content) for i, content in enumerate(contents)]
    found, _ = decode_images(sources, "a table", 8)
    for image, photo in zip(found, PHOTOS, strict=True):
        np.testing.assert_array_equal(image.numpy(), shrink(photo, 8))


@pytest.mark.parametrize("shape", [(4, 5), (4, 1, 5, 5)])
def test_other_samples_are_refused(shape):
    with pytest.raises(UserError, match="resize is for images of bytes, and own holds float32"):
        resize_images(Dataset("own", torch.rand(shape), Y, 2), 4)


def test_the_size_is_a_part_of_what_identifies_the_data(folder):
    digests = {federate(load(str(folder), resize=side), "iid", 1).digest() for side in (8, 9, 10)}
    assert len(digests) == 3


def test_the_command_line_divides_such_a_folder(folder):
    command = ["partition", "--dataset", str(folder), "--clients", "1", "--partition", "iid"]
    assert CliRunner().invoke(app, command).exit_code != 0
    assert CliRunner().invoke(app, [*command, "--resize", "8"]).exit_code == 0
