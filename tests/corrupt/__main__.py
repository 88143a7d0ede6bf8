"""`python -m corrupt`, or `make corrupt`: try every file × damage × command that reads it."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from corrupt.judge import BAD, GOOD, Judge, cases
from corrupt.worlds import build
from fuzz import bounded


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m corrupt", description=__doc__)
    parser.add_argument(
        "worlds", nargs="*", help="finished, stopped, 'cells', 'stopped cell', csv; all by default"
    )
    parser.add_argument(
        "--only", help="the cases whose line contains this text, such as 'history.csv | empty'"
    )
    parser.add_argument("--share", type=int, default=1, help="try only every N-th case")
    parser.add_argument(
        "--keep", type=Path, help="leave the damaged folder of the (last) case here"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    bounded.SECONDS = 60
    began = time.monotonic()
    counts: dict[tuple[str, str], Counter[str]] = {}
    faults = []
    memory = Path("/dev/shm")  # in memory: thousands of small folders are written
    with tempfile.TemporaryDirectory(
        prefix="corrupt-", dir=memory if memory.is_dir() else None
    ) as place:
        judge = Judge(Path(place))
        worlds = build(Path(place), options.worlds)
        bounded.SECONDS = 10
        for number, case in enumerate(cases(worlds)):
            if number % options.share or (options.only and options.only not in str(case)):
                continue
            verdict, why = judge.judge(case, options.keep)
            if verdict == "hang":  # or the machine was busy
                verdict, why = judge.judge(case)
            counts.setdefault((case.world.name, case.command.name), Counter())[verdict] += 1
            if verdict in BAD or options.only:
                faults.append(verdict) if verdict in BAD else None
                print(f"{verdict.upper()}: {case}\n    {why}", flush=True)
    names = (*GOOD, *BAD)
    print(
        f"\n{'folder':14}{'command':26}{'cases':>7}"
        + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in names)
    )
    total = Counter[str]()
    for (world, command), counted in counts.items():
        print(_line(world, command, counted))
        total += counted
    print(_line("together", "", total))
    print(
        f"{total.total()} cases, {len(faults)} faults, {time.monotonic() - began:.0f} s. "
        "Repeat one with --only 'LINE'."
    )
    return 1 if faults else 0


def _line(world: str, command: str, counted: Counter[str]) -> str:
    cells = "".join(f"{counted[name]:>{max(9, len(name) + 2)}}" for name in (*GOOD, *BAD))
    return f"{world:14}{command:26}{counted.total():7}{cells}"


if __name__ == "__main__":
    sys.exit(main())
