"""FedFomo: Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order
Model Optimization. ICLR 2021."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads, broadcast_lanes
from fedala.lanes.randomness import draw
from fedala.lanes.trees import replace_models, squared_distances
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class FedFomo(Method):
    """A client steps towards those clients' models that lower the loss on a slice of its data.

    The server sends no model that nobody has trained: nothing in round 1, and later none of a
    client that has not taken part yet or has no training samples.
    """

    name = "fedfomo"
    title = "FedFomo"
    summary = "each client moves towards the clients' models that lower its own loss"
    kind = "others' models"
    sends_model_stack = True
    refuses_ala = "FedFomo downloads several models, and ALA blends a single one"
    refuses_server_optimizer = "the server keeps the models of all clients, and no global one"

    share: float = option(
        0.2,
        "share of the training data that weighs the models and is not trained on",
        above=0,
        most=0.99,
    )

    # --- the server ----------------------------------------------------------------------------

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        clients = len(server_round.sizes)
        models = {name: torch.stack([value] * clients, 1) for name, value in initial.items()}
        return {
            "models": models,
            "known": torch.zeros(clients, dtype=torch.bool, device=task.device),
        }

    def send(self, server: State, server_round: ServerRound) -> Message:
        known = server["known"]
        if not known.any():
            return Message()
        return Message({name: value[:, known] for name, value in server["models"].items()})

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        index = torch.tensor(uploads.clients, device=uploads.weights.device)
        models = replace_models(server["models"], uploads.clients, uploads.stack().model)
        known = server["known"].index_copy(0, index, uploads.weights > 0)
        return {"models": models, "known": known}

    # --- the client ----------------------------------------------------------------------------

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial, "previous": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        own, previous = state["local"], state["previous"]
        if not received.model:
            return own, state
        weights = self.weights(cohort, received.model, previous)
        helped = weights.any(1)

        def mix(name: str) -> Tensor:
            """Σ weight_n·θ_n, or the own model if no model helps.

            It is previous + Σ weight_n(θ_n − previous), as the weights add up to 1. A model that
            has diverged has weight 0, and 0·∞ is not a number.
            """
            models = torch.nan_to_num(received.model[name][0], posinf=0, neginf=0)
            mixed = torch.tensordot(weights.to(models.dtype), models, 1)
            return torch.where(broadcast_lanes(helped, mixed), mixed, own[name])

        initialized = {
            name: mix(name) if value.is_floating_point() else value for name, value in own.items()
        }
        return initialized, state

    def weights(self, cohort: Cohort, models: Params, previous: Params) -> Tensor:
        """[lane, n]: max(0, (L(previous) − L(θ_n)) / ‖θ_n − previous‖), normalised.

        If no model helps, all are 0. A client without samples cannot weigh: all models are equal.
        """
        rows = [held_out for held_out, _ in self._split(cohort)]
        # Losses are sums over the slice: the number of its samples cancels in the normalisation.
        before = cohort.evaluate(previous, rows).loss
        theta = {name: models[name][0] for name in cohort.task.trainable}
        distances = squared_distances({name: previous[name] for name in theta}, theta).sqrt()
        columns = []
        for n, distance in enumerate(distances.unbind(1)):
            model = {name: value[:, n] for name, value in models.items()}
            gain = before - cohort.evaluate(model, rows, is_shared=True).loss
            columns.append(torch.where((gain > 0) & (distance > 0), gain / distance, 0))
        weights = torch.stack(columns, 1)
        weights[[lane for lane, size in enumerate(cohort.sizes()) if size == 0]] = 1
        total = weights.sum(1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized, rows=[rest for _, rest in self._split(cohort)])
        return Message(trained), {"local": trained, "previous": initialized}

    def _split(self, cohort: Cohort) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each lane's slice that weighs the models, the same in every round, and the rest.

        A single sample is both.
        """
        parts = []
        for client, seed in zip(cohort.clients, cohort.seeds, strict=True):
            rows = cohort.task.parts["train"][client]
            held_out = np.zeros(len(rows), dtype=bool)
            order = draw(seed, "fedfomo slice", client=client).permutation(len(rows))
            held_out[order[: max(1, int(self.share * len(rows) + 1e-9))]] = True
            parts.append((rows[held_out], rows[~held_out] if len(rows) > 1 else rows))
        return parts
