"""FedFomo: Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order Model Optimization.
ICLR 2021."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedala.lanes.cohort import Cohort, Params, Task, broadcast_lanes
from fedala.lanes.randomness import draw
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class FedFomo(Method):
    """The clients' latest models go to every client, which steps towards those that lower the loss on a slice of its data.

    The server sends no model that nobody has trained: nothing in round 1, and later none of a client that has not yet taken
    part or has no training samples.
    """

    name = "fedfomo"
    title = "FedFomo"
    summary = "each client moves towards the clients' models that lower its own loss"
    stacked = True
    refuses_ala = "FedFomo downloads several models, and ALA blends a single one"

    share: float = option(
        0.2,
        "share of the client's training data that weighs the models and is not trained on",
        above=0,
        most=0.99,
    )

    # --- the server ------------------------------------------------------------------------------------------------

    def serve(self, task: Task, start: Params, sizes: Sequence[int]) -> State:
        known = torch.zeros(len(sizes), dtype=torch.bool, device=next(iter(start.values())).device)
        return {
            "models": {name: torch.stack([value] * len(sizes), 1) for name, value in start.items()},
            "known": known,
        }

    def send(self, server: State, clients: list[int]) -> Params:
        known = server["known"]
        return (
            {name: value[:, known] for name, value in server["models"].items()}
            if known.any()
            else {}
        )

    def aggregate(
        self, server: State, uploads: Params, weights: Tensor, clients: list[int]
    ) -> State:
        place = torch.tensor(clients, device=weights.device)
        models = {
            name: value.index_copy(1, place, uploads[name][None])
            for name, value in server["models"].items()
        }
        return {"models": models, "known": server["known"].index_copy(0, place, weights > 0)}

    # --- the client ------------------------------------------------------------------------------------------------

    def fresh(self, task: Task, start: Params) -> State:
        return {"local": start, "previous": start}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        own, previous = state["local"], state["previous"]
        if not received:
            return own, state
        weights = self.weights(cohort, received, previous)
        helped = weights.any(1)

        def mix(name: str) -> Tensor:
            """previous + Σ weight_n(θ_n − previous), or the client's own, last trained model where no model helps."""
            mixed = previous[name].clone()
            for n, weight in enumerate(weights.to(mixed.dtype).unbind(1)):
                weight = broadcast_lanes(weight, mixed)
                # A model that has diverged has weight 0, and 0·∞ is not a number.
                mixed += torch.where(
                    weight > 0, weight * (received[name][:, n] - previous[name]), 0
                )
            return torch.where(broadcast_lanes(helped, mixed), mixed, own[name])

        return {
            name: mix(name) if value.is_floating_point() else value for name, value in own.items()
        }, state

    def weights(self, cohort: Cohort, received: Params, previous: Params) -> Tensor:
        """[lane, n]: max(0, (L(previous) − L(θ_n)) / ‖θ_n − previous‖), normalised; all 0 where no model helps.

        A client without samples cannot weigh: for it, all models are equal.
        """
        rows = [held for held, _ in self._split(cohort)]
        # Losses are sums over the slice: the number of its samples cancels in the normalisation.
        before = cohort.evaluate(previous, rows).loss
        columns = []
        for n in range(next(iter(received.values())).shape[1]):
            model = {name: value[:, n] for name, value in received.items()}
            # To the lanes, the model is one that all of them received: it runs once for all of them.
            gain = (
                before
                - replace(cohort, received=model, source=[0] * len(cohort))
                .evaluate(model, rows)
                .loss
            )
            moves = [
                (model[name] - previous[name]).flatten(1).square().sum(1)
                for name in cohort.task.trainable
            ]
            distance = torch.stack(moves).sum(0).sqrt()
            columns.append(torch.where((gain > 0) & (distance > 0), gain / distance, 0))
        weights = torch.stack(columns, 1)
        weights[[lane for lane, size in enumerate(cohort.sizes()) if size == 0]] = 1
        total = weights.sum(1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        trained = cohort.sgd(initialized, rows=[rest for _, rest in self._split(cohort)])
        return trained, {"local": trained, "previous": initialized}

    def _split(self, cohort: Cohort) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each lane's slice that weighs the models, the same in every round, and the rest. A single sample serves as both."""
        parts = []
        for client, seed in zip(cohort.clients, cohort.seeds, strict=True):
            rows = cohort.task.parts["train"][client]
            held = np.zeros(len(rows), dtype=bool)
            order = draw(seed, "fedfomo slice", client=client).permutation(len(rows))
            held[order[: max(1, int(self.share * len(rows) + 1e-9))]] = True
            parts.append((rows[held], rows[~held] if len(rows) > 1 else rows))
        return parts
