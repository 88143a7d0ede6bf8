"""Tables of numbers in csv and parquet files: features, categories, targets, and refusals."""

import numpy as np
import pytest

from fedala.data import load
from fedala.errors import UserError


def write(tmp_path, content):
    (tmp_path / "d.csv").write_text(content)
    return str(tmp_path / "d.csv")


def test_numbers_and_words_become_features(tmp_path):
    content = "Age, colour ,ill,ok\n3,red,yes,true\n-1.5e1,blue,no,False\n4,red,no,1\n0,blue,no,0\n"
    own = load(write(tmp_path, content), label_column="ill")
    assert own.feature_names == ("Age", "colour=blue", "colour=red", "ok")
    assert own.x.tolist() == [[3, 0, 1, 1], [-15, 1, 0, 0], [4, 0, 1, 1], [0, 1, 0, 0]]
    assert (own.class_names, own.y.tolist()) == (("no", "yes"), [1, 0, 0, 0])
    assert own.notes == (
        "The features are the columns Age, colour, ok.",
        "The column colour holds words, each of which becomes a feature of zeros and ones: "
        "blue, red.",
    )


@pytest.mark.parametrize(
    ("labels", "kind", "expected"),
    [
        ("2 10 2", "classes", [0, 1, 0]),
        ("2.0 10.0 2", "classes", [0, 1, 0]),
        ("0.5 2 -1e3", "numbers", [0.5, 2.0, -1000.0]),
        ("x 1 2.5", "classes", [2, 0, 1]),
    ],
)
@pytest.mark.parametrize("column", ["label", "class", "Target", "y"])
def test_labels_are_classes_unless_some_are_not_whole(tmp_path, labels, kind, expected, column):
    lines = "".join(f"{i},{label}\n" for i, label in enumerate(labels.split()))
    own = load(write(tmp_path, f"a,{column}\n{lines}"))
    assert (own.kind, own.y.tolist()) == (kind, expected)
    assert own.feature_names == ("a",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b,y\n1,2,0\n1,,1\n", ": 1 missing value: b 1; the first in line 3, column b"),
        ("a,b,y\n1,2,0\n?,3,1\n", "1 missing value: a 1; the first in line 3"),
        ("a,y\n1,0\nNaN,1\n", "the first in line 3, column a. Drop the lines or fill"),
        ("a,y\n1,0\ninf,1\n", "line 3: the column a holds inf; every value must be a finite"),
        ("a,y\n1,0\n1e39,1\n", "beyond float32"),
        ("a,y\n1,0\n2,1\n1O,1\n", "line 4: '1O' in the column a is not a number"),
        ("a,y\n1,0\n1_0,1\n", "line 3: '1_0' in the column a is not a number"),
        (
            "a,y\nu,0\nv,1\nw,1\n",
            "column a holds 3 different words in 3 lines, such as 'u' in line 2",
        ),
        ("a,y\n1,0\n2,1,3\n", "line 3 has 3 columns, but the first line names 2"),
        ("a,a,y\n1,2,0\n", "names the column a twice"),
        (",a,y\n0,2,0\n", r"column 1 has no name .* index=False"),
        ("y\n0\n1\n", "has no columns beside the label"),
        ("a,y\n1,0\n2,\n", "line 3: the label is empty; every sample needs one"),
        ("a,y\n1,0.5\n2,nan\n", "targets that are not finite"),
        ("a,y\n1,0.5\n2,1e39\n", "targets that are NaN or infinite"),
        ("a,b\n1,0\n", r"no label column: .*label_column names another.* names a, b"),
        ("a,y\n", "is empty"),
        ("a,part,y\n1,bolt,0\n2,nut,1\n", "holds 'bolt' for sample 0; .* give it another name"),
    ],
)
def test_an_unsound_table(tmp_path, content, says):
    with pytest.raises(UserError, match=says) as caught:
        load(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_many_words_are_no_categories(tmp_path):
    lines = "".join(f"w{i % 65},{i % 2}\n" for i in range(200))
    with pytest.raises(UserError, match="holds more than 64 different words in 200 lines"):
        load(write(tmp_path, "a,y\n" + lines))
    lines = "".join(f"w{i % 64},{i % 2}\n" for i in range(200))
    assert load(write(tmp_path, "a,y\n" + lines)).x.shape == (200, 64)


def test_a_client_column_is_never_a_feature(tmp_path):
    content = "a,user,town,y\n1,7,P,0\n2,7,Q,1\n3,8,P,0\n4,8,Q,1\n"
    own = load(write(tmp_path, content))
    assert own.client_names == ("7", "8")
    assert own.feature_names == ("a", "town=P", "town=Q")
    own = load(write(tmp_path, content), clients_by="town")
    assert own.client_names == ("P", "Q")
    assert own.notes[:2] == (
        "The column town names 2 clients.",
        "The features are the columns a, user.",
    )


def parquet(tmp_path, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    return str(tmp_path / "d.parquet")


def test_a_parquet_table_is_read_as_its_csv(tmp_path):
    import pyarrow as pa
    from pyarrow.csv import write_csv

    rng = np.random.RandomState(1)
    columns = {
        "small": rng.normal(size=40).astype(np.float32), "wide": rng.normal(size=40),
        "count": rng.randint(0, 9, 40), "flag": rng.rand(40) < 0.5,
        "word": rng.choice(["p", "q", "r"], 40), "target": rng.normal(size=40),
    }  # fmt: skip
    parquet(tmp_path, **columns)
    write_csv(pa.table(columns), tmp_path / "d.csv")
    one, other = (load(str(tmp_path / f"d.{end}")) for end in ("csv", "parquet"))
    assert one.x.tolist() == other.x.tolist()
    assert one.y.tolist() == other.y.tolist()
    assert one.feature_names == other.feature_names
    assert one.notes == other.notes
    assert one.kind == "numbers"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"a": [1.0, None], "y": [0, 1]}, "1 missing value: a 1; the first in row 1"),
        ({"a": [1, None], "y": [0, 1]}, "1 missing value: a 1; the first in row 1"),
        ({"a": [1.0, float("inf")], "y": [0, 1]}, r"row 1: the column a holds inf"),
        ({"a": ["u", None], "y": [0, 1]}, "1 missing value: a 1; the first in row 1"),
        ({"a": [[1], [2]], "y": [0, 1]}, r"the column a holds list<.*>; a feature must be"),
        ({"a": [1, 2], "y": [0, None]}, r"column y: row 1 holds None"),
        ({"a": [1, 2], "y": [0, 1], "user": ["u", None]}, r"column user: row 1 holds None"),
        ({"y": [0, 1]}, "has no columns beside the label"),
    ],
)
def test_an_unsound_parquet_table(tmp_path, columns, says):
    with pytest.raises(UserError, match=says):
        load(parquet(tmp_path, **columns))


def test_a_folder_of_tables_without_parts_is_one_table(tmp_path):
    for i in range(2):
        (tmp_path / "data").mkdir(exist_ok=True)
        parquet(tmp_path, a=[i, i + 10], y=[0, 1])
        (tmp_path / "d.parquet").rename(tmp_path / "data" / f"part-{i}.parquet")
    own = load(str(tmp_path))
    assert own.x.flatten().tolist() == [0, 10, 1, 11]
    assert own.split is None


def test_a_table_that_lacks_a_column_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2], "y": [0, 1]}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"b": [1, 2], "y": [0, 1]}), tmp_path / "test.parquet")
    with pytest.raises(UserError, match="the same in all its parts"):
        load(str(tmp_path))
