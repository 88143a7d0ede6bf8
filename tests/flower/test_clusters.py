"""The batch scripts of docs/flower-clusters.md work, with a stand-in for Slurm."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from fedala.flower.local import find_free_port  # noqa: E402
from fedala.flower.processes import FAMILY, find_family  # noqa: E402
from fedala.runs.folder import RunFolder  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower-clusters.md").read_text(encoding="utf-8")
RAY_JOB, NODES_JOB = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)

#: Starts all tasks on this machine. Every option of the page's calls has a value.
SRUN = """#!/bin/bash
tasks=$SLURM_NTASKS
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks ]] && tasks=$2
    shift 2
done
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def submit(tmp_path):
    """Return a function that runs a batch script on this machine, as one of two nodes."""
    shared, job = tmp_path / "shared", find_free_port()
    source = ROOT / "src"
    write_program(tmp_path / "bin" / "srun", SRUN)
    write_program(
        shared / ".venv" / "bin" / "activate",
        f"export PATH={tmp_path}/bin:{Path(sys.executable).parent}:$PATH PYTHONPATH={source}\n",
    )
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    new = [sys.executable, "-m", "fedala", "flower", "new", str(shared / "my-app")]
    subprocess.run([*new, "--clients", "2", "--rounds", "1"], env=environment, check=True)
    slurm = {"JOB_ID": job, "NNODES": 2, "NTASKS": 2, "CPUS_PER_TASK": 1}
    environment |= {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment |= {"SLURMD_NODENAME": "127.0.0.1", FAMILY: f"{tmp_path}/job"}
    environment["FLWR_DISABLE_UPDATE_CHECK"] = "1"

    def run(script):
        text = script.replace("/shared/fedala", str(shared))
        # Not a pipe: what the script leaves running, and Slurm would end, would keep it open.
        with (tmp_path / "log").open("w+") as log:
            done = subprocess.run(
                ["bash", "-c", text], env=environment, stdout=log, stderr=log, timeout=600
            )
            log.seek(0)
            return shared, done.returncode, log.read()

    try:
        yield run
    finally:
        for pid in find_family(f"{tmp_path}/job"):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)


def assert_finished(shared, code, log):
    assert code == 0, log
    [rows] = RunFolder(shared / "runs" / "my-app").history().values()
    assert [row.round for row in rows] == [0, 1]


@pytest.mark.deployment
def test_a_job_with_a_ray_cluster(submit):
    """Two Ray nodes of one CPU each on this machine, hence two clients at a time."""
    pytest.importorskip(
        "ray", reason="Ray is not installed: pip install 'fedala[flower-simulation]'"
    )
    resources = "num-supernodes=20 client-resources-num-cpus=4 client-resources-num-gpus=1.0"
    assert resources in RAY_JOB
    script = RAY_JOB.replace(resources, "num-supernodes=2 client-resources-num-cpus=1")
    shared, code, log = submit(script)
    assert_finished(shared, code, log)
    assert list((shared / "state" / "fedala" / "my-app").glob("client-0000[01]"))


@pytest.mark.deployment
def test_a_job_with_supernodes(submit):
    shared, code, log = submit(NODES_JOB)
    assert_finished(shared, code, log)
    states = shared / "state" / "my-app"
    assert {path.name for path in states.glob("client-*")} == {"client-00000", "client-00001"}
