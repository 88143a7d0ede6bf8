"""A client's state between rounds, in private files that never leave its machine.

Flower starts a new process for every message, and forgets `context.state` when a SuperNode
restarts. A FedALA client that lost its local model and its weights W would start over unnoticed.
So both are in files.
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

#: The personal model that a client of fedala's own app saves after the last round.
MODEL_FILE = "model.safetensors"


class StoredClient:
    """The stored states of one client of one experiment, to read. Reading changes nothing."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        check_experiment_name(experiment)
        self.about = {"experiment": experiment, "client": client}
        self.folder = root / experiment / client
        for folder in (root, self.folder.parent, self.folder):
            if folder.is_symlink():
                raise _make_link_error(folder)

    def state_path(self, round: int) -> Path:
        """Return the path of the state after this round."""
        return self.folder / f"round-{round:06d}.safetensors"

    def list_rounds(self) -> list[int]:
        """Return the rounds whose states are stored, in order."""
        rounds = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if match := re.fullmatch(r"round-(\d{6,})\.safetensors", path.name, re.ASCII):
                rounds.append(int(match[1]))
        return sorted(rounds)

    def read(self, round: int) -> tuple[State, dict[str, Any]]:
        """Return the state after this round and its description. Refuse a damaged file."""
        path = self.state_path(round)
        if path.is_symlink():
            raise files.DamagedFile(f"{path} is a link, which this program does not follow.")
        state, about = tensor_files.load(path)
        expected = {**about, **self.about, "round": round}
        if about != expected:
            raise files.DamagedFile(f"{path} belongs to {about}, not to {expected}.")
        return state, about

    def load(self, round: int) -> State | None:
        """Return the state after this round. If it is missing or damaged, log it; return None."""
        try:
            state, _ = self.read(round)
        except files.DamagedFile as error:
            log.error(
                "%s This client has LOST its state of round %d and starts over.", error, round
            )
            return None
        return state


class ClientStore(StoredClient):
    """The states of one client of one experiment, by the round that ended with them."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        super().__init__(root, experiment, client)
        make_private_folder(root, is_shared=True)
        make_private_folder(self.folder.parent)
        make_private_folder(self.folder)

    def load(self, round: int) -> State | None:
        """Return the state after this round. If it is missing or damaged, log it; return None.

        A damaged file gets another name.
        """
        state, path = super().load(round), self.state_path(round)
        if state is None and os.path.lexists(path):
            aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
            path.rename(aside)
            log.error("The damaged file is now %s.", aside)
        return state

    def save(self, round: int, state: State, *, previous: int = 0, **about: Any) -> None:
        """Save the state after this round, and delete all others but that of `previous`.

        The server has yet to say which of the two the client continues from.
        """
        about = {**about, **self.about, "round": round}
        tensor_files.save(self.state_path(round), state, about, private=True)
        for other in self.list_rounds():
            if other not in (round, previous):
                self.state_path(other).unlink()

    def save_model(self, model: Mapping[str, Tensor]) -> None:
        """Save the client's personal model of the last round as a plain safetensors file."""
        tensors = {name: value.cpu().contiguous() for name, value in model.items()}
        files.write_file(self.folder / MODEL_FILE, serialize(tensors), private=True)


def make_private_folder(folder: Path, *, is_shared: bool = False) -> None:
    """Make a folder that only its owner can enter, or restrict an existing one.

    Refuse a link. A folder that the operator may share with other programs (`is_shared`) is only
    closed to writing.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if folder.is_symlink():
            raise _make_link_error(folder) from None
        raise UserError(f"{folder} cannot hold a client's state: {error.strerror}.") from None
    try:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        wanted = mode & ~0o022 if is_shared else 0o700
        if status.st_uid != os.geteuid():
            # In another user's folder, other users must not be able to replace our files: it must
            # be closed to writing, or sticky.
            if not is_shared or (mode & 0o022 and not mode & stat.S_ISVTX):
                raise UserError(
                    f"{folder} belongs to another user, who could read or replace a client's "
                    "state: name a folder of your own as state-dir."
                )
        elif mode != wanted:
            os.fchmod(descriptor, wanted)
    finally:
        os.close(descriptor)


def _make_link_error(folder: Path) -> UserError:
    return UserError(
        f"{folder} is a link, but a client's state must not be behind a link: remove it, "
        "or name the folder itself as state-dir."
    )


def check_experiment_name(experiment: str) -> None:
    """Refuse a name that could lead out of its folder: it comes from the server."""
    if not is_experiment_name(experiment):
        raise UserError(
            f"An experiment's name must be letters, digits, dots and dashes, not {experiment!r}."
        )


def is_experiment_name(text: str) -> bool:
    """Tell whether an experiment can have this name."""
    return re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII) is not None


def choose_state_dir(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of the node config (`state-dir`), or the user's own state directory."""
    if folder := node_config.get("state-dir"):
        return Path(str(folder)).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedala"


def name_client(context: Context) -> str:
    """Name a client on its node by its number in the federation, or else by its node id."""
    number = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if number is None else name_client_number(number)


def name_client_number(number: Any) -> str:
    """Name a client by its number in the federation."""
    if not re.fullmatch(r"\d{1,18}", str(number), re.ASCII):
        raise UserError(f"partition-id in the node config must be a whole number, not {number!r}.")
    return f"client-{int(number):05d}"
