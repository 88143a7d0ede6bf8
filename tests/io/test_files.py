"""Files are complete or absent, and locks have one holder."""

import os
import stat
import subprocess
import sys

import pytest

from fedala.errors import UserError
from fedala.io import files


@pytest.mark.parametrize("fault", ["flush", "replace"])
def test_a_fault_leaves_the_old_file_and_nothing_else(fault, tmp_path, monkeypatch):
    files.write_file(tmp_path / "f", b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files if fault == "flush" else os, fault, fail)
    with pytest.raises(OSError, match="No space"):
        files.write_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / ".f.new").symlink_to(tmp_path / "precious")
    files.write_file(tmp_path / "f", b"new")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_private_files_are_private(tmp_path):
    files.write_file(tmp_path / "f", b"x", private=True)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_a_lock_is_held_by_one_and_not_by_the_dead(tmp_path):
    hold = f"""
import time, sys, pathlib
from fedala.io import files
with files.lock(pathlib.Path({str(tmp_path / "lock")!r}), "busy"):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="taken"), files.lock(tmp_path / "lock", "taken"):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with files.lock(tmp_path / "lock", "taken"):
        pass
