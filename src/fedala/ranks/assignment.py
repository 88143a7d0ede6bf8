"""Which rank does the work of which lane."""

from collections.abc import Callable, Mapping, Sequence

from fedala.simulation.client_states import Lane


def assign_lanes(
    lanes: Sequence[Lane],
    ranks: int,
    load: Callable[[Lane], int],
    owners: Mapping[Lane, int],
) -> list[list[Lane]]:
    """Return the lanes of each rank: greedily, the longest first, each to whoever has least.

    A lane that has an owner stays with it, because its state is there.
    """
    shares: list[list[Lane]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    free = []
    for lane in lanes:
        if lane in owners:
            shares[owners[lane]].append(lane)
            loads[owners[lane]] += load(lane)
        else:
            free.append(lane)
    for lane in sorted(free, key=lambda lane: (-load(lane), lane)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(lane)
        loads[rank] += load(lane)
    return [sorted(share) for share in shares]
