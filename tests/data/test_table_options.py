"""Tables as people have them: columns to leave out, missing values, separators, whole numbers."""

import numpy as np
import pandas as pd
import pytest
import torch

import fedala
from fedala.data import federate, load, make_dataset
from fedala.errors import Caution, UserError
from fedala.runs.config import Config
from fedala.runs.plan import plan

ROWS = "id,when,a,los\n" + "".join(f"{i + 100},day {i},{i % 4}.5,{i % 3}\n" for i in range(12))


def write(tmp_path, text, name="my.csv"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_columns_are_left_out(tmp_path):
    path = write(tmp_path, ROWS)
    with pytest.raises(UserError, match=r"column when .* Leave it out with drop_columns='when'"):
        load(path, label_column="los")
    data = load(path, label_column="los", drop_columns=["WHEN"])
    assert data.feature_names == ("id", "a")
    note = "The column id looks like a row number; drop_columns='id' leaves it out."
    assert note in data.notes
    data = load(path, label_column="los", drop_columns=["when", "id"])
    assert data.feature_names == ("a",)
    assert not any("row number" in note for note in data.notes)
    for dropped in ("when, id", ("when", "id")):  # a text, as messages suggest it
        assert load(path, label_column="los", drop_columns=dropped).feature_names == ("a",)
        frame = make_dataset(pd.read_csv(path), label_column="los", drop_columns=dropped)
        assert frame.feature_names == ("a",)
    with pytest.raises(UserError, match="no column day, which drop_columns names"):
        load(path, label_column="los", drop_columns=["day"])
    with pytest.raises(UserError, match="los is in drop_columns and in label_column"):
        load(path, label_column="los", drop_columns=["los"])
    with pytest.raises(UserError, match="drop_columns are for your own data"):
        load("digits", drop_columns=["a"])


def test_a_column_has_one_role(tmp_path):
    path = write(tmp_path, "user,x\na,1\nb,2\n")
    with pytest.raises(UserError, match="the column user cannot be both the label and the clients"):
        load(path, label_column="user", clients_by="User")


def test_columns_beside_the_texts_are_named_unless_they_are_left_out(tmp_path):
    """The same for a csv file and a frame."""
    lines = [f"film {i},words on film {i},{i % 5},{'ab'[i % 2]}" for i in range(20)]
    path = write(tmp_path, "title,text,stars,label\n" + "\n".join(lines) + "\n")
    said = (
        "The column text holds the texts. Not read: title, stars. If one of these is the text to "
        "classify, call it text."
    )
    for data in (load(path), make_dataset(pd.read_csv(path))):
        assert said in data.notes
    assert not any("Not read" in one for one in load(path, drop_columns=["title", "stars"]).notes)
    text = (tmp_path / "my.csv").read_text()
    other = write(tmp_path, text.replace("title,text", "title,body"))
    advice = "with drop_columns='title'; if it is the text to classify, call it text"
    with pytest.raises(UserError, match=advice):
        load(other)


@pytest.mark.parametrize("value", ["when,id", ["when", "id"]])
def test_a_run_leaves_columns_out_and_predicts_whole_numbers(tmp_path, value):
    values = {"dataset": write(tmp_path, ROWS), "label_column": "los", "drop_columns": value}
    values |= {"method": "fedavg", "partition": "iid", "clients": 2, "rounds": 1}
    classes = plan(Config.from_values(values)).federation.dataset
    assert (classes.kind, classes.classes, classes.feature_names) == ("classes", 3, ("a",))
    for loss in ("mse", "mae", "huber"):
        numbers = plan(Config.from_values({**values, "loss": loss})).federation.dataset
        assert (numbers.kind, numbers.classes) == ("numbers", 1)
        assert numbers.y.dtype == torch.float32
        np.testing.assert_array_equal(numbers.y, [i % 3 for i in range(12)])


def test_many_whole_numbers_are_said_to_be_classes(tmp_path):
    path = write(tmp_path, "a,y\n" + "".join(f"{i}.5,{i % 11}.0\n" for i in range(33)))
    said = "The label y holds 11 whole numbers, which are read as classes; loss='mse'"
    assert any(note.startswith(said) for note in load(path).notes)
    assert not any("whole numbers" in note for note in load(path, is_regression=True).notes)


@pytest.mark.parametrize("kind", ["csv", "frame", "parquet"])
@pytest.mark.parametrize(
    ("labels", "is_regression", "expected"),
    [
        ([0.5, 2.0, 1.5], False, [0.5, 2.0, 1.5]),
        ([3, 1, 3], True, [3.0, 1.0, 3.0]),
        ([2, 0, 1], False, [2, 0, 1]),
    ],
)
def test_texts_have_targets_like_other_samples(tmp_path, kind, labels, is_regression, expected):
    frame = pd.DataFrame({"text": ["good", "very good", "bad"], "label": labels})
    if kind == "frame":
        data = make_dataset(frame, is_regression=is_regression)
    else:
        path = tmp_path / f"my.{kind}"
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        data = load(str(path), is_regression=is_regression)
    is_classes = not is_regression and isinstance(labels[0], int)
    assert data.kind == ("classes" if is_classes else "numbers")
    assert data.y.tolist() == expected


@pytest.mark.parametrize("kind", ["csv", "frame", "parquet"])
@pytest.mark.parametrize(
    "words", [("False", "True"), ("01", "02"), ("1.0", "2.0"), ("0", "1"), ("bad", "good")]
)
def test_classes_of_texts_are_called_as_they_are_written(tmp_path, kind, words):
    """A run folder knows its classes by these names."""
    frame = pd.DataFrame({"text": ["a b", "c d", "e f"], "label": [words[1], words[0], words[1]]})
    if kind == "frame":
        data = make_dataset(frame)
    else:
        path = tmp_path / f"my.{kind}"
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        data = load(str(path))
    assert data.class_names == words
    assert data.y.tolist() == [1, 0, 1]


@pytest.mark.parametrize("word", ["NA", "abc"])
def test_a_target_that_is_not_a_number_is_named(tmp_path, word):
    path = write(tmp_path, f"a,y\n1,0.5\n2,{word}\n3,1.5\n")
    says = f"the column y holds '{word}' for sample 1, which is not a number; all targets must be."
    with pytest.raises(UserError, match=says):
        load(path, is_regression=True)


def test_whole_numbers_in_memory_are_targets_of_a_regression():
    data = make_dataset(([[1.0], [2.0], [4.0]], [5, 7, 7]), is_regression=True)
    assert (data.kind, data.y.dtype) == ("numbers", torch.float32)
    assert data.y.tolist() == [5.0, 7.0, 7.0]


def test_all_missing_values_are_counted(tmp_path):
    path = write(tmp_path, "a,b,c,y\n1,2,x,0\n1,?,x,1\n,,y,0\n1,2,NA,1\n")
    says = (
        r"4 missing values: a 1, b 2, c 1; the first in line 3, column b\. Drop the lines or fill"
    )
    with pytest.raises(UserError, match=says):
        load(path)


def test_missing_values_of_parquet_are_counted(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"a": [1.0, None, None], "b": ["u", "u", None], "y": [0, 1, 0]})
    pq.write_table(table, tmp_path / "my.parquet")
    with pytest.raises(UserError, match="3 missing values: a 2, b 1; the first in row 1, column a"):
        load(str(tmp_path / "my.parquet"))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_separators_are_found(tmp_path, separator):
    text = 'name,a,"weight, kg",label\nu,1,2.5,x\nu,2,3.5,y\nv,3,0.5,x\nv,4,1,y\n'
    usual = load(write(tmp_path, text))
    lines = text.replace('"weight, kg"', "weight").replace(",", separator)
    other = load(write(tmp_path, lines.replace("weight", '"weight, kg"'), "other.csv"))
    assert torch.equal(usual.x, other.x)
    assert torch.equal(usual.y, other.y)
    assert other.feature_names == usual.feature_names == ("name=u", "name=v", "a", "weight, kg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a;y\n1;0\n2,5;1\n3;0\n", "line 3: the column a holds 2,5, a number with a decimal comma"),
        ("a;y\n1;0,5\n2;1,5\n3;2\n", "column y holds 0,5, a number with a decimal comma"),
    ],
)
def test_decimal_commas_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path, text))


