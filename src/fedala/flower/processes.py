"""Programs that end with the process that started them, however that process ends.

Run as a script, this file is the reaper: a process that waits until its starter has ended, then
kills the remaining programs and deletes the temporary folder. It imports only the standard library,
so that it starts fast.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

#: The environment variable that marks a program and its descendants. Its value is folder/name.
FAMILY = "FEDALA_FEDERATION"

#: The signals that ask a process to end: Ctrl-C, `kill`, and a closed terminal.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Processes:
    """Programs that run in `folder` and end with the context.

    Without a folder, they get a temporary one, which is deleted with the context. The first signal
    that asks to stop raises KeyboardInterrupt. Later ones are ignored, because cleaning up takes
    seconds. If this process dies without cleaning up (`kill -9`), the reaper does it.
    """

    #: Seconds that programs have to end on their own before they are killed.
    grace = 5.0

    def __init__(self, folder: Path | None = None) -> None:
        self._given_folder = folder and folder.absolute()
        self.folder = self._given_folder or Path()  # until the reaper made one
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._is_stopping = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._catch_signals(stack)
            self._start_reaper(stack)
            stack.callback(self.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._stack.close()

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        output: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a program that appends its output to `output`."""
        with (output or Path(os.devnull)).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env={**environment, FAMILY: f"{self.folder}/{name}"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends them
            )
        return self.processes[name]

    def kill(self, name: str) -> None:
        """Kill a program and everything it has started."""
        kill_family(f"{self.folder}/{name}")  # Flower's own processes leave the process group
        with suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(10)

    def stop(self) -> None:
        """End all programs, including one that a signal prevented from entering `processes`."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + self.grace
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        kill_family(str(self.folder))
        for process in self.processes.values():
            process.kill()  # without /proc, families cannot be found
            process.wait()

    def _catch_signals(self, stack: ExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals only to the main thread
        for number in STOP:
            # An ignored signal stays ignored: `nohup` and a shell's background jobs rely on it.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, number, signal.signal(number, self._interrupt))

    def _interrupt(self, number: int, frame: Any) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            raise KeyboardInterrupt

    def _start_reaper(self, stack: ExitStack) -> None:
        folders = [str(self._given_folder)] if self._given_folder else []
        command = [sys.executable, "-I", __file__, *folders]
        pipe = subprocess.PIPE
        reaper = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd="/", start_new_session=True)
        stack.callback(reaper.communicate, b"ended in order")  # and wait for its end
        assert reaper.stdout is not None
        folder = reaper.stdout.readline().rstrip(b"\n")
        if not folder:
            raise OSError("a temporary folder could not be made")
        self.folder = Path(os.fsdecode(folder))


def find_family(name: str) -> list[int]:
    """Return the ids of the processes with this folder or folder/name, and of their descendants."""
    mark = os.fsencode(f"{FAMILY}={name}")
    family = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if any(text == mark or text.startswith(mark + b"/") for text in variables):
                family.append(int(path.parent.name))
    return family


def kill_family(name: str, watch: float = 0, seconds: float = 10) -> None:
    """Kill these processes until none remains: they may start others meanwhile.

    Go on for `watch` seconds even if there is none.
    """
    start = time.monotonic()
    while (family := find_family(name)) or time.monotonic() < start + watch:
        if time.monotonic() > start + seconds:
            break
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def reap(folders: Sequence[str]) -> None:
    """Print the folder, wait for the end of the input, then kill and delete.

    `folders` has one folder, which is not deleted, or none: then the reaper makes a temporary one.
    """
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    folder = folders[0] if folders else tempfile.mkdtemp(prefix="fedala-demo-")
    with suppress(BrokenPipeError):  # the starter is already dead
        os.write(1, os.fsencode(folder) + b"\n")
    in_order = sys.stdin.buffer.read()  # ends when the starter closes the pipe or dies
    # A starter that was killed may leave a program that is just starting and not yet marked.
    kill_family(folder, watch=0 if in_order else 2)
    if not folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    reap(sys.argv[1:])
