"""Modules of many kinds, with data and a loss for each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ala.common import PAIR, POINTS, labels, mlp, normal
from torch import Tensor, nn


class Ends(nn.Module):
    """A model that does something after its last layer with parameters."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.fc, self.end = nn.Linear(4, 5), nn.Linear(5, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.fc(self.body(x).tanh()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.fc = (
            nn.Embedding(9, 4),
            nn.GRU(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = (
            nn.Embedding(9, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.fc(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Tagger(nn.Module):
    """Answers every position. The positions of all samples form one batch of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.embedding(x).flatten(0, 1))


class Tied(nn.Module):
    """The output layer has the embedding's weight and a bias of its own."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.hidden, self.decoder = (
            nn.Embedding(9, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 9, bias=bias),
        )
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.hidden(self.embedding(x).mean(1)).tanh())


class TiedBelow(nn.Module):
    """The same, but the weight is registered under the output layer's name."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.decoder, self.embedding = (
            nn.Linear(4, 4),
            nn.Linear(4, 9),
            nn.Embedding(9, 4),
        )
        self.embedding.weight = self.decoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.hidden(self.embedding(x).mean(1)).tanh())


class Unseen(nn.Module):
    """Uses its last layer's weight below that layer, unseen by the module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.linear(self.body(x), self.fc.weight).tanh())


class TimeFirst(nn.Module):
    """Answers every position, positions first. There may be as many as samples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.embedding(x).transpose(0, 1))


class Bytes(nn.Module):
    """Takes images of bytes as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8
        return self.fc(self.body(x.double() / 100).tanh())


class HeadFirst(nn.Module):
    """Registers its output layer first, and computes it last."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).tanh())


class Twice(nn.Module):
    """Uses its last layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(self.body(x)).tanh())


class Scaled(nn.Module):
    """A parameter outside any layer, and a buffer in a module that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body, self.norm, self.fc = (
            nn.Linear(4, 5),
            nn.BatchNorm1d(5, affine=False),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.body(x))) * self.scale


def batch_statistics() -> nn.Module:
    """Return a model that normalises by the batch, in evaluation mode as well."""
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)
    )


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(),
        nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Linear(5, 3),
    )  # fmt: skip


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.fc = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.fc((self.left(left) + self.right(right)).tanh())


WORDS = labels(11, 9 * 7, seed=3) % 9
TEXTS = torch.from_numpy(np.random.default_rng(5).integers(9, size=(11, 6)))


def per_position(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


def positions_first(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.permute(1, 2, 0), target)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, Callable[[Any, Any], Tensor]]] = {
    "sequential": (mlp, POINTS, labels(11), F.cross_entropy),
    "log-softmax": (lambda: Ends(lambda z: z.log_softmax(1)), POINTS, labels(11), F.nll_loss),
    "softmax": (lambda: Ends(lambda z: z.softmax(1)), POINTS, labels(11), F.cross_entropy),
    "inplace-relu": (
        lambda: Ends(lambda z: F.relu(z, inplace=True)),
        POINTS,
        labels(11),
        F.cross_entropy,
    ),
    "inplace-scale": (lambda: Ends(lambda z: z.mul_(0.1)), POINTS, labels(11), F.cross_entropy),
    "squeezed": (lambda: Ends(lambda z: z.sum(1)), POINTS, normal(11), F.mse_loss),
    "gru": (Recurrent, TEXTS, labels(11), F.cross_entropy),
    "attention": (Attention, TEXTS, labels(11), F.cross_entropy),
    "tagger": (Tagger, TEXTS, TEXTS % 3, per_position),
    "two-positions-first": (TimeFirst, TEXTS[:, :2], TEXTS[:, :2] % 3, positions_first),
    "three-positions-first": (TimeFirst, TEXTS[:, :3], TEXTS[:, :3] % 3, positions_first),
    "tied": (Tied, TEXTS, WORDS, F.cross_entropy),
    "tied-below": (TiedBelow, TEXTS, WORDS, F.cross_entropy),
    "unseen": (Unseen, POINTS, labels(11), F.cross_entropy),
    "batch-statistics": (batch_statistics, POINTS, labels(11), F.cross_entropy),
    "bytes": (Bytes, (POINTS * 40 + 128).byte(), labels(11), F.cross_entropy),
    "tied-no-bias": (lambda: Tied(bias=False), TEXTS, WORDS, F.cross_entropy),
    "head-first": (HeadFirst, POINTS, labels(11), F.cross_entropy),
    "twice": (Twice, POINTS, labels(11), F.cross_entropy),
    "scaled": (Scaled, POINTS, labels(11), F.cross_entropy),
    "batch-norm": (normalised, normal(11, 1, 4, 4), labels(11), F.cross_entropy),
    "tuple": (TwoInputs, PAIR, labels(11), F.cross_entropy),
    "dict": (TwoInputs, {"right": PAIR[1], "left": PAIR[0]}, labels(11), F.cross_entropy),
    "regression": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        POINTS,
        normal(11, 2),
        F.mse_loss,
    ),
}
