"""A dataset of PFLlib becomes one .npz file with the same samples, clients and parts."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.data import load
from fedala.data.pfllib import convert_pfllib
from fedala.errors import UserError
from fedala.io import untrusted

random = np.random.default_rng(0)


def make_clients(sizes=(8, 5, 9), shape=(1, 6, 6), kind=np.float32):
    y = [np.arange(size) % 3 for size in sizes]
    x = [random.normal(size=(size, *shape)).astype(kind) * 50 for size in sizes]
    return [{"x": own_x, "y": own_y} for own_x, own_y in zip(x, y, strict=True)]


def write(folder, train, test, config=None):
    """Write files as PFLlib's `save_file` does."""
    for part, clients in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True)
        for number, data in enumerate(clients):
            with open(folder / part / f"{number}.npz", "wb") as file:
                np.savez_compressed(file, data=data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "MNIST", make_clients(), make_clients((2, 1, 3)), {"num_clients": 3})


def test_every_sample_keeps_its_client_and_its_part(tmp_path):
    parts = {"train": make_clients(), "test": make_clients((2, 1, 3))}
    found = convert_pfllib(write(tmp_path / "in", **parts), tmp_path / "mine.npz")
    assert found == (3, 22, 6, (1, 6, 6), ())
    with np.load(tmp_path / "mine.npz") as arrays:
        assert len(arrays.files) == 6
        for part, clients in parts.items():
            for number, own in enumerate(clients):
                is_own = arrays[f"client_{part}"] == number
                np.testing.assert_array_equal(arrays[f"x_{part}"][is_own], own["x"])
                np.testing.assert_array_equal(arrays[f"y_{part}"][is_own], own["y"])


def test_windows_of_sensors_lose_their_row_of_an_image(tmp_path):
    """PFLlib has HAR as N×9×1×128, an image of one row. Bytes stay images, however flat."""
    train = make_clients((4, 5), (9, 1, 12))
    found = convert_pfllib(write(tmp_path / "in", train, train), tmp_path / "har.npz")
    assert found.shape == (9, 12)
    x = np.concatenate([own["x"] for own in train])
    np.testing.assert_array_equal(np.load(tmp_path / "har.npz")["x_train"], x[:, :, 0])
    flat = make_clients((4, 5), (1, 1, 12), np.uint8)
    assert convert_pfllib(write(tmp_path / "b", flat, flat), tmp_path / "b.npz").shape == (1, 1, 12)


def test_clients_without_samples_are_named(tmp_path):
    train, test = make_clients((4, 0, 5)), make_clients((2, 0, 0))
    folder = write(tmp_path / "in", train, test)
    done = CliRunner().invoke(app, ["convert", "pfllib", str(folder), "--out", f"{folder}.npz"])
    assert "3 clients with 9 training and 2 test samples" in done.output
    assert "Left out, as they have no samples: clients 1\n" in done.output


def test_a_folder_that_was_not_converted_says_how(folder, tmp_path):
    with pytest.raises(UserError, match=r"fedala convert pfllib .*MNIST --out MNIST\.npz"):
        load(str(folder))


def test_more_than_nine_clients_keep_their_numbers(tmp_path):
    clients = [{"x": np.full((2, 3), float(i)), "y": np.array([0, 1])} for i in range(12)]
    convert_pfllib(write(tmp_path / "in", clients, clients), tmp_path / "mine.npz")
    with np.load(tmp_path / "mine.npz") as arrays:
        np.testing.assert_array_equal(arrays["x_train"][:, 0], arrays["client_train"])
        assert arrays["client_test"].tolist() == [i for i in range(12) for _ in range(2)]


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (random.normal(size=(6, 4)), np.float32),
        (random.normal(size=(6, 3, 4)).astype(np.float16), np.float32),
        (np.asfortranarray(random.normal(size=(6, 4)).astype(">f8")), np.float32),
        (random.integers(0, 256, (6, 1, 4, 4), dtype=np.uint8), np.uint8),
        (random.integers(0, 99, (6, 1, 4, 4)), np.float32),
        (random.integers(0, 80, (6, 9)), np.int32),
    ],
    ids=["features", "series", "fortran", "bytes", "whole numbers", "tokens"],
)
def test_types_are_those_of_the_npz_reader(tmp_path, x, kind):
    clients = [{"x": x, "y": np.arange(6) % 2}]
    convert_pfllib(write(tmp_path / "in", clients, clients), tmp_path / "mine.npz")
    with np.load(tmp_path / "mine.npz") as arrays:
        assert arrays["x_train"].dtype == kind
        np.testing.assert_array_equal(arrays["x_train"], x.astype(kind))
    own = load(str(tmp_path / "mine.npz"))
    assert (len(own.y), own.classes) == (12, 2)


def test_texts_with_their_lengths_become_tokens(tmp_path):
    """PFLlib holds a text as (tokens, length), in an array of objects."""
    texts = [([1, 2, 3, 0], 4), ([7, 0, 0, 0], 4), ([5, 5, 0, 0], 4)]
    short = [([9, 8], 2)] * 2
    clients = [
        {"x": np.array(texts, dtype=object), "y": np.array([0, 1, 2])},
        {"x": np.array(short, dtype=object), "y": [0, 1]},
    ]
    convert_pfllib(write(tmp_path / "in", clients, clients), tmp_path / "mine.npz")
    own = load(str(tmp_path / "mine.npz"))
    assert own.vocabulary == 10
    assert own.x[:5].tolist() == [tokens for tokens, _ in texts] + [[9, 8, 0, 0]] * 2


