"""What a client keeps between rounds, in a directory of its own: it survives the process, and never leaves the machine.

Flower starts a fresh process for every message, and forgets `context.state` when a SuperNode restarts. A client of FedALA
that lost its local model and its weights W would start over without anybody noticing; so they are in files.
"""

import os
import re
import stat
import time
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import Context
from safetensors.torch import save as serialize
from torch import Tensor

from fedala.errors import UserError
from fedala.io import files, tensor_files
from fedala.methods import State

log = getLogger("flwr")


class Kept:
    """The states that one client of one experiment was left with, by the round that left them."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        check_name(experiment)
        self.about = {"experiment": experiment, "client": client}
        self.folder = root / experiment / client
        make_private(root, keeps_others=True)
        make_private(self.folder.parent)
        make_private(self.folder)

    def path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """The rounds whose states are there, in order."""
        names = (
            re.fullmatch(r"round-(\d{6,})\.safetensors", path.name, re.ASCII)
            for path in self.folder.iterdir()
        )
        return sorted(int(name[1]) for name in names if name)

    def load(self, round: int) -> State | None:
        """The state that `round` left. What is missing or damaged is gone: the client is told so, and gets None."""
        path = self.path(round)
        try:
            if path.is_symlink():
                raise files.DamagedFile(
                    f"{path} is a link, which this program never makes and does not follow."
                )
            state, about = tensor_files.load(path)
            other = {**about, **self.about, "round": round}
            if about != other:
                raise files.DamagedFile(f"{path} belongs to {about}, not to {other}.")
        except files.DamagedFile as error:
            log.error(
                "%s This client has LOST its state of round %d and starts over.", error, round
            )
            if os.path.lexists(path):
                aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
                path.rename(aside)
                log.error("The damaged file is now %s.", aside)
            return None
        return state

    def save(self, round: int, state: State, *, before: int = 0, **about: Any) -> None:
        """Keeps the state that `round` left, beside the one that it started from, until the server has said which counts."""
        tensor_files.save(
            self.path(round), state, {**about, **self.about, "round": round}, private=True
        )
        for other in self.rounds():
            if other not in (round, before):
                self.path(other).unlink()

    def save_model(self, model: Mapping[str, Tensor]) -> None:
        """Keeps the client's personal model of the last round, as a plain safetensors file."""
        tensors = {name: value.cpu().contiguous() for name, value in model.items()}
        files.write_file(self.folder / "model.safetensors", serialize(tensors), private=True)


def make_private(folder: Path, *, keeps_others: bool = False) -> None:
    """Make a folder that only its owner can enter, or close one that is there.

    A link is refused, not followed. A folder that `keeps_others`, which the operator may have made
    for more than this program, is only closed to writing.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a link, and a client's state is not kept behind one: remove it, or name the folder "
                "itself as state-dir."
            ) from None
        raise UserError(f"{folder} cannot hold a client's state: {error.strerror}.") from None
    try:
        found = os.fstat(descriptor)
        mode = stat.S_IMODE(found.st_mode)
        wanted = mode & ~0o022 if keeps_others else 0o700
        if found.st_uid != os.geteuid():
            # Nobody but us may be able to exchange what we keep in somebody else's folder:
            # it is closed to writing, or sticky.
            if not keeps_others or (mode & 0o022 and not mode & stat.S_ISVTX):
                raise UserError(
                    f"{folder} belongs to another user, who could read or exchange a client's state: name a folder of "
                    "this user's as state-dir."
                )
        elif mode != wanted:
            os.fchmod(descriptor, wanted)
    finally:
        os.close(descriptor)


def check_name(experiment: str) -> None:
    """An experiment's name comes from the server, and becomes a path."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", experiment, re.ASCII):
        raise UserError(
            f"An experiment's name must be letters, digits, dots and dashes, not {experiment!r}."
        )


def directory(node_config: Mapping[str, Any]) -> Path:
    """Where a node keeps its clients' states: what its operator says (`state-dir`), or the user's own state directory."""
    if chosen := node_config.get("state-dir"):
        return Path(str(chosen)).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedala"


def name_of(context: Context) -> str:
    """A client's name on its node: its number in the federation, or else the node's own."""
    number = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if number is None else f"client-{int(number):05d}"
