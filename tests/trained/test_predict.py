"""Predictions for new samples of every kind, with or without labels."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from trained.worlds import NAMES, PIXELS, Y, features, images, linear, run
from typer.testing import CliRunner

from fedala import UserError, load, onboard
from fedala.cli.app import app
from fedala.data import Dataset
from fedala.data.text import encode_texts
from fedala.metrics import ACCURACY
from fedala.trained.federation import MOST_READY
from fedala.trained.scores import ModelScore, Scores

WORDS = ("good", "bad", "fine", "poor")
TEXTS = [f"a {WORDS[i % 4]} day number {i % 5}" for i in range(60)]
COLUMNS = ("height", "colour=blue", "colour=red", "age", "weight")


def reference(trained, client, x):
    """Return the probabilities of a client's module, one sample at a time."""
    model = trained.personal(client)
    with torch.no_grad():
        return np.stack(
            [
                model(trained.preprocessing.prepare(x[i : i + 1])).softmax(1)[0].numpy()
                for i in range(len(x))
            ]
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("images") / "run"
    run(place)
    return place


@pytest.fixture(scope="module")
def trained(folder):
    return load(folder)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Train on texts."""
    folder = tmp_path_factory.mktemp("texts") / "run"
    ids, tokens = encode_texts(TEXTS)
    options = {"vocabulary": len(tokens) + 1, "tokens": tokens}
    run(folder, Dataset("texts", ids, torch.from_numpy(Y), 4, NAMES, **options))
    return load(folder)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Train on a table of numbers and words."""
    folder = tmp_path_factory.mktemp("tables") / "run"
    y = torch.from_numpy(Y)
    x = torch.rand(60, 5, generator=torch.Generator().manual_seed(0))
    data = Dataset("table", x, y, 4, ("0", "1", "2", "3"), feature_names=COLUMNS)
    run(folder, data, model=linear(4))
    return load(folder, model=linear(4))


def test_classes_and_probabilities(trained):
    wanted = reference(trained, 1, PIXELS)
    found = trained.predict(PIXELS, 1, probabilities=True)
    assert np.abs(found - wanted).max() < 1e-6
    assert found.sum(1) == pytest.approx(np.ones(60))
    assert trained.predict(PIXELS, 1).tolist() == [NAMES[k] for k in wanted.argmax(1)]
    other = trained.predict(PIXELS, 0, probabilities=True)
    assert np.abs(other - wanted).max() > 1e-4
    assert trained.predict(PIXELS[:1], "1", probabilities=True) == pytest.approx(wanted[:1])


def test_python_refuses_to_guess_a_model_as_the_command_line_does(tmp_path):
    run(tmp_path / "run", method="ditto")
    trained = load(tmp_path / "run")
    sentence = (
        r"Each of the 3 clients has its own model: name one with client, or .* is_global=True"
    )
    with pytest.raises(UserError, match=sentence):
        trained.predict(PIXELS)
    with pytest.raises(UserError, match="Give either client or is_global=True, not both"):
        trained.predict(PIXELS, 1, is_global=True)
    np.savez(tmp_path / "new.npz", x=PIXELS)
    command = ["predict", str(tmp_path / "run"), "--data", str(tmp_path / "new.npz")]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2
    assert "--client, or take the global one with --global" in " ".join(answer.output.split())
    with torch.no_grad():
        wanted = trained.global_model()(trained.preprocessing.prepare(PIXELS)).softmax(1).numpy()
    found = trained.predict(PIXELS, is_global=True, probabilities=True)
    assert np.abs(found - wanted).max() < 1e-6


def test_a_single_row_is_given_as_a_frame(tables, readers):
    frame = pd.DataFrame({"height": [1.0, 2.0], "colour": ["red", "blue"], "age": 3.5, "weight": 1})
    for row, kind in ((frame.iloc[0], "Series"), (frame.iloc[0].to_dict(), "dict")):
        with pytest.raises(UserError, match=rf"given as a {kind}: give a DataFrame .*\[sample\]"):
            tables.predict(row, 0)
        assert tables.predict(pd.DataFrame([row]), 0) == tables.predict(frame, 0)[:1]
    with pytest.raises(UserError, match="given as a dict"):
        readers.predict({"text": "a good day"}, 0)
    assert readers.predict(pd.Series(TEXTS), 0).tolist() == readers.predict(TEXTS, 0).tolist()


def test_models_come_and_go_and_their_answers_stay(trained, monkeypatch):
    monkeypatch.setattr("fedala.trained.federation.MOST_READY", 2)
    before = [trained.predict(PIXELS, client, probabilities=True) for client in (0, 1, 2)]
    assert len(trained._ready) == 2 < MOST_READY
    after = [trained.predict(PIXELS, client, probabilities=True) for client in (0, 1, 2)]
    assert np.array_equal(before, after)


def test_images_come_from_files_with_and_without_labels(trained, tmp_path):
    wanted = trained.predict(PIXELS, 2).tolist()
    np.savez(tmp_path / "with.npz", x=PIXELS[:, 0], y=Y)
    np.savez_compressed(tmp_path / "without.npz", x=PIXELS[:, 0])
    np.savez(
        tmp_path / "parts.npz",
        x_train=PIXELS[:50],
        y_train=Y[:50],
        x_test=PIXELS[50:],
        y_test=Y[50:],
    )
    (tmp_path / "images" / "deeper").mkdir(parents=True)
    encoded = []
    for number, pixels in enumerate(PIXELS[:, 0]):
        place = "deeper/" if number >= 50 else ""
        path = tmp_path / "images" / f"{place}{number:02d}.png"
        Image.fromarray(pixels).save(path)
        encoded.append({"bytes": path.read_bytes(), "path": None})
    pq.write_table(pa.table({"image": encoded}), tmp_path / "new.parquet")
    for name in ("with.npz", "without.npz", "parts.npz", "images", "new.parquet"):
        for path in (tmp_path / name, str(tmp_path / name)):
            assert trained.predict(path, 2).tolist() == wanted, name
    assert trained.predict(images(), 2).tolist() == wanted


def test_a_folder_of_each_client_is_refused_without_options_that_are_not_there(
    folder, trained, tmp_path
):
    for client, rows in (("ada", range(8)), ("bob", range(8, 20))):
        for row in rows:
            path = tmp_path / "photos" / client / NAMES[Y[row]] / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[row, 0]).save(path)
    sentence = "if they are the clients, give the folder of a single one; otherwise, remove one"
    photos = tmp_path / "photos"
    for ask in (lambda: trained.evaluate(photos, 0), lambda: onboard(folder, photos)):
        with pytest.raises(UserError, match=sentence) as error:
            ask()
        assert "--" not in str(error.value)
    found = trained.evaluate(photos / "ada", 0)
    assert found.loss == pytest.approx(trained.evaluate((PIXELS[:8], Y[:8]), 0).loss, rel=1e-5)
    assert found.samples == 8


