"""The models that were tested in the latest evaluation, as long as somebody may ask for them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedala.lanes import Params, State, Task, tree_map
from fedala.lanes.messages import drop_transient
from fedala.lanes.trees import take
from fedala.methods import Method
from fedala.records import PersonalModel
from fedala.simulation.client_states import Lane
from fedala.simulation.server_round import get_global_model


class ModelStack(ABC):
    """The models of several lanes, wherever they are."""

    @abstractmethod
    def select(self, lanes: Sequence[int]) -> "ModelStack":
        """Return some of the lanes. The memory of the others is not kept alive."""

    @abstractmethod
    def get(self, lane: int) -> Params:
        """Return the model of one lane."""


@dataclass(frozen=True)
class StackHere(ModelStack):
    """Models on this machine, in the tensors that a cohort has tested."""

    models: Params = field(repr=False)
    lanes: int

    def select(self, lanes: Sequence[int]) -> "StackHere":
        if len(lanes) == self.lanes:
            return self

        def copy(value: Tensor) -> Tensor:
            if value.stride(0) == 0:  # one model in all lanes
                return value[: len(lanes)]
            return value.index_select(0, torch.tensor(lanes, device=value.device))

        return StackHere(tree_map(copy, self.models), len(lanes))

    def get(self, lane: int) -> Params:
        own: Params = take(self.models, slice(lane, lane + 1))
        return own


ClientModels = tuple[Sequence[int], ModelStack]
"""Some clients, and their models in the same order."""


@dataclass(frozen=True)
class RunModels:
    """The models of one evaluation of one run. Iterating makes one `PersonalModel` after another.

    They stay in the tensors that the cohorts tested, so that keeping them costs next to nothing.
    """

    task: Task
    run: int
    seed: int
    stacks: Sequence[ClientModels] = field(repr=False)
    beginners: Sequence[int]
    """Clients that have never taken part: they have the initial model."""
    initial: Params = field(repr=False)
    global_model: Params = field(repr=False)

    def __iter__(self) -> Iterator[PersonalModel]:
        for clients, stack in self.stacks:
            for lane, client in enumerate(clients):
                yield self._give(client, stack.get(lane))
        for client in self.beginners:
            yield self._give(client, self.initial, is_initial=True)
        if self.global_model:
            yield self._give(None, self.global_model)

    def _give(
        self, client: int | None, model: Params, *, is_initial: bool = False
    ) -> PersonalModel:
        travelling = drop_transient(self.task, model)
        return PersonalModel(self.seed, client, travelling, is_initial, self.run)


@dataclass
class EvaluatedModels:
    """The models of one evaluation of all runs."""

    method: Method
    task: Task
    servers: Sequence[State]
    """As they were when the evaluated models were sent."""
    joined: Sequence[Sequence[int]]
    cohorts: list[tuple[Sequence[Lane], ModelStack]] = field(default_factory=list)

    def add(self, lanes: Sequence[Lane], here: Params, elsewhere: ModelStack | None) -> None:
        """Note the models of a cohort."""
        self.cohorts.append((lanes, elsewhere or StackHere(here, len(lanes))))

    def of_run(
        self,
        run: int,
        seed: int,
        initial: Params,
        absent: Iterable[ClientModels] = (),
        beginners: Sequence[int] = (),
    ) -> RunModels:
        """Return the models of one run, with those of clients that took no part."""
        stacks: list[ClientModels] = []
        for lanes, stack in self.cohorts:
            positions = [position for position, lane in enumerate(lanes) if lane[0] == run]
            if positions:
                clients = [lanes[position][1] for position in positions]
                stacks.append((clients, stack.select(positions)))
        global_model = get_global_model(self.method, self.servers[run])
        stacks += absent
        return RunModels(self.task, run, seed, stacks, beginners, initial, global_model)
