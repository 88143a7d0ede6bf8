"""The known datasets, from small files in the formats that they are published in."""

import csv
import gzip
import io
import struct
import sys

import numpy as np
import pytest
import torch

from fedala.data import known_datasets, load
from fedala.errors import UserError

RNG = np.random.RandomState(0)
GREY = RNG.randint(0, 256, (6, 28, 28), dtype=np.uint8)
COLOUR = RNG.randint(0, 256, (12, 32, 32, 3), dtype=np.uint8)
LABELS = [3, 1, 4, 1, 5, 9]


def encoded(array, kind="PNG"):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def write_idx(path, array):
    array = np.asarray(array, dtype=np.uint8)
    data = (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder, end=""):
    for part, rows in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", GREY[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", LABELS[rows])


def write_parquet(folder, columns, names=None, parts=("train", "test")):
    """Write files as `datasets` does; the first half of the samples is the training part."""
    import datasets

    half = len(next(iter(columns.values()))) // 2
    features = {name: datasets.Value("string") for name in columns}
    features |= {name: datasets.Image() for name in columns if name in ("image", "img")}
    features |= {name: datasets.ClassLabel(names=names) for name in columns if "label" in name}
    folder.mkdir(parents=True)
    made = {}
    for part, rows in zip(parts, (slice(0, half), slice(half, None)), strict=True):
        content = {name: values[rows] for name, values in columns.items()}
        made[part] = datasets.Dataset.from_dict(content, features=datasets.Features(features))
        made[part].to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return datasets.DatasetDict(made)


def assert_is_grey(dataset, name="mnist"):
    assert dataset.name == name
    assert dataset.x.dtype == torch.uint8
    np.testing.assert_array_equal(dataset.x.numpy(), GREY[:, None])
    assert dataset.y.tolist() == LABELS
    assert dataset.classes == 10
    assert dataset.note == "partial: 6 of 70000 samples"


def test_digits_are_embedded_and_fit_the_papers_cnn():
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert digits.x.shape == (1797, 1, 28, 28)
    assert digits.x.dtype == torch.uint8
    assert digits.y.tolist() == load_digits().target.tolist()
    assert (digits.classes, digits.note, digits.class_names) == (10, "", tuple("0123456789"))
    assert int(digits.x.min()) == 0
    assert int(digits.x.max()) == 255
    # Corners lie beyond the outermost pixel centres, so bilinear scaling keeps their values.
    corners = load_digits().images[:, [0, 0, 7, 7], [0, 7, 0, 7]] * 255 / 16
    np.testing.assert_allclose(digits.x[:, 0, [0, 0, 27, 27], [0, 27, 0, 27]], corners, atol=0.5)


def test_the_table_of_datasets_holds_the_papers_settings():
    rows = {row.name: row for row in known_datasets()}
    assert list(rows) == [
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "tiny-imagenet",
        "ag_news",
        "mnist-writers",
        "heart-disease",
        "har",
        "har-signals",
    ]
    papers = list(rows.values())[:7]
    assert [row.lr for row in papers] == [0.1, 0.1, 0.1, 0.005, 0.005, 0.005, 0.1]
    assert [row.rounds for row in papers] == [30] + [2000] * 6
    assert [row.model for row in papers] == ["cnn"] * 6 + ["fasttext"]


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw", "mnist/MNIST/raw"])
def test_mnist_from_idx_files(tmp_path, folder, end):
    write_mnist(tmp_path / folder, end)
    assert_is_grey(load("mnist", tmp_path))


def test_fashion_mnist_does_not_take_mnists_folder(tmp_path):
    write_mnist(tmp_path / "MNIST/raw")
    with pytest.raises(UserError, match="no copy of fashion-mnist"):
        load("fashion-mnist", tmp_path)
    write_mnist(tmp_path / "FashionMNIST/raw")
    fashion = load("fashion-mnist", tmp_path)
    assert_is_grey(fashion, "fashion-mnist")
    assert fashion.class_names[9] == "Ankle boot"


