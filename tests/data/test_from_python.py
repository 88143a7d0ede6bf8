"""`make_dataset` and `run(dataset=…)` take what a program has, or refuse it in one sentence."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedala
from fedala.data import Dataset, federate, load, make_dataset
from fedala.errors import UserError

random = np.random.default_rng(0)
X = random.normal(size=(12, 5)).astype(np.float32)
Y = np.arange(12) % 3
BYTES = random.integers(0, 256, (12, 6, 7, 3), dtype=np.uint8)


class Pairs(TorchDataset):
    """A dataset as people write it."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def assert_same(one, other):
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)
    assert (one.x.dtype, one.y.dtype) == (other.x.dtype, other.y.dtype)
    assert one.classes == other.classes


READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.astype(np.float64), Y.astype(np.uint8)),
        (torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y).int()),
        (X.tolist(), Y.tolist()),
        (list(X), torch.from_numpy(Y)),
        (READ_ONLY, Y[:, None]),
        (pd.DataFrame(X), pd.Series(Y)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Pairs(X, Y),
        Pairs(torch.from_numpy(X), torch.from_numpy(Y)),
        Subset(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), range(12)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_many_forms_are_one_dataset(data):
    own = make_dataset(data)
    assert_same(own, Dataset("own", torch.from_numpy(X), torch.from_numpy(Y), 3))
    assert (own.clients, own.split, own.name) == (None, None, "own")


@pytest.mark.parametrize(
    "x",
    [
        BYTES,
        BYTES.transpose(0, 3, 1, 2),
        BYTES.astype(np.int64),
        torch.from_numpy(BYTES).permute(0, 3, 1, 2),
        [Image.fromarray(image) for image in BYTES],
    ],
    ids=["last", "first", "int64", "tensor", "pillow"],
)
def test_images_have_their_channels_first(x):
    own = make_dataset((x, Y) if not isinstance(x, list) else Pairs(x, Y))
    assert own.x.dtype == torch.uint8
    np.testing.assert_array_equal(own.x, BYTES.transpose(0, 3, 1, 2))


def test_grey_images_get_a_channel_and_rows_of_bytes_and_bools_are_numbers():
    assert make_dataset((BYTES[..., 0], Y)).x.shape == (12, 1, 6, 7)
    own = make_dataset((BYTES[:, :, 0, 0], Y))
    assert own.x.dtype == torch.float32
    np.testing.assert_array_equal(own.x, BYTES[:, :, 0, 0].astype(float))
    assert make_dataset((X > 0, Y)).x.tolist() == (X > 0).astype(float).tolist()


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64, np.uint16])
def test_rows_of_whole_numbers_are_tokens_of_any_length(kind):
    x = random.integers(0, 40, (12, 9)).astype(kind)
    own = make_dataset((x, Y))
    assert (own.x.dtype, own.vocabulary) == (torch.int32, x.max() + 1)
    np.testing.assert_array_equal(own.x, x)


def test_texts_are_tokenised_and_labels_may_be_names():
    own = make_dataset((["a b", "b c", "b"], ["dog", "cat", "dog"]))
    assert own.tokens == ("b", "a", "c")
    assert own.x.tolist() == [[2, 1], [1, 3], [1, 0]]
    assert own.notes == ("Texts are read as up to 2 tokens.",)
    assert (own.class_names, own.y.tolist()) == (("cat", "dog"), [1, 0, 1])


def test_floats_are_numbers_to_predict_and_a_matrix_of_ones_and_zeros_labels():
    assert make_dataset((X, Y / 2)).kind == "numbers"
    assert make_dataset((X, X[:, :2].astype(np.float64))).classes == 2
    own = make_dataset((X, np.eye(3, dtype=int)[Y]))
    assert (own.kind, own.classes) == ("labels", 3)
    assert make_dataset((X, Y > 0)).y.tolist() == (Y > 0).tolist()


def name_owners(own):
    return [own.client_names[client] for client in own.clients.tolist()]


@pytest.mark.parametrize(
    "ids",
    [list("bacabc" * 2), np.array(list("bacabc" * 2)), pd.Series(list("bacabc" * 2))],
    ids=["list", "array", "series"],
)
def test_clients_say_whose_sample_it_is(ids):
    for own in (make_dataset((X, Y), clients=ids), make_dataset((X, Y, ids))):
        assert own.client_names == ("a", "b", "c")
        assert name_owners(own) == list(ids)


def test_client_numbers_are_ordered_as_numbers():
    own = make_dataset((X, Y), clients=torch.arange(12) % 2 * 8 + 2)
    assert own.client_names == ("2", "10")
    assert name_owners(own)[:2] == ["2", "10"]


HALVES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


