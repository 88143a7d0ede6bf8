"""FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive Federated
Optimization. ICLR 2021."""

from dataclasses import dataclass

import torch

from fedala.lanes import Params, State, Task, Uploads
from fedala.methods import Method, ServerRound
from fedala.options import option


@dataclass(frozen=True)
class FedAdam(Method):
    """The server takes a step of Adam along the clients' mean change."""

    name = "fedadam"
    title = "FedAdam"
    summary = "Adam at the server, on the mean of the clients' changes"
    has_personal_models = False

    server_lr: float = option(0.01, "η: the server's learning rate", above=0)
    beta1: float = option(0.9, "β₁: decay of the first moment m", least=0, most=1)
    beta2: float = option(0.99, "β₂: decay of the second moment v", least=0, most=1)
    tau: float = option(0.001, "τ: how far the step adapts", above=0)

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        m = {name: torch.zeros_like(initial[name]) for name in task.trainable}
        v = {name: torch.full_like(initial[name], self.tau**2) for name in task.trainable}
        return {"global": initial, "m": m, "v": v}

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        model, m, v = uploads.average().model, {}, {}
        for name, before in server["m"].items():
            change = model[name] - server["global"][name]
            m[name] = self.beta1 * before + (1 - self.beta1) * change
            v[name] = self.beta2 * server["v"][name] + (1 - self.beta2) * change.square()
            step = m[name] / (v[name].sqrt() + self.tau)
            model[name] = server["global"][name] + self.server_lr * step
        return {"global": model, "m": m, "v": v}
