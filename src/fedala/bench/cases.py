"""The cases that `fedala bench` measures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data import Dataset, Federation, federate, load
from fedala.errors import UserError

_MAX_PARTITIONED = 1000  # clients; more of them share one pool of random samples


@dataclass(frozen=True)
class Case:
    """A method on a model and on samples like those of `dataset`: real ones, or random ones."""

    name: str
    dataset: str
    shape: tuple[int, ...]
    classes: int
    samples: int
    model: str = "cnn"
    method: str = "fedala"
    partition: str = "dir:0.1"
    clients: int = 20
    join_ratio: float = 1.0
    seeds: int = 1
    lr: float = 0.005
    vocabulary: int | None = None
    has_plain_loop: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the run."""

    @property
    def can_use_real_data(self) -> bool:
        return self.clients <= _MAX_PARTITIONED

    def build_federation(self, real: Dataset | None = None) -> Federation:
        """Divide the `real` samples among the clients, or random ones if there are none."""
        if not self.can_use_real_data:
            return self._build_population()
        return federate(real or self._random_dataset(), self.partition, self.clients)

    def _random_dataset(self) -> Dataset:
        random = np.random.default_rng(0)
        y = torch.from_numpy(np.resize(np.arange(self.classes), self.samples))
        if self.vocabulary:
            # Like news: 20 to 66 words and padding; the n-th most frequent word has a
            # probability of about 1/n.
            words = self.vocabulary ** random.random((self.samples, *self.shape), dtype=np.float32)
            lengths = random.integers(20, 67, (self.samples, 1))
            is_word = np.arange(self.shape[0]) < lengths
            x = torch.from_numpy(np.where(is_word, words, 0).astype(np.int32))
        else:
            pixels = random.integers(0, 256, (self.samples, *self.shape), dtype=np.uint8)
            x = torch.from_numpy(pixels)
        return Dataset(f"random {self.dataset}", x, y, self.classes, vocabulary=self.vocabulary)

    def _build_population(self) -> Federation:
        """Give each of very many clients sixty samples of one pool; sharing them saves no time."""
        data, random = self._random_dataset(), np.random.default_rng(0)
        rows = [random.integers(0, self.samples, 60) for _ in range(self.clients)]
        train, test, empty = (
            tuple(row[part] for row in rows) for part in (slice(45), slice(45, None), slice(0))
        )
        return Federation(data, train, test, empty)


_MNIST = Case("mnist, fedala", "mnist", (1, 28, 28), 10, 70_000, lr=0.1)
_CIFAR = Case("cifar10, fedala", "cifar10", (3, 32, 32), 10, 60_000)
_MANY = replace(_MNIST, has_plain_loop=False)
_AVERAGED = replace(_MNIST, method="fedavg", has_plain_loop=False)
_SIXTEEN_RATES = {"lr": ",".join(f"{0.4 / 2 ** (k / 2):.4g}" for k in range(16))}
CASES = (
    replace(_MNIST, name="mnist, fedavg", method="fedavg"),
    _MNIST,
    replace(_MNIST, name="mnist, fedala, 5 seeds", seeds=5, has_plain_loop=False),
    replace(_AVERAGED, name="mnist, fedavg, momentum", options={"momentum": 0.9}),
    replace(_AVERAGED, name="mnist, fedavg, adamw", options={"optimizer": "adamw"}),
    replace(_AVERAGED, name="mnist, fedavg, 16 learning rates", options={"sweep": _SIXTEEN_RATES}),
    _CIFAR,
    replace(_CIFAR, name="cifar100, fedala", dataset="cifar100", classes=100),
    Case(
        "resnet18, fedala", "tiny-imagenet", (3, 64, 64), 200, 13_340, "resnet18",
        partition="iid", lr=0.1,
    ),
    Case(
        "tiny-imagenet cnn, fedala", "tiny-imagenet", (3, 64, 64), 200, 100_000,
        has_plain_loop=False,
    ),
    Case(
        "1,000 clients of 50 samples, 50 joining, fedavg", "cifar10", (3, 32, 32), 10, 67_000,
        method="fedavg", partition="iid", clients=1000, join_ratio=0.05, lr=0.1,
        has_plain_loop=False,
    ),
    replace(_MNIST, name="mnist, mlp, fedala", model="mlp"),
    Case("fasttext, fedala", "ag_news", (200,), 4, 127_600, "fasttext", lr=0.1, vocabulary=98_635),
    replace(_MANY, name="1,001 clients, 100 joining", clients=1_001, join_ratio=0.0999),
    replace(_MANY, name="100,000 clients, 100 joining", clients=100_000, join_ratio=0.001),
)  # fmt: skip
_SMALL = Case("small mnist, fedavg", "mnist", (1, 28, 28), 10, 2_000, method="fedavg", lr=0.1)
_SMALL_AVERAGED = replace(_SMALL, has_plain_loop=False)
QUICK = (
    _SMALL,
    replace(_SMALL, name="small mnist, fedala", method="fedala"),
    replace(_SMALL, name="small mnist, mlp, fedala", method="fedala", model="mlp"),
    replace(_SMALL_AVERAGED, name="small mnist, fedavg, momentum", options={"momentum": 0.9}),
    replace(_SMALL_AVERAGED, name="small mnist, fedavg, adamw", options={"optimizer": "adamw"}),
    replace(
        _SMALL_AVERAGED,
        name="small mnist, fedavg, 16 learning rates",
        options={"sweep": _SIXTEEN_RATES},
    ),
)


def load_real_data(
    cases: Iterable[Case], data_dir: Path
) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Load the datasets of `cases` from `data_dir`.

    Returns them by name, and for those that cannot be loaded the reason. Raises `UserError` if
    none can be loaded: a folder that was named and has no data is a mistake.
    """
    loaded: dict[str, Dataset] = {}
    reasons: dict[str, str] = {}
    for name in dict.fromkeys(case.dataset for case in cases if case.can_use_real_data):
        try:
            loaded[name] = load(name, data_dir)
        except UserError as error:
            reasons[name] = str(error)
    if not loaded:
        if not reasons:
            raise UserError("These cases use random data only: leave out --data-dir.")
        raise UserError(next(iter(reasons.values())))
    return loaded, reasons