def test_a_named_npz(tmp_path):
    np.savez_compressed(tmp_path / "mnist.npz", x=GREY, y=np.array(LABELS, dtype=np.uint8))
    assert_is_grey(load("mnist", tmp_path))


def test_mnist_from_the_hubs_parquet_files(tmp_path):
    images = [{"bytes": encoded(image), "path": None} for image in GREY]
    write_parquet(
        tmp_path / "mnist" / "mnist", {"image": images, "label": LABELS}, list("0123456789")
    )
    assert_is_grey(load("mnist", tmp_path))


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10_from_its_binary_version(tmp_path, folder):
    folder = tmp_path / folder
    folder.mkdir(parents=True, exist_ok=True)
    planes = COLOUR.transpose(0, 3, 1, 2)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        records = [bytes([j % 10]) + planes[j].tobytes() for j in (2 * i, 2 * i + 1)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    cifar = load("cifar10", tmp_path)
    np.testing.assert_array_equal(cifar.x.numpy(), planes)
    assert cifar.y.tolist() == [j % 10 for j in range(12)]
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_4\.bin is missing"):
        load("cifar10", tmp_path)


def test_cifar100_has_the_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    planes = COLOUR.transpose(0, 3, 1, 2)
    for name, rows in (("train", range(8)), ("test", range(8, 12))):
        (folder / f"{name}.bin").write_bytes(
            b"".join(bytes([7, 80 + j]) + planes[j].tobytes() for j in rows)
        )
    (folder / "fine_label_names.txt").write_text("\n".join(f"thing{i}" for i in range(100)) + "\n")
    cifar = load("cifar100", tmp_path)
    np.testing.assert_array_equal(cifar.x.numpy(), planes)
    assert cifar.y.tolist() == list(range(80, 92))
    assert (cifar.classes, cifar.class_names[91]) == (100, "thing91")
    with (folder / "test.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="not a multiple of 3074"):
        load("cifar100", tmp_path)


def test_cifar100_from_the_hubs_parquet_files(tmp_path):
    images = [{"bytes": encoded(image), "path": None} for image in COLOUR]
    names = [f"thing{i}" for i in range(100)]
    columns = {"img": images, "fine_label": list(range(80, 92)), "coarse_label": [1] * 12}
    write_parquet(tmp_path / "cifar100", columns, names)
    cifar = load("cifar100", tmp_path)
    np.testing.assert_array_equal(cifar.x.numpy(), COLOUR.transpose(0, 3, 1, 2))
    assert cifar.y.tolist() == list(range(80, 92))
    assert cifar.class_names == tuple(names)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar100", "cifar100/cifar-100-python/train"),
    ],
)
def test_pickled_cifar_is_refused_unopened(tmp_path, name, file):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(b"anything")
    with pytest.raises(UserError, match="a pickle, which is never loaded; get the binary version"):
        load(name, tmp_path)


def write_tiny_imagenet(folder, classes=200):
    image = RNG.randint(0, 256, (64, 64, 3), dtype=np.uint8)
    for k in range(classes):
        path = folder / "train" / f"n{k:08}" / "images" / f"n{k:08}_0.JPEG"
        path.parent.mkdir(parents=True)
        # The published set has grey images among the coloured ones.
        path.write_bytes(encoded(image[:, :, 0] if k == 5 else image, "JPEG"))
    (folder / "val" / "images").mkdir(parents=True)


@pytest.mark.parametrize("folder", ["tiny-imagenet-200", ""])
def test_tiny_imagenet_is_its_training_part(tmp_path, folder):
    write_tiny_imagenet(tmp_path / folder)
    tiny = load("tiny-imagenet", tmp_path)
    assert tiny.x.shape == (200, 3, 64, 64)
    assert tiny.y.tolist() == list(range(200))
    assert tiny.class_names[7] == "n00000007"
    assert bool((tiny.x[5, 0] == tiny.x[5, 2]).all())


