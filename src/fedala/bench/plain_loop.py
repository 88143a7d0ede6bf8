"""The plain loop that `fedala bench` compares with: one client after another, `torch.optim.SGD`.

Public implementations of FedAvg and FedALA work like this. The data is already on the device.
As in the authors' code, evaluation uses batches of the training size, and ALA runs the whole model
in every batch.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes.layers import upper


class PlainLoop:
    """FedAvg, or FedALA with `ala`, on clients whose samples are already on the device."""

    def __init__(
        self,
        model: nn.Module,
        train: Sequence[tuple[Tensor, Tensor]],
        test: Sequence[tuple[Tensor, Tensor]],
        *,
        ala: bool,
        lr: float,
        batch_size: int = 10,
        share: float = 0.8,
        eta: float = 1.0,
    ) -> None:
        self.server, self.train, self.test = model, train, test
        self.clients = [copy.deepcopy(model) for _ in train]
        self.governed = upper(model, 1) if ala else ()
        self.weights: list[dict[str, Tensor]] = [{} for _ in train]
        self.lr, self.batch_size, self.share, self.eta = lr, batch_size, share, eta
        self.random = np.random.default_rng(0)

    def run_round(self) -> float:
        """Run one round; return the accuracy of the initialised models."""
        correct = samples = 0
        for client, model in enumerate(self.clients):
            self._initialize(client, model)
            right, count = self._evaluate(model, *self.test[client])
            correct, samples = correct + right, samples + count
            self._train(model, *self.train[client])
        sizes = [len(y) for _, y in self.train]
        with torch.no_grad():
            for name, value in self.server.state_dict().items():
                states = [model.state_dict()[name] for model in self.clients]
                if value.is_floating_point():
                    value.copy_(
                        sum(n / sum(sizes) * state for n, state in zip(sizes, states, strict=True))
                    )
        return correct / samples

    def _initialize(self, client: int, model: nn.Module) -> None:
        received, local = dict(self.server.named_parameters()), dict(model.named_parameters())
        old = {name: local[name].detach().clone() for name in self.governed}
        model.load_state_dict(self.server.state_dict())
        if not old or all(torch.equal(old[name], received[name]) for name in old):
            return
        weights = self.weights[client] or {name: torch.ones_like(old[name]) for name in old}
        update = {name: (received[name] - old[name]).detach() for name in old}
        x, y = self.train[client]
        chosen = np.sort(self.random.permutation(len(x))[: max(1, int(self.share * len(x)))])
        rows = torch.as_tensor(chosen, device=x.device)
        model.eval()
        for part in rows.split(self.batch_size):  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for name in old:
                    local[name].copy_(old[name] + update[name] * weights[name])
            loss = F.cross_entropy(model(x[part]), y[part])
            gradients = torch.autograd.grad(loss, [local[name] for name in old])
            for name, gradient in zip(old, gradients, strict=True):
                weights[name] = (weights[name] - self.eta * gradient * update[name]).clamp(0, 1)
        with torch.no_grad():
            for name in old:
                local[name].copy_(old[name] + update[name] * weights[name])
        self.weights[client] = weights

    def _evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int]:
        model.eval()
        correct = 0
        with torch.no_grad():
            for start in range(0, len(x), self.batch_size):
                part = slice(start, start + self.batch_size)
                correct += int((model(x[part]).argmax(1) == y[part]).sum().item())
        return correct, len(x)

    def _train(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        order = torch.as_tensor(self.random.permutation(len(x)), device=x.device)
        for part in order.split(self.batch_size):  # type: ignore[no-untyped-call]
            if len(part) == self.batch_size or len(x) < self.batch_size:
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
