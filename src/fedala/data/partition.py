"""The paper's ways of dividing the samples of a dataset among clients.

A partition is a list with one array of sample indices per client, disjoint and complete. NumPy's
`RandomState` draws in the order of the authors' code, so seed 1 gives the splits of the paper.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedala.errors import UserError
from fedala.options import suggest

Labels = Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Partitioner = Callable[..., list[Indices]]

#: The fewest samples of a client, if the dataset has enough: a quarter, for testing, is a batch.
LEAST = 40
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
    if not 0 < beta < math.inf:
        raise UserError(
            f"The β of a Dirichlet partition must be a number greater than 0, not {beta}."
        )
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
    if not 1 <= c <= classes:
        raise UserError(
            f"A pathological partition of {classes} classes gives a client "
            f"1 to {classes} of them, not {c}."
        )
    if c * clients < classes:
        raise UserError(
            f"{clients} clients with {c} classes each cannot hold {classes} classes; "
            f"use at least {math.ceil(classes / c)} clients "
            f"or {math.ceil(classes / clients)} classes per client."
        )
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


def partitioner(spec: str) -> Partitioner:
    """Return the function for `dir:0.1`, `pathological:2` or `iid`.

    It takes (labels, clients=…, seed=…) and returns a partition.
    """
    kind, _, value = spec.partition(":")
    try:
        if kind == "dir":
            return partial(dirichlet, beta=float(value))
        if kind == "pathological":
            return partial(pathological, classes_per_client=int(value))
    except ValueError:
        example = "dir:0.1" if kind == "dir" else "pathological:2"
        raise UserError(
            f"The partition {spec} lacks its number; write it as in {example}."
        ) from None
    if spec == "iid":
        return iid
    rest = suggest(spec, ("dir:0.1", "pathological:2", "iid", "a .json file"))
    raise UserError(f"There is no partition {spec}{rest}.")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise UserError(f"The seed of a partition must be from 0 to {2**32 - 1}, not {seed}.")


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
