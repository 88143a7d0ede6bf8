"""How fast is it here? Seconds per round on this machine, against the plain per-client loop, measured in the same run."""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.bench.plain_loop import PlainLoop
from fedala.data import Dataset, Federation, federate, load
from fedala.errors import UserError
from fedala.models import build_model
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.plan import plan


@dataclass(frozen=True)
class Case:
    """One thing to measure. Samples are those of `dataset` where there is a copy of it, else random ones of its shape."""

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
    plain: bool = True

    def federation(self, data_dir: Path | None) -> Federation:
        """The clients' data."""
        if self.clients > 1000:
            return self._population()
        try:
            data = load(self.dataset, data_dir) if data_dir else self._random()
        except UserError:
            data = self._random()
        return federate(data, self.partition, self.clients)

    def _random(self) -> Dataset:
        random = np.random.default_rng(0)
        y = torch.from_numpy(np.resize(np.arange(self.classes), self.samples))
        if self.vocabulary:
            # As news are: 20 to 66 words, the n-th most frequent one with probability about 1/n, and padding.
            words = self.vocabulary ** random.random((self.samples, *self.shape), dtype=np.float32)
            lengths = random.integers(20, 67, (self.samples, 1))
            x = torch.from_numpy(
                np.where(np.arange(self.shape[0]) < lengths, words, 0).astype(np.int32)
            )
        else:
            x = torch.from_numpy(
                random.integers(0, 256, (self.samples, *self.shape), dtype=np.uint8)
            )
        return Dataset(f"random {self.dataset}", x, y, self.classes, vocabulary=self.vocabulary)

    def _population(self) -> Federation:
        """Very many clients of sixty samples each, drawn from one pool: they may share samples, which costs nothing less."""
        data, random = self._random(), np.random.default_rng(0)
        rows = [random.integers(0, self.samples, 60) for _ in range(self.clients)]
        empty = tuple(row[:0] for row in rows)
        return Federation(
            data, tuple(row[:45] for row in rows), tuple(row[45:] for row in rows), empty
        )


MNIST = Case("mnist, fedala", "mnist", (1, 28, 28), 10, 70_000, lr=0.1)
CIFAR = Case("cifar10, fedala", "cifar10", (3, 32, 32), 10, 60_000)
CASES = (
    replace(MNIST, name="mnist, fedavg", method="fedavg"),
    MNIST,
    replace(MNIST, name="mnist, fedala, 5 seeds", seeds=5, plain=False),
    CIFAR,
    replace(CIFAR, name="cifar100, fedala", dataset="cifar100", classes=100),
    Case("resnet18, fedala", "tiny-imagenet", (3, 64, 64), 200, 13_340, "resnet18", partition="iid", lr=0.1),
    Case("fasttext, fedala", "ag_news", (200,), 4, 127_600, "fasttext", lr=0.1, vocabulary=98_635),
    replace(MNIST, name="1,001 clients, 100 joining", clients=1_001, join_ratio=0.0999, plain=False),
    replace(MNIST, name="100,000 clients, 100 joining", clients=100_000, join_ratio=0.001, plain=False),
)  # fmt: skip
QUICK = tuple(
    Case(f"small mnist, {method}", "mnist", (1, 28, 28), 10, 2_000, method=method, lr=0.1)
    for method in ("fedavg", "fedala")
)


@dataclass(frozen=True)
class Figures:
    """Seconds: until the first round is done, the round of ALA's initial stage, a steady round, and the plain loop's."""

    case: str
    device: str
    precision: str
    start: float
    initial: float
    steady: float
    plain: float | None
    accuracy: float

    @property
    def speedup(self) -> float | None:
        return None if self.plain is None else self.plain / self.steady


def measure(
    case: Case,
    *,
    device: str = "auto",
    precision: str = "float32",
    data_dir: Path | None = None,
    rounds: int = 6,
    plain: bool = True,
) -> Figures:
    """Runs a case for some rounds, and the plain loop for two."""
    federation = case.federation(data_dir)
    options: dict[str, Any] = {
        "method": case.method, "dataset": case.dataset, "model": case.model, "lr": case.lr, "rounds": rounds, "seeds": case.seeds,
        "device": device, "precision": precision, "join_ratio": case.join_ratio,
    }  # fmt: skip
    options["eval_clients"] = "joined" if case.join_ratio < 1 else "all"
    began = time.perf_counter()
    checked = plan(Config.from_values(options), federation)
    simulation = build_simulation(checked, checked.methods[0])
    seconds = []
    accuracy = 0.0
    for round in range(1, rounds + 1):
        before = began if round == 1 else time.perf_counter()
        accuracy = simulation.step(round, train=True)[0].row.accuracy
        _wait(checked.device)
        seconds.append(time.perf_counter() - before)
    steady = statistics.median(seconds[2:])
    own = _plain(case, federation, checked.device) if plain and case.plain else None
    name = (
        torch.cuda.get_device_name()
        if checked.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return Figures(case.name, name, precision, seconds[0], seconds[1], steady, own, accuracy)


def _plain(case: Case, federation: Federation, device: torch.device) -> float:
    data = federation.dataset
    x = (
        (data.x.to(device).float() / 255 - 0.5) / 0.5
        if data.x.dtype == torch.uint8
        else data.x.to(device)
    )
    y = data.y.to(device)

    def parts(rows: tuple[np.ndarray, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (x[torch.as_tensor(r, device=device)], y[torch.as_tensor(r, device=device)])
            for r in rows
        ]

    model = build_model(case.model, data).to(device)
    train, test = parts(federation.train), parts(federation.test)
    loop = PlainLoop(model, train, test, ala="fedala" in case.method, lr=case.lr)
    loop.round()
    began = time.perf_counter()
    loop.round()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def markdown(figures: list[Figures]) -> str:
    """The table that stands in benchmarks/RESULTS.md."""
    lines = [
        "| case | device | precision | start, s | initial stage, s | round, s | plain loop, s | faster |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        plain = "" if f.plain is None else f"{f.plain:.2f}"
        faster = "" if f.speedup is None else f"{f.speedup:.1f} ×"
        lines.append(
            f"| {f.case} | {f.device} | {f.precision} | {f.start:.1f} | {f.initial:.3f} | {f.steady:.3f} | {plain} | {faster} |"
        )
    return "\n".join(lines) + "\n"
