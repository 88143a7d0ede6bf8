"""What a federated method is: FedAvg, and the two or three functions in which it differs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task, UpdateRule, Uploads
from fedala.lanes.class_features import measure_features
from fedala.lanes.features import find_last_cut
from fedala.lanes.heads import Head
from fedala.lanes.layers import divide_layers, layers_of, upper
from fedala.lanes.randomness import draw, torch_generator

#: The kinds of fedala's own methods, in the order of lists.
KINDS = (
    "one model for all",
    "fine-tuned",
    "own layers",
    "own model",
    "blended",
    "others' models",
    "features",
)


@dataclass(frozen=True, repr=False)
class ServerRound:
    """A round of one run, as the server's functions see it."""

    seed: int
    round: int
    """From 1; 0 before the first round."""
    rounds: int
    clients: Sequence[int]
    """The participants, in the order of the lanes of a message; before the first round, all."""
    sizes: Sequence[int]
    """Every client's number of training samples."""

    def __repr__(self) -> str:
        clients = f"{len(self.clients)} of {len(self.sizes)} clients"
        return f"<ServerRound {self.round} of {self.rounds}, seed {self.seed}: {clients}>"

    def draw(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Return the server's generator of one purpose in this round."""
        return draw(self.seed, purpose, client=client, round=self.round)

    def torch_generator(self, purpose: str) -> torch.Generator:
        """Return the same as a torch generator on the CPU."""
        return torch_generator(self.seed, purpose, round=self.round)


@dataclass(frozen=True)
class Method:
    """One method. Its fields are its hyperparameters, and it has no other state.

    In a round, the server `send`s a message. Each participant `initialize`s its local model, is
    tested with the `model_to_evaluate`, `train`s and uploads a message. The server `aggregate`s the
    uploads. Everything is written for a cohort of lanes: the first dimension of every tensor is the
    lane. What a client or the server keeps between rounds is in its `State`, and nowhere else. In a
    client's, `local` is the model that its training ended with, and `personal` the model that is
    tested, if that is another.
    """

    #: Name on the command line, name in tables, and one line about what it does.
    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    #: What a client is tested with, in a word or two, by which lists are sorted: one of `KINDS`.
    kind: ClassVar[str] = ""
    #: Whether each client is tested with a model of its own, and not with the global one.
    has_personal_models: ClassVar[bool] = True
    #: Whether every client must take part in every round.
    requires_all_clients: ClassVar[bool] = False
    #: Whether the message's model is one stack of models, [1, M, …], for all clients. Lanes of
    #: different runs then form different cohorts, so that a cohort shares one stack without a copy
    #: (`received.model[name][0]` is all of it).
    sends_model_stack: ClassVar[bool] = False
    #: Whether a round depends on the number of rounds. Such a run cannot be resumed with more.
    schedule_depends_on_rounds: ClassVar[bool] = False
    #: What replaces the model's last layer, if the method has more parameters than the model.
    head: ClassVar[type[Head] | None] = None
    #: Whether the model must have a body: layers below the last one.
    requires_body: ClassVar[bool] = False
    #: Whether the method works with features, what enters the last layer. A model is refused if
    #: that layer cannot be cut off.
    requires_features: ClassVar[bool] = False
    #: Whether the method works with the classes of the samples. A task without classes is refused.
    requires_classes: ClassVar[bool] = False
    #: The names of what a client reports (`Cohort.metrics`). A server accepts no others.
    metrics: ClassVar[frozenset[str]] = frozenset({"train_loss"})
    #: Hyperparameters that may be [lane] instead of a number, in a cohort of runs that differ in
    #: them. If the message is a stack of models, cohorts never mix runs, and all may differ.
    lane_numbers: ClassVar[frozenset[str]] = frozenset()
    #: Hyperparameters whose default has changed, and their former default. A run records which
    #: value it has, so a record that does not is an older one and means the former default.
    former_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    #: Why an optimiser that remembers earlier steps makes no sense, to end the sentence
    #: "x cannot train with momentum or Adam: …"; empty if it does.
    refuses_slots: ClassVar[str] = ""
    #: Why `+ala` makes no sense, to end the sentence "x+ala is refused: …"; empty if it does.
    refuses_ala: ClassVar[str] = ""
    #: Why an optimiser at the server makes no sense, to end such a sentence; empty if it does.
    refuses_server_optimizer: ClassVar[str] = ""
    #: Why no client can join that was not there during training, to end the sentence
    #: "x takes no newcomers: …"; empty if one can.
    refuses_newcomers: ClassVar[str] = ""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that this method cannot work with, by a `UserError`."""
        if self.requires_body:
            divide_layers(self.title, layers_of(model), 1)

    def check_task(self, task: Task, initial: Params) -> None:
        """Refuse samples, or a model on samples, as `check_model` does; `initial` is Θ⁰."""
        if self.requires_classes:
            measure_features(task, self.title)
        if self.requires_features:
            find_last_cut(task, initial, self.title)

    def check_optimizer(self, rule: UpdateRule) -> None:
        """Refuse an optimiser that this method cannot train with, by a `UserError`."""
        if rule.keeps_slots and self.refuses_slots:
            raise UserError(
                f"{self.title} cannot train with momentum or Adam: {self.refuses_slots}."
            )

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        """Return the names of the trainings in a round, and the parameters that each one steps.

        If a run keeps the optimisers' slots from round to round, each training has its own.
        """
        return {"local": task.trainable}

    # --- what travels --------------------------------------------------------------------------

    def shared_part(self, task: Task, model: Params) -> Params:
        """Return the part of a model that travels. The rest stays with the client, in its state."""
        return model

    def extra_template(self, task: Task, initial: Params) -> State:
        """Return the extra tensors of an upload, as one lane: their names, types and shapes.

        A Flower server refuses an upload with any others. A whole number that is not negative here
        is a counter, and must be one in every upload.
        """
        return {}

    # --- the server ----------------------------------------------------------------------------

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        """Return the server's state before the first round.

        `initial` is the shared part of the initial model Θ⁰, as one lane.
        """
        return {"global": initial}

    def send(self, server: State, server_round: ServerRound) -> Message:
        """Return the message to the participants: one lane for all of them, or one for each."""
        return Message(server["global"])

    def send_to_newcomers(self, server: State, server_round: ServerRound) -> Message:
        """Return the message to clients that have never taken part: one lane for all of them.

        `server_round` is that of the participants. A method with a message for each client says
        here what a client gets that the server does not know.
        """
        return self.send(server, server_round)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        """Return the server's state after the round. `server` stays as it is."""
        return {"global": uploads.average().model}

    def global_model(self, server: State) -> Params:
        """Return the global model, as one lane; empty if the method has none."""
        model: Params = server.get("global", {})
        return model

    # --- the client ----------------------------------------------------------------------------

    def init_client(self, task: Task, initial: Params) -> State:
        """Return the state of clients before their first round; `initial` is Θ⁰ in every lane."""
        return {}

    def received_model(
        self, cohort: Cohort, received: Message, state: State
    ) -> tuple[Params, State]:
        """Return the one model of a message that a client starts from, and the state after it.

        ALA blends this model. A method that sends a stack of models picks one here.
        """
        return received.model, state

    def complete_model(self, cohort: Cohort, received: Params, local: Params) -> Params:
        """Return a received model with all that only the client has: its own parts, of `local`.

        It is what `+ala` starts from. A method overrides it if a part follows from what is there,
        and neither travels nor stays.
        """
        return {**local, **received}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        """Return the local model that training starts from, and the state after it."""
        return self.received_model(cohort, received, state)

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        """Return the model that is tested before training.

        `personal`, if the state has one, is from the client's last round.
        """
        model: Params = state.get("personal", initialized)
        return model

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        """Train; return the upload and the client's new state."""
        return Message(cohort.fit(initialized)), state

    def model_when_absent(self, upload: Message, state: State) -> Params:
        """Return the personal model of a client until it takes part again.

        `upload` and `state` are those of its last round.
        """
        model: Params = state["personal"] if "personal" in state else state.get("local", {})
        return model or upload.model

    def trained_model(
        self, cohort: Cohort, received: Message, upload: Message, state: State
    ) -> Params:
        """Return the personal model right after training, for runs that test it, too."""
        return self.model_when_absent(upload, state)

    def scale_epochs(self, factor: Fraction) -> Self:
        """Return the method for a training that is `factor` times as long as in a round.

        The task has the local epochs; a method overrides this if it counts epochs of its own.
        """
        return self

    # --- ALA -----------------------------------------------------------------------------------

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        """Return the names that ALA blends if it replaces this method's initialisation."""
        return upper(model, layers)

    def ala_weights(self, state: State) -> Params:
        """Return ALA's weights W by parameter name, for the record; empty if there are none."""
        return {}