def test_the_list_of_features_is_complete(tmp_path):
    names = [f"f{i}" for i in range(43)]
    path = write(tmp_path, f"{','.join(names)},y\n" + "".join(f"{'1,' * 43}{i}\n" for i in (0, 1)))
    assert f"The features are the columns {', '.join(names[:40])} and 3 more." in load(path).notes


PEOPLE = """Proband,text_size,smoker,Split,pressure,ok,Y
p1,1,no,train,120.5,True,2
p1,2,yes,train,130,False,3
p1,3,no,test,125,True,2
p2,4,yes,train,110.25,True,3
p2,2,no,train,150,False,2
p2,3,yes,test,99,True,3
"""


@pytest.mark.parametrize("is_regression", [False, True])
def test_a_frame_is_read_as_the_same_csv(tmp_path, is_regression):
    options = {"clients_by": "proband", "drop_columns": ["text_size"]}
    path = write(tmp_path, PEOPLE)
    frame = pd.read_csv(path)
    file = federate(load(path, **options, is_regression=is_regression))
    whole = federate(make_dataset(frame, **options, is_regression=is_regression))
    assert whole.dataset.notes == file.dataset.notes
    assert file.dataset.feature_names == ("smoker=no", "smoker=yes", "pressure", "ok")
    pieces = dict(iter(frame.drop(columns="Proband").groupby(frame["Proband"])))
    options = {"drop_columns": ["text_size"], "is_regression": is_regression}
    by_client = federate(make_dataset(pieces, **options))
    for own in (whole, by_client):
        assert own.digest() == file.digest()
        for name in ("feature_names", "class_names", "classes", "client_names"):
            assert getattr(own.dataset, name) == getattr(file.dataset, name)


