"""However a process ends, its programs end and its temporary folder is deleted.

`sleep` replaces Flower's programs here. test_deployment.py uses the real ones.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

HUP, INT, KILL, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM
SOURCE = Path(__file__).parents[2] / "src" / "fedala" / "flower"

#: One program takes a moment to end in order. The other ignores signals and starts a process that
#: leaves its group.
DRIVER = """
import signal, time
for number in IGNORED:
    signal.signal(number, signal.SIG_IGN)
from processes import Processes

Processes.grace = 1
with Processes() as programs:
    (programs.folder / "private.key").write_text("secret")
    print("starting", flush=True)
    programs.spawn("stubborn", ["sh", "-c", "trap '' TERM INT HUP; setsid sleep 60 & sleep 60"])
    orderly = "trap 'sleep 0.4; touch $FEDALA_TEST.ended; exit' TERM; touch ready;"
    orderly += "while :; do sleep 0.02; done"
    programs.spawn("orderly", ["sh", "-c", orderly])
    while not (programs.folder / "ready").exists():
        time.sleep(0.01)
    print("running", flush=True)
    time.sleep(PATIENCE)
print("clean", flush=True)
"""


def find_marked(mark):
    """Return the ids of the processes with this mark in their environment."""
    marked = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(f"FEDALA_TEST={mark}") in path.read_bytes().split(b"\0"):
                marked.append(int(path.parent.name))
        except OSError:
            continue
    return marked


def start_driver(folder, ignored=(), patience=60):
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    environment |= {"TMPDIR": str(folder), "FEDALA_TEST": str(folder)}
    script = DRIVER.replace("PATIENCE", str(patience))
    script = script.replace("IGNORED", str(list(map(int, ignored))))
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def assert_nothing_remains(folder, seconds=10):
    end = time.monotonic() + seconds
    while find_marked(folder) or list(folder.iterdir()):
        assert time.monotonic() < end, (find_marked(folder), list(folder.rglob("*")))
        time.sleep(0.02)


#: Signals with the seconds to wait before each.
ONCE = {"HUP": [(0, HUP)], "TERM": [(0, TERM)], "INT": [(0, INT)], "KILL": [(0, KILL)]}
TWICE = {
    "TERM-TERM": [(0, TERM), (0.01, TERM)],
    "INT-INT": [(0, INT), (0.01, INT)],
    "HUP-TERM-cleaning": [(0, HUP), (0.2, TERM)],
    "INT-5": [(0, INT), *4 * [(0.1, INT)]],
    "TERM-KILL-cleaning": [(0, TERM), (0.2, KILL)],
}


@pytest.mark.parametrize("moment", ["starting", "running"])
@pytest.mark.parametrize("patterns", [ONCE, TWICE], ids=["once", "more than once"])
def test_nothing_remains_after_signals(patterns, moment, tmp_path):
    with ExitStack() as stack:
        drivers = {name: stack.enter_context(start_driver(tmp_path / name)) for name in patterns}
        for name, driver in drivers.items():
            assert any(line.strip() == moment for line in driver.stdout), name
        for name, driver in drivers.items():
            assert list((tmp_path / name).rglob("private.key"))
            for delay, number in patterns[name]:
                time.sleep(delay)
                driver.send_signal(number)
        for name, driver in drivers.items():
            assert driver.wait(10) != 0
            assert_nothing_remains(tmp_path / name, 10 if "KILL" in name else 0)
            if moment == "running" and "KILL" not in name:
                assert (tmp_path / f"{name}.ended").exists(), "the clean-up was cut short"


def test_nothing_remains_after_a_kill_during_the_start(tmp_path):
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(start_driver(tmp_path / str(number))) for number in range(12)
        ]
        for number, driver in enumerate(drivers):
            time.sleep(0.02)
            driver.send_signal((KILL, TERM, HUP)[number % 3])
        for number, driver in enumerate(drivers):
            driver.wait(10)
            assert_nothing_remains(tmp_path / str(number))


def test_nothing_remains_at_the_end(tmp_path):
    with start_driver(tmp_path / "x", patience=0) as driver:
        assert "clean" in driver.stdout.read()
        assert driver.wait(10) == 0
    assert_nothing_remains(tmp_path / "x", 0)


def test_an_ignored_signal_stays_ignored(tmp_path):
    """`nohup` and a shell's background jobs rely on it."""
    with start_driver(tmp_path / "x", ignored=[HUP, INT], patience=0.5) as driver:
        assert any(line.strip() == "running" for line in driver.stdout)
        for number in (HUP, INT):
            driver.send_signal(number)
        assert driver.wait(10) == 0
    assert_nothing_remains(tmp_path / "x", 0)


def test_a_program_that_was_just_starting_is_killed(tmp_path):
    """Its mark can be seen only after the reaper has begun to look."""
    command = [sys.executable, "-I", str(SOURCE / "processes.py"), str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as reaper:
        assert reaper.stdout.readline()
        reaper.stdin.close()
        time.sleep(0.5)
        environment = {**os.environ, "FEDALA_FEDERATION": f"{tmp_path}/late"}
        with subprocess.Popen(["sleep", "60"], env=environment) as program:
            assert program.wait(10) == -KILL
        assert reaper.wait(10) == 0
