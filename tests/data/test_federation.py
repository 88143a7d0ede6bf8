"""Every client's share is split once, and a partition file gives back the same partition."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedala
from fedala.data import Dataset, Federation, federate, iid, write_partition
from fedala.data.natural import list_clients
from fedala.errors import UserError
from fedala.lanes.randomness import draw


def dataset(samples=120, classes=3, name="toy"):
    y = torch.arange(samples) % classes
    return Dataset(name, torch.zeros(samples, 2), y, classes)


def parts(federation):
    return [
        [p.tolist() for p in part]
        for part in (federation.train, federation.validation, federation.test)
    ]


@given(st.integers(2, 200), st.integers(1, 8), st.floats(0, 0.99), st.integers(0, 50))
def test_train_validation_and_test_are_disjoint_and_complete(samples, clients, validation, seed):
    clients = min(clients, samples)
    federation = federate(dataset(samples, 2), "iid", clients, seed, validation)
    everything = federation.train + federation.validation + federation.test
    assert sorted(np.concatenate(everything).tolist()) == list(range(samples))
    for train, held_out, test in zip(
        federation.train, federation.validation, federation.test, strict=True
    ):
        training = len(train) + len(held_out)
        assert training == int(0.75 * (training + len(test)))
        assert len(held_out) == int(validation * training)


def test_the_split_depends_on_seed_and_client_and_validation_is_the_end_of_train():
    data = dataset()
    federation = federate(data, "iid", 4, seed=7, validation=0.2)
    for client, share in enumerate(iid(data.y, clients=4, seed=7)):
        order = share[draw(7, "split", client=client).permutation(30)]
        np.testing.assert_array_equal(federation.train[client], order[:18])
        np.testing.assert_array_equal(federation.validation[client], order[18:22])
        np.testing.assert_array_equal(federation.test[client], order[22:])


def test_counts_cover_all_parts_by_class():
    data = dataset()
    federation = federate(data, "pathological:1", 3, validation=0.3)
    assert federation.counts().tolist() == [[40, 0, 0], [0, 40, 0], [0, 0, 40]]


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_a_written_partition_reads_back_the_same(tmp_path, validation):
    federation = federate(dataset(), "dir:1", 5, seed=3, validation=validation)
    write_partition(federation, tmp_path / "p.json")
    for clients in (5, None):
        again = federate(
            dataset(), str(tmp_path / "p.json"), clients, seed=99, validation=validation
        )
        assert parts(again) == parts(federation)
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_validation_can_be_cut_from_a_file_that_has_none_and_a_files_own_stays(tmp_path):
    path = str(tmp_path / "p.json")
    write_partition(federate(dataset(), "iid", 4), path)
    assert parts(federate(dataset(), path, 4, validation=0.2)) == parts(
        federate(dataset(), "iid", 4, validation=0.2)
    )
    write_partition(federate(dataset(), "iid", 4, validation=0.2), path)
    again = federate(dataset(), path, 4, validation=0.5)
    assert parts(again) == parts(federate(dataset(), "iid", 4, validation=0.2))
    assert again.notes == (f"{path} has validation samples, so validation=0.5 is ignored.",)
    assert federate(dataset(), path, 4).notes == ()


def test_validation_samples_of_the_data_take_the_place_of_the_option_and_it_is_said():
    split = torch.arange(120, dtype=torch.int8) % 3
    data = replace(dataset(), split=split)
    sentence = f"{data.name} has validation samples, so validation=0.2 is ignored."
    given = federate(data, "iid", 4, validation=0.2)
    assert parts(given) == parts(federate(data, "iid", 4))
    assert given.notes[-1] == sentence
    pooled = federate(data, "iid", 4, validation=0.2, split="pooled")
    assert sentence not in pooled.notes


def test_a_client_given_as_a_list_is_split_as_any_share(tmp_path):
    shares = [share.tolist() for share in iid(dataset().y, clients=4, seed=7)]
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps({"format": "fedala-partition", "version": 1, "samples": 120, "clients": shares})
    )
    assert parts(federate(dataset(), str(path), 4, seed=7)) == parts(
        federate(dataset(), "iid", 4, seed=7)
    )


def change(tmp_path, **changes):
    path = tmp_path / "p.json"
    write_partition(federate(dataset(), "iid", 2), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "else"}, 'does not say "format"'),
        ({"version": 2}, "version 2; this program reads version 1"),
        ({"samples": 119}, "with 119 samples, whose labels differ from those of toy with 120"),
        ({"labels": "0" * 64}, "a partition fits one dataset only"),
        ({"clients": []}, "names no clients"),
        ({"clients": {}}, "names no clients"),
        ({"clients": [[1, 2], [2, 3]]}, "lists the sample 2 twice"),
        ({"clients": [{"train": [1], "test": [1]}, []]}, "lists the sample 1 twice"),
        ({"clients": [[1], [120]]}, "client 1 must list whole numbers from 0 to 119"),
        ({"clients": [[-1], [3]]}, "client 0 must list whole numbers"),
        ({"clients": [[1.0], [3]]}, "whole numbers"),
        ({"clients": [[True], [3]]}, "whole numbers"),
        ({"clients": [{"train": [1], "test": "2"}, [3]]}, "client 0, test must list"),
        ({"clients": [{"train": [1]}, [3]]}, "must be a list of samples, or have train, test"),
        (
            {"clients": [{"train": [1], "test": [], "tset": []}, [3]]},
            "must be a list of samples, or have train, test",
        ),
        ({"clients": [1, 2]}, "must be a list of samples"),
        ({"clients": [[1], [2], [3]]}, "holds 3 clients, but 2 were asked for"),
    ],
)
def test_a_partition_file_is_checked(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        federate(dataset(), change(tmp_path, **changes), 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not readable JSON"),
        (b"\xff", "not readable JSON"),
        (b"[1]", "does not say"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"samples": 1' + b"0" * 99 + b"}", "more than 64 bits"),
        (b'"\\ud800"', "not Unicode"),
    ],
)
def test_a_file_that_is_no_partition(tmp_path, content, says):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(UserError, match=says):
        federate(dataset(), str(tmp_path / "p.json"))


def test_a_partition_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"no partition file .*nowhere\.json"):
        federate(dataset(), str(tmp_path / "nowhere.json"))


def test_another_datasets_labels_are_refused_even_in_the_same_number(tmp_path):
    write_partition(federate(dataset(), "iid", 2), tmp_path / "p.json")
    other = Dataset("other", torch.zeros(120, 2), (torch.arange(120) + 1) % 3, 3)
    with pytest.raises(UserError, match=r"made for toy .* those of other"):
        federate(other, str(tmp_path / "p.json"), 2)


@pytest.mark.parametrize(
    ("path", "says"), [("no/where/p.json", "cannot be written"), ("p.txt", r"called ….json")]
)
def test_a_partition_that_cannot_be_written(tmp_path, path, says):
    with pytest.raises(UserError, match=says):
        write_partition(federate(dataset(), "iid", 2), tmp_path / path)


@pytest.mark.parametrize("validation", [-0.1, 1.0, math.nan])
def test_the_validation_share_must_be_a_share(validation):
    with pytest.raises(UserError, match="at least 0 and less than 1"):
        federate(dataset(), "iid", 2, validation=validation)


def test_the_seed_must_fit():
    with pytest.raises(UserError, match="seed of a partition"):
        federate(dataset(), "iid", 2, seed=-1)


def natural(split=None):
    """Eight samples of three people; a has four, b and c have two."""
    return Dataset(
        "people",
        torch.arange(16, dtype=torch.float32).view(8, 2),
        torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]),
        2,
        clients=torch.tensor([1, 0, 0, 2, 0, 1, 0, 2]),
        client_names=("a", "b", "c"),
        split=split,
    )


def test_natural_clients_get_their_own_samples_without_being_asked():
    found = federate(natural())
    own = zip(found.train, found.test, strict=True)
    assert [sorted([*train, *test]) for train, test in own] == [[1, 2, 4, 6], [0, 5], [3, 7]]
    assert found.client_names == ("a", "b", "c")
    assert found.notes == ()


@pytest.mark.parametrize("partition", ["natural", "iid"])
def test_a_given_split_is_kept_or_pooled(partition):
    parts = torch.tensor([0, 0, 2, 0, 2, 2, 1, 2], dtype=torch.uint8)
    clients = None if partition == "natural" else 2
    found = federate(natural(parts), partition, clients)
    for number, part in enumerate(("train", "validation", "test")):
        rows = sorted(row for own in getattr(found, part) for row in own)
        assert rows == (parts == number).nonzero().flatten().tolist()
    pooled = federate(natural(parts), partition, clients, split="pooled")
    assert [sorted(own) for own in pooled.test] != [sorted(own) for own in found.test]
    assert all(len(own) == 0 for own in pooled.validation)


def test_natural_clients_that_the_data_do_not_name_are_refused():
    data = replace(natural(), clients=None, client_names=())
    with pytest.raises(UserError, match="does not say whose sample is whose"):
        federate(data, "natural")
    with pytest.raises(UserError, match="has 3 clients, but 5 were asked for; ask for fewer"):
        federate(natural(), "natural", 5)


def test_a_given_split_is_said_aloud():
    parts = torch.tensor([0, 0, 2, 0, 2, 0, 1, 0], dtype=torch.uint8)
    assert federate(natural(parts)).notes == (
        "The split of the data is kept: 5 train, 1 validation, 2 test; split='pooled' mixes them.",
        "2 clients (b, c) are without test samples, so that they do not count in scores.",
    )
    assert federate(natural(parts), split="pooled").notes == ()


def test_names_with_commas_are_separated_by_semicolons():
    assert list_clients(["Hill", "East"]) == "Hill, East"
    assert list_clients(["County, Hill", "East"]) == "County, Hill; East"
    assert list_clients([*"abcdefghijkl"]) == "a, b, c, d, e, f, g, h, i, j, …"


def test_clients_that_cannot_train_are_left_out_and_keep_the_splits_of_the_others():
    clients = torch.tensor([1, 0, 0, 2, 0, 1, 0, 0])  # c has a single sample
    data = replace(natural(), clients=clients)
    found = federate(data)
    assert found.client_names == ("a", "b")
    assert "8 samples" in data.describe()
    assert "7 samples" in found.describe()
    [note] = found.notes
    assert note.startswith("Client c is left out, because a client needs at least two samples")
    with pytest.raises(UserError, match="has 3 clients, 2 of them with samples to train with, but"):
        federate(data, clients=3)
    parts = torch.tensor([2, 0, 2, 0, 0, 2, 0, 0], dtype=torch.uint8)  # b has test samples alone
    only = federate(replace(natural(parts), clients=clients))
    assert (only.client_names, len(only.train)) == (("a",), 1)
    assert "2 clients (b, c) are left out" in only.notes[0]
    with pytest.raises(UserError, match="no client has two samples"):
        federate(replace(natural(), clients=torch.arange(8), client_names=tuple("abcdefgh")))


def test_some_of_many_clients_are_drawn_by_the_seed_of_the_partition():
    owners = torch.arange(60) % 20
    names = tuple(f"p{number:02}" for number in range(20))
    data = replace(dataset(60), clients=owners, client_names=names)
    everybody, some = federate(data), federate(data, clients=6, seed=1)
    assert some.notes == ("6 of the 20 clients are drawn, by the seed of the partition.",)
    assert list(some.client_names) == sorted(some.client_names)
    for name, train, test in zip(some.client_names, some.train, some.test, strict=True):
        place = names.index(name)
        np.testing.assert_array_equal(train, everybody.train[place])
        np.testing.assert_array_equal(test, everybody.test[place])
    assert federate(data, clients=6, seed=1).client_names == some.client_names
    assert federate(data, clients=6, seed=2).client_names != some.client_names


def test_a_partition_file_keeps_the_names_of_natural_clients(tmp_path):
    path, data = tmp_path / "p.json", natural(torch.tensor([0, 0, 2, 0, 2, 2, 1, 2]).byte())
    written = federate(data, clients=2)
    write_partition(written, path)
    again = federate(data, str(path))
    assert parts(again) == parts(written)
    assert again.client_names == written.client_names
    assert again.digest() == written.digest()
    content = json.loads(path.read_text())
    for names in (["a"], ["a", 1], "ab"):
        path.write_text(json.dumps({**content, "names": names}))
        with pytest.raises(UserError, match="names must list a name for each of its 2 clients"):
            federate(data, str(path))
    del content["names"]
    path.write_text(json.dumps(content))
    assert federate(data, str(path)).client_names == ()


def test_a_divided_client_without_training_samples_is_refused():
    data = replace(dataset(6, 2), split=torch.tensor([0, 2, 2, 2, 2, 2]).byte())
    with pytest.raises(UserError, match="gets no sample that the data put into the training part"):
        federate(data, "iid", 2)


def pieces(*lists):
    return tuple(np.array(rows, dtype=np.int64) for rows in lists)


def test_a_federation_made_by_hand_takes_lists_and_other_whole_numbers():
    own = Federation(dataset(6, 2), [[0, 1], np.array([2], np.int32)], ((3,), [4]), [[], []])
    assert parts(own) == [[[0, 1], [2]], [[], []], [[3], [4]]]
    assert {row.dtype for row in (*own.train, *own.test, *own.validation)} == {np.dtype(np.int64)}
    own.check()


@pytest.mark.parametrize(
    ("train", "test", "validation", "says"),
    [
        (pieces([0], [1]), pieces([2]), pieces([], []), "it has train 2, validation 0|2, test 1"),
        ((), (), (), "at least one client"),
        (pieces([0, 6]), pieces([1]), pieces([]), "train part .* from 0 to 5, .* has 0 to 6"),
        (pieces([0]), pieces([-1]), pieces([]), "test part .* it has -1 to -1"),
        ((np.array([0.5]),), pieces([1]), pieces([]), "train part of client 0 .* not float64"),
        ((np.ones(6, bool),), pieces([1]), pieces([]), "whole numbers, not bool"),
        (pieces([[0, 1]]), pieces([1]), pieces([]), r"of shape \(1, 2\)"),
        (np.zeros((1, 2), int), pieces([1]), pieces([]), "must be a tuple .* not ndarray"),
        (([[0], [1, 2]],), pieces([1]), pieces([]), "must be a list of indices"),
        (pieces([0]), pieces([1]), {"a": 1}, "must be a tuple .* not dict"),
    ],
)
def test_the_form_of_a_federation_is_checked(train, test, validation, says):
    with pytest.raises(UserError, match=says):
        Federation(dataset(6, 2), train, test, validation)


@pytest.mark.parametrize(
    ("train", "test", "validation", "says"),
    [
        (pieces([0, 1]), pieces([1]), pieces([]), "sample 1 is in the train part of client 0 and"
         " again in the test part of client 0"),
        (pieces([0], [3, 0]), pieces([1], [2]), pieces([], []), "0 .* train part of client 1"),
        (pieces([0], [3]), pieces([1], [2]), pieces([], [1]), "validation part of client 1 and .*"
         " test part of client 0"),
        (pieces([0, 0]), pieces([1]), pieces([]), "train part of client 0 and again in the train"),
        (pieces([0], []), pieces([1], [2]), pieces([], []), "Client 1 .* no training samples"),
    ],
)  # fmt: skip
def test_overlaps_and_empty_training_parts_are_refused_before_a_run(train, test, validation, says):
    own = Federation(dataset(6, 2), train, test, validation)
    with pytest.raises(UserError, match=says):
        own.check()
    with pytest.raises(UserError, match=says):
        fedala.run(dataset=own)


def test_a_federation_that_nobody_can_test_is_refused_before_a_run(tmp_path):
    own = Federation(dataset(6, 2), pieces([0, 1], [2]), pieces([], []), pieces([3], [4]))
    alone = replace(dataset(6, 2), split=torch.zeros(6, dtype=torch.uint8))  # all for training
    divided = {"partition": "iid", "clients": 2}
    for data, options in ((own, {}), (alone, divided)):
        with pytest.raises(UserError, match="No client has test samples"):
            fedala.run(dataset=data, method="fedavg", out=tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()


def test_the_checks_are_quick_for_very_many_clients():
    clients = 50_000
    rows = np.arange(2 * clients).reshape(2, clients, 1)
    data, none = dataset(2 * clients, 2), (np.arange(0),) * clients
    start = time.process_time()
    Federation(data, tuple(rows[0]), tuple(rows[1]), none).check()
    assert time.process_time() - start < 2


def test_clients_of_a_partition_file_keep_the_split_of_the_data(tmp_path):
    part = torch.arange(12, dtype=torch.uint8) % 3
    data = Dataset("own", torch.zeros(12, 2), torch.arange(12) % 2, 2, split=part)
    content = {"format": "fedala-partition", "version": 1, "samples": 12}
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**content, "clients": [list(range(6)), list(range(6, 12))]}))
    given = federate(data, str(file))
    for number, name in enumerate(("train", "validation", "test")):
        assert [set(part[rows].tolist()) for rows in getattr(given, name)] == [{number}] * 2
    pooled = federate(data, str(file), split="pooled")
    assert [*map(len, pooled.train)] == [4, 4]
    assert not any(map(len, pooled.validation))