def test_a_frame_may_hold_texts():
    frame = pd.DataFrame({"text": ["good film", "bad", "good"], "label": ["a", "b", "a"], "n": 1})
    data = make_dataset(frame)
    assert data.tokens[0] == "good"
    assert data.class_names == ("a", "b")


def test_a_run_predicts_whole_numbers_of_a_frame(tmp_path):
    frame = pd.DataFrame({"a": np.arange(12) / 7, "when": [f"d{i}" for i in range(12)]})
    frame["los"] = np.arange(12) % 5
    columns = {"label_column": "los", "drop_columns": ["when"]}
    options = {"method": "fedavg", "partition": "iid", "clients": 2}
    run = fedala.run(
        dataset=frame, loss="mae", rounds=1, out=tmp_path / "run", **columns, **options
    )
    assert run.config.drop_columns == "when"
    assert run.config.loss == "mae"
    again = fedala.run(dataset=frame, resume=tmp_path / "run", rounds=2)
    assert again.config.rounds == 2


class Several(torch.utils.data.Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return self.x, place % 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (([[1, 2, 3], [1], [2, 2], [3]], [0, 1, 0, 1]), "1 to 3 values, and .* pad them with 0"),
        (({"tokens": np.ones((4, 2))}, [0, 1, 0, 1]), "x is a dict; a run needs one array"),
        (Several({"tokens": torch.ones(3)}), "x is a dict; a run needs one array"),
        (Several((torch.ones(3), torch.ones(4))), "x of a sample is several tensors; a run needs"),
    ],
)
def test_samples_are_one_array_each(data, message):
    with pytest.raises(UserError, match=message):
        make_dataset(data)


def test_a_forgotten_column_of_clients_is_proposed(tmp_path, monkeypatch):
    monkeypatch.setattr("fedala.data.partition._MAX_TRIES", 20)
    rows = [f"VP-{i % 4},{i % 5},{i}.5,{i % 2},{'uv'[i % 2]}" for i in range(40)]
    path = write(tmp_path, "\n".join(["proband,site,a,sick,label", *rows]))
    says = "my.csv names no clients, .* one of the columns proband, site says .* clients_by='NAME'"
    with pytest.raises(UserError, match=says):
        federate(load(path))
    assert len(federate(load(path, clients_by="proband")).train) == 4
    with pytest.raises(UserError, match=r"None of 20 draws .* fewer clients\.$"):
        federate(load(path), "dir:0.1")
    with pytest.raises(UserError, match=r"If a column \(array, or level of folders\) says"):
        federate(make_dataset((np.zeros((40, 2)), np.arange(40) % 2)))


def test_a_model_of_a_frame_predicts_a_frame(tmp_path):
    frame = pd.DataFrame({"smoker": ["no", "yes"] * 6, "ok": [True, False, False] * 4})
    frame["a"], frame["label"] = np.arange(12) / 7, np.arange(12) % 2
    options = {"method": "fedavg", "partition": "iid", "clients": 2, "rounds": 1}
    fedala.run(dataset=frame, out=tmp_path / "run", **options)
    trained = fedala.load(tmp_path / "run")
    frame.to_csv(tmp_path / "new.csv", index=False)
    by_frame, by_file = (
        trained.predict(one, probabilities=True) for one in (frame, tmp_path / "new.csv")
    )
    np.testing.assert_array_equal(by_frame, by_file)
    with pytest.raises(UserError, match="row 0: the word 'maybe' of the column smoker was not"):
        trained.predict(frame.assign(smoker="maybe"))


def test_whole_numbers_that_hardly_repeat_are_not_taken_for_classes(tmp_path):
    """Of 23 costs, 12 have a single sample; with one of them repeated, 11 of 23 have."""
    costs = [1000 - 7 * k for k in range(12)] + [-k for k in range(1, 12)] * 2
    rows = [f"{k}.5,{cost}" for k, cost in enumerate(costs)]
    path = write(tmp_path, "\n".join(["a,label", *rows, ""]))
    values = {"dataset": path, "method": "fedavg", "partition": "iid", "clients": 2, "rounds": 1}
    sentence = (
        r"23 different whole numbers as labels, and 12 of them have a single sample.*"
        r"loss='mse', mae or huber; if they are classes, with loss='cross_entropy'\."
    )
    with pytest.raises(UserError, match=sentence):
        plan(Config.from_values(values))
    for loss, kind in (("mse", "numbers"), ("cross_entropy", "classes")):
        checked = plan(Config.from_values({**values, "loss": loss}))
        assert checked.federation.dataset.kind == kind
        assert not any("whole numbers" in note for note in checked.federation.notes)
    write(tmp_path, "\n".join(["a,label", *rows, "0.5,1000", ""]))
    [note] = [one for one in plan(Config.from_values(values)).federation.notes if "whole" in one]
    assert isinstance(note, Caution)
    assert "23 whole numbers, which are read as classes" in note
