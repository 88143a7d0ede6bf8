"""Whose states a client's folder holds: those of one method, with one model.

Two apps with the same name of an experiment share the folder. The second one would continue from
the states of the first, and delete them.
"""

import hashlib

from fedala.errors import UserError
from fedala.flower.client_store import ClientStore
from fedala.io import tensor_files
from fedala.io.files import DamagedFile
from fedala.lanes.trees import Params


class StatesOfAnotherMethod(UserError):
    """The folder holds states of another method. The server learns the name of this class."""


class StatesOfAnotherModel(UserError):
    """The folder holds states of another model."""


def identify_model(model: Params) -> str:
    """Return a digest of the names, types and shapes of a model."""
    lines = [f"{name} {value.dtype} {list(value.shape)}" for name, value in sorted(model.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_states(store: ClientStore, method: str, model: str) -> None:
    """Refuse a folder with states of another method or model. States of early versions name none.

    What is damaged or a link is not looked at: it is reported when the state is loaded.
    """
    for round in store.list_rounds():
        path = store.state_path(round)
        if path.is_symlink():
            continue
        try:
            about = tensor_files.read_about(path)
        except DamagedFile:
            continue
        remedy = (
            "Give this run an experiment name of its own in the run config, or delete that folder "
            "if its experiment is over."
        )
        owner = about.get("method", "an app with ala_mod")
        if owner != method:
            raise StatesOfAnotherMethod(
                f"{store.folder} holds the states of {owner}, and this run is of {method}. {remedy}"
            )
        if about.get("model", model) != model:
            raise StatesOfAnotherModel(
                f"{store.folder} holds the states of another model. {remedy}"
            )