def test_a_copy_with_other_classes_is_another_dataset(tmp_path):
    write_tiny_imagenet(tmp_path, classes=3)
    with pytest.raises(UserError, match="3 classes, but tiny-imagenet has 200"):
        load("tiny-imagenet", tmp_path)


NEWS = [
    (3, "Oil, up", "It's $50."),
    (4, "Chips", 'A "new" one'),
    (1, "Summit", "held"),
    (2, "Final", "won"),
]


def assert_is_news(dataset):
    assert (dataset.classes, dataset.class_names) == (
        4,
        ("World", "Sports", "Business", "Sci/Tech"),
    )
    assert dataset.y.tolist() == [2, 3, 0, 1]
    assert dataset.x.dtype == torch.int32
    assert dataset.x.shape == (4, 200)
    # Every word occurs once, so the vocabulary is in the order of the alphabet.
    first = ["oil", ",", "up", "it", "'", "s", "$50", "."]
    words = sorted([*first, "chips", "a", "new", "one", "summit", "held", "final", "won"])
    ids = {word: i + 1 for i, word in enumerate(words)}
    assert dataset.x[0, :9].tolist() == [ids[word] for word in first] + [0]
    assert dataset.x[3, :3].tolist() == [ids["final"], ids["won"], 0]
    assert dataset.vocabulary == len(words) + 1
    assert dataset.note == "partial: 4 of 127600 samples"


def test_ag_news_as_published(tmp_path):
    (tmp_path / "ag_news_csv").mkdir()
    for part, rows in (("train", NEWS[:3]), ("test", NEWS[3:])):
        with (tmp_path / "ag_news_csv" / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    assert_is_news(load("ag_news", tmp_path))
    (tmp_path / "ag_news_csv" / "test.csv").write_text("5,a,b\n")
    with pytest.raises(UserError, match=r"test\.csv, line 1: .* class from 1 to 4"):
        load("ag_news", tmp_path)
    (tmp_path / "ag_news_csv" / "test.csv").unlink()
    with pytest.raises(UserError, match=r"test\.csv is missing"):
        load("ag_news", tmp_path)


@pytest.mark.parametrize("first", [0, 1])
def test_ag_news_from_one_csv_with_a_header(tmp_path, first):
    with (tmp_path / "ag_news.csv").open("w", newline="") as file:
        rows = [(label - 1 + first, f"{title} {text}", "train") for label, title, text in NEWS]
        csv.writer(file).writerows([("label", "text", "split"), *rows])
    assert_is_news(load("ag_news", tmp_path))


def news_columns():
    return {
        "text": [f"{title} {text}" for _, title, text in NEWS],
        "label": [label - 1 for label, _, _ in NEWS],
    }


def test_ag_news_from_the_hubs_parquet_files(tmp_path):
    write_parquet(tmp_path / "data", news_columns(), ["World", "Sports", "Business", "Sci/Tech"])
    assert_is_news(load("ag_news", tmp_path))


def test_the_hub_is_asked_where_there_is_no_data_dir(tmp_path, monkeypatch):
    import datasets

    made = write_parquet(
        tmp_path / "data", news_columns(), ["World", "Sports", "Business", "Sci/Tech"]
    )
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda identifier: asked.append(identifier) or made
    )
    assert_is_news(load("ag_news"))
    assert asked == ["fancyzhx/ag_news"]


def test_images_of_the_hub_and_only_the_parts_that_belong(tmp_path, monkeypatch):
    import datasets

    images = [{"bytes": encoded(image), "path": None} for image in GREY]
    made = write_parquet(tmp_path / "data", {"image": images, "label": LABELS}, list("0123456789"))
    made = datasets.DatasetDict(
        {"extra": made["test"], "test": made["test"], "train": made["train"]}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda identifier: made)
    assert_is_grey(load("mnist"))


