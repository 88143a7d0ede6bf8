"""A user's own data: the accepted files, and the message for any other.

Long because it has a case for every way in which a file can be wrong.
"""

import io
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from data_files import replace_hub, save_image

from fedala.data import Dataset, arrays, load
from fedala.errors import UserError
from fedala.io import untrusted

Y = np.array([0, 1, 2, 1])


def npz(tmp_path, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(tmp_path / "my.npz", **arrays)
    return str(tmp_path / "my.npz")


def refused(says, name):
    with pytest.raises(UserError, match=says) as caught:
        load(str(name))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


IMAGES = np.arange(4 * 6 * 5 * 3).reshape(4, 6, 5, 3).astype(np.uint8)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (IMAGES, IMAGES.transpose(0, 3, 1, 2)),
        (IMAGES.transpose(0, 3, 1, 2), IMAGES.transpose(0, 3, 1, 2)),
        (IMAGES[..., 0], IMAGES[:, None, :, :, 0]),
        (IMAGES[..., :1], IMAGES[:, None, :, :, 0]),
        (np.asfortranarray(IMAGES), IMAGES.transpose(0, 3, 1, 2)),
    ],
)
def test_images_in_any_layout_become_channels_first(tmp_path, x, expected, compressed):
    own = load(npz(tmp_path, compressed, x=x, y=Y))
    assert own.x.dtype == torch.uint8
    np.testing.assert_array_equal(own.x.numpy(), expected)
    assert own.y.tolist() == Y.tolist()
    assert (own.classes, own.vocabulary, own.name) == (3, None, str(tmp_path / "my.npz"))


@pytest.mark.parametrize("x", [np.eye(4), np.ones((4, 2, 3, 4, 5), np.float16), IMAGES[:, :, 0, 0]])
def test_anything_else_is_float32(tmp_path, x):
    own = load(npz(tmp_path, x=x, y=Y[:, None]))
    assert own.x.dtype == torch.float32
    np.testing.assert_array_equal(own.x.numpy(), x.astype(np.float32))


@pytest.mark.parametrize(
    "keys",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("images_train", "labels_train", "images_test", "labels_test"),
    ],
)
def test_parts_are_merged_train_first(tmp_path, keys):
    parts = dict(zip(keys, (IMAGES[:3], Y[:3], IMAGES[3:], Y[3:]), strict=True))
    own = load(npz(tmp_path, **dict(reversed(parts.items()))))
    np.testing.assert_array_equal(own.x.numpy(), IMAGES.transpose(0, 3, 1, 2))
    assert own.y.tolist() == Y.tolist()


@pytest.mark.parametrize("kind", [np.int16, np.uint32, np.int64])
def test_rows_of_whole_numbers_are_tokens(tmp_path, kind):
    """The vocabulary is the largest token and 0, the padding: 8 rows of an embedding."""
    own = load(npz(tmp_path, x=np.array([[1, 2, 3], [7, 0, 0]] * 2, kind), y=Y))
    assert (own.x.dtype, own.vocabulary) == (torch.int32, 8)
    assert own.x.tolist() == [[1, 2, 3], [7, 0, 0]] * 2