def test_texts_come_from_files_and_unknown_words_are_unknown(readers, tmp_path):
    wanted = readers.predict(TEXTS, 0).tolist()
    lines = [f'"{text}",{NAMES[label]}' for text, label in zip(TEXTS, Y, strict=True)]
    (tmp_path / "with.csv").write_text("\n".join(["Text,label", *lines]))
    (tmp_path / "without.csv").write_text("\n".join(["text", *TEXTS]))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "new.parquet")
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{number:02d}.txt").write_text(text)
    for name in ("with.csv", "without.csv", "new.parquet", "folder"):
        assert readers.predict(str(tmp_path / name), 0).tolist() == wanted, name
    scores = readers.evaluate(tmp_path / "with.csv", client=0)
    assert scores.accuracy == np.mean(np.array(wanted) == np.array(NAMES)[Y])
    with pytest.raises(UserError, match="put it into a list"):
        readers.predict("a good day", 0)
    # Data with words of its own has other numbers for them.
    ids, tokens = encode_texts(["zebra", *TEXTS])
    other = Dataset(
        "other", ids, torch.tensor([0, *Y]), 4, NAMES, vocabulary=len(tokens) + 1, tokens=tokens
    )
    assert readers.predict(other, 0).tolist()[1:] == wanted
    assert readers.predict(["zebra"], 0)[0] == readers.predict([""], 0)[0]


