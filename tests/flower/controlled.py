"""A method that sends and uploads tensors besides the model, and a model with odd names."""

from dataclasses import dataclass

import torch
from small import Net
from torch import nn

from fedala.lanes import Message
from fedala.methods import Method


@dataclass(frozen=True)
class Controlled(Method):
    """FedAvg that starts half a mean move ahead, and counts the clients that ever took part."""

    name = "controlled"
    title = "Controlled"
    summary = "FedAvg with control variates"
    has_personal_models = True

    def extra_template(self, task, initial):
        moves = {name: torch.zeros_like(initial[name]) for name in task.trainable}
        return {"control": {"moves": moves}, "joined": torch.zeros(1, dtype=torch.int64)}

    def init_server(self, task, initial, server_round):
        return {"global": initial, **self.extra_template(task, initial)}

    def send(self, server, server_round):
        extra = {key: value for key, value in server.items() if key != "global"}
        return Message(server["global"], extra)

    def aggregate(self, server, uploads, server_round):
        mean = uploads.average()
        joined = sum(message.extra["joined"] for _, message in uploads)
        control = mean.extra["control"]
        return {"global": mean.model, "control": control, "joined": server["joined"] + joined}

    def initialize(self, cohort, received, state):
        moves, joined = received.extra["control"]["moves"], received.extra["joined"]
        ahead = 0.5 / (1 + joined.double()).sqrt()
        model = dict(received.model)
        for name, move in moves.items():
            rate = ahead.to(move.dtype).view(-1, *[1] * (move.dim() - 1))
            model[name] = model[name] + rate * move
        return model, state

    def train(self, cohort, initialized, received, state):
        trained = cohort.fit(initialized)
        moves = {n: trained[n] - received.model[n] for n in received.extra["control"]["moves"]}
        joined = torch.ones(len(cohort), dtype=torch.int64, device=cohort.task.device)
        return Message(trained, {"control": {"moves": moves}, "joined": joined}), state


class SlashedNet(nn.Module):
    """The small model, whose parameters have slashes in their names."""

    def __init__(self):
        super().__init__()
        for name, layer in Net().named_children():
            self.add_module(f"a/{name}", layer)
        self.register_parameter("a", nn.Parameter(torch.ones(1)))

    def forward(self, x):
        conv, norm, hidden, out = (self.get_submodule(f"a/{n}") for n in Net()._modules)
        x = torch.max_pool2d(norm(conv(x)).relu(), 2)
        return self.a * out(hidden(x.flatten(1)).relu())
