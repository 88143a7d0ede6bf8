"""Ranks as threads of one process: the same commands, without the cost of processes.

What they say to each other is pickled and packed as between processes.
"""

import pickle
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from small import QUICK, start_of

from fedala.methods import make
from fedala.ranks.group import RankGroup, count_packed, describe_tree, dump, pack, unpack
from fedala.ranks.lead import dismiss, obey
from fedala.ranks.transport import RankTransport
from fedala.ranks.worker import Worker
from fedala.simulation import Simulation
from fedala.simulation.local_transport import LocalTransport

CPU = torch.device("cpu")


class Hub:
    """Where the threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(60)
        found = list(self.values)
        self.barrier.wait(60)
        return found


def copy(tree: Any) -> Any:
    return unpack(pack(tree, CPU).clone(), pickle.loads(pickle.dumps(describe_tree(tree))), CPU)


class ThreadGroup(RankGroup):
    def __init__(self, rank: int, hub: Hub) -> None:
        self.rank, self.size, self.local_size, self.hub = rank, hub.size, hub.size, hub
        self.is_broken = False

    def note_start(self) -> None:
        pass  # threads are not started again

    def share(self, value: Any = None) -> Any:
        with self._watch():
            found = self.hub.exchange(self.rank, dump(value))[0]
        return value if self.rank == 0 else pickle.loads(found)

    def gather(self, value: Any) -> list[Any]:
        with self._watch():
            found = self.hub.exchange(self.rank, dump(value) if self.rank else None)
        return [value, *map(pickle.loads, found[1:])] if self.rank == 0 else []

    def share_tree(self, tree: Any, template: Any, device: torch.device) -> Any:
        with self._watch():
            found = self.hub.exchange(self.rank, tree if tree is None else copy(tree))[0]
        assert describe_tree(found) == template
        return tree if self.rank == 0 else copy(found)

    def send_tree(self, tree: Any, rank: int) -> None:
        if pack(tree, CPU).numel():  # nothing is not sent
            self.hub.queues[self.rank, rank].put(copy(tree))

    def receive_tree(self, template: Any, rank: int, device: torch.device) -> Any:
        if not count_packed(template):
            return template
        found = self.hub.queues[rank, self.rank].get(timeout=60)
        assert describe_tree(found) == template
        return found

    def add_trees(self, tree: Any) -> Any:
        with self._watch():
            found = self.hub.exchange(self.rank, copy(tree))
        flat = [pack(one, CPU) for one in found]
        assert all(one.shape == flat[0].shape for one in flat)
        total = found[0]
        for other in found[1:]:
            total = _add(total, other)
        return total


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {name: _add(a[name], b[name]) for name in a}
    if isinstance(a, tuple):
        return type(a)(*[_add(*pair) for pair in zip(a, b, strict=True)])
    return a + b


def run_ranks(ranks: int, lead: Callable[[RankGroup], Any], serve: Callable[[RankGroup], None]):
    """Let rank 0 lead in this thread, and the others serve in threads of their own."""
    hub = Hub(ranks)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            serve(ThreadGroup(rank, hub))
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    group = ThreadGroup(0, hub)
    try:
        return lead(group)
    finally:
        if group.is_broken or errors:
            hub.barrier.abort()
        else:
            dismiss(group)
        for thread in threads:
            thread.join(60)
        if errors and not group.is_broken:
            raise errors[0]


def evaluate_on_ranks(
    ranks: int,
    method: str,
    make_task: Callable[[], Any],
    *,
    lanes: int | None = None,
    prepare: Callable[[Simulation], None] = lambda simulation: None,
    **options: Any,
):
    """Run all rounds of a method over ranks, as `small.evaluate` does in one process."""
    chosen, lock = make(method, QUICK.get(method)), threading.Lock()
    policy = options.get("on_divergence", "skip")

    def build(transport: Any) -> Simulation:
        with lock:  # the initial model is made with torch's one generator
            task = make_task()
            return Simulation(chosen, task, start_of(task), transport=transport, **options)

    def serve(group: RankGroup) -> None:
        simulation = build(lambda setup: LocalTransport(setup, lanes=lanes))
        obey(group, Worker(group, simulation.transport, policy))

    def lead(group: RankGroup):
        simulation = build(
            lambda setup: RankTransport(group, LocalTransport(setup, lanes=lanes), policy)
        )
        prepare(simulation)
        models: dict[Any, Any] = {}
        evaluations = list(
            simulation.run(lambda one: models.update({(one.seed, one.client): one.model}))
        )
        return simulation, evaluations, models

    return run_ranks(ranks, lead, serve)
