"""Tables that come later: onboarding, prediction and evaluation read them as the run did."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import fedala
from fedala.cli.app import app
from fedala.errors import UserError

NAMES = "age,pressure,diag,ward,grade,died,hospital"
#: Too few rows to tell what a column holds.
NEW = [
    "61,120.5,A1,east,1,0,new",
    "42,131,B2,west,x,1,new",
    "75,118,B2,west,2,1,new",
    "33,127.25,A1,east,y,0,new",
]


#: The same as the features of the run: age, pressure, diag=A1, …, grade=z.
ENCODED = np.array(
    [
        [61, 120.5, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0],
        [42, 131, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0],
        [75, 118, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0],
        [33, 127.25, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0],
    ],
    np.float32,
)


def write(path, rows, names=NAMES):
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train on a table of numbers and words: some words of the column grade look like numbers."""
    place = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    rows = [
        f"{i},{random.integers(20, 90)},{random.normal(120, 9):.2f},{['A1', 'B2', 'C3'][i % 3]},"
        f"{['east', 'west'][i % 2]},{'12xyz'[i % 5]},{int(i % 3 == 1)},{'nse'[i % 4 % 3]}"
        for i in range(60)
    ]
    fedala.run(
        dataset=write(place / "train.csv", rows, f"id,{NAMES}"),
        label_column="died",
        drop_columns="id",
        clients_by="hospital",
        method="ditto",
        rounds=1,
        device="cpu",
        normalize="standard",
        out=place / "run",
    )
    return place / "run"


def ask_all(folder, data):
    """Return what onboarding, prediction and evaluation of some data are."""
    trained = fedala.load(folder)
    return [
        lambda: fedala.onboard(folder, data, epochs=0, device="cpu"),
        lambda: trained.predict(data, 0),
        lambda: trained.evaluate(data, 0),
    ]


@pytest.mark.parametrize("kind", ["path", "dataset", "federation"])
def test_a_word_that_was_not_there_in_training_is_refused_in_one_sentence(folder, tmp_path, kind):
    rows = [f"{40 + i},120,{'A1' if i else 'Z99'},east,x,{i % 2},{'nse'[i % 3]}" for i in range(36)]
    path = data = write(tmp_path / "new.csv", rows)
    if kind != "path":
        data = fedala.data.load(str(path), label_column="died", clients_by="hospital")
    if kind == "federation":
        data = fedala.data.federate(data)
    sentence = "the word 'Z99' of the column diag was not there in training; it had A1, B2, C3"
    onboard, predict, evaluate = ask_all(folder, data)
    for ask in (onboard, evaluate) if kind == "federation" else (onboard, predict, evaluate):
        with pytest.raises(UserError, match=sentence):
            ask()
    if kind == "path":
        answer = CliRunner().invoke(app, ["onboard", str(folder), "--data", str(data)])
        assert answer.exit_code == 2


def test_the_columns_of_a_federation_are_found_by_their_names(folder, tmp_path):
    rows = [f"{40 + i},120,{'ABC'[i % 3]}{i % 3 + 1},east,x,{i % 2},new" for i in range(36)]
    path = write(tmp_path / "new.csv", rows)
    data = fedala.data.load(str(path), label_column="died", clients_by="hospital")
    other = replace(data, x=data.x.flip(1), feature_names=data.feature_names[::-1])
    found = [
        fedala.onboard(folder, fedala.data.federate(one), epochs=0, device="cpu").clients[0].losses
        for one in (data, other)
    ]
    assert found[0] == found[1]


def describe_newcomer(folder, data):
    [client] = fedala.onboard(folder, data, epochs=1, device="cpu").clients
    return client.train_samples, client.losses


def test_a_newcomers_table_is_encoded_as_the_run_encoded_its_own(folder, tmp_path):
    """Few rows, further columns and few words do not matter: the columns are known."""
    path = write(tmp_path / "new.csv", NEW)
    frame = pd.read_csv(path)
    wider = frame[frame.columns[::-1]].assign(remark=[f"free {i}" for i in range(4)], empty=np.nan)
    wider.to_csv(tmp_path / "wider.csv")  # with a column that has no name
    pq.write_table(pa.Table.from_pandas(wider), tmp_path / "wider.parquet")
    wanted = describe_newcomer(folder, (ENCODED, frame["died"].to_numpy()))
    assert wanted[0] == 3
    for data in (
        path,
        tmp_path / "wider.csv",
        tmp_path / "wider.parquet",
        frame,
        wider,
        wider.drop(columns="hospital"),
        [wider],
        (wider, wider["died"].to_numpy()),
        {"new": wider.drop(columns="hospital")},
    ):
        assert describe_newcomer(folder, data) == wanted