def test_a_table_is_read_by_the_names_of_its_columns(tables, tmp_path):
    rows = [(170.5, "red", 30, 70.25), (160, "blue", 20, 50), (1.5, "red", 3, 0.5)]
    x = np.array([[170.5, 0, 1, 30, 70.25], [160, 1, 0, 20, 50], [1.5, 0, 1, 3, 0.5]])
    wanted = tables.predict(x, 0, probabilities=True)
    lines = [f"{weight},x,{height},{age},{colour},2.0" for height, colour, age, weight in rows]
    (tmp_path / "new.csv").write_text("\n".join(["weight,other,height,age,colour,y", *lines]))
    frame = dict(zip(("height", "colour", "age", "weight"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({name: list(frame[name]) for name in frame}), tmp_path / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        assert np.array_equal(tables.predict(tmp_path / name, 0, probabilities=True), wanted)
    found = tables.evaluate(tmp_path / "new.csv", 0)
    assert found.accuracy == (wanted.argmax(1) == 2).mean()
    assert tables.evaluate(tmp_path / "new.csv", 0, label_column="y") == found
    text = (tmp_path / "new.csv").read_text()
    for old, new, sentence in (
        ("height", "size", "no column height: its columns are weight, other"),
        ("blue", "green", r"line 3: the word 'green' of the column colour .* it had blue, red"),
        ("160", "tall", r"line 3: 'tall' in the column height is not a number"),
    ):
        (tmp_path / "bad.csv").write_text(text.replace(old, new))
        with pytest.raises(UserError, match=sentence):
            tables.predict(tmp_path / "bad.csv", 0)
    (tmp_path / "bad.csv").write_text(text.replace(",y", ",grade"))
    with pytest.raises(UserError, match=r"no label column .*other, height, age, colour, grade"):
        tables.evaluate(tmp_path / "bad.csv", 0)
    assert tables.evaluate(tmp_path / "bad.csv", 0, label_column="grade") == found


def test_labels_and_numbers(tmp_path):
    y = (torch.arange(60).view(-1, 1) % torch.tensor([2, 3])) % 2
    data = features(y, 2, ("wet", "cold"))
    run(tmp_path / "labels", data, model=linear(2))
    trained = load(tmp_path / "labels", model=linear(2))
    chances = trained.predict(data.x, 0, probabilities=True)
    found = trained.predict(data.x, 0)
    assert chances.shape == (60, 2)
    assert np.array_equal(found, (chances > 0.5).astype(int))
    assert trained.evaluate(data, 0).score == (found == y.numpy()).mean()
    numbers = features(torch.arange(60) / 60, 1)
    run(tmp_path / "numbers", numbers, model=linear(1))
    trained = load(tmp_path / "numbers", model=linear(1))
    found = trained.predict(numbers.x, 1)
    assert found.shape == (60,)
    wanted = ((found - numbers.y.numpy()) ** 2).mean()
    assert trained.evaluate(numbers, 1).score == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(UserError, match="no probabilities"):
        trained.predict(numbers.x, 1, probabilities=True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no file"),
        (b"PK", "not a readable .npz file"),
        (b"", "not a readable .npz file"),
    ],
)
def test_files_that_are_not_data_are_refused(trained, tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "new.npz").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        trained.predict(tmp_path / "new.npz", 0)


def test_arrays_of_objects_and_other_files_are_refused(trained, tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    (tmp_path / "new.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"other": [1]}), tmp_path / "new.parquet")
    for name, sentence in (
        ("objects.npz", "pickled"),
        ("new.txt", "does not hold samples"),
        ("empty", "no images"),
        ("new.parquet", "no image or text column"),
    ):
        with pytest.raises(UserError, match=sentence):
            trained.predict(tmp_path / name, 0)


def test_scores_are_a_table_in_a_notebook_and_a_frame():
    plain = (ModelScore("<a>", 0.5, 1.25, 4), ModelScore(None, 1.0, 0.5, 4))
    scores = Scores(ACCURACY, plain)
    shown = scores._repr_html_()
    assert "<td>client &lt;a&gt;</td><td>50.00</td><td>1.25</td><td>4</td>" in shown
    assert "global model" in shown
    assert scores.to_frame()["score"].tolist() == [0.5, 1.0]
    first = ModelScore("=a", 0.5, 1.25, 4, {"f1": 0.25}, 0.75)
    scores = Scores(ACCURACY, (first, ModelScore(None, 1.0, 0.5, 4, {}, 0.5)))
    shown = scores._repr_html_()
    assert "<th>macro F1 in %</th>" in shown
    assert "<td>25.00</td>" in shown
    assert "<td>–</td>" in shown  # it is not defined
    assert "always the most frequent class: 50.00 to 75.00 %" in shown
    assert scores.to_frame()["f1"].isna().tolist() == [False, True]
    assert scores.csv().splitlines() == [
        "client,accuracy,loss,samples,f1,majority_share",
        "'=a,0.5,1.25,4,0.25,0.75",
        ",1.0,0.5,4,,0.5",
    ]
