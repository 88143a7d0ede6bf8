"""The long form of the fuzz tests: `python -m fuzz.campaign MINUTES [TARGET …]`, or `make fuzz`."""

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from fuzz.bounded import Outcome, attempt
from fuzz.targets import Target, secret, targets

# Imported here, once: every case would import it again.
for _name in ("matplotlib.figure", "PIL.Image", "pydantic", "sklearn.datasets", "torch._dynamo"):
    importlib.import_module(_name)


def case(target: Target, rng: random.Random) -> Outcome:
    """One damaged input, and what became of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "here")
        folder.mkdir()
        secret(Path(place, "secret"))
        target.write(folder, rng)
        return attempt(target.command(rng), folder, before=target.before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float)
    parser.add_argument("targets", nargs="*", help=", ".join(targets()))
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [targets()[name] for name in options.targets or targets()]
    end, number, slowest = time.monotonic() + 60 * options.minutes, options.seed, 0.0
    tried, read, faults = Counter[str](), Counter[str](), Counter[str]()
    while time.monotonic() < end:
        for target in chosen:
            outcome = case(target, random.Random(f"{target.name} {number}"))
            tried[target.name] += 1
            read[target.name] += outcome.code == 0
            slowest = max(slowest, outcome.seconds)
            if outcome.fault:
                kind = f"{target.name}: {outcome.fault}: {outcome.says.strip()[-80:]!a}"
                if not faults[kind]:
                    print(
                        f"--- case {number}, {kind}\n{outcome.says[-2000:]!a}".replace("\\n", "\n"),
                        flush=True,
                    )
                faults[kind] += 1
        number += 1
    for name in tried:
        print(f"{name:16} {tried[name]:7} tried {read[name]:7} read, the others refused")
    print(f"{tried.total()} inputs, {faults.total()} faults, slowest {slowest:.1f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
