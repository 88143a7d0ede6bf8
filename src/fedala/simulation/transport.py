"""How the clients' part of a round gets done: on this machine, or by nodes of a federation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from fedala.lanes import Cohort, Message, Params, Recipe, State, Task, Uploads
from fedala.lanes.messages import add_transient
from fedala.lanes.uploads import Piece
from fedala.methods import Method
from fedala.methods.returned import check_tensors
from fedala.simulation.client_round import CohortResult, RoundRequest, init_client_state
from fedala.simulation.client_states import Lane, States
from fedala.simulation.evaluated_models import ClientModels, StackHere
from fedala.simulation.variants import Variant, merge

T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What the round loop and its transport both know."""

    method: Method
    task: Task
    initial: Sequence[Params]
    """The initial model Θ⁰ of each run, as one lane."""
    seeds: Sequence[int]
    rounds: int
    join_ratio: float
    parts: Sequence[str]
    """The parts of the data that are tested."""
    variants: Sequence[Variant] = ()
    """By run: the variant of the method; empty: all runs are of the same."""
    held_out: int = 0
    """How many clients take no part in training: the last ones of the task."""

    @property
    def population(self) -> int:
        """Return the number of clients that take part."""
        return len(self.task.parts["train"]) - self.held_out

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """The shape of a table of scores: [run, client, part, figure]."""
        return len(self.seeds), self.population, len(self.parts), 3

    @cached_property
    def shared(self) -> list[Params]:
        """The part of each run's initial model that travels."""
        parts = [self.method.shared_part(self.task, model) for model in self.initial]
        return [check_tensors(self.method, "shared_part", part, lanes=1) for part in parts]

    def reset_transient(self, run: int, message: Message) -> Message:
        """Give a message the initial values of buffers that would not travel in a federation."""
        return add_transient(self.task, message, self.shared[run])

    def init_client(self, task: Task, lane: Lane) -> State:
        """Return the state of a client before its first round."""
        return init_client_state(self.method, task, self.initial[lane[0]])

    def method_of(self, run: int) -> Method:
        """Return the method of a run, with its own numbers."""
        return self.variants[run].method if self.variants else self.method

    def recipes_of(self, lanes: Sequence[Lane]) -> Sequence[Recipe]:
        """Return how each of some lanes trains; empty: as the task says."""
        return [self.variants[run].recipe for run, _ in lanes] if self.variants else ()

    def method_for(self, lanes: Sequence[Lane], cohort: Cohort) -> Method:
        """Return the method of a cohort; numbers that differ between its runs are [lane]."""
        return merge([self.method_of(run) for run, _ in lanes], cohort.spread)


class Transport(ABC):
    """Does the clients' part of the rounds. `joined` and `clients` are lists by run."""

    setup: Setup
    #: What clients keep between rounds, as far as it is kept here.
    client_states: States
    #: The most clients in a cohort (None: all), and how many cohorts work at a time.
    lanes: int | None = None
    threads: int = 1
    #: Whether clients may be there in a later round that were not there in the first.
    can_grow: bool = False

    def set_width(self, lanes: int | None, threads: int) -> None:
        """Work with so many lanes and threads from now on."""
        self.lanes, self.threads = lanes, threads

    def begin_round(self) -> bool:
        """Wait until a round can begin; tell whether the clients' sizes may be others now."""
        return False

    def list_members(self, population: int) -> Sequence[int]:
        """Return the clients among which participants are drawn, in order."""
        return range(population)

    def count_answers(self) -> dict[str, int]:
        """Return how many clients were `asked` in this round, and have `answered`.

        Empty if they are on this machine, where all of them do.
        """
        return {}

    @abstractmethod
    def run_round(
        self, request: RoundRequest, sent: Sequence[Message], joined: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        """Let the participants of every run do their part, with what their server sent."""

    @abstractmethod
    def score_models(
        self,
        round: int,
        models: Sequence[Params],
        clients: Sequence[Sequence[int]],
        *,
        predicts: bool = False,
    ) -> Iterator[CohortResult]:
        """Test one model per run, as it is, on the samples of some clients.

        If it `predicts`, collect the predictions, too, if the samples are on this machine.
        """

    def predict_absent(
        self, round: int, clients: Sequence[Sequence[int]]
    ) -> Iterator[CohortResult]:
        """Collect the predictions of the personal models of absent clients, if they are here."""
        return iter(())

    def run_newcomers(
        self,
        work: Callable[[Method, Cohort, Sequence[Lane], State], T],
        round: int,
        sent: Sequence[Message],
        clients: Sequence[Sequence[int]],
    ) -> Iterator[T]:
        """Let clients do some work that have never taken part, cohort by cohort.

        `work` gets the states of clients before their first round. Nothing is kept of it.
        """
        raise NotImplementedError("newcomers are tested on this machine only")

    @abstractmethod
    def keep_states(self, result: CohortResult, policy: str) -> None:
        """Keep the clients' new states; those of diverged clients follow the policy."""

    def finish_round(self, round: int, counted: Collection[Lane]) -> None:
        """End a round. `counted` are the clients whose uploads the servers have taken."""
        self.client_states.settle()

    def undo_round(self) -> None:
        """Bring the clients back to where they were before the round."""
        self.client_states.undo()

    def reduce_lanes(self) -> tuple[int, int] | None:
        """Halve the lanes after an out-of-memory error; return (before, after), or None."""
        return None

    def updates_needed(self) -> int:
        """Return how many uploads a round needs to count."""
        return 1

    def collect_uploads(
        self, run: int, clients: Sequence[int], weights: Tensor, pieces: Sequence[Piece]
    ) -> Uploads:
        """Return what some clients of a run uploaded, in the order of their numbers."""
        return Uploads(clients, weights, pieces)

    def find_first_bad_step(
        self,
        lane: Lane,
        request: RoundRequest,
        sent: Sequence[Message],
        joined: Sequence[Sequence[int]],
    ) -> int | None:
        """Return the first training step of a client whose numbers are not finite, from 1."""
        return None

    def keeps_models(self) -> bool:
        """Tell whether the clients' personal models are here, and not with the clients."""
        return True

    def list_absent_models(self, run: int, clients: Sequence[int]) -> Iterator[ClientModels]:
        """Yield the models of clients that take no part now, but did before."""
        for client in clients:
            state = self.client_states.get((run, client))
            if state and (model := self.setup.method.model_when_absent(Message(), state)):
                yield [client], StackHere(model, 1)

    def state(self) -> State:
        """Return what the transport must remember between rounds, as tensors.

        Client states are not part of it: they have files of their own.
        """
        return {}

    def restore(self, round: int, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `state` returned after so many rounds."""
