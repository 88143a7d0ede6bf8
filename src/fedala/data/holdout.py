"""Clients that are held out: they take no part in training, and arrive as newcomers."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from fedala.data.dataset import PARTS
from fedala.data.federation import Federation
from fedala.errors import UserError
from fedala.lanes.randomness import draw


def hold_out_clients(federation: Federation, which: str, seed: int = 1) -> Federation:
    """Hold out a share (`0.2`) or a number (`5`) of the clients, or the last ones (`last:5`).

    A draw by `seed` chooses those of a share or a number. They get the last numbers, and the others
    keep their order. So the others are numbered, and draw their random numbers, as if there were
    nobody else.
    """
    population = len(federation.train)
    chosen = _choose(which, population, seed)
    known = [client for client in range(population) if client not in chosen]
    order = (*known, *sorted(chosen))
    parts: dict[str, Any] = {
        part: tuple(getattr(federation, part)[i] for i in order) for part in PARTS
    }
    names = tuple(federation.client_names[i] for i in order) if federation.client_names else ()
    original = () if order == tuple(range(population)) else order
    return replace(federation, **parts, client_names=names, held_out=len(chosen), original=original)


def check_tested(federation: Federation) -> None:
    """Refuse a federation if none of the clients that take part can be tested."""
    if not any(map(len, federation.known.test)):
        raise UserError(
            "No client has test samples, so no model could be tested: put some of the samples into "
            "the test part."
        )


def check_holdout(which: str) -> None:
    """Refuse a text that does not say which clients to hold out."""
    _parse(which)


def count_held_out(which: str, population: int) -> int:
    """Return how many clients are held out; refuse all of them."""
    _, amount = _parse(which)
    count = max(1, int(np.floor(amount * population + 0.5))) if amount < 1 else int(amount)
    if count >= population:
        raise UserError(
            f"holdout_clients holds out {count} of {population} clients, and at least one must "
            "take part in training."
        )
    return count


def _parse(which: str) -> tuple[bool, float]:
    """Return whether they are the last ones, and their share (below 1) or number."""
    text = which.strip().lower()
    is_last = text.startswith("last:")
    text = text.removeprefix("last:")
    if re.fullmatch(r"0?\.\d{1,9}", text) and float(text) > 0:
        return is_last, float(text)
    if re.fullmatch(r"[1-9]\d{0,8}", text):
        return is_last, int(text)
    raise UserError(
        "holdout_clients must be a share such as 0.2, a number of clients such as 5, or the last "
        f"ones, such as last:5, not {which!r}."
    )


def _choose(which: str, population: int, seed: int) -> set[int]:
    count = count_held_out(which, population)
    if _parse(which)[0]:
        return set(range(population - count, population))
    chosen = draw(seed, "held-out clients").choice(population, count, replace=False)
    return set(chosen.tolist())
