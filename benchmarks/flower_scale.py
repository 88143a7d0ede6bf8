"""Measure seconds per round of many clients: Flower's simulation engine against `fedala run`.

    python benchmarks/flower_scale.py --nodes 100 1000 --rounds 10

Both run FedALA on the same federation with the same config: forty samples of 16 features per
client, an MLP, ten participants per round, one thread per process. The engine runs the app that
`fedala flower new` writes, with one Ray actor per core. The seconds are those of `history.csv`,
without the first round, in which all clients test the initial model. The start is everything
before the first round: Flower, Ray, and the introduction of every node.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedala.flower.local import OFFLINE_ENVIRONMENT, find_program
from fedala.flower.processes import FAMILY, kill_family
from fedala.runs.folder import RunFolder

UNAVAILABLE = "Connection to the SuperLink is unavailable"
SAMPLES, FEATURES, CLASSES, PARTICIPANTS = 40, 16, 4, 10


def write_data(path: Path, clients: int) -> None:
    """Write samples that a small model can learn."""
    random = np.random.default_rng(0)
    y = random.integers(0, CLASSES, clients * SAMPLES)
    centres = random.normal(size=(CLASSES, FEATURES))
    x = (centres[y] + random.normal(size=(len(y), FEATURES))).astype(np.float32)
    np.savez(path, x=x, y=y)


def list_options(data: Path, clients: int, rounds: int) -> list[str]:
    """Return the options of a run, which both have."""
    values = {
        "method": "fedala", "dataset": str(data), "partition": "iid", "clients": clients,
        "model": "mlp", "join_ratio": PARTICIPANTS / clients, "rounds": rounds, "batch_size": 10,
        "normalize": "none",
    }  # fmt: skip
    options = []
    for name, value in values.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    return options


def run_fedala(folder: Path, *arguments: str) -> None:
    """Run a command of fedala."""
    command = [sys.executable, "-m", "fedala", *arguments]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)


def run_engine(folder: Path, nodes: int) -> float:
    """Run the app in Flower's simulation engine; return the seconds from start to end."""
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\noptions.num-supernodes = {nodes}\n'
        "options.backend.client-resources.num-cpus = 1\n"
    )
    environment = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    environment["XDG_STATE_HOME"] = str(folder / "state")
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(path)
    command = [find_program("flwr"), "run", "app", "local", "--stream"]
    options = ["--run-config", f"out='{folder}' experiment='there'"]
    environment[FAMILY] = f"{folder}/engine"
    log, text = folder / "engine.log", UNAVAILABLE
    try:
        while UNAVAILABLE in text:  # on a busy machine, flwr does not wait until its SuperLink runs
            with log.open("wb") as file:
                start = time.perf_counter()
                whole = [*command, *options]
                subprocess.run(whole, env=environment, cwd=folder, stdout=file, stderr=file)
            text = log.read_text()
    finally:
        kill_family(f"{folder}/engine")  # Flower leaves a SuperLink running
    if not (folder / "there" / "summary.json").exists():
        sys.exit(text[-3000:])
    return time.perf_counter() - start


def measure(folder: Path) -> tuple[float, float]:
    """Return the median seconds of a round, and those of all rounds."""
    [rows] = RunFolder(folder).history().values()
    return statistics.median(row.seconds for row in rows[1:-1]), sum(row.seconds for row in rows)


def compare(nodes: int, rounds: int) -> str:
    """Run both, and return a line of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder / "data.npz", nodes)
        options = list_options(folder / "data.npz", nodes, rounds)
        run_fedala(folder, "run", *options, "--out", "here")
        run_fedala(folder, "flower", "new", "app", *options)
        whole = run_engine(folder, nodes)
        here, _ = measure(folder / "here")
        engine, total = measure(folder / "there")
    share = f"{engine:.2f} | {here:.3f} | {whole - total:.0f}"
    return f"| {nodes} | {share} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| nodes | simulation engine, s/round | fedala run, s/round | start and end, s |")
    print("|---|---|---|---|")
    for nodes in options.nodes:
        print(compare(nodes, options.rounds), flush=True)


if __name__ == "__main__":
    main()
