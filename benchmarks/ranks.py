"""One run over several ranks against one process: the largest differences, and seconds a round.

    python benchmarks/ranks.py                       # all methods, 1, 2 and 4 ranks, gloo
    python benchmarks/ranks.py --device cuda         # ranks that share a GPU, or have one each
    python benchmarks/ranks.py --speed               # seconds a round: threads against ranks
    python benchmarks/ranks.py --widths              # seconds a round by the clients of one device
    python benchmarks/ranks.py --latency             # seconds of a command to all ranks (gloo)

Everything runs by torchrun in real processes. The table is Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fedala.data import Dataset, Federation
from fedala.methods import make
from fedala.ranks.group import RankGroup, is_started_by_torchrun
from fedala.ranks.lead import Leader, dismiss, serve
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver
from fedala.runs.plan import plan

QUICK = {"fedavg-c.epochs": 2, "fedprox-c.epochs": 2}


def list_jobs(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return the configs to run: every method, with all and with half of the clients.

    Methods that the model does not allow are left out, with a sentence.
    """
    common = {
        "dataset": "digits", "model": arguments.model, "partition": "dir:0.3", "clients": 8,
        "rounds": 3, "batch_size": 20, "lr": 0.05, "device": arguments.device, "save_models": True,
    }  # fmt: skip
    names = arguments.method
    if not names:
        possible = plan(Config.from_values({**common, "method": "all"}))
        names = possible.config.methods
        print("\n".join(possible.notes))
    jobs = []
    for precision in arguments.precision:
        for name in names:
            base = name.partition("+")[0]
            for ratio in (1.0, 0.5):
                if ratio < 1 and make(name).requires_all_clients:
                    continue
                settings = {k: v for k, v in QUICK.items() if k.startswith(f"{base}.")}
                own = {"method": name, "join_ratio": ratio, "precision": precision, "set": settings}
                jobs.append({**common, **own})
    return jobs


def carry_out(jobs: list[dict[str, object]], out: Path) -> None:
    """Run all jobs in this process, or as one of several ranks; rank 0 writes the results."""
    group = RankGroup() if is_started_by_torchrun() else None
    if group and "latency" in jobs[0]:
        seconds = time_commands(group)
        if group.rank == 0:
            save_file({"seconds": seconds}, out / "0.safetensors")
        return group.leave()
    for number, job in enumerate(jobs):
        if group and group.rank:
            serve(group)
            continue
        config = Config.from_values(job)
        leader = Leader(group) if group else None
        checked = leader.plan(config) if leader else plan(config)
        options = {"simulate": leader.simulate} if leader else {}
        began = time.perf_counter()
        [result] = execute(checked, None, **options).methods.values()
        seconds = time.perf_counter() - began
        tensors = {
            f"{client}/{name}": value.contiguous()
            for (_, client), model in result.models.items()
            for name, value in model.items()
        }
        rows = [[row.score, row.loss] for row in result.history]
        rounds = [row.seconds for row in result.history[2:-1]]
        tensors["history"] = torch.tensor(rows, dtype=torch.float64)
        tensors["seconds"] = torch.tensor([seconds, sum(rounds) / max(1, len(rounds))])
        save_file(tensors, out / f"{number}.safetensors")
        if group:
            dismiss(group)
    if group:
        group.leave()


def start(jobs: list[dict[str, object]], ranks: int, threads: int = 1) -> list[dict[str, object]]:
    """Run all jobs with so many ranks (0: in one process without torchrun)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "jobs.json").write_text(json.dumps(jobs))
        program = [sys.executable]
        if ranks:
            program += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*program, __file__, "--child", folder], check=True, env=environment)
        return [load_file(Path(folder) / f"{number}.safetensors") for number in range(len(jobs))]


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between any two numbers of models and history."""
    assert found.keys() == expected.keys()
    return max(
        (found[name].double() - expected[name].double()).abs().max().item()
        for name in expected.keys() - {"seconds"}
    )


