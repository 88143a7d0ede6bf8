"""Say what a run is and where it ran: its identity, versions, commit, command and device."""

import hashlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.errors import printable
from fedala.lanes.layer_units import list_registered_layers
from fedala.lanes.outputs import scores_of
from fedala.lanes.randomness import torch_seed
from fedala.methods import find_code, hyperparameters, make
from fedala.runs.digests import Digests
from fedala.runs.model_trial import first_output
from fedala.runs.own_code import code_versions
from fedala.runs.plan import Plan
from fedala.runs.results import RunResult
from fedala.runs.resumable_options import identify
from fedala.runs.sweep_results import find_sweeps
from fedala.version import __version__

#: What the record of a run says of the layers of a user's own model. Runs of first versions, which
#: counted layers as they are registered, say nothing.
LAYERS = {"layers": "as used"}


def describe(plan: Plan, origin: Mapping[str, Any] | None = None) -> Digests:
    """Start the record of a run: what it is, and which program runs it.

    `origin` has the options as they were before seeds or methods were added. The run stays the same
    run, so they make its identity.
    """
    began = replace(plan, config=replace(plan.config, **(origin or {})))
    return Digests(
        identity=_identity(began),
        versions={
            **versions(),
            **code_versions(plan.config),
            **_list_own_hyperparameters(plan),
            **(LAYERS if plan.config.has_own_model else {}),
        },
        probe=_probe(plan),
        origin=dict(origin or {}),
    )


def _list_own_hyperparameters(plan: Plan) -> dict[str, str]:
    """Return the hyperparameters of methods that are not this package's: their code may change."""
    found: dict[str, str] = {}
    for name in plan.config.methods:
        if find_code(name)[0]:
            values = hyperparameters(make(name, plan.config.set))
            found |= {key: f"{value}" for key, value in values.items()}
    return found


def keep_layers(plan: Plan, record: Digests | None) -> Plan:
    """Return the plan with the layers that the recorded run began with."""
    if not plan.config.has_own_model or (record and record.versions.items() >= LAYERS.items()):
        return plan
    return replace(plan, layers=list_registered_layers(plan.make_skeleton()))


def _identity(plan: Plan) -> str:
    """Return the digest of the options that may not change on a resume, and of the data."""
    what = {
        **identify(plan.config),
        "set": dict(plan.config.set),
        "data": plan.federation.digest(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _probe(plan: Plan) -> list[float]:
    """Return the first outputs of the first seed's initial model; none if it cannot run alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(plan.config.seed, "initial model"))
        model = plan.make_model()
    try:
        output = first_output(model, plan.federation.dataset)
        scores = scores_of(output)
        return [round(value, 6) for value in scores.double().flatten()[:16].tolist()]
    except Exception:  # a user's own model may need other samples than these
        return []


def list_program_changes(record: Digests | None, about: Digests) -> list[str]:
    """Return how the program or the model differs from the one that the run began with."""
    if record is None:
        return []
    changes = [
        f"{name}: {_shorten(record.versions[name])} → {_shorten(version)}"
        for name, version in about.versions.items()
        if record.versions.get(name, version) != version
    ]
    is_same = len(record.probe) == len(about.probe) and np.allclose(
        record.probe, about.probe, rtol=1e-3, atol=1e-5, equal_nan=True
    )
    if record.probe and not is_same:
        changes.append("model: it computes something else from the same initial state")
    return changes


def _shorten(version: str) -> str:
    """Return a version for a sentence: of a digest, its first digits."""
    return version[:19] if version.startswith("sha256:") else version


def summarize(plan: Plan, result: RunResult, seconds: float) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    sweeps = find_sweeps(result.config.sweep, result.methods)
    values = {member.label: hyperparameters(member.method) for member in plan.members}
    share = result.majority_share
    return {
        "methods": {
            label: {**summary, "hyperparameters": values[label]}
            for label, summary in result.summaries().items()
        },
        **({"sweep": {one.method: one.summary() for one in sweeps}} if sweeps else {}),
        **({"majority_share": share} if share is not None else {}),
        "note": "best: the best round, picked on test data as in the paper; final: the last round",
        "rounds": result.config.rounds,
        "seeds": result.config.seeds,
        "seconds": seconds,
        "command": command(has_arguments=plan.has_local_clients),
        "data": plan.federation.dataset.note,
        "versions": {
            **versions(),
            **code_versions(plan.config),
            "commit": _commit(),
            "device": _device_name(plan.device),
            **({"ranks": plan.ranks} if plan.ranks > 1 else {}),
        },
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "fedala": __version__,
    }


def command(*, has_arguments: bool = True) -> str:
    """Return the running command as one would type it.

    Without arguments, it is the program alone: Flower gives a token to its server app that way.
    """
    program = Path(sys.argv[0])
    is_own = program.stem == "fedala" or program.parts[-2:] in (
        ("cli", "app.py"),
        ("fedala", "__main__.py"),
    )
    arguments = sys.argv[1:] if has_arguments else []
    return printable(shlex.join(["fedala" if is_own else sys.argv[0], *arguments]), 100_000)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {platform.machine()}, {threads} thread{'s' * (threads != 1)}"


@cache
def _commit() -> str | None:
    """Return the git commit of the source tree that runs; None if fedala is installed."""
    here = Path(__file__).resolve().parent
    if not (here.parents[2] / "pyproject.toml").is_file():
        return None  # a repository around an installed package is somebody else's
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
