"""Ways of dividing the samples of a dataset among clients: the paper's, and others.

A partition is a list with one array of sample indices per client, disjoint and complete. NumPy's
`RandomState` draws in the order of the authors' code, so seed 1 gives the splits of the paper.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fedala.errors import UserError
from fedala.options import suggest

Labels = Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Partitioner = Callable[..., list[Indices]]

#: The fewest samples of a client, if the dataset has enough: a quarter, for testing, is a batch.
LEAST = 40
#: The same for partitions that the paper does not have, which shall leave clients small.
_FEW = 10
#: Draws of a whole partition. The paper's settings take a handful, 20 clients on digits hundreds.
_MAX_TRIES = 10_000
#: Shares drawn in all tries together, about a minute; the limit for many classes × clients.
_MAX_SHARES = 20_000_000


def dirichlet(labels: Labels, *, clients: int, beta: float, seed: int = 1) -> list[Indices]:
    """Divide every class in proportions drawn from Dir(β).

    A client that holds its even share gets no more. The draw is repeated until the smallest client
    holds min(40, half an even share) samples.
    """
    values = _check(labels, clients, seed)
    _check_beta(beta)
    rng = np.random.RandomState(seed)
    even = len(values) / clients
    least = min(LEAST, even / 2)
    members = [np.flatnonzero(values == label) for label in np.unique(values)]
    tries = min(_MAX_TRIES, max(10, _MAX_SHARES // (len(members) * clients)))
    for _ in range(tries):
        pieces = _draw_dirichlet(members, clients, beta, even, rng)
        if pieces is not None and min(sum(map(len, piece)) for piece in pieces) >= least:
            return [np.concatenate(piece) for piece in pieces]
    raise UserError(
        f"None of {tries} draws of dir:{beta:g} gives each of {clients} clients "
        f"{math.ceil(least)} of {len(values)} samples; use a larger β or fewer clients."
    )


def _draw_dirichlet(
    members: list[Indices], clients: int, beta: float, even: float, rng: np.random.RandomState
) -> list[list[Indices]] | None:
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for indices in members:
        indices = indices.copy()
        rng.shuffle(indices)
        proportions = rng.dirichlet(np.repeat(beta, clients)) * (sizes < even)
        total = proportions.sum()
        if not total > 0:
            return None  # a small β: the draw underflows, or only full clients are drawn
        cuts = (np.cumsum(proportions / total) * len(indices)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(indices, cuts)):
            pieces[client].append(piece)
            sizes[client] += len(piece)
    return pieces


def pathological(
    labels: Labels, *, clients: int, classes_per_client: int, seed: int = 1
) -> list[Indices]:
    """Give every client up to c classes; each class goes to the first clients that lack classes.

    Shares of a class are uneven. If c·clients is not a multiple of the classes, the last classes
    and clients get fewer, but at least one.
    """
    values = _check(labels, clients, seed)
    members = [np.flatnonzero(values == label) for label in np.unique(values)]
    classes, c = len(members), classes_per_client
    _check_classes_per_client("pathological", c, clients, classes)
    rng = np.random.RandomState(seed)
    least = min(LEAST, len(values) / clients / 2)
    lacking = np.full(clients, c)  # classes that each client can still get
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for label, indices in enumerate(members):
        # The second term leaves a client for each later class; the authors' code fails there.
        count = min(math.ceil(clients * c / classes), int(lacking.sum()) - (classes - 1 - label))
        holders = np.flatnonzero(lacking)[:count]
        sizes = _draw_sizes(len(indices), len(holders), least / classes, rng)
        for client, piece in zip(holders, np.split(indices, np.cumsum(sizes)), strict=True):
            pieces[client].append(piece)
        lacking[holders] -= 1
    shares = [np.concatenate(piece) for piece in pieces]
    empty = next((client for client, share in enumerate(shares) if len(share) == 0), None)
    if empty is not None:
        raise UserError(
            f"The partition pathological:{c} of {len(values)} samples leaves client {empty} "
            "without any; use fewer clients."
        )
    return shares


def _draw_sizes(samples: int, holders: int, least: float, rng: np.random.RandomState) -> list[int]:
    """Draw the uneven sizes of all shares but the last, which is the remainder."""
    even = samples / holders
    low, high = max(1, int(max(even / 10, least))), int(even)
    if low >= high:  # too few to be uneven
        return [len(share) for share in np.array_split(np.arange(samples), holders)][:-1]
    return [int(size) for size in rng.randint(low, high, holders - 1)]


def iid(labels: Labels, *, clients: int, seed: int = 1) -> list[Indices]:
    """Give every client an even share of all samples at random."""
    values = _check(labels, clients, seed)
    return np.array_split(np.random.RandomState(seed).permutation(len(values)), clients)


def quantity(labels: Labels, *, clients: int, beta: float, seed: int = 1) -> list[Indices]:
    """Give clients shares of all samples at random whose sizes follow Dir(β).

    Everybody gets min(10, half an even share) samples, at least one; Dir(β) divides the others.
    """
    values = _check(labels, clients, seed)
    _check_beta(beta)
    rng = np.random.RandomState(seed)
    least = max(1, min(_FEW, len(values) // clients // 2))
    order = rng.permutation(len(values))
    proportions = _draw_proportions(clients, beta, rng)
    ends = _cut(proportions, len(values) - least * clients) + least * np.arange(1, clients)
    return np.split(order, ends)


def extended_dirichlet(
    labels: Labels, *, clients: int, classes_per_client: int, beta: float, seed: int = 1
) -> list[Indices]:
    """Give every client c classes at random, and divide a class among its holders by Dir(β).

    This is ExDir(c, β) of Li & Li, "Convergence Analysis of Sequential Federated Learning on
    Heterogeneous Data" (2023). The classes are drawn until each has half as many holders as on
    average, and at least one. Both draws are repeated until the smallest client holds min(10, half
    an even share) samples. A client may hold fewer than c classes: its share of one may be 0.
    """
    values = _check(labels, clients, seed)
    _check_beta(beta)
    members = [np.flatnonzero(values == label) for label in np.unique(values)]
    c = classes_per_client
    _check_classes_per_client("extdir", c, clients, len(members))
    rng = np.random.RandomState(seed)
    least = max(1, min(_FEW, len(values) / clients / 2))
    tries = min(_MAX_TRIES, max(10, _MAX_SHARES // (len(members) * clients)))
    for _ in range(tries):
        holders = _draw_holders(len(members), clients, c, rng)
        if holders is None:
            continue
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for indices, own in zip(members, holders, strict=True):
            cuts = _cut(_draw_proportions(len(own), beta, rng), len(indices))
            for client, piece in zip(own, np.split(rng.permutation(indices), cuts), strict=True):
                pieces[client].append(piece)
        if min(sum(map(len, piece)) for piece in pieces) >= least:
            return [np.concatenate(piece) for piece in pieces]
    raise UserError(
        f"None of {tries} draws of extdir:{c}:{beta:g} gives every class a client and each of "
        f"{clients} clients {math.ceil(least)} of {len(values)} samples; use a larger β, more "
        "classes per client, or another number of clients."
    )


def _draw_holders(
    classes: int, clients: int, c: int, rng: np.random.RandomState
) -> list[Indices] | None:
    """Draw c classes for every client; return the clients of each class, or None if too few."""
    holds = np.zeros((clients, classes), dtype=bool)
    for row in holds:
        row[rng.choice(classes, c, replace=False)] = True
    if holds.sum(0).min() < max(1, c * clients // classes // 2):
        return None
    return [np.flatnonzero(column) for column in holds.T]


def clustered(
    labels: Labels, *, clients: int, clusters: int, beta: float = 0.1, seed: int = 1
) -> list[Indices]:
    """Divide the samples among k clusters by `dirichlet`, and a cluster's evenly among its clients.

    Clients 0, 1, … form the first cluster, and so on; the sizes of clusters differ by at most one
    client. Inside a cluster, the samples of every class are dealt out one by one, so the clients'
    counts of a class differ by at most one sample.
    """
    values = _check(labels, clients, seed)
    if not 1 <= clusters <= clients:
        raise UserError(f"{clients} clients can form 1 to {clients} clusters, not {clusters}.")
    shares = dirichlet(values, clients=clusters, beta=beta, seed=seed)
    sizes = [len(members) for members in np.array_split(np.arange(clients), clusters)]
    for cluster, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        if len(share) < size:
            raise UserError(
                f"Cluster {cluster} of cluster:{clusters} has {len(share)} samples for {size} "
                "clients; use fewer clients or fewer clusters."
            )
    # A share is ordered by class, so every size-th sample is an even part of each class.
    return [
        share[first::size]
        for share, size in zip(shares, sizes, strict=True)
        for first in range(size)
    ]


def _draw_proportions(
    count: int, beta: float, rng: np.random.RandomState
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Draw from Dir(β). A tiny β underflows; then one gets all, which is the limit of Dir(β)."""
    proportions = rng.dirichlet(np.repeat(beta, count))
    if not np.isfinite(proportions).all():
        proportions = np.zeros(count)
        proportions[rng.randint(count)] = 1
    return proportions


