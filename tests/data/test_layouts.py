"""Files say whose sample is whose and which are for testing, in every layout, and never in silence.

Long because it has a case for every layout.
"""

import numpy as np
import pytest
from data_files import replace_hub, save_image

from fedala.data import federate, load
from fedala.errors import UserError

IMAGES = np.arange(4 * 6 * 5 * 3).reshape(4, 6, 5, 3).astype(np.uint8)
#: Twelve samples of three people, two features; eight are for training.
X = np.random.RandomState(0).normal(size=(12, 2)).astype(np.float32)
Y = np.arange(12) % 2
USERS = ["ada", "bob", "eve", "bob"] * 3
PARTS = ["train"] * 8 + ["test"] * 4
SPLIT_NOTE = "The split of the data is kept: 8 train, 4 test; split='pooled' mixes them."


def write_npz(path, users=USERS):
    parts = {"train": slice(0, 8), "test": slice(8, 12)}
    arrays = {}
    for part, rows in parts.items():
        arrays |= {f"x_{part}": X[rows], f"y_{part}": Y[rows]}
        arrays[f"user_{part}"] = np.array(users)[rows]
    np.savez(path / "d.npz", **arrays)
    return str(path / "d.npz")


def write_csv(path, name="d.csv", rows=range(12), header="User,a,b,Split,label"):
    lines = [f"{USERS[i]},{X[i, 0]!s},{X[i, 1]!s},{PARTS[i]},{Y[i]}" for i in rows]
    (path / name).write_text("\n".join([header, *lines, ""]))
    return str(path / name)


def write_parquet(path, rows=slice(0, 12), split=True):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"user": USERS[rows], "a": X[rows, 0], "b": X[rows, 1].astype(float)}
    columns |= {"split": PARTS[rows]} if split else {}
    pq.write_table(pa.table({**columns, "label": Y[rows]}), path)
    return str(path)


def write_parquet_folder(path):
    write_parquet(path / "train-0.parquet", slice(0, 5), split=False)
    write_parquet(path / "train-1.parquet", slice(5, 8), split=False)
    write_parquet(path / "test.parquet", slice(8, 12), split=False)
    return str(path)


LAYOUTS = {
    "npz": write_npz,
    "csv": write_csv,
    "parquet": lambda path: write_parquet(path / "d.parquet"),
    "parquet folder": write_parquet_folder,
}


@pytest.mark.parametrize("split", ["given", "pooled"])
def test_the_same_data_in_any_layout_are_the_same_federation(tmp_path, split):
    found = []
    for name, write in LAYOUTS.items():
        (tmp_path / name).mkdir()
        found.append(federate(load(write(tmp_path / name)), split=split, validation=0.5))
    assert len({federation.digest() for federation in found}) == 1
    for federation in found:
        assert federation.client_names == ("ada", "bob", "eve")
        assert federation.dataset.x.tolist() == X.tolist()
        trained = sorted(i for part in (federation.train, federation.validation) for own in part
                         for i in own.tolist())  # fmt: skip
        assert (trained == list(range(8))) is (split == "given")
        assert any(note.endswith("user names 3 clients.") or note.endswith("User names 3 clients.")
                   for note in federation.notes)  # fmt: skip
        assert (SPLIT_NOTE in federation.notes) is (split == "given")


def test_the_hub_has_clients_and_parts_too(monkeypatch):
    def rows(part):
        return {"user": USERS[part], "a": X[part, 0], "b": X[part, 1], "label": Y[part].tolist()}

    replace_hub(monkeypatch, None, test=rows(slice(8, 12)), train=rows(slice(0, 8)))
    federation = federate(load("hub:somebody/something"))
    assert federation.client_names == ("ada", "bob", "eve")
    assert SPLIT_NOTE in federation.notes
    assert federation.dataset.feature_names == ("a", "b")


