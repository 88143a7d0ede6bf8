"""Where the time of a round goes on a GPU, kernel by kernel, against what the GPU can do.

    python benchmarks/kernel_profile.py --case "mnist, fedala" --case "mnist, fedala, 5 seeds"

For each case: the median of some rounds, and one profiled round: how long the device was busy, and
its kernels by their share. The ceilings (matrix products, copies) are measured in the same process.
`--kernels 0` measures the rounds alone.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedala.bench.cases import CASES, Case, load_real_data
from fedala.errors import UserError
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.plan import plan


def time_kernel(work: Callable[[], Any], repeats: int = 20) -> float:
    """Return the seconds of some work on the device."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def report_ceilings() -> None:
    """Print what large matrix products and copies reach."""
    a = torch.randn(8192, 8192, device="cuda")
    for name, allowed in (("float32", False), ("tf32", True)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        seconds = time_kernel(lambda: a @ a, 5)
        print(f"ceiling, {name} matrix product: {2 * 8192**3 / seconds / 1e12:.0f} TFLOP/s")
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    seconds = time_kernel(lambda: target.copy_(source), 5)
    print(f"ceiling, copy: {8 * 2**30 / seconds / 1e12:.2f} TB/s (read and written)", flush=True)


def build(case: Case, data_dir: str | None) -> Any:
    """Return the simulation of a case."""
    real = None
    with suppress(UserError):  # there are no such samples: random ones then
        real = load_real_data([case], Path(data_dir))[0].get(case.dataset) if data_dir else None
    options = {
        "method": case.method, "dataset": case.dataset, "model": case.model, "lr": case.lr,
        "rounds": 1000, "seeds": case.seeds, "device": "cuda", "join_ratio": case.join_ratio,
        "eval_clients": "joined" if case.join_ratio < 1 else "all", **case.options,
    }  # fmt: skip
    checked = plan(Config.from_values(options), case.build_federation(real))
    [group] = checked.groups
    return build_simulation(
        checked.for_group(group), group.members[0].method, variants=group.variants
    )


def count_training_flops(simulation: Any) -> float:
    """Return the arithmetic of a round's training: three forward passes a sample."""
    task, setup = simulation.setup.task, simulation.setup
    row = torch.zeros(1, dtype=torch.int64, device=task.device)
    with FlopCounterMode(display=False) as counter:
        task.model(task.inputs(row).to("meta"))  # the skeleton has no weights
    sizes = [len(rows) // task.batch_size * task.batch_size for rows in task.parts["train"]]
    joined = round(setup.join_ratio * len(sizes)) / len(sizes)
    return 3 * counter.get_total_flops() * sum(sizes) * joined * len(setup.seeds)


def run_rounds(simulation: Any, first: int, count: int) -> list[float]:
    """Return the seconds of some rounds."""
    seconds = []
    for round in range(first, first + count):
        began = time.perf_counter()
        simulation.step(round, train=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def list_kernels(simulation: Any, round: int) -> tuple[list[tuple[str, int, float]], float]:
    """Return (name, calls, ms) of one round's kernels, and the ms in which any of them ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run_rounds(simulation, round, 1)
    calls: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            calls[event.name].append(event.time_range.end - event.time_range.start)
    busy, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    rows = [(name, len(own), sum(own) / 1e3) for name, own in calls.items()]
    return sorted(rows, key=lambda row: -row[2]), busy / 1e3


def report_kernels(simulation: Any, round: int, most: int) -> None:
    """Print the kernels of one round that take the most time."""
    kernels, busy = list_kernels(simulation, round)
    total, launches = sum(row[2] for row in kernels), sum(row[1] for row in kernels)
    print(f"device busy {busy:.1f} ms, kernels {total:.1f} ms, {launches} launches\n")
    print("| kernel | calls | ms | µs each |\n|---|---|---|---|")
    for name, count, ms in kernels[:most]:
        print(f"| `{name[:90]}` | {count} | {ms:.2f} | {ms / count * 1e3:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", help="a case of `fedala bench`; default: all")
    parser.add_argument("--data-dir", help="real samples, where a case has them")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=25, help="rows of the kernel table")
    args = parser.parse_args()
    if args.kernels:
        report_ceilings()
    for case in CASES:
        if args.case and case.name not in args.case:
            continue
        began = time.perf_counter()
        simulation = build(case, args.data_dir)
        run_rounds(simulation, 1, 1)
        start = time.perf_counter() - began
        run_rounds(simulation, 2, 2)
        median = statistics.median(run_rounds(simulation, 4, args.rounds))
        print(f"\n## {case.name}: {median * 1e3:.1f} ms a round, start {start:.1f} s")
        flops = count_training_flops(simulation)
        print(f"training: {flops / 1e12:.2f} TFLOP, {flops / median / 1e12:.1f} TFLOP/s")
        if args.kernels:
            report_kernels(simulation, 4 + args.rounds, args.kernels)
        del simulation
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
