"""Use ALA in your own training loop.

Two clients train a plain model with plain SGD and plain averaging. ALA is one line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fedala import ALA


def client_data(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points in the plane; the two clients label the same regions differently."""
    x = torch.randn(200, 2)
    return x, ((x[:, 0] > 0).long() + shift) % 2 + 2 * (x[:, 1] > 0).long()


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train the model for one epoch in batches of ten."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, len(x), 10):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i : i + 10]), y[i : i + 10]).backward()
        optimizer.step()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of samples that the model labels correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def main(rounds: int = 10) -> dict[str, float]:
    """Train both clients and return the mean accuracy of the global and the personal models."""
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    data = [client_data(shift) for shift in (0, 1)]
    locals_ = [copy.deepcopy(server) for _ in data]
    alas = [ALA(layers=1) for _ in data]  # one per client, for its whole life

    for round in range(1, rounds + 1):
        for ala, model, (x, y) in zip(alas, locals_, data, strict=True):
            report = ala.initialize(model, server, (x, y), loss=F.cross_entropy)  # the one line
            print(f"round {round}: {report.epochs} epochs of weight learning,", end=" ")
            print(f"mean of W {report.weight_mean:.2f}")
            train(model, x, y)
        states = [model.state_dict() for model in locals_]
        server.load_state_dict(
            {name: sum(state[name] for state in states) / len(states) for name in states[0]}
        )

    results = {"global": sum(accuracy(server, x, y) for x, y in data) / 2}
    for ala, model, (x, y) in zip(alas, locals_, data, strict=True):
        ala.initialize(model, server, (x, y))
    results["personal"] = (
        sum(accuracy(model, x, y) for model, (x, y) in zip(locals_, data, strict=True)) / 2
    )
    print(f"global model {results['global']:.1%}, personal models {results['personal']:.1%}")
    return results


if __name__ == "__main__":
    main()