@pytest.mark.parametrize("owners", [[10, 9, 10, 9], ["u9", "u1", "u9", "u1"], [b"q", b"p"] * 2])
def test_the_clients_of_an_npz_are_numbers_or_strings(tmp_path, owners):
    np.savez(tmp_path / "d.npz", x=X[:4], y=Y[:4], place=np.array(owners))
    own = load(str(tmp_path / "d.npz"), clients_by="place")
    assert own.clients.tolist() == [1, 0, 1, 0]
    assert own.client_names in (("9", "10"), ("u1", "u9"), ("p", "q"))
    assert own.notes == ("The array place names 2 clients.",)
    assert load(str(tmp_path / "d.npz")).clients is None


@pytest.mark.parametrize(
    ("arrays", "clients_by", "says"),
    [
        ({"client": np.arange(3)}, None, r"client is int64 of shape \(3,\); .* each of the 4"),
        ({"client": np.zeros((4, 1), int)}, None, "must name the client of each"),
        ({"client": np.zeros(4)}, None, "by a whole number or a string"),
        ({"user": np.array([{}] * 4)}, None, "user is an array of pickled Python objects"),
        ({}, "town", "to name the clients, it needs town"),
        ({"client": np.array([b"\xff"] * 4)}, None, "not a readable"),
    ],
)
def test_unsound_clients_of_an_npz(tmp_path, arrays, clients_by, says):
    np.savez(tmp_path / "d.npz", x=X[:4], y=Y[:4], **arrays)
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "d.npz"), clients_by=clients_by)


def test_clients_of_all_parts_or_of_none(tmp_path):
    parts = {"x_train": X[:4], "y_train": Y[:4], "x_test": X[4:6], "y_test": Y[4:6]}
    for further in ({"client_train": np.arange(4)}, {"client": np.arange(6)}):
        np.savez(tmp_path / "d.npz", **parts, **further)
        with pytest.raises(UserError, match="it needs client_train and client_test"):
            load(str(tmp_path / "d.npz"))


def test_a_split_that_lacks_a_part_does_not_count_and_says_so(tmp_path):
    parts = {"x_train": X[:8], "y_train": Y[:8]}
    np.savez(tmp_path / "d.npz", **parts)
    alone = load(str(tmp_path / "d.npz"))
    assert (alone.split, alone.notes) == (None, ())
    np.savez(tmp_path / "d.npz", **parts, x_val=X[8:], y_val=Y[8:])
    own = load(str(tmp_path / "d.npz"))
    assert own.split is None
    assert own.notes == (
        "The files have a part train and validation but none called test, so their split does not "
        "count, and each client's samples are split 75/25.",
    )


def test_texts_have_clients_and_parts_too(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("label,text,Subject,part\na,one,2,Train\nb,two,10,TEST\nb,three,2,val\n")
    own = load(str(path))
    assert own.client_names == ("2", "10")
    assert own.clients.tolist() == [0, 1, 0]
    assert own.split.tolist() == [0, 2, 1]
    assert own.notes[:1] == ("The column Subject names 2 clients.",)
    assert own.tokens == ("one", "three", "two")


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (
            "label,text,split\na,b,early\n",
            {},
            "column split holds 'early' for sample 0; .* another",
        ),
        ("label,text,user\na,b,ada\na,c, \n", {}, "line 3: the client is empty; every text needs"),
        ("label,text\na,b\n", {"clients_by": "usr"}, "no column usr, which clients_by names"),
        (
            "label,text\na,b\n",
            {"label_column": "lab"},
            r"label_column names \(did you mean label",
        ),
    ],
)
def test_unsound_columns_of_texts(tmp_path, content, options, says):
    (tmp_path / "d.csv").write_text(content)
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "d.csv"), **options)


