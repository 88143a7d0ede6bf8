"""FedDyn: Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on Dynamic
Regularization. ICLR 2021."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import Cohort, Gradients, Message, Params, State, Task, Uploads, densify
from fedala.methods import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class FedDyn(Method):
    """A client minimises f_i(θ) − ⟨g_i, θ⟩ + α/2·‖θ − θ_server‖²; g_i becomes ∇f_i in time."""

    name = "feddyn"
    title = "FedDyn"
    summary = "a regulariser that changes every round makes local and global optima agree"
    has_personal_models = False

    alpha: float = option(0.1, "α: strength of the dynamic regulariser", above=0)

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        return {"global": initial, "h": self.init_client(task, initial)["g"]}

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        has_samples = (uploads.weights > 0).double()
        model, h = uploads.average(has_samples).model, {}
        share = has_samples.sum() / sum(size > 0 for size in server_round.sizes)
        for name, before in server["h"].items():
            h[name] = before - self.alpha * share * (model[name] - server["global"][name])
            model[name] = model[name] - h[name] / self.alpha
        return {"global": model, "h": h}

    def init_client(self, task: Task, initial: Params) -> State:
        return {"g": {name: torch.zeros_like(initial[name]) for name in task.trainable}}

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        anchor = {name: received.model[name] for name in cohort.task.trainable}
        trained = cohort.fit(
            initialized,
            gradients=correct_gradients,
            fixed={"g": state["g"]},
            proximal=(self.alpha, anchor),
        )
        g = {
            name: value - self.alpha * (trained[name] - anchor[name])
            for name, value in state["g"].items()
        }
        return Message(trained), {"g": g}


def correct_gradients(
    task: Task, model: Params, fixed: State, x: Any, y: Any
) -> tuple[Tensor, Gradients]:
    """Return ∇f(θ) − g_i. The pull α(θ − θ_server) is the proximal term."""
    losses, gradients = task.gradients(model, x, y)
    for name, value in densify(gradients).items():
        gradients[name] = value - fixed["g"][name]
    return losses, gradients
