"""Measure seconds per round on this machine, and compare with the plain per-client loop."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedala.bench.cases import Case
from fedala.bench.plain_loop import PlainLoop
from fedala.data import Dataset, Federation
from fedala.models import build_model
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.plan import plan


@dataclass(frozen=True)
class Measurement:
    """What was measured of one case, in seconds."""

    case: str
    data: str  # "real", or "random"
    device: str
    precision: str
    start: float  # until the first round is done
    initial: float  # the round of ALA's initial stage
    steady: float  # a later round
    plain: float | None  # a round of the plain loop
    accuracy: float

    @property
    def speedup(self) -> float | None:
        return None if self.plain is None else self.plain / self.steady


def measure(
    case: Case,
    *,
    real: Dataset | None = None,
    device: str = "auto",
    precision: str = "float32",
    rounds: int = 6,
    plain: bool = True,
) -> Measurement:
    """Run a case for some rounds, and the plain loop for two."""
    federation = case.build_federation(real)
    options: dict[str, Any] = {
        "method": case.method,
        "dataset": case.dataset,
        "model": case.model,
        "lr": case.lr,
        "rounds": rounds,
        "seeds": case.seeds,
        "device": device,
        "precision": precision,
        "join_ratio": case.join_ratio,
        "eval_clients": "joined" if case.join_ratio < 1 else "all",
        **case.options,
    }
    began = time.perf_counter()
    checked = plan(Config.from_values(options), federation)
    [group] = checked.groups
    simulation = build_simulation(
        checked.for_group(group), group.members[0].method, variants=group.variants
    )
    seconds = []
    accuracy = 0.0
    for round in range(1, rounds + 1):
        before = began if round == 1 else time.perf_counter()
        accuracy = simulation.step(round, train=True)[0].row.accuracy
        _synchronize(checked.device)
        seconds.append(time.perf_counter() - before)
    measure_plain = plain and case.has_plain_loop
    return Measurement(
        case=case.name,
        data=_describe_data(federation.dataset, real),
        device=_describe_device(checked.device),
        precision=precision,
        start=seconds[0],
        initial=seconds[1],
        steady=statistics.median(seconds[2:]),
        plain=_measure_plain_loop(case, federation, checked.device) if measure_plain else None,
        accuracy=accuracy,
    )


def _describe_data(measured: Dataset, real: Dataset | None) -> str:
    if measured is not real:
        return "random"
    return f"real ({real.note})" if real.note else "real"


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _measure_plain_loop(case: Case, federation: Federation, device: torch.device) -> float:
    """Return the seconds of the plain loop's second round."""
    data = federation.dataset
    x, y = data.x.to(device), data.y.to(device)
    if x.dtype == torch.uint8:
        x = (x.float() / 255 - 0.5) / 0.5

    def select(rows: tuple[np.ndarray, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        indices = [torch.as_tensor(row, device=device) for row in rows]
        return [(x[index], y[index]) for index in indices]

    model = build_model(case.model, data).to(device)
    train, test = select(federation.train), select(federation.test)
    loop = PlainLoop(model, train, test, ala="fedala" in case.method, lr=case.lr)
    loop.run_round()
    began = time.perf_counter()
    loop.run_round()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def format_markdown(measurements: Iterable[Measurement]) -> str:
    """Return the table of benchmarks/RESULTS.md."""
    headings = (
        "case", "data", "device", "precision", "start, s", "initial stage, s", "round, s",
        "plain loop, s", "faster",
    )  # fmt: skip
    rows = [headings, ("---",) * len(headings)]
    for m in measurements:
        plain = "" if m.plain is None else f"{m.plain:.2f}"
        faster = "" if m.speedup is None else f"{m.speedup:.1f} ×"
        seconds = (f"{m.start:.1f}", f"{m.initial:.3f}", f"{m.steady:.3f}", plain)
        rows.append((m.case, m.data, m.device, m.precision, *seconds, faster))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
