"""What is saved with a model turns raw samples into what the model was trained on, to the bit."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from small import Net

from fedala.data import Dataset
from fedala.data.images import resize_images
from fedala.data.preprocessing import Preprocessing
from fedala.data.text import encode_texts
from fedala.errors import UserError
from fedala.lanes.normalization import Normalization
from fedala.lanes.task import Task

RANDOM = np.random.default_rng(0)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
PIXELS = RANDOM.integers(0, 256, (6, 3, 4, 5), np.uint8)
TEXTS = ["The cat sat.", "a dog", "A cat!", "the dog sat", "cat", "mat; the mat"]
COLOUR = Normalization((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
FIVE = Normalization((1.0, 2.0, 3.0, 4.0, 5.0), (0.3, 0.6, 1.0, 2.0, 7.0))


def as_task(dataset, normalization, precision="float32"):
    options = {"normalization": normalization, "precision": precision}
    task = Task(Net(), dataset.x, dataset.y, [np.arange(6)], **options)
    return task.inputs(torch.arange(len(dataset.y)))


def of_texts(length=200):
    ids, tokens = encode_texts(TEXTS, length=length)
    return Dataset("t", ids, LABELS, 3, vocabulary=len(tokens) + 1, tokens=tokens)


def floats(*shape):
    return RANDOM.normal(3, 5, (6, *shape))


CASES = {
    "bytes": (Dataset("i", torch.from_numpy(PIXELS), LABELS, 3), None, PIXELS),
    "colours": (Dataset("i", torch.from_numpy(PIXELS), LABELS, 3), COLOUR, PIXELS),
    "one figure": (
        Dataset("i", torch.from_numpy(PIXELS), LABELS, 3),
        Normalization((0.3,), (0.2,)),
        PIXELS,
    ),
    "texts": (of_texts(), None, TEXTS),
    "short texts": (of_texts(2), None, TEXTS),
}
for name, shape, figures in (
    ("features as is", (5,), None),
    ("features", (5,), FIVE),
    ("windows", (5, 7), FIVE),
    ("sequences", (7, 5), replace(FIVE, is_channels_last=True)),
    ("float images", (5, 4, 3), FIVE),
):
    raw = floats(*shape)
    CASES[name] = (Dataset("f", torch.from_numpy(raw).float(), LABELS, 3), figures, raw)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_raw_samples_become_what_the_task_gives_and_a_file_keeps_it(case, precision):
    dataset, normalization, raw = CASES[case]
    found = Preprocessing.of(dataset, normalization, getattr(torch, precision))
    wanted = as_task(dataset, normalization, precision)
    loaded = Preprocessing.from_json(found.to_json())
    assert loaded == found
    for one in (found, loaded):
        assert torch.equal(one.prepare(raw), wanted)
        assert one.prepare(raw).dtype == wanted.dtype
        assert torch.equal(one.encode(raw), dataset.x)
        assert one.encode(raw).dtype == dataset.x.dtype
    assert torch.equal(found.prepare(raw[:1]), wanted[:1])
    assert len(found.prepare(raw[:0])) == 0


def test_axis_of_the_figures():
    """Of C×L samples, figures are for rows; of L×C sequences, for columns."""
    for shape, is_last, index in (((5, 7), False, (2, 1)), ((7, 5), True, (1, 2))):
        raw, figures = floats(*shape), replace(FIVE, is_channels_last=is_last)
        dataset = Dataset("f", torch.from_numpy(raw).float(), LABELS, 3)
        found = Preprocessing.of(dataset, figures).prepare(raw)
        assert found[0][index].item() == pytest.approx((raw[0][index] - 3) / 1.0, rel=1e-5)


def test_images_may_have_their_channels_last_and_are_resized_if_those_of_the_run_were():
    dataset = Dataset("i", torch.from_numpy(PIXELS), LABELS, 3)
    plain = Preprocessing.of(dataset, COLOUR)
    wanted = as_task(dataset, COLOUR)
    assert torch.equal(plain.prepare(PIXELS.transpose(0, 2, 3, 1)), wanted)
    assert torch.equal(plain.prepare(list(PIXELS.astype(np.int64))), wanted)
    with pytest.raises(UserError, match=r"must be N×3×4×5.*6×3×2×5"):
        plain.prepare(PIXELS[:, :, :2])
    resized = resize_images(dataset, 8)
    fitted = Preprocessing.of(resized, COLOUR, resize=8)
    assert torch.equal(fitted.prepare(PIXELS), as_task(resized, COLOUR))
    mixed = [PIXELS[0], resized.x[1].numpy(), PIXELS[2].transpose(1, 2, 0)]
    assert torch.equal(fitted.prepare(mixed), as_task(resized, COLOUR)[:3])
    grey = Dataset("g", dataset.x[:, :1], LABELS, 3)
    assert torch.equal(Preprocessing.of(grey, None).prepare(PIXELS[:, 0]), as_task(grey, None))


def test_a_table_is_read_by_the_names_of_its_columns():
    names = ("a", "b", "c", "d", "e")
    raw = floats(5)
    dataset = Dataset("f", torch.from_numpy(raw).float(), LABELS, 3, feature_names=names)
    found = Preprocessing.of(dataset, FIVE)
    table = pd.DataFrame(raw, columns=list(names)).assign(other="x")[["other", *reversed(names)]]
    assert torch.equal(found.prepare(table), found.prepare(raw))
    with pytest.raises(UserError, match="no column c: its columns are other"):
        found.prepare(table.drop(columns="c"))


def test_unknown_words_are_0_and_ids_are_taken_as_they_are():
    found = Preprocessing.of(of_texts(3), None)
    ids = found.prepare(["cat zebra dog the"])
    assert ids.tolist() == [[found.tokens.index("cat") + 1, 0, found.tokens.index("dog") + 1]]
    assert torch.equal(found.prepare(ids.numpy()), ids)


@pytest.mark.parametrize(
    ("case", "raw", "sentence"),
    [
        ("texts", "The cat", "put it into a list"),
        ("texts", [[1, 2]], "shape 200"),
        ("short texts", [[1, 99]], "from 0 to"),
        ("short texts", [[0.5, 1.0]], "takes texts: give a list"),
        ("bytes", PIXELS / 255, "images of bytes.*float64"),
        ("bytes", [PIXELS[0], PIXELS[1][:, :2]], "differ in size"),
        ("bytes", PIXELS.astype(int) * 2, "0 to 255"),
        ("features", [[1.0, 2.0]], "shape 5, and the input has 2"),
        ("features", [1.0, 2.0], "single numbers"),
        ("features", [[1.0], [1.0, 2.0]], "differ in shape"),
        ("features", [[1, 2, 3, 4, float("nan")]], "finite"),
        ("features", [["a"] * 5], "must be numbers"),
    ],
)
def test_other_input_is_refused(case, raw, sentence):
    dataset, normalization, _ = CASES[case]
    with pytest.raises(UserError, match=sentence):
        Preprocessing.of(dataset, normalization).prepare(raw)


def test_texts_without_a_vocabulary_must_be_ids():
    dataset = Dataset("t", torch.ones(6, 4, dtype=torch.int32), LABELS, 3, vocabulary=9)
    found = Preprocessing.of(dataset, None)
    assert torch.equal(found.prepare([[1, 2, 8, 0]]), torch.tensor([[1, 2, 8, 0]]))
    with pytest.raises(UserError, match="rows of 4 token ids"):
        found.prepare(["cat"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version 2"),
        ({"kind": "texts"}, "images, features"),
        ({"kind": "images"}, "shape does not fit"),
        ({"kind": ["images"]}, "images, features"),
        ({"shape": []}, "shape does not fit"),
        ({"shape": [0]}, "from 1 on"),
        ({"shape": [2**20, 2**20]}, "large"),
        ({"shape": [True]}, "from 1 on"),
        ({"shape": 5}, "a list"),
        ({"classes": 4, "class_names": ["a"]}, "1 names for 4"),
        ({"class_names": [1, 2, 3]}, "text"),
        ({"vocabulary": 5}, "vocabulary"),
        ({"normalization": {"mean": [1], "std": [1]}}, "is_channels_last"),
        ({"normalization": {"mean": [1], "std": [0], "is_channels_last": False}}, "not one"),
        ({"normalization": {"mean": [1, 2], "std": [1], "is_channels_last": False}}, "not fit"),
        (
            {
                "shape": [5, 2],
                "normalization": {"mean": [1, 2], "std": [1], "is_channels_last": False},
            },
            "not fit",
        ),
        ({"normalization": {"mean": ["x"], "std": [1], "is_channels_last": False}}, "could not"),
        ({"precision": "int8"}, "float32"),
        ({"targets": None}, "classes"),
    ],
)
def test_a_damaged_file_is_refused(changes, sentence):
    dataset, normalization, _ = CASES["features"]
    values = json.loads(Preprocessing.of(dataset, normalization).to_json())
    with pytest.raises(UserError, match=sentence):
        Preprocessing.from_json(json.dumps({**values, **changes}))


def test_more_tokens_than_the_embedding_has_rows_are_refused():
    values = json.loads(Preprocessing.of(of_texts(), None).to_json())
    with pytest.raises(UserError, match="vocabulary"):
        Preprocessing.from_json(json.dumps({**values, "vocabulary": len(values["tokens"])}))
    for text in ("", "[]", "{", "1" * 30, '{"format": NaN}'):
        with pytest.raises(UserError, match=r"preprocessing\.json"):
            Preprocessing.from_json(text)


def test_refusals_say_what_the_model_takes():
    windows = Dataset("w", torch.zeros(4, 2, 6), torch.arange(4) % 2, 2)
    texts = Dataset("t", torch.ones(4, 3, dtype=torch.int32), torch.arange(4) % 2, 2)
    for data, raw, sentence in (
        (windows, np.zeros((2, 6)), "single sample of shape 2×6 was given: add a first dimension"),
        (windows, ["a", "b"], "samples of shape 2×6, and it holds texts"),
        (texts, ["a", 0.5], "takes texts: give a list of strings"),
        (texts, np.zeros((2, 4, 6), int), "takes texts, as strings or as rows of token ids"),
    ):
        with pytest.raises(UserError, match=sentence):
            Preprocessing.of(data, None).prepare(raw)
