"""Run a tiny model for long: do memory, open files or the time of a round grow?

    python benchmarks/soak.py [ROUNDS] [FOLDER]

Prints resident memory, open files and the median seconds of a round every hundred rounds, and
compares the last figures with the first.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedala import Config
from fedala.data import Dataset, federate
from fedala.records import HistoryRow
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver
from fedala.runs.plan import plan


def build_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))


def resident_memory() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(rounds: int, folder: Path) -> None:
    random = np.random.default_rng(0)
    y = torch.from_numpy(random.integers(0, 3, 600))
    x = (
        torch.from_numpy(random.normal(size=(600, 1, 6, 6)).astype(np.float32))
        + y.view(-1, 1, 1, 1) * 0.5
    )
    data = Dataset("noise", x, y, 3)
    options = {
        "method": "fedala",
        "partition": "iid",
        "clients": 10,
        "rounds": rounds,
        "lr": 0.05,
        "join_ratio": 0.5,
    }
    work = plan(
        Config.from_values({**options, "checkpoint_every": 50}),
        federate(data, "iid", 10),
        build_model,
    )
    every, seconds, seen = max(1, min(100, rounds // 4)), [], []

    def record(method: str, row: HistoryRow) -> None:
        seconds.append(row.seconds)
        if row.round and row.round % every == 0:
            files = len(os.listdir("/proc/self/fd"))
            seen.append((resident_memory(), files, statistics.median(seconds[-every:])))
            print(
                f"round {row.round:5}: {seen[-1][0]:7.1f} MiB, {files} open files, "
                f"{1000 * seen[-1][2]:.2f} ms"
            )

    execute(work, folder, observer=RunObserver(on_row=record))
    first, last = seen[0], seen[-1]
    print(
        f"last to first: memory {last[0] / first[0]:.4f}, open files {last[1] - first[1]:+}, "
        f"time {last[2] / first[2]:.2f}"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(temporary) / "run"
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, where)
