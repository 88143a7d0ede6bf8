"""Keyed randomness: a draw is a function of (seed, client, round, purpose, epoch).

No draw depends on the draws before it. So one lane and many lanes, a resumed and an uninterrupted
run, and a simulation and a real federation all see the same numbers.
"""

import zlib

import numpy as np
import torch


def draw(
    seed: int, purpose: str, *, client: int = 0, round: int = 0, epoch: int = 0
) -> np.random.Generator:
    """Return the generator of one purpose.

    Philox is counter-based: its key and its counter *are* the coordinates of the draw.
    """
    key = np.array([seed, client], dtype=np.uint64)
    counter = np.array([0, epoch, round, zlib.crc32(purpose.encode())], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def torch_seed(seed: int, purpose: str, *, client: int = 0, round: int = 0, epoch: int = 0) -> int:
    """Return a seed for `torch.manual_seed`: for layers that draw themselves (dropout)."""
    return int(draw(seed, purpose, client=client, round=round, epoch=epoch).integers(2**63))


def torch_generator(seed: int, purpose: str, **key: int) -> torch.Generator:
    """Return the same as a torch generator on the CPU."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, **key))
