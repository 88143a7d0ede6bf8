"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on
Dynamic Regularization. ICLR 2021."""

from dataclasses import dataclass

import torch

from fedala.lanes import Cohort, Message, Params, State, Task, Uploads, align
from fedala.methods.base import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class FedDyn(Method):
    """A client minimises f_i(θ) − ⟨g_i, θ⟩ + α/2·‖θ − θ_server‖²; g_i becomes ∇f_i in time."""

    name = "feddyn"
    title = "FedDyn"
    summary = "a regulariser that changes every round makes local and global optima agree"
    kind = "one model for all"
    has_personal_models = False
    lane_numbers = frozenset({"alpha"})
    refuses_server_optimizer = "its server adds up the clients' changes already, in h"

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
        trained = cohort.fit(
            initialized,
            linear={name: -value for name, value in state["g"].items()},
            proximal=(self.alpha, received.model),
        )
        has_samples = cohort.lr.new_tensor(cohort.sizes()) > 0  # without samples, g_i stays
        g = {}
        for name, value in state["g"].items():
            moved = align(has_samples, value) * (trained[name] - received.model[name])
            g[name] = value - align(self.alpha, value) * moved
        return Message(trained), {"g": g}
