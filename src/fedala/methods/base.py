"""What a federated method is: FedAvg, and the two or three functions in which a method differs from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fedala.lanes.cohort import Cohort, Params, Task, average
from fedala.lanes.layers import upper

#: What a client or a server keeps between rounds: nested dicts of tensors, the first dimension of each the lane. In a
#: client's, `local` is the model that its training left, and `personal` the one that is tested, where that is another.
State = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One method; its fields are its hyperparameters, and it has no other state.

    A round is: the server `send`s; each participant `initialize`s its local model; the `evaluated` model is tested; the
    participant `train`s and uploads; the server `aggregate`s. All of it is written for a cohort of lanes: every tensor's first
    dimension is the lane. What clients and server keep between rounds is in their `State`, and nowhere else.
    """

    #: Name on the command line, name in tables, and one line that says what it does.
    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    #: Whether each client is evaluated with a model of its own; otherwise with the global model.
    personal: ClassVar[bool] = True
    #: Whether every client must take part in every round.
    everyone: ClassVar[bool] = False
    #: Whether what is sent is one stack of models, [1, M, …], for all clients: lanes of different runs then go in different
    #: cohorts, so that every cohort has a single stack, shared without a copy (`received[name][0]` is all of it).
    stacked: ClassVar[bool] = False
    #: Whether what a round does depends on how many rounds there are: such a run cannot be resumed with more of them.
    schedule_depends_on_rounds: ClassVar[bool] = False
    #: The names of what a client notes about its round (`Cohort.notes`). A server accepts no others
    #: from its clients.
    notes: ClassVar[frozenset[str]] = frozenset({"train_loss"})
    #: Why `+ala` makes no sense, to end the sentence "x+ala is refused: …"; empty where it does.
    refuses_ala: ClassVar[str] = ""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the method cannot train."""

    def shared(self, task: Task, model: Params) -> Params:
        """The part of a model that travels between server and clients; what does not stays with the client, in its state."""
        return model

    # --- the server ------------------------------------------------------------------------------------------------

    def serve(self, task: Task, start: Params, sizes: Sequence[int]) -> State:
        """The server's state before the first round, from what is `shared` of Θ⁰ (one lane) and the clients' sizes."""
        return {"global": start}

    def send(self, server: State, clients: list[int]) -> Params:
        """What goes to this round's clients: one lane, shared by all, or one lane for each. Exactly this is sent and counted."""
        sent: Params = server["global"]
        return sent

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        """The server's state after the round; `weights` are the clients' numbers of training samples."""
        return {"global": average(uploads, weights)}

    # --- the client ------------------------------------------------------------------------------------------------

    def fresh(self, task: Task, start: Params) -> State:
        """The state of clients that take part for the first time; `start` holds Θ⁰ in every lane. What starts is `local`."""
        return {}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        """The local model that training starts from, and the state after it."""
        return received, state

    def evaluated(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> Params:
        """The personal model that is tested, before training; `personal`, if the state has one, is what the last round left."""
        model: Params = state.get("personal", initialized)
        return model

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        """Local training: what is uploaded, and the client's new state."""
        return cohort.sgd(initialized), state

    def ala_weights(self, state: State) -> Params:
        """ALA's weights W by parameter name, for the record; empty where there are none."""
        return {}

    def left(self, upload: Params, state: State) -> Params:
        """The personal model that a participation leaves behind, until the client takes part again."""
        model: Params = state["personal"] if "personal" in state else state.get("local", upload)
        return model

    # --- ALA in its place ------------------------------------------------------------------------------------------

    def governed(self, model: nn.Module, layers: int) -> tuple[str, ...]:
        """The parameters that ALA blends when it replaces this method's initialisation."""
        return upper(model, layers)
