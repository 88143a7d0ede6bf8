"""Run a command of fedala in a watched child process with little time and memory.

The child is a fork of this process, so a case costs milliseconds and not an import of torch.
"""

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedala.cli import app as cli

SECONDS = 15
#: Bytes of address space beyond those of this process; libraries reserve more than they use.
ADDRESS_SPACE = 3 * 2**30
#: Bytes of memory in use beyond those of this process.
MEMORY = 768 * 2**20

#: Events that must not happen, whatever is read; Python announces them to an audit hook.
_NEVER = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
)
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "shutil.rmtree",
)


class Outcome(NamedTuple):
    """How a command ended. `fault` is empty for success, or one sentence and code 2."""

    code: int
    says: str
    fault: str
    seconds: float


def attempt(
    arguments: list[str], folder: Path, *, before: Callable[[], None] | None = None
) -> Outcome:
    """Run `fedala ARGUMENTS` in `folder`; it may not write, or read a secret, outside of it."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(arguments, folder, output.fileno(), before)
        _, status, used = os.wait4(child, 0)
        seconds = time.monotonic() - began
        output.seek(0)
        said = output.read().encode(errors="replace").decode()
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, said, _fault(code, said, used.ru_maxrss * 1024 - _resident()), seconds)


def _fault(code: int, said: str, memory: int) -> str:
    if code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return "does not end"
    if code < 0:
        return f"crashes ({signal.Signals(-code).name})"
    if code not in (0, 2):
        return f"ends with {code}"
    if memory > MEMORY:
        return f"takes {memory / 2**20:.0f} MiB"
    sentences = [line for line in said.splitlines() if line.startswith("Error: ")]
    if (
        code == 2
        and "Usage:" not in said
        and (len(sentences) != 1 or said.splitlines()[-1] != sentences[0])
    ):
        return "does not end in one sentence"
    if not all(c.isprintable() or c == "\n" for c in said):
        return "prints control characters"
    return ""


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _child(
    arguments: list[str], folder: Path, output: int, before: Callable[[], None] | None
) -> None:
    """Run the command and end the process."""
    code = 99
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(n, "w", encoding="utf-8", closefd=False) for n in (1, 2)
        )
        os.chdir(folder)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + ADDRESS_SPACE, here + ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        sys.addaudithook(_watch(folder))
        if before:
            before()
        sys.argv = ["fedala", *arguments]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _watch(folder: Path) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that ends the process before a forbidden event."""
    secret = str(folder.resolve().parent / "secret")
    allowed = (str(folder.resolve()), "/dev/null")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        is_ours = any(program in str(arguments) for program in ("git", "fedala.io.image_files"))
        wrong = event.startswith(_NEVER) and not is_ours
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            named = os.path.abspath(os.fsdecode(arguments[0]))
            path = os.path.realpath(named)
            flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
            is_written = isinstance(arguments[2], int) and arguments[2] & flags
            wrong = named.startswith(secret) or bool(is_written and not path.startswith(allowed))
        elif event in _CHANGES and isinstance(arguments[0], (str, bytes)):
            # A link itself may be removed.
            parent, _ = os.path.split(os.path.abspath(os.fsdecode(arguments[0])))
            is_relative_to_open_folder = any(isinstance(a, int) and a >= 0 for a in arguments[1:])
            wrong = not is_relative_to_open_folder and not os.path.realpath(parent).startswith(
                allowed
            )
        if wrong:
            print(f"FORBIDDEN: {event} {arguments}", file=sys.stderr, flush=True)
            os._exit(71)

    return hook