def test_an_image_tree_has_parts_and_clients(tmp_path):
    names = ["test/ada/a/1.png", "train/bob/b/1.png", "train/ada/a/1.png", "train/ada/b/1.png"]
    for i, name in enumerate(names):
        save_image(tmp_path / name, IMAGES[i])
    own = load(str(tmp_path), clients_by="folder")
    assert own.class_names == ("a", "b")
    assert own.client_names == ("ada", "bob")
    assert own.clients.tolist() == [0, 0, 1, 0]
    assert own.split.tolist() == [0, 0, 0, 2]
    assert own.notes == (f"The folders of {tmp_path} name 2 clients.",)
    np.testing.assert_array_equal(own.x.numpy(), IMAGES[[2, 3, 1, 0]].transpose(0, 3, 1, 2))
    with pytest.raises(UserError, match="name them with clients_by='folder'"):
        load(str(tmp_path))
    assert load(str(tmp_path / "train"), clients_by="folder").split is None
    with pytest.raises(UserError, match="it takes clients_by='folder', not user"):
        load(str(tmp_path), clients_by="user")
    with pytest.raises(UserError, match="label_column is for tables"):
        load(str(tmp_path), label_column="class")


def test_a_table_beside_the_folders_of_images_is_not_the_dataset(tmp_path):
    for i, name in enumerate(["train/a/1.png", "train/b/1.png", "test/a/1.png"]):
        save_image(tmp_path / name, IMAGES[i])
    for name in ("about.json", "about.parquet", "train/about.json"):
        (tmp_path / name).write_text("{}")
    assert load(str(tmp_path)).split.tolist() == [0, 0, 2]


def test_the_columns_of_known_datasets_cannot_be_named():
    with pytest.raises(UserError, match="are for your own data"):
        load("digits", clients_by="writer")


@pytest.mark.parametrize("kind", ["npz", "csv", "images", "parquet"])
def test_files_that_name_neither_are_divided_as_ever(tmp_path, kind):
    """The digests are from before the readers knew clients and splits."""
    rng = np.random.RandomState(3)
    if kind == "npz":
        np.savez(
            tmp_path / "d.npz", x=rng.randint(0, 255, (40, 6, 6), np.uint8), y=np.arange(40) % 4
        )
    elif kind == "csv":
        words = [" ".join(rng.choice(["a", "b", "c", "d"], 5)) for _ in range(40)]
        lines = [f"{i % 3},{word},{i}" for i, word in enumerate(words)]
        (tmp_path / "d.csv").write_text("\n".join(["label,text,id", *lines]))
    elif kind == "images":
        for i in range(8):
            save_image(
                tmp_path / f"d.images/{i % 2}/{i}.png", rng.randint(0, 255, (6, 6), np.uint8)
            )
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {"text": ["a b", "b", "c", "d"] * 5, "label": [0, 1, 2, 3] * 5, "id": range(20)}
        pq.write_table(
            pa.table({k: list(v) for k, v in columns.items()}), tmp_path / "train-0.parquet"
        )
        (tmp_path / "test-0.parquet").write_bytes((tmp_path / "train-0.parquet").read_bytes())
    data = _load_pooled(tmp_path, kind)
    assert federate(data, "iid", 2, validation=0.2).digest()[:16] == _DIGESTS[kind]


_DIGESTS = {
    "npz": "1529d451da8fec70",
    "csv": "6a1fa10d2484d118",
    "images": "0335c37209d2c2f8",
    "parquet": "1704e2eddc4e70e1",
}


def _load_pooled(folder, kind):
    if kind == "parquet":  # a known dataset: its parts are pooled
        return load("ag_news", folder)
    return load(str(folder / f"d.{kind}"))


def test_clients_without_test_samples_do_not_count(tmp_path):
    """The accuracy over both clients is that of the one client who has test samples."""
    from fedala import run

    rng = np.random.RandomState(0)
    x = rng.randint(0, 255, (20, 28, 28), np.uint8)
    arrays = {
        "x_train": x[:16], "y_train": np.arange(16) % 2, "client_train": np.arange(16) // 8,
        "x_test": x[16:], "y_test": np.arange(4) % 2, "client_test": np.zeros(4, int),
    }  # fmt: skip
    np.savez(tmp_path / "d.npz", **arrays)
    federation = federate(load(str(tmp_path / "d.npz")))
    assert federation.notes[-1].startswith("Client 1 is without test samples")
    result = run(dataset=federation, method="fedavg", rounds=1, device="cpu")
    alone = [row.score * 4 for row in result.history]  # hits among the four test samples
    assert all(score == int(score) and 0 <= score <= 4 for score in alone)
