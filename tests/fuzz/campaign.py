"""The long form: `python -m fuzz.campaign MINUTES [TARGET …]`."""

import argparse
import collections
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from fuzz.bounded import attempt
from fuzz.targets import secret, targets

torch.set_num_threads(1)


def warm() -> None:
    """Imports here, once, what every case would import again."""
    import matplotlib.figure  # noqa: F401
    import PIL.Image
    import pyarrow.parquet  # noqa: F401
    import sklearn.datasets  # noqa: F401

    PIL.Image.init()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [targets()[name] for name in options.targets] if options.targets else list(targets().values())
    warm()
    end = time.monotonic() + 60 * options.minutes
    tried: collections.Counter[str] = collections.Counter()
    loaded: collections.Counter[str] = collections.Counter()
    faults: dict[str, str] = {}
    slowest = 0.0
    case = options.seed
    while time.monotonic() < end:
        for target in chosen:
            rng = random.Random(f"{target.name} {case}")
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "here"
                folder.mkdir()
                secret(Path(place) / "secret")
                target.write(folder, rng)
                outcome = attempt(list(target.arguments), folder, before=target.before)
            tried[target.name] += 1
            loaded[target.name] += outcome.code == 0
            slowest = max(slowest, outcome.seconds)
            if outcome.fault:
                last = outcome.says.strip().splitlines()[-1][:200] if outcome.says.strip() else ""
                key = f"{target.name}: {outcome.fault}: {last[:100]}"
                if key not in faults:
                    faults[key] = outcome.says
                    print(f"--- case {case} {key}\n{outcome.says[-1800:]!a}".replace("\\n", "\n"), flush=True)
        case += 1
    print(f"{sum(tried.values())} inputs, {len(faults)} kinds of fault, slowest {slowest:.1f} s")
    for name in tried:
        print(f"{name:16} {tried[name]:7} tried {loaded[name]:7} loaded")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
