"""FedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. Personalized Cross-Silo Federated Learning on
Non-IID Data. AAAI 2021."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads
from fedala.lanes.trees import share, squared_distances, take
from fedala.methods.base import ServerRound
from fedala.methods.own_model import OwnModel
from fedala.options import option


@dataclass(frozen=True)
class FedAMP(OwnModel):
    """The server sends client i its own mix u_i of all models, near ones most; w_i is pulled to it.

    The server's models, one for each client, are in two parts, what learns and the rest (running
    statistics): only what learns has a distance.
    """

    name = "fedamp"
    title = "FedAMP"
    summary = "each client is pulled towards the models that are like its own"
    kind = "others' models"
    requires_all_clients = True
    lane_numbers = frozenset({"alpha", "lam", "sigma"})
    refuses_server_optimizer = "the server keeps a model for each client, and no global one"

    alpha: float = option(
        1000.0, "α: the server's step size; also divides the clients' pull", above=0
    )
    lam: float = option(1.0, "λ: strength of the clients' pull, λ/(2α)·‖w − u‖²", least=0)
    sigma: float = option(
        0.1, "σ: squared distance over which the attention 1 − exp(−‖w_i − w_j‖²/σ) decays", above=0
    )

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        return _split(share(initial, len(server_round.sizes)), task.trainable)

    def send(self, server: State, server_round: ServerRound) -> Message:
        everybody = {**server["learned"], **server["rest"]}
        return Message(take(everybody, list(server_round.clients)))

    def send_to_newcomers(self, server: State, server_round: ServerRound) -> Message:
        """Return the mean of the clients' mixes: without an upload, nobody is near or far."""
        everybody = {**server["learned"], **server["rest"]}
        return Message(
            {
                name: value.mean(0, keepdim=True) if value.is_floating_point() else value[:1]
                for name, value in everybody.items()
            }
        )

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        models = uploads.stack().model
        learned = {name: models[name] for name in server["learned"]}
        distances = squared_distances(learned, learned)
        shares = self.shares(distances, uploads.weights)

        def mix(value: Tensor) -> Tensor:  # counters are not mixed: a client's stay its own
            if not value.is_floating_point():
                return value
            mixed: Tensor = torch.tensordot(shares.to(value.dtype), value, 1)
            return mixed

        # A client without an upload keeps its model.
        before = {**server["learned"], **server["rest"]}
        index = torch.tensor(uploads.clients, device=uploads.weights.device)
        mixed = {
            name: before[name].index_copy(0, index, mix(value)) for name, value in models.items()
        }
        return _split(mixed, server["learned"])

    def shares(self, distances: Tensor, weights: Tensor) -> Tensor:
        """Return the share of client j in u_i, [i, j], by their squared distance.

        A client without samples has no share in other clients' models.
        """
        xi = self.alpha / self.sigma * torch.exp(-distances / self.sigma) * (weights > 0)
        xi.fill_diagonal_(0)
        xi /= xi.sum(1, keepdim=True).clamp(min=1)
        return xi + torch.diag((1 - xi.sum(1)).clamp(min=0))

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        local = cohort.fit(initialized, proximal=(self.lam / self.alpha, received.model))
        # Without samples, the pull is the whole objective, and u its minimum.
        empty = slice(sum(size > 0 for size in cohort.sizes()), None)
        for name, value in local.items():
            value[empty] = received.model[name][empty]
        return Message(local), {"local": local}


def _split(models: Params, learned: Sequence[str] | Params) -> State:
    return {
        "learned": {name: models[name] for name in learned},
        "rest": {name: value for name, value in models.items() if name not in learned},
    }