def _cut(proportions: np.ndarray[Any, np.dtype[np.float64]], samples: int) -> Indices:
    """Return where `np.split` cuts so many samples."""
    return (np.cumsum(proportions) * samples).astype(np.int64)[:-1].clip(max=samples)


class _Spec(NamedTuple):
    """How a partition is written: an example, the function, and the numbers behind its name."""

    example: str
    divide: Partitioner
    numbers: tuple[tuple[str, type], ...] = ()
    optional: int = 0
    """How many of the last numbers may be left out."""
    needs_classes: bool = True


_CLASSES, _BETA = ("classes_per_client", int), ("beta", float)
_SPECS = {
    "dir": _Spec("dir:0.1", dirichlet, (_BETA,)),
    "pathological": _Spec("pathological:2", pathological, (_CLASSES,)),
    "iid": _Spec("iid", iid, needs_classes=False),
    "quantity": _Spec("quantity:0.5", quantity, (_BETA,), needs_classes=False),
    "extdir": _Spec("extdir:2:10", extended_dirichlet, (_CLASSES, _BETA)),
    "cluster": _Spec("cluster:4", clustered, (("clusters", int), _BETA), optional=1),
}


def partitioner(spec: str) -> Partitioner:
    """Return the function for `dir:β`, `pathological:c`, `iid`, `quantity:β`, `extdir:c:β`, ….

    The last one is `cluster:k` or `cluster:k:β`. The function takes (labels, clients=…, seed=…)
    and returns a partition.
    """
    known, numbers = _find(spec)
    least, most = len(known.numbers) - known.optional, len(known.numbers)
    try:
        if not least <= len(numbers) <= most:
            raise ValueError
        pairs = zip(known.numbers, numbers, strict=False)
        return partial(known.divide, **{name: kind(text) for (name, kind), text in pairs})
    except ValueError:
        lacks = "its number" if most == 1 else "one of its numbers, or has too many"
        raise UserError(
            f"The partition {spec} lacks {lacks}; write it as in {known.example}."
        ) from None


