"""Let processes that share a GPU work on it at the same time, by NVIDIA's MPS.

Without it, they take turns. The daemon that it needs is the command's own and ends with it
(`mps_daemon.py`). Only processes that the command starts are its clients.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch

from fedala.io.child_processes import share_code
from fedala.runs.mps_daemon import CONTROL, is_running, name_folders

#: The environment variable that is `off` to do without MPS.
SWITCH = "FEDALA_MPS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Clients that a server takes on one GPU, since Volta.
_MOST_CLIENTS = 48
#: Seconds that the first client may wait for the server.
_FIRST_CLIENT = 30.0
#: Seconds that the command waits for the daemon's end. After that, the daemon ends without it.
_END = 10.0
#: Makes a context on each of the GPUs whose numbers are the arguments, and removes it.
_CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0)
for number in map(int, sys.argv[1:]):
    failed = failed or cuda.cuDeviceGet(ctypes.byref(device), number)
    failed = failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    failed = failed or cuda.cuDevicePrimaryCtxRelease_v2(device)
raise SystemExit(bool(failed))
"""


@contextmanager
def share_gpus(devices: Sequence[str], announce: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Run an MPS daemon for processes on these devices; yield what their environment needs for it.

    Nothing if no two of them share a GPU, MPS is not installed or switched off, or the user has a
    daemon. If MPS does not work here, `announce` gets a sentence.
    """
    gpus = _find_shared_gpus(devices)
    is_off = os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "none")
    has_own = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if not gpus or is_off or has_own or not shutil.which(CONTROL) or is_running(os.environ):
        yield {}
        return
    with ExitStack() as stack:
        environment = stack.enter_context(_run_daemon(_name_gpus()))
        if not environment or not _serves(environment, gpus):
            stack.close()
            environment = {}
            announce(
                "NVIDIA's MPS could not be started, so processes that share a GPU take turns. "
                f"{SWITCH}=off does without it."
            )
        yield environment


def _find_shared_gpus(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs in use if some process shares one, as far as MPS allows."""
    counts = Counter(device for device in devices if device.startswith("cuda"))
    if not 1 < max(counts.values(), default=0) <= _MOST_CLIENTS:
        return []
    return sorted(int(device.partition(":")[2] or 0) for device in counts)


def _name_gpus() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with names in the place of numbers, if it has numbers.

    A client of a daemon counts the daemon's GPUs, so that numbers would choose twice.
    """
    if not re.fullmatch(r"[\d, ]+", os.environ.get(_VISIBLE, "")):
        return {}
    count = torch.cuda.device_count()
    names = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    return {_VISIBLE: ",".join(f"GPU-{name.removeprefix('GPU-')}" for name in names)}


@contextmanager
def _run_daemon(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run a daemon; yield the environment of its clients, nothing if it has not started."""
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedala.runs.mps_daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env={**share_code(), **environment},
        start_new_session=True,  # a terminal's Ctrl-C reaches neither it nor the daemon
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        folder = keeper.stdout.readline().strip()
        yield {**environment, **name_folders(folder)} if folder else {}
    finally:
        keeper.stdin.close()
        keeper.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(_END)


def _serves(environment: dict[str, str], gpus: Sequence[int]) -> bool:
    """Tell whether a process in this environment can use these GPUs."""
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-c", _CLIENT, *map(str, gpus)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_FIRST_CLIENT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return False
    return found.returncode == 0
