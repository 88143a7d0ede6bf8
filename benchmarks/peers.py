"""Seconds of a round, side by side with other frameworks that run from their source.

    python benchmarks/peers.py --out peers --pfllib DIR --fl-bench DIR --fluke DIR --pfl DIR
    python benchmarks/peers.py --out peers --quick --device cpu …    # a few minutes
    python benchmarks/peers.py --out peers --part 8 --limit 45 --minutes 2.8 …    # a GPU's time

Every framework gets the same samples, the same clients, the paper's CNN, batches of ten, one epoch
and plain SGD, and runs alone, unmodified, in a process of its own (`peer_runs.py`). The accuracy
after the same number of rounds stands beside the time, and the load of the machine before and
after.

- mnist: 20 clients, Dir(0.1), all of them joining, lr 0.005, evaluated in every round. The samples
  are the MNIST files that PFLlib comes with, as it divided them, or else synthetic ones. With
  --part 8, every framework has an eighth of each client's, so that their proportions stay.
- cifar: 1,000 clients of 50 samples, 50 joining, lr 0.1, evaluated at the end: the setting of
  pfl-research, with synthetic images of CIFAR's shape.

A framework whose folder is not given, or that fails, is in the table with the reason. A finished
run is a line of peers.jsonl; the same command again does what is missing.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedala
from fedala.data import Dataset, federate
from fedala.data.pfllib import convert_pfllib

WARM_UP = 2  # rounds: the start, and FedALA's initial stage
DRIVER = Path(__file__).with_name("peer_runs.py")
PACKAGE_ROOT = Path(fedala.__file__).parents[1]
FIGURES = ("version", "stand_ins", "accuracy", "reason")  # of a run, not of its rounds
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    name: str
    joined: int
    lr: float
    rounds: int
    evaluates: bool
    data: str  # in words


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    setting: str
    framework: str
    method: str
    evaluates: bool = True

    @property
    def key(self) -> str:
        return f"{self.setting}, {self.framework}, {self.title}"

    @property
    def title(self) -> str:
        is_reduced = self.setting == "mnist" and not self.evaluates
        return f"{self.method}, not evaluated" if is_reduced else self.method


RUNS = (
    Run("mnist", "fedala", "FedAvg"),
    Run("mnist", "fedala", "FedALA"),
    Run("mnist", "PFLlib", "FedAvg"),
    Run("mnist", "fluke", "FedAvg"),
    Run("mnist", "FL-bench", "FedAvg"),
    Run("mnist", "pfl-research", "FedAvg"),
    Run("mnist", "PFLlib", "FedALA"),
    Run("cifar", "fedala", "FedAvg", evaluates=False),
    Run("cifar", "pfl-research", "FedAvg", evaluates=False),
    Run("cifar", "fluke", "FedAvg", evaluates=False),
    Run("cifar", "FL-bench", "FedAvg", evaluates=False),
    Run("cifar", "PFLlib", "FedAvg", evaluates=False),
    Run("mnist", "fedala", "FedAvg", evaluates=False),
)
OPTIONS = {"PFLlib": "pfllib", "FL-bench": "fl_bench", "fluke": "fluke", "pfl-research": "pfl"}


def make_images(count: int, shape: tuple[int, int, int], seed: int = 0) -> tuple[Any, Any]:
    """Return bytes and labels: a blurred pattern for each class, with noise that hides some."""
    random = np.random.default_rng(seed)
    channels, side, _ = shape
    coarse = random.uniform(0, 255, (10, channels, side // 4, side // 4))
    patterns = coarse.repeat(4, axis=2).repeat(4, axis=3)
    y = np.resize(np.arange(10), count)
    x = np.empty((count, *shape), dtype=np.uint8)
    for part in np.array_split(np.arange(count), max(1, count // 5000)):
        noise = random.normal(0, 110, (len(part), *shape))
        x[part] = np.clip(0.5 * patterns[y[part]] + 64 + noise, 0, 255)
    return x, y


def make_cifar(is_quick: bool) -> Arrays:
    """Return synthetic samples of 1,000 clients: 50 to train and 17 to test each."""
    clients, train, test = (100, 20, 5) if is_quick else (1000, 50, 17)
    x, y = make_images(clients * (train + test), (3, 32, 32))
    order = np.random.default_rng(1).permutation(len(y))
    client = np.repeat(np.arange(clients), train + test)
    is_test = np.tile(np.arange(train + test) >= train, clients)
    return {"x": x[order], "y": y[order], "client": client, "is_test": is_test}


def read_mnist(pfllib: Path) -> Arrays:
    """Return the MNIST files of PFLlib, as its own script divided them among 20 clients."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mnist.npz"
        convert_pfllib(pfllib / "dataset" / "MNIST", path)
        with np.load(path) as found:
            parts = {name: found[name] for name in found.files}

    def join(name: str) -> Any:
        return np.concatenate([parts[f"{name}_train"], parts[f"{name}_test"]])

    x = np.rint((join("x") + 1) / 2 * 255).astype(np.uint8)  # it stores pixels from −1 to 1
    is_test = np.arange(len(x)) >= len(parts["y_train"])
    return {"x": x, "y": join("y"), "client": join("client"), "is_test": is_test}


