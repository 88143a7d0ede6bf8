"""Known datasets with clients of their own: MNIST by writers, Heart Disease, HAR."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fedala.data import federate, load, natural_sets
from fedala.errors import UserError


def read_qmnist_writers(train: Path, test: Path, images: int) -> np.ndarray:
    """Make the table of writers from QMNIST's extended labels, as the one in the package was made.

    They are big-endian int32 with eight columns: class, series, writer, …. Only the first `images`
    of the test images are MNIST's.
    """
    parts = []
    for path in (train, test):
        data = gzip.decompress(path.read_bytes())
        magic, rows, columns = struct.unpack(">3i", data[:12])
        assert (magic, columns) == (0x0C02, 8)
        parts.append(np.frombuffer(data[12:], ">i4").reshape(rows, columns))
    return np.concatenate([parts[0][:, 2], parts[1][:images, 2]]).astype(np.uint16)


def write_qmnist(path, rows):
    table = np.array([[label, 4, writer, 0, 30 + label, 0, 0, 0] for label, writer in rows], ">i4")
    path.write_bytes(gzip.compress(struct.pack(">3i", 0x0C02, *table.shape) + table.tobytes()))


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """Six training images of writers 2154, 0 and 7, and three test images of 2578 and 3."""
    write_qmnist(tmp_path / "a.gz", [(5, 2154), (0, 7), (4, 2154), (1, 0), (9, 0), (2, 7)])
    write_qmnist(tmp_path / "b.gz", [(7, 2578), (2, 3), (1, 3), (0, 99)])
    writers = read_qmnist_writers(tmp_path / "a.gz", tmp_path / "b.gz", 3)
    assert writers.tolist() == [2154, 7, 2154, 0, 0, 7, 2578, 3, 3]
    labels = np.array([5, 0, 4, 1, 9, 2, 7, 2, 1])
    np.savez(tmp_path / "writers.npz", writers=writers)
    np.savez(tmp_path / "mnist.npz", x=np.zeros((9, 28, 28), np.uint8), y=labels)
    monkeypatch.setattr(natural_sets, "_WRITERS", tmp_path / "writers.npz")
    monkeypatch.setattr(natural_sets, "MNIST_TRAIN", 6)
    digest = hashlib.sha256(labels.astype(np.uint8).tobytes()).hexdigest()
    monkeypatch.setattr(natural_sets, "_MNIST_LABELS", digest)
    return tmp_path


def test_mnist_by_writers_has_those_of_the_training_images_first(small_mnist):
    own = load("mnist-writers", small_mnist)
    assert own.client_names == ("w0000", "w0007", "w2154", "w0003", "w2578")
    assert own.clients.tolist() == [2, 1, 2, 0, 0, 1, 4, 3, 3]
    assert own.split is None
    found = federate(own)  # w2578 has a single image
    assert found.client_names == ("w0000", "w0007", "w2154", "w0003")
    assert "first the 3 of the training images, then the 2 others" in found.notes[0]


def test_another_order_of_mnist_is_refused(small_mnist):
    data = dict(np.load(small_mnist / "mnist.npz"))
    np.savez(small_mnist / "mnist.npz", x=data["x"], y=data["y"][::-1])
    with pytest.raises(UserError, match=r"not MNIST with all 70,000 images in the official order"):
        load("mnist-writers", small_mnist)


def test_the_writers_in_the_package_are_those_of_mnist():
    """NIST has writers 0 to 610 (employees) and 2100 to 2599 (students) of these digits."""
    writers = natural_sets.read_writers()
    assert (writers.shape, writers.dtype) == ((70_000,), np.uint16)
    train, test = (set(part.tolist()) for part in (writers[:60_000], writers[60_000:]))
    assert (len(train), len(test), train & test) == (539, 297, set())
    assert all(writer <= 610 or 2100 <= writer <= 2599 for writer in train | test)
    assert writers[:8].tolist() == [2154, 0, 2232, 0, 2168, 0, 2109, 0]
    packed = np.load(Path(__file__).with_name("mnist_labels.npz"))["packed"]
    labels = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    digest = hashlib.sha256(labels.astype(np.uint8).tobytes()).hexdigest()
    assert digest == natural_sets._MNIST_LABELS
    # Nobody wrote one digit only: writers and labels belong together.
    assert all(len(np.unique(labels[writers == writer])) > 1 for writer in np.unique(writers))


PATIENTS = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    "67.0,1.0,4.0,160.0,286.0,0.0,0.0,108.0,1.0,1.5,2.0,3.0,?,2\n",
    "hungarian": "28,1,2,130,132,0,1,185,0,0,?,?,?,0\n29,1,2,120,?,0,0,160,0,0,?,?,?,0\n",
    "switzerland": "32,1,3,95,0,0,0,127,0,.7,1,?,?,1\n\n",
    "va": "63,1,4,140,260,0,1,112,1,3,2,?,?,2\n44,1,4,130,209,0,1,127,0,0,?,?,?,0\n",
}


def write_patients(folder, **changes):
    for hospital, content in {**PATIENTS, **changes}.items():
        (folder / f"processed.{hospital}.data").write_text(content)


def test_heart_disease_as_flamby_prepares_it(tmp_path):
    write_patients(tmp_path)
    own = load("heart-disease", tmp_path)
    assert own.client_names == ("cleveland", "hungarian", "switzerland", "va")
    assert own.clients.tolist() == [0, 0, 1, 2, 3, 3]
    assert own.y.tolist() == [0, 1, 0, 1, 1, 0]
    assert own.x[0].tolist() == pytest.approx([63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1])
    assert own.x[2].tolist() == [28, 1, 130, 132, 0, 185, 0, 0, 1, 0, 0, 1, 0]
    assert own.feature_names[8:] == ("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2")
    assert own.note == "partial: 6 of 740 samples"
    with pytest.raises(UserError, match="name their folder with data_dir"):
        load("heart-disease")


@pytest.mark.parametrize(
    "line", ["1,2,3\n", "63,1,9,145,233,1,2,150,0,2.3,3,0,6,0\n", PATIENTS["va"].replace("63", "x")]
)
def test_an_unsound_patient_is_named(tmp_path, line):
    write_patients(tmp_path, va=line)
    with pytest.raises(UserError, match=r"processed\.va\.data, line 1: a patient has 14 numbers"):
        load("heart-disease", tmp_path)
    (tmp_path / "processed.va.data").unlink()
    with pytest.raises(UserError, match=r"processed\.va\.data is missing"):
        load("heart-disease", tmp_path)


@pytest.fixture
def har(tmp_path):
    """Three training samples of people 10 and 1, and two test samples of person 2."""
    rng = np.random.RandomState(0)
    for part, labels, people in (("train", [5, 1, 6], [10, 1, 1]), ("test", [2, 2], [2, 2])):
        folder = tmp_path / "UCI HAR Dataset" / part
        (folder / "Inertial Signals").mkdir(parents=True)
        np.savetxt(folder / f"X_{part}.txt", rng.rand(len(labels), 561), "%16.7e", delimiter="")
        np.savetxt(folder / f"y_{part}.txt", labels, "%d")
        np.savetxt(folder / f"subject_{part}.txt", people, "%d")
        for name in natural_sets._SIGNALS:
            path = folder / "Inertial Signals" / f"{name}_{part}.txt"
            np.savetxt(path, rng.rand(len(labels), 128), "%16.7e", delimiter="")
    return tmp_path


@pytest.mark.parametrize(("name", "shape"), [("har", (5, 561)), ("har-signals", (5, 9, 128))])
def test_har_by_people(har, name, shape):
    own = load(name, har)
    assert tuple(own.x.shape) == shape
    assert own.client_names == ("1", "2", "10")
    assert own.clients.tolist() == [2, 0, 0, 1, 1]
    assert own.y.tolist() == [4, 0, 5, 1, 1]
    assert own.class_names[4] == "standing"
    assert own.split is None
    folder = har / "UCI HAR Dataset" / "train"
    file = folder / ("X_train.txt" if name == "har" else "Inertial Signals/body_acc_x_train.txt")
    first = np.loadtxt(file, dtype=np.float32)
    np.testing.assert_array_equal(own.x.numpy()[:3] if name == "har" else own.x[:3, 0], first)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("y_train.txt", "5\n1\n", "y_train.txt has 2 lines, but there are 3 samples"),
        ("y_train.txt", "5\n1\n7\n", "activities must be numbers from 1 to 6"),
        ("subject_train.txt", "10\n1\nI1\n", "subject_train.txt is not a file of numbers"),
        ("X_train.txt", "1 2 3\n", "X_train.txt has 3 numbers in a line; it must have 561"),
        ("subject_train.txt", None, "subject_train.txt is missing"),
    ],
)
def test_an_unsound_copy_of_har(har, file, content, says):
    path = har / "UCI HAR Dataset" / "train" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says):
        load("har", har)
