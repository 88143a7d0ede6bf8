"""The models that were tested in the latest evaluation, as long as somebody may ask for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedala.lanes import Message, Params, State, Task, tree_map
from fedala.lanes.messages import drop_transient
from fedala.lanes.trees import take
from fedala.methods import Method
from fedala.records import PersonalModel
from fedala.simulation.client_states import ClientStates, Lane
from fedala.simulation.participation import list_absent


@dataclass(frozen=True)
class RunModels:
    """The models of one evaluation of one run. Iterating makes one `PersonalModel` after another.

    They stay in the tensors that the cohorts tested, so that keeping them costs next to nothing.
    """

    task: Task
    run: int
    seed: int
    cohorts: Sequence[tuple[Sequence[int], Params]] = field(repr=False)
    """Clients, and their models as a stack."""
    absent: Sequence[tuple[int, Params, bool]] = field(repr=False)
    """A client, its model, and whether that is the initial one."""
    global_model: Params = field(repr=False)

    def __iter__(self) -> Iterator[PersonalModel]:
        for clients, models in self.cohorts:
            for lane, client in enumerate(clients):
                yield self._give(client, take(models, slice(lane, lane + 1)))
        for client, model, is_initial in self.absent:
            yield self._give(client, model, is_initial=is_initial)
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
    cohorts: list[tuple[Sequence[Lane], Params]] = field(default_factory=list)

    def of_run(
        self, run: int, seed: int, initial: Params, states: ClientStates, population: int
    ) -> RunModels:
        """Return the models of one run; call it before the next round changes the states.

        `population` is 0 if the clients have no models of their own, or keep them elsewhere.
        """
        absent = []
        for client in list_absent(population, self.joined[run]):
            state = states.get((run, client))
            if state is None:
                absent.append((client, initial, True))
            elif model := self.method.model_when_absent(Message(), state):
                absent.append((client, model, False))
        cohorts = []
        for lanes, models in self.cohorts:
            positions = [position for position, lane in enumerate(lanes) if lane[0] == run]
            if positions:
                clients = [lanes[position][1] for position in positions]
                cohorts.append((clients, _copy_lanes(models, positions, len(lanes))))
        global_model = self.method.global_model(self.servers[run])
        return RunModels(self.task, run, seed, cohorts, absent, global_model)


def _copy_lanes(models: Params, positions: Sequence[int], lanes: int) -> Params:
    """Return some lanes of a stack: a copy, which does not keep the others' memory alive."""
    if len(positions) == lanes:
        return models

    def copy(value: Tensor) -> Tensor:
        if value.stride(0) == 0:  # one model in all lanes
            return value[: len(positions)]
        return value.index_select(0, torch.tensor(positions, device=value.device))

    own: Params = tree_map(copy, models)
    return own