def make_mnist() -> Arrays:
    """Return synthetic samples of MNIST's shape, divided by Dir(0.1)."""
    x, y = make_images(70_000, (1, 28, 28))
    data = Dataset("synthetic", torch.from_numpy(x), torch.from_numpy(y), 10)
    federation = federate(data, "dir:0.1", 20)
    rows, client, is_test = [], [], []
    for k, parts in enumerate(zip(federation.train, federation.test, strict=True)):
        for part, own in enumerate(parts):
            rows.append(own)
            client.append(np.full(len(own), k))
            is_test.append(np.full(len(own), bool(part)))
    chosen = np.concatenate(rows)
    return {
        "x": x[chosen], "y": y[chosen], "client": np.concatenate(client),
        "is_test": np.concatenate(is_test),
    }  # fmt: skip


def take_few(arrays: Arrays, part: int, train: int | None) -> Arrays:
    """Return one in `part` of each client's samples, at most `train` and a third of it to test."""
    keep = []
    for client in range(arrays["client"].max() + 1):
        for is_test, most in ((False, train), (True, train and train // 3)):
            own = (arrays["client"] == client) & (arrays["is_test"] == is_test)
            keep.append(np.flatnonzero(own)[::part][:most])
    rows = np.concatenate(keep)
    return {name: values[rows] for name, values in arrays.items()}


def make_settings(arguments: argparse.Namespace, folder: Path) -> dict[str, Setting]:
    """Write the samples of the settings that are asked for; return these."""
    settings = {}
    if "mnist" in arguments.setting:
        has_files = arguments.pfllib and (arguments.pfllib / "dataset/MNIST/train/0.npz").exists()
        arrays = read_mnist(arguments.pfllib) if has_files else make_mnist()
        arrays = take_few(arrays, arguments.part, arguments.samples)
        np.savez(folder / "mnist.npz", **arrays)
        what = "MNIST, divided by PFLlib" if has_files else "synthetic, divided by fedala"
        part = f", one sample in {arguments.part}" if arguments.part > 1 else ""
        told = f"{what}{part}: {describe_sizes(arrays)}"
        settings["mnist"] = Setting("mnist", 20, 0.005, arguments.rounds, True, told)
    if "cifar" in arguments.setting:
        arrays = make_cifar(arguments.quick)
        np.savez(folder / "cifar.npz", **arrays)
        joined = 5 if arguments.quick else 50
        told = f"synthetic images: {describe_sizes(arrays)}"
        settings["cifar"] = Setting("cifar", joined, 0.1, arguments.rounds, False, told)
    return settings


def describe_sizes(arrays: Arrays) -> str:
    tests = int(arrays["is_test"].sum())
    clients = int(arrays["client"].max()) + 1
    return f"{clients:,} clients, {len(arrays['y']) - tests:,} training and {tests:,} test samples"


def carry_out(run: Run, setting: Setting, arguments: argparse.Namespace, data: Path) -> Arrays:
    """Run one framework in a process of its own; return what it measured, or why it did not."""
    source = "" if run.framework == "fedala" else getattr(arguments, OPTIONS[run.framework])
    if source is None:
        return {"reason": f"--{OPTIONS[run.framework].replace('_', '-')} was not given"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "framework": run.framework, "method": run.method, "source": str(source),
            "data": str(data / f"{run.setting}.npz"), "folder": str(folder),
            "device": arguments.device, "joined": setting.joined, "lr": setting.lr,
            "rounds": setting.rounds, "evaluates": run.evaluates,
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        environment = dict(os.environ)
        if run.framework == "fedala":
            environment["PYTHONPATH"] = str(PACKAGE_ROOT)
        if arguments.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        limit = min(arguments.limit, max(1.0, arguments.end - time.monotonic()))
        with (folder / "output").open("w") as output:
            child = subprocess.Popen(
                [sys.executable, str(DRIVER), str(folder / "job.json")],
                stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment,
            )  # fmt: skip
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                code = None
        result = summarize(folder / "rounds.jsonl", read_commit(source))
        if code is None and "accuracy" not in result:
            result["reason"] = f"stopped after {limit:.0f} s, in round {result['rounds'] + 1}"
        elif code:
            result["reason"] = f"it failed: {result.get('reason', f'exit status {code}')[:200]}"
            if arguments.verbose:
                print((folder / "output").read_text(errors="replace"), file=sys.stderr)
        return result


def summarize(path: Path, commit: str) -> Arrays:
    """Return the figures of a run from the lines that it wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged: Arrays = {"version": ""}
    for line in lines:
        merged.update({name: line[name] for name in line if name in FIGURES})
    rounds = [line for line in lines if "round" in line]
    merged["version"] = f"{merged['version']} {commit}".strip()
    merged["rounds"] = len(rounds)
    measured = rounds[WARM_UP:]
    if measured:
        seconds = [line["seconds"] for line in measured]
        rest = [line["seconds"] - line["evaluation"] for line in measured]
        merged |= {
            "seconds": statistics.median(seconds), "fastest": min(seconds),
            "slowest": max(seconds), "without_evaluation": statistics.median(rest),
        }  # fmt: skip
    return merged


def read_commit(source: Any) -> str:
    """Return the commit that the file COMMIT beside a framework's source names, if any."""
    path = Path(source or ".") / "COMMIT"
    return path.read_text().strip()[:10] if source and path.exists() else ""


def format_table(
    setting: Setting, results: dict[str, Arrays], arguments: argparse.Namespace
) -> str:
    """Return the rows of a setting as Markdown."""
    evaluated = "evaluated every round" if setting.evaluates else "evaluated at the end"
    lines = [
        f"{setting.name}: {setting.data}; {setting.joined} join, batch 10, lr {setting.lr}, one "
        f"epoch, {evaluated}. {arguments.machine}.",
        "",
        "| framework | method | round, s | fastest – slowest | without evaluation, s | "
        f"against fedala | accuracy after {setting.rounds} rounds | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        found = results.get(run.key)
        if run.setting == setting.name and found is not None:
            own = results.get(f"{setting.name}, fedala, {run.method}", {})
            lines.append(format_row(run, found, own))
    return "\n".join([*lines, ""])


def format_row(run: Run, found: Arrays, own: Arrays) -> str:
    cells = [f"{run.framework} {found.get('version', '')}".strip(), run.title]
    if "seconds" in found:
        spread = f"{found['fastest']:.4g} – {found['slowest']:.4g}"
        rest = found["without_evaluation"]
        is_apart = run.framework != "fedala" and run.evaluates
        cells += [f"{found['seconds']:.4g}", spread, f"{rest:.4g}" if is_apart else ""]
        times = found["seconds"] / own["seconds"] if "seconds" in own else None
        cells.append("" if times is None or run.framework == "fedala" else f"{times:.3g} ×")
    else:
        cells += [""] * 4
    cells.append(f"{100 * found['accuracy']:.2f} %" if "accuracy" in found else "")
    notes = [found["reason"]] if "reason" in found else []
    if "rounds" in found and "load" in found:
        notes.append("load {} to {}".format(*found["load"]))
    if found.get("stand_ins"):
        notes.append(f"stand-ins for {', '.join(found['stand_ins'])}")
    return f"| {' | '.join([*cells, '; '.join(notes)])} |"


def describe_machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {os.cpu_count()} cores, {versions}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    for framework, option in OPTIONS.items():
        name = f"--{option.replace('_', '-')}"
        parser.add_argument(name, type=Path, help=f"the source of {framework}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--minutes", type=float, default=9, help="for everything")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one run")
    parser.add_argument("--rounds", type=int, default=5, help=f"{WARM_UP} of them to warm up")
    parser.add_argument("--setting", nargs="+", default=["mnist", "cifar"],
                        choices=("mnist", "cifar"))  # fmt: skip
    parser.add_argument("--part", type=int, default=1, metavar="N",
                        help="mnist: one in N samples of each client")  # fmt: skip
    parser.add_argument("--samples", type=int,
                        help="mnist: at most so many training samples of a client")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="mnist: --samples 60; cifar: 100 clients of 20 samples")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show how a framework failed")
    arguments = parser.parse_args()
    for option in OPTIONS.values():
        source = getattr(arguments, option)
        if source is not None and not source.is_dir():
            parser.error(f"--{option.replace('_', '-')}: there is no folder {source}.")
        setattr(arguments, option, source.resolve() if source else None)
    arguments.samples = arguments.samples or (60 if arguments.quick else None)
    if arguments.rounds <= WARM_UP:
        parser.error(f"--rounds must be more than the {WARM_UP} to warm up.")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.machine = describe_machine(arguments.device)
    arguments.end = time.monotonic() + 60 * arguments.minutes
    return arguments


def read_results(path: Path) -> dict[str, Arrays]:
    """Return what earlier runs measured, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def main() -> None:
    arguments = read_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "peers.jsonl"
    results = read_results(path)
    with tempfile.TemporaryDirectory() as name:
        settings = make_settings(arguments, Path(name))
        for run in RUNS:
            if run.setting not in settings or "seconds" in results.get(run.key, {}):
                continue
            if time.monotonic() > arguments.end:
                results[run.key] = {"reason": "not run: time was out"}
                continue
            load, began = os.getloadavg()[0], time.monotonic()
            found = carry_out(run, settings[run.setting], arguments, Path(name))
            found["took"] = round(time.monotonic() - began, 1)
            found["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
            results[run.key] = found
            with path.open("a") as file:
                file.write(json.dumps({"key": run.key, "machine": arguments.machine, **found}))
                file.write("\n")
            told = f"{found['seconds']:.4g} s a round" if "seconds" in found else found["reason"]
            print(f"{run.key}: {told}, {found['took']:.0f} s in all", flush=True)
    text = "\n".join(format_table(own, results, arguments) for own in settings.values())
    (arguments.out / "peers.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
