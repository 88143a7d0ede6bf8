"""Batches of seeds: the runs of a method that began together, as one simulation.

A run folder begins with one batch. Seeds that are added later are a batch of their own, with its
own checkpoints. Runs are independent, so their results do not depend on their batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fedala.runs.config import Config
from fedala.runs.plan import Plan


def name_seeds(seeds: Sequence[int]) -> str:
    """Return the words for successive seeds."""
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


@dataclass(frozen=True)
class Batch:
    """Seeds that run side by side."""

    number: int
    seeds: range

    def narrow(self, plan: Plan) -> Plan:
        """Return the plan of these seeds alone."""
        config = replace(plan.config, seed=self.seeds.start, seeds=len(self.seeds))
        return replace(plan, config=config)


def cut_sizes(sizes: Sequence[int], seeds: int) -> list[int]:
    """Return the sizes of the first batches, which have so many seeds together.

    A process that was killed may have recorded one more than its config has. Without any, all seeds
    are one batch.
    """
    ends = list(accumulate(sizes))
    if not sizes:
        return [seeds]
    if seeds not in ends:
        raise ValueError(f"its batches of {list(sizes)} seeds do not make {seeds}")
    return list(sizes[: ends.index(seeds) + 1])


def split_seeds(config: Config, sizes: Sequence[int]) -> list[Batch]:
    """Return the batches of a config's seeds, by their sizes."""
    ends = list(accumulate(sizes, initial=config.seed))
    return [Batch(number, range(*both)) for number, both in enumerate(pairwise(ends))]