def needs_classes(spec: str) -> bool:
    """Tell whether a partition divides samples by their class."""
    return _find(spec)[0].needs_classes


def _find(spec: str) -> tuple[_Spec, list[str]]:
    """Return what a partition is, and the texts of its numbers."""
    kind, *numbers = spec.split(":")
    if kind not in _SPECS or (numbers and not _SPECS[kind].numbers):
        rest = suggest(spec, (*(row.example for row in _SPECS.values()), "natural", "a .json file"))
        raise UserError(f"There is no partition {spec}{rest}.")
    return _SPECS[kind], numbers


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise UserError(f"The seed of a partition must be from 0 to {2**32 - 1}, not {seed}.")


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise UserError(
            f"The β of a Dirichlet partition must be a number greater than 0, not {beta}."
        )


def _check_classes_per_client(kind: str, c: int, clients: int, classes: int) -> None:
    if not 1 <= c <= classes:
        raise UserError(
            f"The partition {kind} of {classes} classes gives a client "
            f"1 to {classes} of them, not {c}."
        )
    if c * clients < classes:
        raise UserError(
            f"{clients} clients with {c} classes each cannot hold {classes} classes; "
            f"use at least {math.ceil(classes / c)} clients "
            f"or {math.ceil(classes / clients)} classes per client."
        )


def _check(labels: Labels, clients: int, seed: int) -> np.ndarray[Any, Any]:
    values = np.asarray(labels)
    if values.ndim != 1 or len(values) == 0:
        raise UserError(
            "The labels to partition must be a list of at least one label, "
            f"not an array of shape {values.shape}."
        )
    if not 1 <= clients <= len(values):
        raise UserError(
            f"{len(values)} samples can be divided among 1 to {len(values)} clients, not {clients}."
        )
    check_seed(seed)
    return values
