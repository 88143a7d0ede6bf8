"""Which clients a method helps: their scores against those under Local, or FedAvg."""

from dataclasses import dataclass

import numpy as np

from fedala.data.natural import list_clients
from fedala.runs.results import MethodResult, RunResult

#: The most methods that sentences name.
_MOST_METHODS = 5


@dataclass(frozen=True)
class Gains:
    """The clients, by number, that score better, equally and worse than under another method."""

    better: list[int]
    equal: list[int]
    worse: list[int]


def compare_clients(own: MethodResult, base: MethodResult) -> Gains | None:
    """Compare the clients' scores at the last evaluation, mean of the runs that both have."""
    seeds = sorted(own.client_means.keys() & base.client_means.keys())
    if not seeds:
        return None
    mine, others = (
        np.stack([one.client_means[seed] for seed in seeds]).mean(0) for one in (own, base)
    )
    if mine.shape != others.shape:
        return None
    with np.errstate(invalid="ignore"):  # infinite under both
        gains = mine - others if own.metric.higher_is_better else others - mine
    is_known = np.isfinite(gains)  # a client without test samples has no score
    signs = [is_known & (gains > 0), is_known & (gains == 0), is_known & (gains < 0)]
    return Gains(*(np.flatnonzero(chosen).tolist() for chosen in signs))


def describe_gains(result: RunResult) -> list[str]:
    """Say which clients each method helps against Local, or else FedAvg; a sentence for each."""
    base = result.methods.get("local") or result.methods.get("fedavg")
    if base is None:
        return []
    sentences = []
    for one in result.methods.values():
        gains = None if one is base else compare_clients(one, base)
        count = sum(map(len, (gains.better, gains.equal, gains.worse))) if gains else 0
        if gains and count:
            names = [result.name_client(number) for number in gains.better]
            named = f" ({list_clients(names)})" if names else ""
            sentences.append(
                f"Against {base.title}, {one.title} helps {len(gains.better)} of {count} "
                f"clients{named}, {len(gains.equal)} equal, {len(gains.worse)} lose."
            )
    if len(sentences) > _MOST_METHODS:
        more = len(sentences) - _MOST_METHODS
        sentences[_MOST_METHODS:] = [f"The page says the same of {more} more methods."]
    return sentences
