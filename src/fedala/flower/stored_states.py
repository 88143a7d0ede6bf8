"""The states that clients have stored on this machine: list them, read a model, delete them."""

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save as serialize
from torch import Tensor

from fedala.errors import UserError
from fedala.flower.client_store import (
    MODEL_FILE,
    StoredClient,
    choose_state_dir,
    is_experiment_name,
    name_client_number,
)
from fedala.io import files
from fedala.trained.modules import read_weights
from fedala.version import __version__

#: The files of a client: its states, its model, remainders of a fault, and damaged states.
_FILE = re.compile(r"\.?(round-\d{6,}|model)\.safetensors(\.new|\.damaged-\d+)?", re.ASCII)
_CLIENT = re.compile(r"(client-\d{5,}|node--?\d+)", re.ASCII)
#: Flower draws its run ids from 64 bits, so a short number is somebody's name for an experiment.
_RUN = re.compile(r"run-\d{9,}", re.ASCII)


@dataclass(frozen=True)
class StoredState:
    """What one client has stored of one experiment."""

    root: Path
    experiment: str
    client: str
    round: int | None
    """The last round whose state is there."""
    size: int
    """Bytes of all files."""
    changed: float
    """When a file changed last, in seconds since 1970."""

    @property
    def belongs_to_run(self) -> bool:
        """Tell whether it is of a run without a named experiment: no later run uses it."""
        return _RUN.fullmatch(self.experiment) is not None

    @property
    def folder(self) -> Path:
        """Return the folder of the files."""
        return self.root / self.experiment / self.client

    @property
    def title(self) -> str:
        """Name it in a sentence."""
        return f"{self.experiment}/{self.client}"


def list_states(state_dir: str | Path | None = None) -> list[StoredState]:
    """Return what clients have stored under `state_dir`, by experiment and client.

    Without it, that is the folder of nodes without a `state-dir`. Links are not followed.
    """
    root = find_root(state_dir)
    states = []
    for experiment in filter(lambda folder: is_experiment_name(folder.name), _list_folders(root)):
        for client in _list_folders(experiment):
            if _CLIENT.fullmatch(client.name) and (state := _describe(client)):
                states.append(state)
    return states


def _describe(folder: Path) -> StoredState | None:
    """Return what is in a client's folder, or None if there is nothing of ours."""
    experiment, root = folder.parent.name, folder.parents[1]
    rounds = StoredClient(root, experiment, folder.name).list_rounds()
    status = []
    for path in _list_files(folder):
        with contextlib.suppress(FileNotFoundError):  # a client has just replaced it
            status.append(path.lstat())
    if not status:
        return None
    size, changed = sum(one.st_size for one in status), max(one.st_mtime for one in status)
    last = rounds[-1] if rounds else None
    return StoredState(root, experiment, folder.name, last, size, changed)


def select_states(
    states: Iterable[StoredState],
    *,
    experiment: str | None = None,
    client: str | int | None = None,
    older_than: float | None = None,
    runs: bool = False,
) -> list[StoredState]:
    """Return the states of an experiment, of a client, or unchanged for `older_than` days.

    With `runs`, only those that belong to one Flower run.
    """
    name = None if client is None else _name_client(client)
    before = time.time() - 86_400 * (older_than or 0)
    return [
        state
        for state in states
        if (experiment is None or state.experiment == experiment)
        and (name is None or state.client == name)
        and (older_than is None or state.changed < before)
        and (state.belongs_to_run or not runs)
    ]


def delete_states(states: Iterable[StoredState]) -> None:
    """Delete the files of these states, and the folders that are empty then.

    Other files in these folders stay: `state-dir` may be a folder that others use, too.
    """
    for state in states:
        for path in _list_files(state.folder):
            path.unlink(missing_ok=True)
        for folder in (state.folder, state.folder.parent):
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()


def load_personal(
    experiment: str | None = None,
    client: str | int | None = None,
    *,
    state_dir: str | Path | None = None,
) -> dict[str, Tensor]:
    """Return a client's personal model as a state dict: `model.load_state_dict(load_personal())`.

    It is the client's local model as its last training left it. (The initialised model also depends
    on the model that the server sends next. The app's evaluate function gets it, with
    `ala_mod(…, evaluate=True)`.) The names are those of the model that `setup` returns. What the
    app does not send is not in it. For a client of fedala's own app, it is the personal model that
    the method evaluates, which is there after the last round.

    `experiment` and `client` can be left out if there is only one. A client is named by its number,
    `partition-id`, or by the name of its folder.
    """
    return read_personal(find_state(experiment, client, state_dir=state_dir))


def find_state(
    experiment: str | None = None,
    client: str | int | None = None,
    *,
    state_dir: str | Path | None = None,
) -> StoredState:
    """Return the only state of this experiment and client, or say which ones there are."""
    root = find_root(state_dir)
    states = list_states(root)
    if not states:
        raise UserError(f"{root} holds no client's state: name the node's state-dir.")
    found = select_states(states, experiment=experiment, client=client)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{root} holds no such state. It has {_enumerate(states)}.")
    raise UserError(
        f"{root} holds {len(found)} such states: name the experiment and the client. "
        f"There are {_enumerate(found)}."
    )


def read_personal(state: StoredState) -> dict[str, Tensor]:
    """Return the personal model in a client's state."""
    if state.round is not None:
        stored = StoredClient(state.root, state.experiment, state.client)
        tree, about = stored.read(state.round)
        if "ala" in tree and "method" not in about:  # the state of ala_mod
            local = tree["local"]
            names = about.get("names") or list(local)
            return dict(zip(names, local.values(), strict=True))
    path = state.folder / MODEL_FILE
    if path.is_symlink() or not path.is_file():
        raise UserError(
            f"{state.title} has no personal model yet: a client of fedala's own app saves it after "
            "the last round."
        )
    return read_weights(path)[0]


def export_personal(state: StoredState, path: Path) -> Path:
    """Write a client's personal model as a plain .safetensors file."""
    # A tensor with two names is stored under both: the format has no views.
    tensors = {name: value.clone().contiguous() for name, value in read_personal(state).items()}
    metadata = {"format": "pt", "fedala": __version__, "experiment": state.experiment}
    metadata |= {"client": state.client, "round": str(state.round or "")}
    files.write_output(path, serialize(tensors, metadata))
    return path


def find_root(state_dir: str | Path | None) -> Path:
    root = choose_state_dir({}) if state_dir is None else Path(state_dir).expanduser()
    if state_dir is not None and not root.is_dir():
        raise UserError(f"{root} is not a folder: name a node's state-dir.")
    return root


def _name_client(client: str | int) -> str:
    return name_client_number(client) if str(client).isdecimal() else str(client)


def _list_folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{parent} cannot be read: {error.strerror}.") from None


def _list_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if _FILE.fullmatch(path.name)]


def _enumerate(states: Sequence[StoredState], most: int = 8) -> str:
    names = ", ".join(state.title for state in states[:most])
    return names if len(states) <= most else f"{names} and {len(states) - most} more"