def test_images_and_labels_is_another_spelling(tmp_path):
    assert load(npz(tmp_path, images=IMAGES, labels=Y)).y.tolist() == Y.tolist()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": IMAGES[:0], "y": Y[:0]}, "is empty"),
        ({"x": IMAGES, "y": Y * 0}, "single class"),
        (
            {"x": IMAGES, "y": Y - 1},
            "from -1 to 1, 3 in all; labels must be 0 to 2, without gaps",
        ),
        ({"x": IMAGES, "y": Y * 10**9}, "from 0 to 2000000000, 3 in all; labels must be 0 to 2"),
        ({"x": IMAGES, "y": Y * 1j}, "must be a whole number for each sample"),
        ({"x": IMAGES, "y": np.zeros((4, 2, 2))}, "must be a whole number for each sample"),
        ({"x": IMAGES, "y": 2 * np.eye(4, dtype=int)}, "these must be zeros and ones"),
        ({"x": IMAGES, "y": Y * np.nan}, "targets that are NaN or infinite"),
        (
            {"x_train": IMAGES, "y_train": Y / 2, "x_test": IMAGES, "y_test": np.eye(4)},
            "differ in the shape or type of a target",
        ),
        (
            {"x": IMAGES, "y": np.array([0, 1, 2, 2**63], dtype=np.uint64)},
            "labels must be whole numbers",
        ),
        ({"x": IMAGES, "y": Y[:3]}, "the same length"),
        ({"x": np.uint8(3), "y": Y}, "the same length"),
        ({"x": np.array([[1.0], [2.0], [np.nan], [3.0]]), "y": Y}, "NaN or infinite"),
        ({"x": np.array([[1.0], [2.0], [1e300], [3.0]]), "y": Y}, "NaN or infinite"),
        ({"x": np.ones((4, 0)), "y": Y}, "hold nothing"),
        ({"x": np.ones(4), "y": Y}, r"shape \(4,\)"),
        ({"x": IMAGES.astype(int), "y": Y}, r"x is int64 of shape .*; it must be uint8"),
        ({"x": np.ones((4, 9, 9, 9), np.uint8), "y": Y}, "N×H×W×C or N×C×H×W"),
        ({"x": np.array(["a", "b", "c", "d"]), "y": Y}, "it must be uint8"),
        ({"x": np.array([[0, -1]] * 4), "y": Y}, "tokens are from 0 to"),
        ({"x": np.array([[0, 2**30]] * 4), "y": Y}, "tokens are from 0 to"),
        ({"x": IMAGES}, "holds x; it must hold the arrays x and y"),
        ({"a": IMAGES, "b": Y}, "holds a, b; it must"),
        ({"x_train": IMAGES, "y_train": Y, "x_test": IMAGES}, "it must hold"),
        (
            {"x_train": IMAGES, "y_train": Y, "x_test": IMAGES[:, :3], "y_test": Y},
            "they must agree",
        ),
        (
            {"x": np.array([{}, 1, 2, 3], dtype=object), "y": Y},
            "x is an array of pickled Python objects",
        ),
        (
            {"x": IMAGES, "y": np.array(["a", None, "b", "c"], dtype=object)},
            "y is an array of pickled",
        ),
    ],
)
def test_an_npz_with_unsound_arrays(tmp_path, arrays, says):
    refused(says, npz(tmp_path, **arrays))


def test_other_arrays_in_the_file_do_not_matter(tmp_path):
    assert load(npz(tmp_path, x=IMAGES, y=Y, extra=np.array([{}], dtype=object))).classes == 3


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_npz(tmp_path, share):
    path = tmp_path / "my.npz"
    npz(tmp_path, x=IMAGES, y=Y)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused("not a readable .npz file", path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x80\x04K\x01."])
def test_a_file_that_is_no_zip(tmp_path, content):
    (tmp_path / "my.npz").write_bytes(content)
    refused("not a readable .npz file", tmp_path / "my.npz")


def test_a_damaged_byte_is_noticed(tmp_path):
    path = tmp_path / "my.npz"
    npz(tmp_path, x=IMAGES, y=Y)
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    refused("not a readable .npz file", path)


def zipped(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_zip_that_is_no_npz(tmp_path):
    refused(
        "holds readme.txt, sub/x; it must hold",
        zipped(tmp_path / "my.npz", {"readme.txt": "hi", "sub/x.npy": ""}),
    )
    refused("not a readable .npz file", zipped(tmp_path / "my.npz", {"x.npy": "hi", "y.npy": "ho"}))


@pytest.mark.parametrize("shape", [(2**40, 28, 28), (5,), (3,), (-2, -2), (2**62, 4)])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_promises_what_the_file_does_not_hold(tmp_path, shape, method):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    y = io.BytesIO()
    np.save(y, Y)
    content = {"x.npy": file.getvalue() + b"four", "y.npy": y.getvalue()}
    refused("does not match the file|not a readable", zipped(tmp_path / "my.npz", content, method))


def test_a_size_that_no_compression_could_reach_is_refused_before_memory_is_taken(tmp_path):
    """The header and the archive's directory both declare 2 GB, for a few compressed bytes."""
    size = 2**31 - 1
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (size, 1)}
    )
    path = zipped(
        tmp_path / "my.npz", {"x.npy": file.getvalue(), "y.npy": b""}, zipfile.ZIP_DEFLATED
    )
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02") + 24  # the field "uncompressed size" of the first entry
    data[at : at + 4] = (size + len(file.getvalue())).to_bytes(4, "little")
    path.write_bytes(data)
    refused("does not match the file", path)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"x": (40_000, 28, 28)}, 40_000 * 784), ({"x": (10_000, 32, 32, 3)}, 10_000 * 3072),
        ({"x_train": (8_000, 32, 32, 3), "x_test": (2_000, 32, 32, 3)}, 10_000 * 3072),
        ({"x": (10_000, 800)}, 4 * 10_000 * 800),
    ],
)  # fmt: skip
def test_reading_takes_the_memory_of_the_result_alone(tmp_path, parts, expected, compressed):
    arrays = {
        name: np.random.RandomState(0).randint(0, 99, shape, np.uint8)
        for name, shape in parts.items()
    }
    arrays |= {name.replace("x", "y"): np.arange(shape[0]) % 3 for name, shape in parts.items()}
    path = npz(tmp_path, compressed, **arrays)
    del arrays
    tracemalloc.start()
    try:
        assert load(path).x.numel() == expected // (4 if len(parts.get("x", ())) == 2 else 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < expected + 20 * 2**20


