"""A stand-in for NVIDIA's `nvidia-cuda-mps-control`: it notes its calls, and its daemon sleeps."""

import time
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = """#!/bin/sh
here="{folder}"
pipes="$CUDA_MPS_PIPE_DIRECTORY"
daemon="$pipes/nvidia-cuda-mps-control.pid"
word="$1"
[ -n "$word" ] || read -r word
echo "$word" "$pipes" "$CUDA_MPS_LOG_DIRECTORY" "$CUDA_VISIBLE_DEVICES" >> "$here/calls"
if [ -e "$here/hang$word" ]; then exec sleep 600; fi
if [ -e "$here/fail$word" ]; then exit 1; fi
if [ "$word" = -d ]; then
    sleep 600 < /dev/null > /dev/null 2>&1 &
    echo $! > "$daemon"
    echo $! >> "$here/daemons"
elif [ -z "$pipes" ] && [ -e "$here/own" ]; then
    echo 4242424
elif [ ! -e "$daemon" ]; then
    echo "Cannot find MPS control daemon process"
    exit 1
elif [ "$word" = quit ]; then
    kill "$(cat "$daemon")"
    rm "$daemon"
fi
"""


@dataclass
class StandIn:
    """The stand-in, and what has been asked of it."""

    folder: Path

    def install(self) -> None:
        """Write the program."""
        program = self.folder / "nvidia-cuda-mps-control"
        program.write_text(_PROGRAM.format(folder=self.folder))
        program.chmod(0o755)

    def let(self, what: str) -> None:
        """`fail-d`: starting fails. `hangquit`: quitting hangs. `own`: the user has a daemon."""
        (self.folder / what).touch()

    @property
    def calls(self) -> list[list[str]]:
        """What it was called for, and the folders and GPUs of its environment."""
        file = self.folder / "calls"
        return [line.split(" ") for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def commands(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def living(self) -> list[int]:
        """The daemons that have not ended."""
        file = self.folder / "daemons"
        numbers = map(int, file.read_text().split()) if file.exists() else ()
        return [number for number in numbers if _is_alive(number)]

    def has_ended(self, seconds: float) -> bool:
        """Wait until no daemon lives and no folder is left; tell whether that came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            folders = [Path(pipes) for _, pipes, *_ in self.calls if pipes]
            if not self.living and not any(folder.exists() for folder in folders):
                return True
            time.sleep(0.05)
        return False


def _is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


#: Runs `fedala` as if its processes shared a GPU.
PROGRAM = """
import sys
from fedala.runs import mps
mps._find_shared_gpus = lambda devices: [0]
mps._serves = lambda environment, gpus: True
from fedala.cli.app import main
main()
"""


#: Code with a method, FedAvg by another name. It notes the process and its MPS folder.
NOTES = """
import os
from dataclasses import dataclass
from fedala.methods import Method, register

with open("notes", "a") as notes:
    print(os.getpid(), os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "-"), file=notes)


@register
@dataclass(frozen=True)
class Noted(Method):
    \"\"\"FedAvg, in a process that has noted its environment.\"\"\"
    name, title, summary, has_personal_models = "noted", "Noted", "like FedAvg", False
"""
