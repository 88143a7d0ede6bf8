"""Partitions that the paper does not have: disjoint, complete, and what their names promise."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedala.data import (
    Dataset,
    clustered,
    dirichlet,
    extended_dirichlet,
    federate,
    partition,
    partitioner,
    quantity,
)
from fedala.errors import UserError


def mixed(sizes, seed):
    return np.random.RandomState(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


labels = st.builds(
    mixed, st.lists(st.integers(12, 60), min_size=2, max_size=6), st.integers(0, 1000)
)
SPECS = ("quantity:0.3", "extdir:2:5", "cluster:3", "cluster:2:5")


def count_classes(y, shares):
    return np.stack([np.bincount(y[share], minlength=y.max() + 1) for share in shares])


@settings(deadline=None, max_examples=60)
@given(labels, st.integers(3, 8), st.sampled_from(SPECS), st.integers(0, 2**32 - 1))
def test_partitions_are_disjoint_complete_and_follow_the_seed(y, clients, spec, seed):
    divide = partitioner(spec)
    try:
        shares = divide(y, clients=clients, seed=seed)
    except UserError as error:
        # Few samples and a small β, or few clients for the classes.
        assert "draws of" in str(error)  # noqa: PT017
        assume(False)
    assert len(shares) == clients
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(y)))
    assert min(map(len, shares)) >= 1
    again = divide(torch.from_numpy(y), clients=clients, seed=seed)
    assert [a.tolist() for a in again] == [share.tolist() for share in shares]


@pytest.mark.parametrize("spec", SPECS)
def test_another_seed_gives_another_partition(spec):
    y = mixed([100] * 4, 0)
    one, other = (
        np.concatenate(partitioner(spec)(y, clients=6, seed=seed)).tolist() for seed in (1, 2)
    )
    assert one != other


def test_quantity_gives_ten_to_everybody_and_divides_the_rest_by_a_dirichlet_draw():
    """1000 samples, 5 clients: 10 each, and 950 in proportions that follow the permutation."""
    rng = np.random.RandomState(7)
    order, p = rng.permutation(1000), rng.dirichlet([0.4] * 5)
    ends = [10 * (i + 1) + int(950 * p[: i + 1].sum()) for i in range(4)]
    shares = quantity(np.zeros(1000), clients=5, beta=0.4, seed=7)
    assert [share.tolist() for share in shares] == [a.tolist() for a in np.split(order, ends)]
    assert min(map(len, shares)) >= 10


def test_the_sizes_of_quantity_vary_as_dirichlet_draws_do_and_its_classes_do_not():
    """A share p of Dir(β) over N clients has the variance (N−1)/(N²(Nβ+1))."""
    y, clients, beta = mixed([2000] * 2, 0), 10, 1.0
    draws = [quantity(y, clients=clients, beta=beta, seed=seed) for seed in range(150)]
    sizes = np.array([[len(share) for share in shares] for shares in draws])
    p = (sizes - 10) / (len(y) - 10 * clients)
    assert p.var() == pytest.approx(9 / (100 * 11), rel=0.15)
    large = [share for share in draws[0] if len(share) > 300]
    assert large
    assert all(abs(y[share].mean() - 0.5) < 0.1 for share in large)


def test_a_tiny_beta_gives_one_client_all_but_the_floor():
    for beta in (1e-5, 1e-300):
        sizes = sorted(map(len, quantity(np.zeros(200), clients=4, beta=beta)))
        assert sizes == [10, 10, 10, 170]


def test_quantity_with_as_many_clients_as_samples_gives_everybody_one():
    assert [len(share) for share in quantity(np.zeros(9), clients=9, beta=0.1)] == [1] * 9


def test_quantity_and_iid_are_for_all_kinds_of_targets():
    data = Dataset("prices", torch.zeros(100, 2), torch.linspace(0, 1, 100), 1)
    federation = federate(data, "quantity:0.5", 4, seed=3)
    shares = quantity(np.zeros(100), clients=4, beta=0.5, seed=3)
    assert federation.sizes().tolist() == [len(share) for share in shares]
    for spec in ("extdir:1:1", "cluster:2", "dir:1", "pathological:1"):
        with pytest.raises(UserError, match=r"by their class, .* use iid, quantity:0\.5"):
            federate(data, spec, 4)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(6, 20), st.integers(0, 1000))
def test_extdir_gives_nobody_more_than_c_classes(c, clients, seed):
    y = mixed([80] * 4, seed)
    shares = extended_dirichlet(y, clients=clients, classes_per_client=c, beta=20, seed=seed)
    held = (count_classes(y, shares) > 0).sum(1)
    assert held.max() <= c
    assert (held >= 1).all()
    # A large β leaves nobody without a class that it has drawn.
    assert held.min() == c or clients > 12


def test_extdir_divides_a_class_among_its_holders_alone():
    """With β → ∞, its holders get even parts: 5 clients with both of 2 classes get a fifth each."""
    y = mixed([100, 50], 0)
    shares = extended_dirichlet(y, clients=5, classes_per_client=2, beta=1e9)
    counts = count_classes(y, shares)
    assert np.abs(counts - [20, 10]).max() <= 1


def test_extdir_shares_of_a_class_vary_as_dirichlet_draws_do():
    """Two classes, four clients that hold both, β = 0.5: the variance is 3/(16·(4·0.5+1))."""
    y = mixed([500, 500], 0)
    shares = [
        count_classes(y, extended_dirichlet(y, clients=4, classes_per_client=2, beta=0.5, seed=s))
        for s in range(200)
    ]
    # Draws that leave a client with fewer than 10 samples are repeated, which is rare here.
    assert (np.stack(shares) / 500).var() == pytest.approx(3 / (16 * 3), rel=0.2)


@pytest.mark.parametrize(
    ("c", "clients", "says"),
    [
        (0, 5, "extdir of 4 classes gives a client 1 to 4"),
        (5, 5, "1 to 4 of them, not 5"),
        (1, 3, "cannot hold 4 classes; use at least 4 clients"),
    ],
)
def test_extdir_must_be_able_to_hold_all_classes(c, clients, says):
    with pytest.raises(UserError, match=says):
        extended_dirichlet([0, 1, 2, 3] * 20, clients=clients, classes_per_client=c, beta=1)


def test_a_hopeless_extdir_ends_with_advice(monkeypatch):
    monkeypatch.setattr(partition, "_MAX_TRIES", 50)
    with pytest.raises(UserError, match=r"50 draws of extdir:1:0.01 .* larger β"):
        extended_dirichlet([0, 1] * 400, clients=20, classes_per_client=1, beta=0.01)


def test_clients_of_a_cluster_share_a_class_distribution():
    y = mixed([300, 200, 100, 400], 5)
    shares = clustered(y, clients=8, clusters=3, beta=0.5, seed=2)
    counts = count_classes(y, shares)
    clusters = [counts[:3], counts[3:6], counts[6:]]  # 3 + 3 + 2 clients
    for own in clusters:
        assert np.ptp(own, axis=0).max() <= 1
        assert np.ptp(own.sum(1)) <= 1
    # Together they have what `dirichlet` gives to clients in place of the clusters.
    whole = count_classes(y, dirichlet(y, clients=3, beta=0.5, seed=2))
    np.testing.assert_array_equal([own.sum(0) for own in clusters], whole)
    shares_of_class = whole / whole.sum(1, keepdims=True)
    assert np.abs(shares_of_class[0] - shares_of_class[1]).max() > 0.1


def test_one_cluster_is_even_and_a_cluster_for_each_client_is_the_dirichlet_partition():
    y = mixed([60, 60, 60], 1)
    assert (count_classes(y, clustered(y, clients=6, clusters=1)) == 10).all()
    own, plain = clustered(y, clients=4, clusters=4, beta=1), dirichlet(y, clients=4, beta=1)
    assert [a.tolist() for a in own] == [a.tolist() for a in plain]
    named = partitioner("cluster:4")(y, clients=4)
    assert [a.tolist() for a in named] == [a.tolist() for a in dirichlet(y, clients=4, beta=0.1)]


@pytest.mark.parametrize("clusters", [0, -1, 5])
def test_clusters_must_be_from_one_to_the_number_of_clients(clusters):
    with pytest.raises(UserError, match=f"1 to 4 clusters, not {clusters}"):
        clustered([0, 1] * 50, clients=4, clusters=clusters)


def test_a_cluster_with_fewer_samples_than_clients_is_refused():
    with pytest.raises(UserError, match="samples for 5 clients; use fewer clients"):
        clustered([0] * 4 + [1] * 6, clients=10, clusters=2, beta=0.1, seed=2)


@pytest.mark.parametrize("divide", [quantity, clustered, extended_dirichlet])
@pytest.mark.parametrize("beta", [0, -1, float("nan"), float("inf")])
def test_beta_must_be_positive(divide, beta):
    own = {clustered: {"clusters": 2}, extended_dirichlet: {"classes_per_client": 1}}
    with pytest.raises(UserError, match="greater than 0"):
        divide([0, 1] * 50, clients=2, beta=beta, **own.get(divide, {}))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("quantity", "lacks its number; write it as in quantity:0.5"),
        ("quantity:0.5:1", "as in quantity:0.5"),
        ("extdir:2", "one of its numbers, or has too many; write it as in extdir:2:10"),
        ("extdir:2.5:1", "as in extdir:2:10"),
        ("extdir:2:1:1", "as in extdir:2:10"),
        ("cluster", "as in cluster:4"),
        ("cluster:", "as in cluster:4"),
        ("clusters:4", "did you mean cluster:4"),
        ("quantty:0.5", "did you mean quantity:0.5"),
    ],
)
def test_a_partition_that_is_written_wrongly(spec, says):
    with pytest.raises(UserError, match=says):
        partitioner(spec)
