"""Killed at any moment, a run goes on to the end that it would have had.

A few kills by default; FEDALA_KILLS sets how many (`make test-kill`: a hundred).
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_resume import same

KILLS = int(os.environ.get("FEDALA_KILLS", "3"))
ROUNDS = 20

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from fedala.errors import RunError
from fedala.running import Watcher, execute
from test_resume import planned

path = Path(sys.argv[1])
work = planned("fedala,ditto", rounds=int(sys.argv[2]), checkpoint_every=1, join_ratio=0.5, seeds=2)
print("ready", flush=True)
try:
    execute(work, path, resume=(path / "config.toml").exists(), force=path.exists() and not (path / "config.toml").exists())
except RunError as error:
    sys.exit(str(error))
"""


def child(path: Path, rounds: int = ROUNDS) -> "subprocess.Popen[str]":
    here = Path(__file__).parent
    code = CHILD.format(path=[str(here.parent / "src"), str(here)])
    command = [sys.executable, "-W", "ignore", "-c", code, str(path), str(rounds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    began = time.monotonic()
    with child(path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return path, time.monotonic() - began


def test_killed_at_random_moments(whole, tmp_path):
    reference, seconds = whole
    moments = random.Random(1)
    path, killed = tmp_path / "run", 0
    while killed < KILLS:
        with child(path) as process:
            try:
                process.wait(timeout=moments.uniform(0, 1.5 * seconds / min(KILLS, 4)))
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
                continue
            assert process.returncode == 0, process.stderr.read()
        same(reference, path)
        path = tmp_path / f"run-{killed}"  # it came to its end: begin with another
    with child(path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    same(reference, path)


def test_a_full_disk(whole, tmp_path):
    reference, _ = whole
    disk = tmp_path / "disk"
    disk.mkdir()
    needed = sum(-(-path.stat().st_size // 4096) * 4096 for path in reference.rglob("*"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={needed // 2}", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        with child(disk / "run") as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert errors.count("\n") == 1
        assert "No space left on device" in errors
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        with child(disk / "run") as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        same(reference, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with child(disk / "run", ROUNDS + 1) as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "Read-only file system" in errors or "cannot be written to" in errors
        same(reference, disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