def test_images_that_the_hub_leaves_in_files(tmp_path, monkeypatch):
    import datasets

    for i, image in enumerate(GREY):
        (tmp_path / f"{i}.png").write_bytes(encoded(image))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))}
    )
    columns = {"image": [str(tmp_path / f"{i}.png") for i in range(6)], "label": LABELS}
    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns, features=features)})
    monkeypatch.setattr(datasets, "load_dataset", lambda identifier: made)
    with pytest.raises(UserError, match=r"image 0 is the path .*0\.png, .* a table cannot make"):
        load("mnist")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path))
    assert_is_grey(load("mnist"))


@pytest.mark.parametrize(
    "error", [ConnectionError("no route\nto host"), FileNotFoundError("gone"), RuntimeError()]
)
def test_no_connection_is_one_sentence_that_knows_a_way_out(monkeypatch, error):
    import datasets

    def fail(identifier):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        UserError, match=r"zh-plus/tiny-imagenet .* could not be loaded .* data_dir\.$"
    ) as caught:
        load("tiny-imagenet")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("digits", "sklearn.datasets", r"needs scikit-learn: pip install 'fedala\[digits\]'"),
        ("mnist", "datasets", r"needs datasets: pip install 'fedala\[hub\]'"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, name, module, says):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=says):
        load(name)


def test_a_data_dir_without_the_dataset(tmp_path):
    with pytest.raises(UserError, match=r"no copy of cifar10 in .*cifar10\.npz"):
        load("cifar10", tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        load("cifar10", tmp_path / "nowhere")


def test_a_copy_of_another_shape_is_another_dataset(tmp_path):
    np.savez(tmp_path / "mnist.npz", x=COLOUR, y=np.arange(12) % 10)
    with pytest.raises(UserError, match="shape 3×32×32, but those of mnist are 1×28×28"):
        load("mnist", tmp_path)


def test_labels_beyond_the_classes(tmp_path):
    np.savez(tmp_path / "mnist.npz", x=GREY, y=np.arange(6) + 5)
    with pytest.raises(UserError, match="labels 5 to 10; the labels of 10 classes are 0 to 9"):
        load("mnist", tmp_path)


WHOLE = bytes((0, 0, 8, 3)) + struct.pack(">3I", 6, 28, 28) + GREY.tobytes()
HUGE = bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**31, 2**31, 2**31)


@pytest.mark.parametrize(
    ("end", "content", "says"),
    [
        ("", HUGE + b"some", "do not fit its length"),
        (".gz", gzip.compress(HUGE + b"some"), "do not fit its length"),
        (
            "",
            bytes((0, 0, 8, 3)) + struct.pack(">3I", 1, 28, 28) + bytes(783),
            "holds more or fewer",
        ),
        (
            "",
            bytes((0, 0, 8, 3)) + struct.pack(">3I", 1, 28, 28) + bytes(785),
            "holds more or fewer",
        ),
        ("", b"GIF89a..........", "not an IDX file"),
        ("", bytes((0, 0, 8, 3)) + b"\0\0", "not a readable IDX file"),
        (".gz", b"not gzip at all", "not a readable IDX file"),
        (".gz", gzip.compress(WHOLE)[:-200], "not a readable IDX file"),
    ],
    ids=[
        "huge",
        "huge-gz",
        "short",
        "long",
        "another-format",
        "half-a-header",
        "not-gzip",
        "truncated-gzip",
    ],
)
def test_a_damaged_idx_file(tmp_path, end, content, says):
    write_mnist(tmp_path, end)
    (tmp_path / f"train-images-idx3-ubyte{end}").write_bytes(content)
    with pytest.raises(UserError, match=says):
        load("mnist", tmp_path)


def test_an_idx_file_that_is_missing_or_of_another_length(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", GREY[:2, :9])
    with pytest.raises(UserError, match="train and t10k images differ in size"):
        load("mnist", tmp_path)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", GREY[4:])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", [1])
    with pytest.raises(UserError, match="6 samples but 5 labels"):
        load("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz is missing"):
        load("mnist", tmp_path)


def test_a_damaged_parquet_file(tmp_path):
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="not a readable parquet file"):
        load("ag_news", tmp_path)