@pytest.mark.parametrize(
    "data",
    [
        HALVES,
        [Pairs(*half) for half in HALVES],
        dict(enumerate(HALVES)),
        {"1": HALVES[1], "0": HALVES[0]},
        [Dataset("own", *map(torch.from_numpy, half), 3) for half in HALVES],
    ],
    ids=["pairs", "datasets", "dict", "dict in another order", "own datasets"],
)
def test_one_entry_for_each_client(data):
    own = make_dataset(data)
    for client, (x, y) in enumerate(HALVES):
        np.testing.assert_array_equal(own.x[own.clients == client], x)
        np.testing.assert_array_equal(own.y[own.clients == client], y)
    assert own.client_names == ("0", "1")
    assert own.classes == 3


def test_a_client_may_lack_classes_that_its_dataset_declares():
    few = [Dataset("own", torch.rand(4, 2), torch.tensor([0, 2] * 2), 5) for _ in range(2)]
    assert make_dataset(few).classes == 5


def test_parts_stay_parts():
    own = make_dataset({"train": HALVES[1], "test": HALVES[0], "val": (X[:2], Y[:2])})
    assert own.split.tolist() == [0] * 7 + [2] * 5 + [1] * 2
    federation = federate(own, "iid", 2)
    assert sorted(np.concatenate(federation.train).tolist()) == list(range(7))
    assert sorted(np.concatenate(federation.test).tolist()) == list(range(7, 12))


@pytest.mark.parametrize("clients_first", [True, False])
def test_parts_of_clients_and_clients_of_parts_are_the_same(clients_first):
    a, b, c, d = ((X[i::4], Y[i::4]) for i in range(4))
    if clients_first:
        data = {"p": {"train": a, "test": b}, "q": {"train": c, "test": d}}
    else:
        data = {"train": {"p": a, "q": c}, "test": {"p": b, "q": d}}
    own = federate(make_dataset(data))
    for rows, (x, _) in zip((*own.train, *own.test), (a, c, b, d), strict=True):
        np.testing.assert_array_equal(own.dataset.x[np.sort(rows)], x)


FRAME = pd.DataFrame({"age": [30, 40, 50, 60], "bmi": [20.5, 21.0, 30.0, 25.0], "sick": [0, 1] * 2})
FRAME["Target"], FRAME["User"] = ["no", "yes", "yes", "no"], ["p", "q", "q", "p"]


def test_a_frame_has_features_a_label_and_maybe_clients():
    own = make_dataset(FRAME)
    assert own.feature_names == ("age", "bmi", "sick")
    assert own.x.tolist() == [[30, 20.5, 0], [40, 21, 1], [50, 30, 0], [60, 25, 1]]
    assert (own.class_names, own.y.tolist()) == (("no", "yes"), [0, 1, 1, 0])
    assert name_owners(own) == ["p", "q", "q", "p"]
    other = make_dataset(
        FRAME.drop(columns=["Target", "User"]), label_column="sick", clients_by="age"
    )
    assert other.client_names == ("30", "40", "50", "60")
    assert (other.y.tolist(), other.feature_names) == ([0, 1, 0, 1], ("bmi",))


def linear():
    return torch.nn.Linear(5, 3)


def test_run_takes_data_of_a_program():
    options = {"rounds": 2, "method": "fedavg", "model": linear, "batch_size": 4}
    ids = [i % 2 for i in range(12)]
    by_ids = fedala.run(dataset=(X, Y), clients=ids, **options)
    assert (by_ids.config.partition, by_ids.config.clients) == ("natural", 2)
    by_list = fedala.run(dataset=[(X[::2], Y[::2]), (X[1::2], Y[1::2])], **options)
    loss = [row.loss for row in by_ids.methods["fedavg"].history]
    assert loss == [row.loss for row in by_list.methods["fedavg"].history]
    by_number = fedala.run(dataset=(X, Y), clients=np.int64(3), partition="iid", **options)
    assert by_number.config.clients == 3


def test_a_run_is_resumed_with_its_data(tmp_path):
    options = {"method": "fedavg", "model": linear, "clients": list("ab" * 6)}
    whole = fedala.run(dataset=(X, Y), rounds=4, **options)
    fedala.run(dataset=(X, Y), rounds=2, out=tmp_path / "run", **options)
    again = fedala.run(dataset=(X, Y), resume=tmp_path / "run", rounds=4, **options)
    last = [result.methods["fedavg"].history[-1] for result in (again, whole)]
    assert last[0].loss == last[1].loss
    with pytest.raises(UserError, match="a run with other data"):
        fedala.run(dataset=(X + 1, Y), resume=tmp_path / "run", rounds=6, **options)


