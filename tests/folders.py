"""Run folders made up in a moment: what a run would have written, without running it."""

from pathlib import Path

import numpy as np
import torch

from fedala.data import Dataset, federate
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder


def accuracy(method: str, seed: int, round: int) -> float:
    """A learning curve that is different for every method and seed."""
    return round / (round + 1 + len(method) / 4) + 0.01 * seed


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
    **options: object,
) -> RunFolder:
    """A folder in which the last method got as far as `reached`; then there is no summary, nor its last evaluation.

    Without `sealed` it has no digests, so that a test may write into it as it likes.
    """
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
    folder.write_split(federate(dataset, "dir:1", clients))
    for method in methods:
        last = rounds if reached is None or method != methods[-1] else reached
        for round in range(last + 1):
            for seed in range(seeds):
                value = accuracy(method, seed, round)
                row = {
                    "seed": seed,
                    "round": round,
                    "accuracy": value,
                    "loss": 2 - value,
                    "accuracy_joined": value,
                }
                row |= {"sent": 10, "uploaded": 10, "seconds": 0.5}
                share = random.dirichlet(np.ones(10), (clients, len(parameters)))
                if "ala" in method:
                    lines = [
                        (client, name, [0.5, *share[client, k]])
                        for client in range(clients)
                        for k, name in enumerate(parameters)
                    ]
                    row |= {"ala_weight": 0.5, "weights": lines}
                folder.add_history(method, [row])
                folder.add_weights(method, row)
                if round == rounds:
                    correct = np.minimum(10, np.floor(10 * value) + np.arange(clients) % 2)
                    row["clients"] = np.stack([correct, 10 - correct, np.full(clients, 10.0)], 1)
                    folder.add_clients(method, row)
        folder.seal(method, finished=last == rounds)
    if reached is None:
        versions = {"python": "3", "torch": "2", "commit": None}
        folder.write_summary(
            {"methods": {}, "seconds": 12.0, "command": "fedala run", "versions": versions}
        )
    if not sealed:
        (path / "digests.json").unlink()
    return RunFolder(path)