def test_wide_numbers_are_converted_piece_by_piece(tmp_path):
    x = np.random.RandomState(0).normal(size=(3_000, 1_000))
    path = npz(tmp_path, x=x, y=np.arange(3_000) % 3)
    tracemalloc.start()
    try:
        own = load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(own.x.numpy(), x.astype(np.float32))
    assert peak < 4 * x.size + 20 * 2**20


def test_all_that_conversion_takes_is_held_against_memory_before_anything_is_read(
    tmp_path, monkeypatch
):
    """100 kB of uint8 become 400 kB of float32."""
    path = npz(tmp_path, compressed=True, x=np.zeros((100, 1000), np.uint8), y=np.arange(100) % 3)
    monkeypatch.setattr(arrays, "_CHUNK", 2**10)
    monkeypatch.setattr(arrays, "_unpack", lambda *_: pytest.fail("it is read"))
    monkeypatch.setattr(untrusted, "free_memory", lambda: 400_000)
    refused("of memory, and only", path)


@pytest.mark.parametrize("chunk", [1, 100, 2**22])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["u1", ">f8", "f2"])
def test_what_is_read_in_pieces_is_what_was_written(tmp_path, monkeypatch, chunk, order, kind):
    monkeypatch.setattr(arrays, "_CHUNK", chunk)
    x = np.asarray(IMAGES, dtype=kind, order=order)
    expected = IMAGES.transpose(0, 3, 1, 2) if kind == "u1" else IMAGES.astype(np.float32)
    np.testing.assert_array_equal(load(npz(tmp_path, x=x, y=Y)).x.numpy(), expected)


def test_an_image_folder_has_a_class_in_each_sub_folder(tmp_path):
    for i, name in enumerate(["dog/b.png", "cat/a.PNG", "cat/deep/c.bmp"]):
        save_image(tmp_path / name, IMAGES[i])
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    own = load(str(tmp_path))
    assert own.class_names == ("cat", "dog")
    assert own.y.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(own.x.numpy(), IMAGES[[1, 2, 0]].transpose(0, 3, 1, 2))


def test_grey_images_stay_grey_only_where_all_are(tmp_path):
    save_image(tmp_path / "a" / "1.png", IMAGES[0, :, :, 0])
    save_image(tmp_path / "b" / "1.png", IMAGES[1, :, :, 0])
    assert load(str(tmp_path)).x.shape == (2, 1, 6, 5)
    save_image(tmp_path / "b" / "2.png", IMAGES[2])
    own = load(str(tmp_path))
    assert own.x.shape == (3, 3, 6, 5)
    assert bool((own.x[0] == torch.from_numpy(IMAGES[0, :, :, 0])).all())


def test_palettes_with_transparency_become_rgb(tmp_path):
    from PIL import Image

    save_image(tmp_path / "a" / "1.png", IMAGES[0])
    (tmp_path / "b").mkdir()
    Image.fromarray(IMAGES[1]).quantize(8).save(tmp_path / "b" / "1.png", transparency=b"\x00\xff")
    assert load(str(tmp_path)).x.shape == (2, 3, 6, 5)


