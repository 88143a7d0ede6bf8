"""`fedala run --devices N`: start torchrun's agent, which starts the ranks."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

import torch

from fedala.errors import UserError
from fedala.runs.devices import share_cores

#: A signal that a rank gets twice within so many seconds is one, which its parent passed on.
GRACE = 1.0
#: After a signal, ranks end their round, however long it takes. Another one ends them at once.
ROUND = 24 * 3600


def check_devices(devices: int, device: str) -> None:
    """Refuse more ranks than there are GPUs. On a CPU, any number may share the cores."""
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices}.")
    count = torch.cuda.device_count()
    if device != "cpu" and count and devices > count:
        raise UserError(
            f"devices is {devices}, and the number of GPUs here is {count}: use --devices {count}."
        )


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `fedala` with these arguments on so many ranks of this machine; return its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(ROUND))
    os.environ.setdefault("OMP_NUM_THREADS", str(share_cores(devices)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else can reach the ranks
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    # The ranks say in a sentence what is wrong; the agent's reports would bury it.
    logging.disable(logging.ERROR)
    try:
        elastic_launch(config, sys.executable)(*_python_options(), "-m", "fedala", *arguments)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        return _explain(error.failures)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _python_options() -> list[str]:
    """Return what keeps files of this folder from being imported, unless they are here, too."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def _explain(failures: Mapping[int, object]) -> int:
    """Return the exit code of a run that failed; say which rank was killed, if one was."""
    codes = {rank: int(getattr(one, "exitcode", 1)) for rank, one in failures.items()}
    for rank, code in sorted(codes.items()):
        if code < 0 and code != -15:  # torchrun ends the others with SIGTERM
            print(
                f"Rank {rank} was killed by signal {-code}. If the run folder has a checkpoint, "
                "fedala run --resume continues from it.",
                file=sys.stderr,
            )
    if codes.get(0, 0) > 0:
        return codes[0]  # rank 0 has said why
    return 1


def end_with_parent() -> None:
    """Let this process get SIGTERM if torchrun's agent is killed: nobody could stop it any more."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            set_signal_of_parents_death = 1
            ctypes.CDLL(None).prctl(set_signal_of_parents_death, int(signal.SIGTERM))
