"""Partitions are disjoint and complete, and the paper's equal those of the authors' code."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedala.data import dirichlet, iid, partition, pathological
from fedala.errors import UserError


@pytest.fixture(scope="module")
def mnist_labels():
    """The labels of MNIST, train then test: two of them in a byte."""
    packed = np.load(Path(__file__).with_name("mnist_labels.npz"))["packed"]
    return np.stack([packed >> 4, packed & 15], axis=1).ravel()


def counts(labels, share):
    return {
        int(k): int(n)
        for k, n in zip(*np.unique(np.asarray(labels)[share], return_counts=True), strict=True)
    }


def assert_disjoint_and_complete(shares, samples):
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))


def mixed(sizes, seed):
    return np.random.RandomState(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


# Up to six classes of uneven sizes, each at least one for every client below.
labels = st.builds(
    mixed, st.lists(st.integers(12, 60), min_size=1, max_size=6), st.integers(0, 1000)
)


@settings(deadline=None, max_examples=60)
@given(labels, st.integers(1, 5), st.floats(0.5, 100), st.integers(0, 2**32 - 1))
def test_dirichlet_is_disjoint_complete_and_leaves_nobody_short(y, clients, beta, seed):
    shares = dirichlet(y, clients=clients, beta=beta, seed=seed)
    assert len(shares) == clients
    assert_disjoint_and_complete(shares, len(y))
    assert min(map(len, shares)) >= min(40, len(y) / clients / 2)


@settings(deadline=None, max_examples=150)
@given(labels, st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_pathological_is_disjoint_complete_and_gives_no_client_more_than_c_classes(
    y, clients, c, seed
):
    classes = len(set(y))
    c = min(c, classes)
    assume(c * clients >= classes)
    shares = pathological(y, clients=clients, classes_per_client=c, seed=seed)
    assert len(shares) == clients
    assert_disjoint_and_complete(shares, len(y))
    assert all(1 <= len(counts(y, share)) <= c for share in shares)


@given(labels, st.integers(1, 12), st.integers(0, 1000))
def test_iid_is_disjoint_complete_and_even(y, clients, seed):
    shares = iid(y, clients=clients, seed=seed)
    assert_disjoint_and_complete(shares, len(y))
    assert {len(share) for share in shares} <= {len(y) // clients, -(-len(y) // clients)}


def test_seed_1_gives_the_authors_split_of_mnist(mnist_labels):
    shares = dirichlet(mnist_labels, clients=20, beta=0.1)
    assert counts(mnist_labels, shares[0]) == {0: 140, 1: 890, 4: 1, 5: 319, 7: 29, 8: 1067, 9: 184}


@pytest.mark.parametrize(
    ("clients", "beta", "seed"), [(20, 0.1, 1), (50, 0.5, 3), (7, 1.0, 2), (10, 0.1, 5)]
)
def test_dirichlet_is_the_authors_algorithm(mnist_labels, clients, beta, seed):
    """The authors' loop on every seventh of MNIST's labels gives the same indices in order."""
    y = mnist_labels[::7]
    rng, held = np.random.RandomState(seed), [[]]
    while min(map(len, held)) < min(40, len(y) / clients / 2):
        held = [[] for _ in range(clients)]
        for k in range(10):
            indices = np.where(y == k)[0]
            rng.shuffle(indices)
            p = rng.dirichlet(np.repeat(beta, clients))
            p = np.array([a * (len(b) < len(y) / clients) for a, b in zip(p, held, strict=True)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(indices)).astype(int)[:-1]
            held = [b + c.tolist() for b, c in zip(held, np.split(indices, cuts), strict=True)]
    assert [share.tolist() for share in dirichlet(y, clients=clients, beta=beta, seed=seed)] == held


@pytest.mark.parametrize(
    ("clients", "c", "seed"), [(20, 2, 1), (50, 2, 1), (100, 3, 4), (10, 10, 2)]
)
def test_pathological_is_the_authors_algorithm(mnist_labels, clients, c, seed):
    y = mnist_labels
    rng, room, held = np.random.RandomState(seed), [c] * clients, [[] for _ in range(clients)]
    for k in range(10):
        indices = np.where(y == k)[0]
        chosen = [i for i in range(clients) if room[i] > 0][: int(np.ceil(clients / 10 * c))]
        even = len(indices) / len(chosen)
        sizes = rng.randint(max(even / 10, 40 / 10), even, len(chosen) - 1).tolist()
        sizes.append(len(indices) - sum(sizes))
        at = 0
        for client, size in zip(chosen, sizes, strict=True):
            held[client] += indices[at : at + size].tolist()
            at += size
            room[client] -= 1
    assert [
        s.tolist() for s in pathological(y, clients=clients, classes_per_client=c, seed=seed)
    ] == held


def test_pathological_clients_form_groups_of_the_same_classes(mnist_labels):
    shares = pathological(mnist_labels, clients=20, classes_per_client=2)
    assert [sorted(counts(mnist_labels, share)) for share in shares] == [
        [2 * group, 2 * group + 1] for group in range(5) for _ in range(4)
    ]


def test_where_classes_do_not_divide_evenly_no_class_is_left_without_a_client():
    """4 clients × 1 class, 3 classes: ⌈4/3⌉ = 2 for the first two leave none for the third."""
    y = np.repeat([0, 1, 2], 30)
    shares = pathological(y, clients=4, classes_per_client=1)
    assert [sorted(counts(y, share)) for share in shares] == [[0], [0], [1], [2]]


def test_labels_may_be_a_tensor_a_list_or_an_array():
    y = [0, 1, 2, 1] * 50
    for kind in (torch.tensor, np.array):
        for one, other in zip(iid(y, clients=3), iid(kind(y), clients=3), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_seed_decides():
    y = [0, 1, 2, 3] * 100
    one, same, other = (np.concatenate(dirichlet(y, clients=4, beta=1, seed=s)) for s in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


@pytest.mark.parametrize("beta", [0.05, 1e-5])  # the second underflows to NaN in the draw itself
def test_a_hopeless_dirichlet_ends_with_advice(monkeypatch, beta):
    monkeypatch.setattr(partition, "_MAX_TRIES", 200)
    with pytest.raises(UserError, match=r"200 draws .* larger β or fewer clients"):
        dirichlet([0, 1] * 400, clients=20, beta=beta)


@pytest.mark.parametrize("beta", [0, -1, math.nan, math.inf])
def test_beta_must_be_positive(beta):
    with pytest.raises(UserError, match="greater than 0"):
        dirichlet([0, 1] * 50, clients=2, beta=beta)


@pytest.mark.parametrize("clients", [0, -3, 101])
@pytest.mark.parametrize(
    "divide",
    [
        iid,
        lambda y, **k: dirichlet(y, beta=1, **k),
        lambda y, **k: pathological(y, classes_per_client=1, **k),
    ],
)
def test_clients_must_be_from_one_to_the_number_of_samples(divide, clients):
    with pytest.raises(UserError, match=f"1 to 100 clients, not {clients}"):
        divide([0, 1] * 50, clients=clients)


@pytest.mark.parametrize(
    ("c", "clients", "says"),
    [
        (0, 5, "1 to 4"),
        (5, 5, "1 to 4"),
        (1, 3, "cannot hold 4 classes; use at least 4 clients or 2 classes"),
    ],
)
def test_pathological_must_be_able_to_hold_all_classes(c, clients, says):
    with pytest.raises(UserError, match=says):
        pathological([0, 1, 2, 3] * 20, clients=clients, classes_per_client=c)


def test_pathological_refuses_to_leave_a_client_empty():
    """Clients 10 to 19 share class 1, which has one sample."""
    with pytest.raises(UserError, match="client 11 without any"):
        pathological([0, 1] + [0] * 20, clients=20, classes_per_client=1)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_the_seed_must_fit(seed):
    with pytest.raises(UserError, match="from 0 to 4294967295"):
        iid([0, 1], clients=1, seed=seed)


@pytest.mark.parametrize("y", [[], [[0, 1]]])
def test_labels_must_be_a_list(y):
    with pytest.raises(UserError, match="list of at least one"):
        iid(y, clients=1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dir", "as in dir:0.1"),
        ("dir:much", "as in dir:0.1"),
        ("pathological:2.5", "as in pathological:2"),
        ("dirr:0.1", "did you mean dir:0.1"),
        ("iid:3", "no partition iid:3"),
        ("", "choose from dir:0.1, pathological:2, iid"),
    ],
)
def test_a_partition_that_does_not_exist(spec, says):
    with pytest.raises(UserError, match=says):
        partition.partitioner(spec)