def test_an_image_folder_in_parts_is_merged_train_first(tmp_path):
    for i, name in enumerate(["test/a/1.png", "train/b/1.png", "train/a/1.png", "val/b/1.png"]):
        save_image(tmp_path / name, IMAGES[i])
    own = load(str(tmp_path))
    assert own.y.tolist() == [0, 1, 1, 0]
    np.testing.assert_array_equal(own.x.numpy(), IMAGES[[2, 1, 3, 0]].transpose(0, 3, 1, 2))


def test_an_unsound_image_folder(tmp_path):
    refused("no sub-folders", tmp_path)
    save_image(tmp_path / "a" / "1.png", IMAGES[0])
    refused("single class", tmp_path)
    (tmp_path / "b").mkdir()
    refused("b holds no images", tmp_path)
    save_image(tmp_path / "b" / "1.png", IMAGES[0, :4])
    refused(r"1\.png has 5×4 pixels, .* has 5×6; all images must have one size", tmp_path)
    save_image(tmp_path / "b" / "1.png", IMAGES[0, :, :, 0].astype(np.uint16) * 256)
    refused("more than 8 bits", tmp_path)


@pytest.mark.parametrize("kind", ["png", "jpg", "gif"])
@pytest.mark.parametrize("cut", [0, 10, -30])
def test_a_broken_image_is_named(tmp_path, kind, cut):
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8)
    save_image(tmp_path / "a" / f"1.{kind}", pixels)
    save_image(tmp_path / "b" / f"2.{kind}", pixels)
    broken = tmp_path / "b" / f"2.{kind}"
    broken.write_bytes(broken.read_bytes()[:cut])
    refused(rf"2\.{kind} is not a readable image", tmp_path)


def test_an_image_that_claims_to_be_gigantic(tmp_path):
    save_image(tmp_path / "a" / "1.png", IMAGES[0])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.ppm").write_bytes(b"P6 10000 10000 255\n")
    refused(r"1\.ppm is not a readable image \(DecompressionBomb", tmp_path)


def write_csv(tmp_path, content):
    path = tmp_path / "my.csv"
    path.write_text(content, encoding="utf-8")
    return path


def test_labels_of_arrays_may_be_strings(tmp_path):
    x = np.zeros((4, 3), np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.array(["good", "bad", "good", "worse"]))
    own = load(str(tmp_path / "d.npz"))
    assert (own.class_names, own.y.tolist()) == (("bad", "good", "worse"), [1, 0, 1, 2])
    np.savez(tmp_path / "e.npz", x_train=x, y_train=["a", "b"] * 2, x_test=x, y_test=[0, 1] * 2)
    with pytest.raises(UserError, match="strings in all of its parts"):
        load(str(tmp_path / "e.npz"))


def test_a_csv_of_labels_and_texts(tmp_path):
    path = write_csv(tmp_path, '\ufeffText,id,Label\n"Good, good",1,pos\nbad,2,neg\n\ngood,3,pos\n')
    own = load(str(path))
    assert own.class_names == ("neg", "pos")
    assert own.y.tolist() == [1, 0, 1]
    assert own.x.tolist() == [[1, 2, 1], [3, 0, 0], [1, 0, 0]]
    assert own.vocabulary == 4


def test_labels_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    own = load(str(write_csv(tmp_path, "label,text\n10,a\n9,b\n10,c\n")))
    assert (own.class_names, own.y.tolist()) == (("9", "10"), [1, 0, 1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no label column: .* names nothing"),
        ("text,kind\na,b\n", "no label column: .* names text, kind"),
        ("label,body\na,b\n", "if it is the text to classify, call it text"),
        ("label,text\na,b\n ,c\n", "line 3: the label is empty"),
        ("label,text\na,b\nc\n", "line 3 has 1 columns, but the first line names 2"),
        ("label,text\n", "is empty"),
        ("label,text\na,b\na,c\n", "single class"),
        ('label,text\na,"b\n', r"not a readable \.csv"),
        ("label,text\na," + "b" * 200_000, r"not a readable \.csv"),
    ],
)
def test_an_unsound_csv(tmp_path, content, says):
    refused(says, write_csv(tmp_path, content))


def test_a_csv_in_another_encoding(tmp_path):
    (tmp_path / "my.csv").write_bytes("label,text\na,é\n".encode("latin-1"))
    refused("line 2 is not in UTF-8: save the file as UTF-8", tmp_path / "my.csv")


