"""The device of a run: which one a name means, and how several processes share what there is."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from fedala.errors import UserError
from fedala.io.child_processes import count_cores
from fedala.options import name_option

#: What `--device` takes, as help of commands.
NAMES = "auto, cpu, cuda, or one of several GPUs, such as cuda:1"
_PATTERN = re.compile("auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?", re.ASCII)
#: What the driver, cuDNN and Triton say of a GPU that has failed.
_DEVICE_ERRORS = re.compile(r"CUDA error|CUDA driver error|cuDNN error|Triton Error \[CUDA\]")


def check_device_name(name: str) -> None:
    """Refuse a name that means no device on any machine."""
    if not _PATTERN.fullmatch(name):
        raise UserError(
            f"device must be one of auto, cpu, cuda and cuda:NUMBER, such as cuda:1, not {name!r}."
        )


def choose_device(name: str) -> torch.device:
    """Return the device that a name means on this machine. Refuse one that is not there."""
    check_device_name(name)
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and not count:
        raise UserError(
            f"device is {name}, and there is no CUDA device here: use "
            f"{name_option('device', 'cpu')} or auto."
        )
    if number and int(number) >= count:
        present = "is 1 CUDA device here: cuda:0"
        if count > 1:
            present = f"are {count} CUDA devices here: cuda:0 to cuda:{count - 1}"
        raise UserError(f"device is {name}, and there {present}.")
    if kind == "cpu" or not count:
        return torch.device("cpu")
    return torch.device(name if number else "cuda")


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one, and keep torch's random state as it is.

    A GPU has nothing left to do at the end, however that comes: a process that ends in the middle
    of its work can break those that share the GPU with it under NVIDIA's MPS.
    """
    is_gpu = device.type == "cuda"
    failure: BaseException | None = None
    try:
        with (
            torch.cuda.device(device) if is_gpu else nullcontext(),
            torch.random.fork_rng(devices=[device] if is_gpu else []),
        ):
            try:
                yield
            except BaseException as error:
                failure = error
                raise
            finally:
                wait_for_device(device)
    except RuntimeError as error:
        if failure is None or not is_device_error(error):
            raise
        # A GPU that has failed cannot get its random state back: what came first says more.
        raise failure from failure.__cause__


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has done its work. One that has failed has none left."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


def is_device_error(error: BaseException) -> bool:
    """Tell whether a GPU has failed, as it can because of another process under NVIDIA's MPS.

    Such a GPU does nothing more for this process. A lack of memory is not a failure.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, getattr(torch, "AcceleratorError", ())):  # since torch 2.8
        return True
    return isinstance(error, RuntimeError) and bool(_DEVICE_ERRORS.search(str(error)))


def share_devices(name: str, jobs: int) -> list[str]:
    """Return the device of each of several processes: GPUs in turn, unless one is named."""
    if name in ("auto", "cuda") and choose_device(name).type == "cuda":
        count = torch.cuda.device_count()
        return [f"cuda:{job % count}" for job in range(jobs)]
    return [name] * jobs


def share_cores(jobs: int) -> int:
    """Return how many cores each of several processes may use."""
    return max(1, count_cores() // jobs)
