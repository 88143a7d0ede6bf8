"""Four processes of `fedala run --jobs` share a GPU by MPS: same bytes, and all stop together."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mps_stand_in import NOTES
from runs.test_jobs import contents

from fedala.runs.folder import RunFolder

CONTROL = "nvidia-cuda-mps-control"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which(CONTROL), reason=f"needs {CONTROL}, which is not there"),
    pytest.mark.skipif(
        "CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="needs a machine without MPS of its own"
    ),
]
METHODS = "noted,fedala,local,ditto"
DEVICE = "cuda:0"


def start(here, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "fedala", "run", *words],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_options(rounds):
    words = f"--method {METHODS} --dataset digits --model mlp --clients 4 --device {DEVICE}"
    return [*words.split(), "--import", "note.py", "--rounds", str(rounds)]


@pytest.fixture
def here(tmp_path):
    (tmp_path / "note.py").write_text(NOTES)
    return tmp_path


def take_notes(here):
    """Return the MPS folders of the processes since the last time, one line for each."""
    lines = [line.split() for line in (here / "notes").read_text().splitlines()]
    (here / "notes").unlink()
    return [folder for _, folder in lines]


def check_daemon(here):
    """Four processes were clients of one daemon, which has ended; the first process was not."""
    first, *others = take_notes(here)
    assert first == "-"
    assert len(others) == 4, others
    assert len(set(others)) == 1
    assert others[0].startswith("/tmp/fedala-mps-")
    assert not Path(others[0]).exists()
    daemons = [
        path.parent
        for path in Path("/proc").glob("[0-9]*/environ")
        if others[0].encode() in _read(path)
    ]
    assert not daemons


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_four_processes_write_what_one_writes(here):
    for name, jobs in (("one", "1"), ("four", "4")):
        words = [*run_options(3), "--checkpoint-every", "1", "--out", name, "--jobs", jobs]
        process = start(here, *words)
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        assert "MPS" not in errors
        if name == "one":
            assert take_notes(here) == ["-"]
    check_daemon(here)
    assert contents(here / "four") == contents(here / "one")


@pytest.mark.parametrize("to_all", [False, True], ids=["to the command", "to all processes"])
def test_sigterm_ends_all_after_their_round(to_all, here):
    before = dict.fromkeys(METHODS.split(","), 0)
    for words in (
        [*run_options(100_000), "--out", "run"],
        ["--resume", "run", "--import", "note.py"],
    ):
        process = start(here, *words, "--jobs", "4")
        try:
            _wait_for_rounds(here / "run", process, before)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            process.send_signal(signal.SIGTERM)
            for child in children.split() if to_all else ():
                os.kill(int(child), signal.SIGTERM)
            _, errors = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert "Traceback" not in errors
        assert "the GPU failed" not in errors  # every process has finished its round
        assert len(re.findall(r"\d+ rounds of", errors)) == 4, errors
        assert "to resume it, use fedala run --resume run" in " ".join(errors.split())
        check_daemon(here)
        folder = RunFolder(here / "run")
        for name, record in folder.record.methods.items():
            rounds = [row["round"] for row in folder.rows("history.csv") if row["method"] == name]
            assert rounds == list(range(len(rounds)))
            assert record.checkpoint == len(rounds) > before[name]
            before[name] = len(rounds)


def _wait_for_rounds(folder, process, before):
    """Wait until each process has three rounds more than before."""
    deadline = time.monotonic() + 300
    files = [folder / "jobs" / str(job) / "history.csv" for job in range(4)]
    while not all(
        file.exists() and len(file.read_text().splitlines()) > 1 + before[name] + 3
        for name, file in zip(before, files, strict=True)
    ):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
