"""A process that starts a daemon of NVIDIA's MPS, and ends it when its stdin closes.

It is a process of its own, so that the daemon ends however the command does: also by a kill. It
starts at once, because it imports neither torch nor anything that does.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedala.io.untrusted import read_file

#: NVIDIA's program: with -d, it starts a daemon; without, it sends commands to one.
CONTROL = "nvidia-cuda-mps-control"
#: Seconds that it may take.
_ANSWER = 10.0
#: Seconds to quit: the daemon waits for its clients, which may outlive a killed command by a round.
_QUIT = 60.0
#: Seconds that the daemon's processes have to end after that.
_END = 5.0


def name_folders(folder: str) -> dict[str, str]:
    """Return the variables that tell a daemon and its clients where they meet."""
    return {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": f"{folder}/logs"}


def is_running(environment: Mapping[str, str]) -> bool:
    """Tell whether programs in this environment have a daemon, even one that does not answer."""
    try:
        return _send("get_server_list", environment, _ANSWER) is not None
    except subprocess.TimeoutExpired:
        return True
    except OSError:  # the program cannot be started
        return False


def main() -> None:
    """Start a daemon in a new folder, print the folder, and end the daemon when stdin closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the daemon would inherit SIG_IGN
    # A socket's path has at most 107 bytes, and $TMPDIR may be long.
    folder = tempfile.mkdtemp(prefix="fedala-mps-", dir="/tmp")
    environment = {**os.environ, **name_folders(folder)}
    try:
        os.mkdir(environment["CUDA_MPS_LOG_DIRECTORY"])
        if _start(environment):
            print(folder, flush=True)
            sys.stdin.read()
    finally:
        _end(folder, environment)
        shutil.rmtree(folder, ignore_errors=True)


def _start(environment: Mapping[str, str]) -> bool:
    """Start a daemon; tell whether it listens."""
    try:
        found = subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the daemon would keep a pipe open
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def _send(command: str, environment: Mapping[str, str], seconds: float) -> str | None:
    """Send a command to the daemon; return the answer, None if there is no daemon."""
    found = subprocess.run(
        [CONTROL],
        env=environment,
        input=f"{command}\n",
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    is_there = found.returncode == 0 and "Cannot find MPS" not in found.stdout + found.stderr
    return found.stdout if is_there else None


def _end(folder: str, environment: Mapping[str, str]) -> None:
    """End the daemon and its servers; kill those that do not end."""
    numbers = ""
    with suppress(OSError):
        numbers = read_file(Path(folder, f"{CONTROL}.pid"), 100).decode()
    with suppress(OSError, subprocess.TimeoutExpired):
        numbers += "\n" + (_send("get_server_list", environment, _ANSWER) or "")
    with suppress(OSError, subprocess.TimeoutExpired):
        _send("quit", environment, _QUIT)
    processes = [int(word) for word in numbers.split() if word.isdecimal()]
    deadline = time.monotonic() + _END
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in filter(_is_alive, processes):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    """Tell whether a process has not ended, whether or not its parent knows."""
    try:
        status = read_file(Path(f"/proc/{process}/stat"), 10_000).decode(errors="replace")
        return status.rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