def compare(arguments: argparse.Namespace) -> None:
    jobs = list_jobs(arguments)
    expected = start(jobs, 0)
    found = {ranks: start(jobs, ranks) for ranks in arguments.ranks}
    print("| method | ρ | precision |" + "".join(f" {r} ranks |" for r in arguments.ranks))
    print("|---|---|---|" + "---|" * len(arguments.ranks))
    worst: dict[str, float] = {}
    for number, job in enumerate(jobs):
        row = f"| {job['method']} | {job['join_ratio']} | {job['precision']} |"
        for ranks in arguments.ranks:
            difference = largest_difference(found[ranks][number], expected[number])
            precision = str(job["precision"])
            worst[precision] = max(worst.get(precision, 0.0), difference)
            row += f" {difference:.1e} |"
        print(row)
    print(f"\nThe largest of each precision: {worst}")


def measure(arguments: argparse.Namespace) -> None:
    """Print the seconds of a round: threads of one process against ranks of one thread each."""
    job = {
        "method": "fedala", "dataset": "digits", "model": arguments.model, "clients": 20,
        "partition": "dir:0.1", "rounds": 12, "device": arguments.device, "save_models": False,
    }  # fmt: skip
    cores = os.cpu_count() or 1
    print("| clients' work | seconds a round |\n|---|---|")
    for ranks in (0, *arguments.ranks):
        [result] = start([job], ranks, threads=max(1, cores // max(1, ranks)))
        name = f"{ranks} ranks" if ranks else f"one process, {cores} threads"
        print(f"| {name} | {result['seconds'][1]:.3f} |", flush=True)


def measure_widths(arguments: argparse.Namespace) -> None:
    """Print the seconds of a round on one device, by the number of clients that train on it."""
    print("| clients on a device | FedAvg, seconds a round | FedALA |\n|---|---|---|")
    for clients in (1, 2, 5, 10, 20, 40, 80, 160, 320, 640):
        federation = make_federation(clients)
        row = f"| {clients} |"
        for method in ("fedavg", "fedala"):
            options = {"method": method, "model": "cnn", "rounds": 8, "eval_every": 8, "lr": 0.01}
            config = Config.from_values(
                {**options, "device": arguments.device, "save_models": False}
            )
            ends: list[float] = []
            observer = RunObserver(should_stop=partial(note_time, ends))
            execute(plan(config, federation), None, observer=observer)
            row += f" {statistics.median(b - a for a, b in pairwise(ends[2:])):.4f} |"
        print(row, flush=True)


def note_time(ends: list[float]) -> bool:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ends.append(time.perf_counter())
    return False


def make_federation(clients: int, samples: int = 500) -> Federation:
    """Return clients with random images, as many for each as a client of CIFAR-10 has."""
    generator = torch.Generator().manual_seed(0)
    count = clients * samples
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.arange(count) % 10
    rows = np.arange(count).reshape(clients, samples)
    none = tuple(np.arange(0) for _ in range(clients))
    return Federation(Dataset("random", x, y, 10), tuple(rows), tuple(rows[:, :100]), none)


def measure_latency(arguments: argparse.Namespace) -> None:
    """Print what it takes to give a command to all ranks and to get their replies."""
    print(
        "| ranks | command, ms | command and replies, ms | sum of 2.3 MB, ms |\n|---|---|---|---|"
    )
    for ranks in arguments.ranks:
        [result] = start([{"latency": True}], ranks)
        print(f"| {ranks} |" + "".join(f" {1e3 * one:.2f} |" for one in result["seconds"].tolist()))


def time_commands(group: RankGroup) -> torch.Tensor:
    tree = {"weights": torch.zeros(582_026)}

    def call() -> None:
        group.share(("released", "name", tuple(range(20))))
        group.gather(list(range(20)))

    for size in (0, 1, 10**6):  # an object may be longer than a slot
        assert group.share(bytes(size)) == bytes(size)
        assert group.gather(bytes(size)) == [bytes(size)] * (group.size if group.rank == 0 else 0)
    found = []
    for work in (lambda: group.share(tuple(range(20))), call, lambda: group.add_trees(tree)):
        for _ in range(20):
            work()
        began = time.perf_counter()
        for _ in range(200):
            work()
        group.gather(None)
        found.append((time.perf_counter() - began) / 200)
    return torch.tensor(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--precision", nargs="+", default=["float64", "float32"])
    parser.add_argument("--method", nargs="+")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--widths", action="store_true")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        carry_out(json.loads((arguments.child / "jobs.json").read_text()), arguments.child)
    elif arguments.speed:
        measure(arguments)
    elif arguments.widths:
        measure_widths(arguments)
    elif arguments.latency:
        measure_latency(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
