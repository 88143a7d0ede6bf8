"""IFCA: Ghosh, Chung, Yin, Ramchandran. An Efficient Framework for Clustered Federated Learning.
NeurIPS 2020."""

from dataclasses import dataclass

import torch

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads
from fedala.lanes.trees import count_lanes, replace_models
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class IFCA(Method):
    """The server has k models. A client trains the one that fits its training samples best, and
    that model becomes the mean of its clients' models.

    It is Algorithm 1 of the publication with option II, model averaging.
    """

    name = "ifca"
    title = "IFCA"
    summary = "k cluster models; each client trains the one that fits its data best"
    kind = "others' models"
    sends_model_stack = True
    refuses_server_optimizer = "the server keeps a model for each cluster, and no global one"

    clusters: int = option(2, "k: number of clusters", least=1)
    noise: float = option(
        0.0,
        "0: the initial models of further clusters have the entries of Θ⁰ in another order; above: "
        "they are Θ⁰ plus noise of so many standard deviations of each tensor",
        least=0,
    )

    @property
    def metrics(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"train_loss", *map(_metric, range(self.clusters))})

    # --- the server ----------------------------------------------------------------------------

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        others = [
            self.draw_model(task, initial, server_round.torch_generator(f"ifca cluster {number}"))
            for number in range(1, self.clusters)
        ]
        models = [initial, *others]
        return {"models": {name: torch.stack([m[name] for m in models], 1) for name in initial}}

    def draw_model(self, task: Task, initial: Params, generator: torch.Generator) -> Params:
        """Return another initial model. What does not learn, and rows of padding, are as in Θ⁰."""
        model = dict(initial)
        for name in task.trainable:
            value = initial[name]
            if self.noise:
                normal = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                scale = self.noise * value.std(correction=0)
                model[name] = value + scale * normal.to(value.device, value.dtype)
            else:
                order = torch.randperm(value.numel(), generator=generator).to(value.device)
                model[name] = value.flatten()[order].view_as(value)
        for name, row in task.padding:
            if name in task.trainable:
                model[name][:, row] = initial[name][:, row]
        return model

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(server["models"])

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        chosen = torch.cat([upload.extra["cluster"] for _, upload in uploads])
        models = server["models"]
        for number in range(self.clusters):
            weights = uploads.weights * (chosen == number)
            if weights.any():  # else the model stays as it is
                models = replace_models(models, [number], uploads.average(weights).model)
        return {"models": models}

    def extra_template(self, task: Task, initial: Params) -> State:
        return {"cluster": torch.zeros(1, dtype=torch.int64, device=task.device)}

    # --- the client ----------------------------------------------------------------------------

    def init_client(self, task: Task, initial: Params) -> State:
        nowhere = torch.zeros(count_lanes(initial), dtype=torch.int64, device=task.device)
        return {"local": initial, "cluster": nowhere}

    def received_model(
        self, cohort: Cohort, received: Message, state: State
    ) -> tuple[Params, State]:
        """Return the model of the cluster with the least loss, the first of equal ones."""
        stack = received.model
        losses = [
            cohort.evaluate({n: v[:, j] for n, v in stack.items()}, "train", is_shared=True).loss
            for j in range(self.clusters)
        ]
        # A model that has diverged is nobody's choice.
        chosen = torch.stack(losses, 1).nan_to_num(torch.inf).argmin(1)
        for number in range(self.clusters):
            cohort.metrics[_metric(number)] = (chosen == number).double()
        model = {name: value[0][chosen] for name, value in stack.items()}
        return model, {**state, "cluster": chosen}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        local = cohort.fit(initialized)
        return Message(local, {"cluster": state["cluster"]}), {**state, "local": local}


def _metric(number: int) -> str:
    """Name a client's metric: 1 if it is in this cluster, else 0. Their mean is a share."""
    return f"cluster_{number + 1}"
