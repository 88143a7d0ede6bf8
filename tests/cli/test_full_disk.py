"""A full disk is a sentence, and nothing half written stays."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trained.worlds import PIXELS, run
from typer.testing import CliRunner

from fedala.cli.app import app

FULL = Path("/dev/full")  # every write to it fails


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    run(here / "run", method="fedavg")
    np.savez(here / "new.npz", x=PIXELS[:5])
    return here


@pytest.mark.parametrize(
    "command",
    [
        "predict {place}/run --data {place}/new.npz --out p.csv",
        "export {place}/run --global --out p.safetensors",
        "partition --dataset digits --plot p.png",
        "partition --dataset digits --save p.json",
        "new method FedMine --out deep/mine",
        "new method FedMine",
        "flower new deep/app --method fedavg",
    ],
)
@pytest.mark.parametrize("writes", [0, 1])  # it may be full after the first file
def test_nothing_half_written_stays(command, writes, place, tmp_path, monkeypatch):
    done = []

    def flush(descriptor):
        done.append(descriptor)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedala.io.files.flush", flush)
    result = CliRunner().invoke(app, command.format(place=place).split(), prog_name="fedala")
    if writes and not command.startswith(("new", "flower")):
        assert (result.exit_code, len(done), len(os.listdir())) == (0, 1, 1)
        return
    assert result.exit_code == 2, result.output
    assert "cannot be written" in result.stderr
    assert "No space left on device." in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["report", "run", "--latex"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_has_no_room(command, unbuffered, place):
    """The sentence is the only one, also if the disk turns out to be full at the very end."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "fedala", *command],
            cwd=place, env=environment, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ended.stderr == "Error: Nothing more can be written: No space left on device.\n"
    assert ended.returncode == 1
