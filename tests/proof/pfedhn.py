"""pFedHN: Shamsian, Navon, Fetaya, Chechik. Personalized Federated Learning using Hypernetworks.
ICML 2021."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads, tree_map
from fedala.methods import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class PFedHN(Method):
    """A hypernetwork at the server makes each client's parameters from the client's embedding."""

    name = "pfedhn"
    title = "pFedHN"
    summary = "a network at the server generates every client's model"
    refuses_ala = "a client receives a model that was made for it, and keeps none to blend"

    size: int = option(8, "numbers of an embedding, and units of the hidden layer", least=1)
    server_lr: float = option(1.0, "α: learning rate of the hypernetwork", above=0)

    def shared_part(self, task: Task, model: Params) -> Params:
        return {name: model[name] for name in task.trainable}

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        generator = server_round.torch_generator("pfedhn")

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=task.dtype) / self.size**0.5
            return values.to(task.device)

        clients, hidden = draw(len(server_round.sizes), self.size), draw(self.size, self.size)
        heads = {name: 0.1 * draw(self.size, *v.shape[1:]) for name, v in initial.items()}
        return {"clients": clients, "hidden": hidden, "heads": heads, "biases": initial}

    def generate(self, network: State, clients: Sequence[int]) -> Params:
        """Return the clients' parameters, a lane for each."""
        hidden = torch.tanh(network["clients"][list(clients)] @ network["hidden"])
        return {
            name: torch.tensordot(hidden, head, 1) + network["biases"][name]
            for name, head in network["heads"].items()
        }

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(self.generate(server, server_round.clients))

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        """Return φ + α·mean((∂θ_i/∂φ)ᵀ(trained_i − θ_i))."""
        rate, trained = self.server_lr / (uploads.weights > 0).sum(), uploads.stack().model
        made, pull_back = torch.func.vjp(lambda net: self.generate(net, uploads.clients), server)
        [gradients] = pull_back({name: trained[name] - value for name, value in made.items()})
        return tree_map(lambda a, b: a + rate * b, server, gradients)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return {**state["local"], **received.model}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}