def test_any_dataset_of_the_hub(monkeypatch):
    replace_hub(
        monkeypatch,
        None,
        test={"sentence": ["c"], "label": [1]},
        unsupervised={"sentence": ["d"], "label": [-1]},
        train={"sentence": ["a", "b"], "label": [0, 1]},
    )
    own = load("hub:somebody/something")
    assert (own.name, own.classes, own.y.tolist()) == ("hub:somebody/something", 2, [0, 1, 1])
    assert own.x[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a": [1], "b": [0]}, "has the columns a, b; it needs a label column"),
        ({"text": ["a"], "b": [0]}, "has the columns text, b; it needs"),
        ({"text": ["a", "b"], "label": [0, None]}, "something else or missing"),
        ({"text": ["a", None], "label": [0, 1]}, "some texts are missing"),
        ({"text": ["a", "b"], "label": [-1, 1]}, "labels must be 0 to 1"),
        ({"image": [b"a", b"b"], "label": [0, 1]}, "image 0 is not a readable image"),
        ({"text": [], "label": []}, "is empty"),
    ],
)
def test_an_unsound_dataset_of_the_hub(monkeypatch, content, says):
    replace_hub(monkeypatch, None, train=content)
    refused(says, "hub:somebody/something")


def test_the_hub_without_a_connection(monkeypatch):
    import datasets

    def fail(identifier):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    refused("could not be loaded .*; check the id and the connection", "hub:somebody/something")


def test_what_does_not_exist(tmp_path):
    refused(r"There is no dataset minst \(did you mean mnist\?\)", "minst")
    refused("There is no dataset xyzzy; choose from digits, mnist", "xyzzy")
    refused(r"no file or folder .*nowhere\.npz", tmp_path / "nowhere.npz")
    refused("no file or folder", tmp_path / "nowhere")
    refused("no file or folder my.csv", "my.csv")
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04K\x01.")
    refused("is not a dataset", tmp_path / "data.pkl")


def test_pillow_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    save_image(tmp_path / "a" / "1.png", IMAGES[0])
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refused(r"needs pillow: pip install 'fedala\[images\]'", tmp_path)


def test_the_core_imports_without_the_optional_packages():
    code = (
        "import sys, fedala.data\n"
        "print({'sklearn', 'PIL', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=path, capture_output=True, text=True
        ).stdout
        == "set()\n"
    )


@pytest.mark.parametrize(
    ("x", "y", "classes", "vocabulary", "says"),
    [
        (
            torch.zeros(4, 2),
            torch.tensor([0, 1, 2, 3]),
            3,
            None,
            "the labels of 3 classes are 0 to 2",
        ),
        (torch.zeros(4, 2), torch.tensor([0.0, 1, 1, 0]), 2, None, "must be 1 and at least 1"),
        (torch.zeros(4, 2), torch.zeros(4, 3), 2, None, "must be 3 and at least 1, not 2"),
        (torch.zeros(4, 2), torch.zeros(4, 2, 2), 2, None, "int64 labels N or float32 targets"),
        (torch.zeros(2, 2), torch.tensor([[0, 1], [2, 0]]), 2, None, "zeros and ones"),
        (torch.zeros(2, 2), torch.tensor([0.0, torch.inf]), 1, None, "every target must be"),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool), 2, None, "int64 labels"),
        (torch.zeros(4, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0]), 2, None, "must hold"),
        (
            torch.zeros(4, 2, dtype=torch.uint8),
            torch.tensor([0, 1, 1, 0]),
            2,
            None,
            "uint8 images N×C×H×W",
        ),
        (
            torch.full((4, 2), -1, dtype=torch.int32),
            torch.tensor([0, 1, 1, 0]),
            2,
            None,
            "outside its vocabulary",
        ),
        (
            torch.full((4, 2), 9, dtype=torch.int32),
            torch.tensor([0, 1, 1, 0]),
            2,
            9,
            "outside its vocabulary",
        ),
    ],
)
def test_a_dataset_made_by_hand_is_checked_too(x, y, classes, vocabulary, says):
    with pytest.raises(UserError, match=says):
        Dataset("mine", x, y, classes, vocabulary=vocabulary)