@pytest.mark.parametrize("place", range(4))
def test_one_row_is_enough(folder, tmp_path, place):
    path = write(tmp_path / "new.csv", [NEW[place]])
    [client] = fedala.onboard(folder, path, epochs=0, device="cpu").clients
    trained = fedala.load(folder)
    given = (ENCODED[[place]], [NEW[place].split(",")[5]])
    assert client.name == "new"
    assert (client.train_samples, client.test_samples) == (0, 1)
    assert trained.evaluate(path, 0) == trained.evaluate(given, 0)


def test_a_column_of_words_may_hold_numbers_alone(folder, tmp_path):
    rows = ["61,120.5,A1,east,1,0,new", "61,120.5,A1,east,2,1,new"] * 4
    path = write(tmp_path / "new.csv", rows)
    frame = pd.read_csv(path)
    assert frame["grade"].dtype.kind == "i"
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "new.parquet")
    dataset = fedala.data.make_dataset(frame, label_column="died", clients_by="hospital")
    assert "grade" in dataset.feature_names
    x = np.repeat(ENCODED[:1], 8, axis=0)
    x[1::2, 7:9] = 0, 1
    wanted = describe_newcomer(folder, (x, np.arange(8) % 2))
    trained = fedala.load(folder)
    chances = trained.predict(x, 0, probabilities=True)
    kinds = (path, tmp_path / "new.parquet", frame, frame.astype({"grade": float}))
    for data in kinds:
        assert describe_newcomer(folder, data) == wanted
        assert np.array_equal(trained.predict(data, 0, probabilities=True), chances)
    # The dataset has one word for the other columns, and grade as numbers.
    assert np.array_equal(trained.predict(dataset, 0, probabilities=True), chances)
    for grade, word in ((3, "3"), (2.5, "2.5"), (True, "True")):
        other = frame.assign(grade=grade)
        sentence = f"the word '{word}' of the column grade was not there in training; it had 1, 2"
        with pytest.raises(UserError, match=sentence):
            trained.predict(other, 0)
        with pytest.raises(UserError, match=sentence):
            fedala.onboard(folder, other)
        if grade is not True:  # which is 1 in a dataset
            made = fedala.data.make_dataset(other, label_column="died", clients_by="hospital")
            with pytest.raises(UserError, match=sentence):
                trained.predict(made, 0)


MISSING = "3 missing values: age 2, ward 1; the first in"


@pytest.mark.parametrize("form", ["csv", "parquet", "frame", "nullable"])
def test_missing_values_are_counted_by_column(folder, tmp_path, form):
    frame = pd.read_csv(write(tmp_path / "new.csv", NEW * 2))
    frame.loc[[2, 5], "age"] = np.nan
    frame.loc[3, "ward"] = None
    path = tmp_path / f"holes.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pandas(frame), path)
    data = {"frame": frame, "nullable": frame.convert_dtypes()}.get(form, path)
    first = "line 4" if form == "csv" else "row 2"
    asks = ask_all(folder, data)
    for ask in asks if data is path else asks[:2]:
        with pytest.raises(UserError, match=f"{MISSING} {first}, column age. Drop the") as error:
            ask()
        assert "--drop" not in str(error.value)


def test_numbers_that_are_not_finite_are_counted_by_column(folder, tmp_path):
    trained = fedala.load(folder)
    x = ENCODED.astype(float)
    x[1:3, 0], x[0, 1] = np.nan, 1e300
    with pytest.raises(UserError, match=r"infinite values \(beyond float32\): age 2, pressure 1;"):
        trained.predict(x, 0)
    frame = pd.read_csv(write(tmp_path / "new.csv", NEW)).assign(age=[1, 2, np.inf, 4])
    with pytest.raises(UserError, match="row 2: the column age holds inf; every value must be"):
        trained.predict(frame, 0)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_missing_label_is_named(folder, tmp_path, ending):
    frame = pd.read_csv(write(tmp_path / "new.csv", NEW))
    frame.loc[1, "died"] = np.nan
    frame.to_csv(tmp_path / "holes.csv", index=False)
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "holes.parquet")
    place = {"csv": "line 3", "parquet": "row 1"}[ending]
    with pytest.raises(UserError, match=f"holes.{ending}, {place}: the label is empty"):
        fedala.load(folder).evaluate(tmp_path / f"holes.{ending}", 0)


def test_a_frame_is_tested_as_the_file_with_the_same_content(folder, tmp_path):
    """Its label is in the column that the run had, or in the one that is named."""
    path = write(tmp_path / "new.csv", NEW)
    frame, trained = pd.read_csv(path), fedala.load(folder)
    wanted = trained.evaluate((ENCODED, [0, 1, 1, 0])).models
    assert len({one.loss for one in wanted}) > 1
    for data in (path, frame, frame[frame.columns[::-1]], frame.assign(remark="x", label=None)):
        assert trained.evaluate(data).models == wanted
    renamed = frame.rename(columns={"died": "dead"})
    assert trained.evaluate(renamed, label_column="dead").models == wanted
    with pytest.raises(UserError, match="The data has no died: its columns are age, pressure"):
        trained.evaluate(renamed)
    frame["died"] = [0, 1, None, 0]
    with pytest.raises(UserError, match="The data, column died: row 2 holds None"):
        trained.evaluate(frame)


