"""The cases that `fedala bench` measures."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

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
CASES = (
    replace(_MNIST, name="mnist, fedavg", method="fedavg"),
    _MNIST,
    replace(_MNIST, name="mnist, fedala, 5 seeds", seeds=5, has_plain_loop=False),
    _CIFAR,
    replace(_CIFAR, name="cifar100, fedala", dataset="cifar100", classes=100),
    Case(
        "resnet18, fedala", "tiny-imagenet", (3, 64, 64), 200, 13_340, "resnet18",
        partition="iid", lr=0.1,
    ),
    Case("fasttext, fedala", "ag_news", (200,), 4, 127_600, "fasttext", lr=0.1, vocabulary=98_635),
    replace(_MANY, name="1,001 clients, 100 joining", clients=1_001, join_ratio=0.0999),
    replace(_MANY, name="100,000 clients, 100 joining", clients=100_000, join_ratio=0.001),
)  # fmt: skip
QUICK = tuple(
    Case(f"small mnist, {method}", "mnist", (1, 28, 28), 10, 2_000, method=method, lr=0.1)
    for method in ("fedavg", "fedala")
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