def test_the_command_converts_and_says_what(folder, tmp_path):
    out = tmp_path / "mine.npz"
    result = CliRunner().invoke(app, ["convert", "pfllib", str(folder), "--out", str(out)])
    assert result.exit_code == 0
    assert "3 clients with 22 training and 6 test samples of shape 1×6×6" in result.output
    assert out.exists()
    again = CliRunner().invoke(app, ["convert", "pfllib", str(folder), "--out", str(out)])
    assert again.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MNIST", "mine.npz"]


def refuse(folder, says, out=None):
    out = out or folder.parent / "mine.npz"
    with pytest.raises(UserError, match=says):
        convert_pfllib(folder, out)
    assert not out.exists()


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("place", ["x", "y", "other", "whole"])
def test_a_pickle_that_runs_a_program_is_refused_and_does_not_run(
    folder, place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data = {"x": np.zeros((2, 2)), "y": np.zeros(2), place: Evil()}
    np.savez_compressed(folder / "test" / "1.npz", data=Evil() if place == "whole" else data)
    refuse(folder, r"1\.npz holds a pickle with posix\.system")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"x": np.zeros((2, 2))}, "does not hold a dict with x and y"),
        ([1, 2], "does not hold a dict with x and y|not one dict"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3)}, "2 samples in x but 3 labels"),
        ({"x": np.zeros((2, 2)), "y": np.zeros((2, 1))}, "y must hold one whole number"),
        ({"x": np.zeros((2, 2)), "y": np.array([0.5, 1])}, "y must hold one whole number"),
        ({"x": np.zeros((2, 2)), "y": np.array([np.nan, 1])}, "y must hold one whole number"),
        ({"x": np.zeros((2, 2)), "y": np.array([np.inf, 1])}, "too large for classes"),
        ({"x": np.zeros((2, 2)), "y": np.array(["a", "b"])}, "y must hold one whole number"),
        ({"x": np.zeros((2, 2)), "y": ["a", "b"]}, "y must hold one whole number"),
        ({"x": np.zeros(2), "y": np.zeros(2)}, r"x is float64 of shape \(2,\)"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, "x is <U1"),
        ({"x": 5, "y": np.zeros(2)}, "x is a int|x is an int|it must be an array or texts"),
        ({"x": np.array([[-1, 2]] * 2), "y": np.zeros(2)}, "tokens are from 0"),
        ({"x": [[1, "a"], [2, 3]], "y": np.zeros(2)}, "not whole numbers from 0 on"),
        ({"x": [1, 2], "y": np.zeros(2)}, "not rows of tokens"),
        ({"x": np.zeros((2, 2), complex), "y": np.zeros(2)}, "type c16"),
        ({"x": np.zeros((2, 5)), "y": np.zeros(2)}, r"of one kind, not float32 of shape \(1, 6, 6"),
    ],
    ids=str,
)
def test_files_that_pfllib_does_not_write(folder, data, says):
    np.savez_compressed(folder / "train" / "1.npz", data=np.array(data, dtype=object)[()])
    refuse(folder, says)


def test_a_pickle_without_its_array_and_an_array_without_a_pickle(folder):
    np.savez(folder / "train" / "1.npz", data=np.zeros(3))
    refuse(folder, r"holds float64 of shape \(3,\), and not one dict")
    np.savez(folder / "train" / "1.npz", other=np.zeros(3))
    refuse(folder, "has no array data")
    (folder / "train" / "1.npz").write_bytes(pickle.dumps({"x": 1}))
    refuse(folder, "is not a readable .npz file")


def test_a_folder_must_be_complete(folder, tmp_path):
    refuse(tmp_path / "nowhere", "has the folders train and test")
    refuse(folder, r"must be called ….npz", tmp_path / "mine.csv")
    refuse(folder, "cannot be written", tmp_path / "no" / "mine.npz")
    (folder / "config.json").write_text('{"num_clients": 4}')
    refuse(folder, "says that there are 4 clients, .* have 3")
    (folder / "config.json").write_text("{")
    refuse(folder, "not readable JSON")
    (folder / "test" / "2.npz").unlink()
    refuse(folder, "client 2 is in one of them only")
    for path in folder.glob("*/*.npz"):
        path.unlink()
    refuse(folder, "there are none")


def write_member(path, content):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", content)


def test_bombs_are_refused_before_they_unpack(folder, monkeypatch):
    monkeypatch.setattr(untrusted, "ALWAYS_ALLOWED", 2**20)
    header = np.lib.format.magic(1, 0) + b"\x46\0{'descr':'|O','fortran_order':False,'shape':()}"
    write_member(folder / "test" / "0.npz", header.ljust(80) + bytes(2**23))
    refuse(folder, "MiB that unpack to .* GiB")


def test_a_text_that_is_there_many_times_is_counted_as_often(folder, monkeypatch):
    """One list of 10,000 tokens, in a pickle of 20 kB that names it 30,000 times."""
    monkeypatch.setattr(untrusted, "ALWAYS_ALLOWED", 2**24)
    tokens = list(range(10_000))
    data = {"x": [tokens] * 30_000, "y": np.zeros(30_000)}
    np.savez_compressed(folder / "train" / "0.npz", data=data)
    refuse(folder, "MiB that unpack to .* GiB")


def test_pipes_and_links_to_devices_are_refused(folder):
    (folder / "train" / "0.npz").unlink()
    os.mkfifo(folder / "train" / "0.npz")
    refuse(folder, "is not a file")
    (folder / "train" / "0.npz").unlink()
    (folder / "train" / "0.npz").symlink_to("/dev/zero")
    refuse(folder, "is not a file")
