"""FedPAC: Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier
Collaboration. ICLR 2023."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Self

import torch
from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task, Uploads
from fedala.lanes.class_features import average_class_means, measure_features, sum_class_features
from fedala.lanes.features import find_last_cut
from fedala.lanes.layers import layers_of
from fedala.lanes.trees import join, share
from fedala.methods.base import Method, ServerRound
from fedala.methods.fedproto import NearPrototypes
from fedala.methods.simplex import minimize_on_simplex
from fedala.options import option

#: The numbers of all matrices that `weigh_heads` solves at a time.
BLOCK = 2**22


@dataclass(frozen=True)
class FedPAC(Method):
    """The body is averaged and keeps each class near its global centroid. The server gives every
    client its own combination of all participants' heads.

    The global model is the mean body with the mean head. A client that the server has no
    combination for gets it: one that takes part for the first time, or a newcomer.
    """

    name = "fedpac"
    title = "FedPAC"
    summary = "a common body that aligns classes, and heads combined for each client"
    kind = "others' models"
    requires_features = True
    requires_classes = True
    lane_numbers = frozenset({"lam"})
    refuses_server_optimizer = "the server has a head for each client, which fits the mean body"

    lam: float = option(1.0, "λ: weight of the distance to the classes' centroids", least=0)
    epochs: int = option(1, "local epochs of the head on the frozen body", least=1)

    def check_model(self, model: nn.Module) -> None:
        if len(layers_of(model)) < 2:
            raise UserError(
                "FedPAC needs a model of at least two layers: the last is the head, the others "
                "are the body."
            )

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        head = [name for name in task.trainable if name in task.layers[0]]
        return {"head": head, "local": [name for name in task.trainable if name not in head]}

    def extra_template(self, task: Task, initial: Params) -> State:
        classes, features = measure_features(task, self.title)
        numbers = torch.zeros(1, classes, features, dtype=task.dtype, device=task.device)
        return {
            "h": numbers,
            "variance": numbers[:, 0, 0],
            "means": numbers,
            "counts": torch.zeros(1, classes, dtype=torch.int64, device=task.device),
        }

    # --- the server ----------------------------------------------------------------------------

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        clients = len(server_round.sizes)
        template = self.extra_template(task, initial)
        heads = {name: initial[name] for name in task.layers[0]}
        return {
            "global": initial,
            "heads": share(heads, clients),
            "has_head": torch.zeros(clients, dtype=torch.bool, device=task.device),
            "centroids": {"means": template["means"], "known": template["counts"] > 0},
        }

    def send(self, server: State, server_round: ServerRound) -> Message:
        clients = list(server_round.clients)
        has_head = server["has_head"][clients]
        model = share(server["global"], len(clients))
        for name, value in server["heads"].items():
            shape = (-1, *[1] * (value.dim() - 1))
            model[name] = torch.where(has_head.view(shape), value[clients], model[name])
        return Message(model, share(server["centroids"], len(clients)))

    def send_to_newcomers(self, server: State, server_round: ServerRound) -> Message:
        return Message(server["global"], server["centroids"])

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        found = join([upload.extra for _, upload in uploads])
        shares = self.head_shares(found["h"], found["variance"], uploads.weights)
        index = torch.tensor(uploads.clients, device=shares.device)
        heads = {}
        for name, before in server["heads"].items():
            own = torch.cat([upload.model[name] for _, upload in uploads])
            mixed = torch.tensordot(shares.to(own.dtype), own, 1)
            heads[name] = before.index_copy(0, index, mixed)
        centroids = server["centroids"]
        means, is_new = average_class_means(found["means"], found["counts"], centroids["means"])
        return {
            "global": uploads.average().model,
            "heads": heads,
            "has_head": server["has_head"].index_fill(0, index, True),
            "centroids": {"means": means, "known": centroids["known"] | is_new},
        }

    def head_shares(self, h: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
        """Return the share of participant j's head in that of participant i, [i, j].

        A client without samples has no share, and gets the mean head.
        """
        shares = (weights / weights.sum()).repeat(len(weights), 1)
        [able] = torch.nonzero(weights > 0, as_tuple=True)
        shares[able] = 0
        shares[able.unsqueeze(1), able] = weigh_heads(h[able].double(), variance[able].double())
        return shares

    # --- the client ----------------------------------------------------------------------------

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task = cohort.task
        cut = find_last_cut(task, initialized, self.title)
        sizes = measure_features(task, self.title)
        # All participants measure h and its variance under the same body, the received one.
        before = sum_class_features(cohort, cut, received.model, *sizes)
        samples = before.counts.sum(1).clamp(min=1)
        h = before.sums / samples.view(-1, 1, 1)
        variance = (before.squares.sum(1) / samples - h.square().sum((1, 2))) / samples
        trained = cohort.fit(
            initialized,
            names=task.layers[0],
            epochs=self.epochs,
            training="head",
            purpose="head",
            report_loss=False,
        )
        trained = cohort.fit(
            trained,
            objective=NearPrototypes(cut),
            fixed={
                "prototypes": received.extra["means"],
                "is_known": received.extra["known"],
                "lam": cohort.constant(self.lam),
            },
            names=initialized.keys() - set(task.layers[0]),
        )
        after = sum_class_features(cohort, cut, trained, *sizes)
        extra = {
            "h": h.to(task.dtype),
            "variance": variance.clamp(min=0).to(task.dtype),
            "means": after.means.to(task.dtype),
            "counts": after.counts.long(),
        }
        return Message(trained, extra), {"local": trained}

    def scale_epochs(self, factor: Fraction) -> Self:
        return replace(self, epochs=ceil(factor * self.epochs))


def weigh_heads(h: Tensor, variance: Tensor) -> Tensor:
    """Return the α_i of each client i, [i, j], that minimise Σ_j α_j²·V_j + ‖Σ_j α_j·(h_j − h_i)‖²
    over α ≥ 0 with Σ_j α_j = 1; `h` is [j, …], V is `variance`, [j].
    """
    h = h.flatten(1)
    h = h - h.mean(0)
    products = h @ h.T
    squares = products.diagonal()
    # A client with one sample shows no variance. A little of it makes every solution unique.
    scale = (squares + variance).max()
    variance = variance.clamp(min=1e-12 * torch.where(scale > 0, scale, 1))
    clients = len(h)
    block = max(1, BLOCK // clients**2)
    shares = []
    for own in (slice(start, start + block) for start in range(0, clients, block)):
        to_own = products[own]
        # (h_j − h_i)·(h_k − h_i), [i, j, k]
        matrices = squares[own].view(-1, 1, 1) - to_own.unsqueeze(1) - to_own.unsqueeze(2)
        shares.append(minimize_on_simplex(matrices + products + torch.diag(variance)))
    return torch.cat(shares)
