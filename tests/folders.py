"""Run folders made up in a moment: what a run would have written, without running it."""

from pathlib import Path

import numpy as np
import torch

from fedala.data import Dataset, federate
from fedala.records import HistoryRow, ModelFigures, WeightSummary
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder


def accuracy(method: str, seed: int, round: int) -> float:
    """A learning curve that is different for every method and seed."""
    return round / (round + 1 + len(method) / 4) + 0.01 * seed


def weights_of(shares: np.ndarray, parameters: tuple[str, ...]) -> list[WeightSummary]:
    """How W is spread, from [client, parameter, share]."""
    return [
        WeightSummary(client, name, 0.5, shares[client, k].tolist())
        for client in range(len(shares))
        for k, name in enumerate(parameters)
    ]


def made_up(
    path: Path,
    methods: tuple[str, ...] = ("fedala", "fedavg", "local"),
    *,
    seeds: int = 2,
    rounds: int = 6,
    reached: int | None = None,
    clients: int = 4,
    parameters: tuple[str, ...] = ("fc.weight", "fc.bias"),
    class_names: tuple[str, ...] = (),
    sealed: bool = False,
    has_metrics: bool = False,
    **options: object,
) -> RunFolder:
    """Make a folder in which the last method got as far as `reached`.

    It then has no summary and no last evaluation.

    Without `sealed` it has no digests, so that a test may write into it as it likes.
    """
    options = {"partition": "dir:0.1", **options}
    config = Config(
        method=",".join(methods),
        rounds=rounds,
        seeds=seeds,
        clients=clients,
        model="cnn",
        **options,
    )
    with RunFolder.create(path, config, force=False) as folder:
        pass  # nobody else works in it
    random = np.random.default_rng(0)
    dataset = Dataset("made up", torch.zeros(60, 2), torch.arange(60) % 3, 3, class_names)
    folder.tables.write_split(federate(dataset, "dir:1", clients))
    for method in methods:
        last = rounds if reached is None or method != methods[-1] else reached
        for round in range(last + 1):
            for seed in range(seeds):
                value = accuracy(method, seed, round)
                shares = random.dirichlet(np.ones(10), (clients, len(parameters)))
                has_weights = "ala" in method
                row = HistoryRow(
                    seed, round, value, 2 - value, value, sent=10, uploaded=10, seconds=0.5,
                    metrics={"ala_weight": 0.5} if has_weights else {},
                )  # fmt: skip
                folder.tables.add_history(method, row)
                if has_weights:
                    folder.tables.add_weights(method, row, weights_of(shares, parameters))
                if round == rounds:
                    correct = np.minimum(10, np.floor(10 * value) + np.arange(clients) % 2)
                    scores = np.stack([correct, 10 - correct, np.full(clients, 10.0)], 1)
                    folder.tables.add_clients(method, row, scores)
                    figures = {"samples": 10 * clients, "accuracy": value, "f1": value / 2}
                    models = [ModelFigures("initialized", figures)]
                    folder.tables.add_metrics(method, row, models if has_metrics else [])
        folder.record_progress([method], is_finished=last == rounds)
    if reached is None:
        versions = {"python": "3", "torch": "2", "commit": None}
        folder.write_summary(
            {"methods": {}, "seconds": 12.0, "command": "fedala run", "versions": versions}
        )
    if not sealed:
        (path / "digests.json").unlink()
    return RunFolder(path)