def test_columns_of_a_frame_are_arguments_of_run():
    own = FRAME.drop(columns=["Target", "User"])
    result = fedala.run(
        dataset=own,
        label_column="sick",
        rounds=1,
        method="fedavg",
        clients=1,
        partition="iid",
        model=lambda: torch.nn.Linear(2, 2),
    )
    assert result.config.clients == 1
    with pytest.raises(UserError, match="label_column"):
        fedala.run(dataset=(X, Y), label_column="sick")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((X, Y[:5]), "has 12 samples in x but 5 in y"),
        ((X.astype(complex), Y), "x is complex64|x is complex128"),
        ((X, Y * 1j), "y is complex128"),
        ((np.array([{}] * 12), Y), "x holds Python objects"),
        (([[1.0], [1.0, 2.0]] * 6, Y), "have 1 to 2 values, and must have one shape"),
        ((X * np.nan, Y), "NaN or infinite"),
        ((X.astype(np.float64) * 1e300, Y), "NaN or infinite"),
        ((X, np.array([None] * 12)), "y holds Python objects"),
        ((X, Y * 2), "labels must be 0 to 2, without gaps"),
        ((X, Y - 1), "labels must be 0 to 2, without gaps"),
        ((X, Y[None, None]), "y has the shape"),
        ((X, Y * 0), "single class"),
        ((X[:0], Y[:0]), "is empty"),
        ((X[0, 0], Y), "x is one number"),
        ((X.astype("datetime64[s]"), Y), "datetime64"),
        ((random.integers(-5, 5, (12, 3)), Y), "tokens are from 0"),
        ((random.integers(0, 500, (12, 3, 3)), Y), "int64 of shape"),
        ((torch.eye(12).to_sparse(), Y), "sparse"),
        ((np.array([["a"]] * 12), Y), "table of texts"),
        ([X, Y], r"a list of arrays; .* a tuple \(x, y\)"),
        (X, "of the type ndarray; data are a pair"),
        ((X, Y, Y, Y), "of the type tuple"),
        ({}, "is empty; data are"),
        ([], "is empty; data are"),
        ({"train": (X, Y), "tset": (X, Y), 1.5: 2}, "name of a client must be text"),
        ({1: (X, Y), "1": (X, Y)}, "two clients of the same name"),
        ([(X, Y), (X[:0], Y[:0])], "client 1 has no samples"),
        ([(X, Y), (X[:, :2], Y)], "samples differ between clients or parts"),
        ([(X, Y), (X, Y / 2)], "targets differ between clients or parts"),
        ([(X, Y), {"train": (X, Y)}], "all clients must have the parts"),
        ({"train": [(X, Y)], "test": (X, Y)}, "parts must name their clients, or none"),
        ({"train": {"train": (X, Y)}}, "parts inside"),
        ([[(X, Y)]], "clients inside"),
        ([(X, Y), 3], "a list of arrays|type int"),
        (Pairs(X, [*Y[:11], None]), "y holds Python objects"),
        (Pairs([X[0], X[0, :2]] * 6, Y), "must have one shape"),
        (TensorDataset(torch.from_numpy(X)), "a sample must be a pair"),
        (Stream(), "Dataset without a length"),
        (DataLoader(Pairs(X, Y)), "give its dataset: loader.dataset"),
        (FRAME.drop(columns="Target"), "no column label, class, target or y"),
        (FRAME.assign(city=list("abcd")), "city holds 4 different words in 4 rows"),
        (FRAME.assign(bmi=np.nan), "4 missing values: bmi 4; the first in row 0"),
        (FRAME[["Target", "User"]], "no columns besides"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_used_is_refused_in_one_sentence(data, says):
    with pytest.raises(UserError, match=says) as caught:
        make_dataset(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        (list("ab"), "for each of the 12 samples, not 2"),
        ([True] * 12, "must be text or a whole number, not True"),
        ([None] * 12, "not None"),
        ([1.5] * 12, "not 1.5"),
        ([""] * 12, "not ''"),
        ({"a": 1}, "not dict"),
    ],
)
def test_clients_that_name_nobody(clients, says):
    with pytest.raises(UserError, match=says):
        fedala.run(dataset=(X, Y), clients=clients)


def test_clients_with_a_name_for_each_sample_go_with_a_pair_only():
    for data in ([(X, Y)], "digits", FRAME):
        with pytest.raises(UserError, match=r"goes with a pair \(x, y\)"):
            fedala.run(dataset=data, clients=list("ab"))


def test_columns_that_a_frame_lacks():
    with pytest.raises(
        UserError, match=r"no column nothing, which label_column names; choose from age"
    ):
        make_dataset(FRAME, label_column="nothing")
    with pytest.raises(UserError, match=r"no column nobody, which clients_by names"):
        make_dataset(FRAME, clients_by="nobody")
    with pytest.raises(UserError, match="two columns of the same name"):
        make_dataset(pd.concat([FRAME, FRAME], axis=1))


def test_a_frame_is_read_as_the_same_table_in_a_file(tmp_path):
    frame = pd.DataFrame({
        "a": [1.0, 2.0, 3.0, 4.0], "subject": list("pqpq"), "y": list("uvvu"),
        "split": ["train", "test", "val", "train"],
    })  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    read, made = load(str(tmp_path / "t.csv")), make_dataset(frame)
    assert made.client_names == read.client_names == ("p", "q")
    assert made.split.tolist() == read.split.tolist() == [0, 2, 1, 0]
    assert made.feature_names == read.feature_names == ("a",)
    assert made.class_names == read.class_names == ("u", "v")