def test_a_frame_of_texts_is_read_by_its_text_column(tmp_path):
    texts = [f"{'ab'[i % 2]} w{i % 5} x" for i in range(40)]
    frame = pd.DataFrame({"title": "t", "text": texts, "kind": [f"k{i % 2}" for i in range(40)]})
    fedala.run(
        dataset=frame,
        label_column="kind",
        drop_columns="title",
        clients=2,
        method="fedavg",
        rounds=1,
        device="cpu",
        out=tmp_path / "run",
    )
    trained = fedala.load(tmp_path / "run")
    wanted = trained.predict(texts, probabilities=True)
    assert np.array_equal(trained.predict(frame, probabilities=True), wanted)
    assert trained.evaluate(frame) == trained.evaluate((texts, frame["kind"].tolist()))
    [client] = fedala.onboard(tmp_path / "run", frame.drop(columns="title"), device="cpu").clients
    assert (client.train_samples, client.test_samples) == (30, 10)
    with pytest.raises(UserError, match="no column text: its columns are title, kind"):
        trained.predict(frame.drop(columns="text"))


@pytest.mark.parametrize("form", ["csv", "parquet", "frame"])
def test_each_client_is_tested_on_its_own_rows_of_a_table(folder, tmp_path, form):
    rows = [line.replace("new", client) for line in NEW for client in ("n", "new", "e")]
    path, trained = write(tmp_path / "new.csv", rows), fedala.load(folder)
    frame = pd.read_csv(path)
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "new.parquet")
    data = frame if form == "frame" else tmp_path / f"new.{form}"
    found = trained.evaluate(data)
    assert [one.client for one in found] == ["e", "n", None]
    given = (ENCODED, [0, 1, 1, 0])
    for one in found.personal:
        assert one == trained.evaluate(given, one.client)[one.client]
    assert found[None].samples == 12
    assert found[None].loss == pytest.approx(trained.evaluate(given)[None].loss, rel=1e-5)
    assert found.notes[1:] == (
        "The data has no samples of s.",
        "Not among the clients of the run: new.",
    )
    assert trained.evaluate(data, "n").samples == 12
    strange = trained.evaluate(frame.assign(hospital="new"))
    assert [one.samples for one in strange] == [12] * 4
    assert "Every model is tested on all samples." in strange.notes[0]
    assert trained.evaluate(frame.drop(columns="hospital")).notes == ()
    answer = CliRunner().invoke(app, ["evaluate", str(folder), "--data", str(path)])
    assert "The data has no samples of s." in answer.output


def test_a_feature_is_neither_the_label_nor_the_client(tmp_path):
    """It may have a name that is usual for them, as `y` and `user` have here."""
    rows = [f"{i % 7},{'pq'[i % 2]},{i % 3 == 0:d},{'ab'[i % 4 // 2]}" for i in range(40)]
    path = write(tmp_path / "new.csv", rows, "y,user,label,client")
    fedala.run(dataset=path, method="fedavg", rounds=1, device="cpu", out=tmp_path / "run")
    trained, frame = fedala.load(tmp_path / "run"), pd.read_csv(path)
    assert trained.clients == ("a", "b")
    found = trained.evaluate(path)
    assert [one.client for one in found] == ["a", "b", None]
    frame.drop(columns="client").to_csv(path, index=False)
    for data in (path, frame.drop(columns="client")):
        assert trained.evaluate(data)[None] == found[None]
        [client] = fedala.onboard(tmp_path / "run", data, device="cpu").clients
        assert client.name == "2"
    frame.drop(columns="label").to_csv(path, index=False)
    with pytest.raises(UserError, match="no label column"):
        trained.evaluate(path)


def test_an_exported_program_takes_an_encoded_table(folder, tmp_path):
    frame = pd.read_csv(write(tmp_path / "new.csv", NEW), dtype={"grade": str})
    trained = fedala.load(folder)
    encoded = trained.preprocessing.encode(frame)
    np.testing.assert_array_equal(encoded, ENCODED)
    program = torch.export.load(trained.export(tmp_path / "model.pt2", client=0)).module()
    chances = program(encoded).softmax(1).detach().numpy()
    wanted = trained.predict(frame, client=0, probabilities=True)
    np.testing.assert_allclose(chances, wanted, atol=1e-6)
    scaled_twice = program(trained.preprocessing.prepare(frame)).softmax(1).detach().numpy()
    assert np.abs(scaled_twice - wanted).max() > 0.01
