"""FedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. Personalized Cross-Silo Federated Learning on Non-IID Data. AAAI 2021."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedala.lanes.cohort import Cohort, Params, Task
from fedala.lanes.trees import take
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class FedAMP(Method):
    """The server sends each client i a model u_i of its own, in which the models near its own weigh most; w_i is pulled to it."""

    name = "fedamp"
    title = "FedAMP"
    summary = "each client is pulled towards the models that are like its own"
    everyone = True

    alpha: float = option(
        1000.0, "α: the server's step size; also divides the clients' pull", above=0
    )
    lam: float = option(1.0, "λ: strength of the clients' pull, λ/(2α)·‖w − u‖²", least=0)
    sigma: float = option(
        0.1, "σ: squared distance over which the attention 1 − exp(−‖w_i − w_j‖²/σ) decays", above=0
    )

    # The server's models, one for each client, stand in two parts, what learns and the rest (running statistics), because
    # distance is one of what learns.

    def serve(self, task: Task, start: Params, sizes: Sequence[int]) -> State:
        everybody = {
            name: value.expand(len(sizes), *value.shape[1:]) for name, value in start.items()
        }
        return _split(everybody, task.trainable)

    def send(self, server: State, clients: list[int]) -> Params:
        sent: Params = take({**server["learned"], **server["rest"]}, clients)
        return sent

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        shares = self.shares(
            squared_distances({name: uploads[name] for name in server["learned"]}), weights
        )

        def mix(value: Tensor) -> Tensor:  # counters are not mixed: a client's stay its own
            return (
                torch.tensordot(shares.to(value.dtype), value, 1)
                if value.is_floating_point()
                else value
            )

        before, place = (
            {**server["learned"], **server["rest"]},
            torch.tensor(clients, device=weights.device),
        )
        # Whoever has brought nothing keeps what it had.
        mixed = {
            name: before[name].index_copy(0, place, mix(value)) for name, value in uploads.items()
        }
        return _split(mixed, server["learned"])

    def shares(self, distances: Tensor, weights: Tensor) -> Tensor:
        """What part client j has in u_i, [i, j], by their squared distance; clients without samples are part of nobody else's."""
        xi = self.alpha / self.sigma * torch.exp(-distances / self.sigma) * (weights > 0)
        xi.fill_diagonal_(0)
        xi /= xi.sum(1, keepdim=True).clamp(min=1)
        return xi + torch.diag((1 - xi.sum(1)).clamp(min=0))

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        return state["local"], state

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        local = cohort.sgd(initialized, proximal=(self.lam / self.alpha, received))
        empty = slice(sum(size > 0 for size in cohort.sizes()), None)
        for (
            name,
            value,
        ) in local.items():  # without samples the pull is the whole objective, and u its minimum
            value[empty] = received[name][empty]
        return local, {"local": local}


def squared_distances(models: Params) -> Tensor:
    """‖w_i − w_j‖² of all pairs, from the differences themselves: by a Gram matrix, float32 would lose near pairs."""

    def to_all(i: int) -> Tensor:
        return sum((v - v[i]).square().flatten(1).sum(1).double() for v in models.values())  # type: ignore[return-value]

    return torch.stack([to_all(i) for i in range(len(next(iter(models.values()))))])


def _split(models: Params, learned: Sequence[str] | Params) -> State:
    return {
        "learned": {name: models[name] for name in learned},
        "rest": {name: value for name, value in models.items() if name not in learned},
    }
