"""What a client of `ala_mod` keeps between rounds: its local model and its weights W."""

from collections.abc import Mapping
from logging import getLogger

from flwr.app import Context
from torch import Tensor

from fedala.ala import ALA
from fedala.errors import UserError
from fedala.flower.client_store import ClientStore, choose_state_dir, name_client

log = getLogger("flwr")


class ModState:
    """The local model and W of one client, in files on its node."""

    def __init__(self, context: Context, experiment: str | None) -> None:
        self.store = ClientStore(
            choose_state_dir(context.node_config),
            experiment or f"run-{context.run_id}",
            name_client(context),
        )

    def load(self, ala: ALA) -> dict[str, Tensor] | None:
        """Return the arrays of the last local model, and load W into `ala`. None if there are none.

        The arrays have the names that the app's training gave them.
        """
        rounds = self.store.list_rounds()
        if not rounds:
            return None
        state = self.store.load(rounds[-1])
        if state is None:
            ala.round = rounds[-1]
            return None
        try:
            ala.load_state_dict(state["ala"])
        except UserError as error:
            log.error(
                "%s This client has LOST its weights W and learns them from the start.", error
            )
            ala.round = rounds[-1]
        return dict(state["local"])

    def save(self, ala: ALA, trained: Mapping[str, Tensor]) -> None:
        """Save the arrays that training returned as the local model, and W."""
        self.store.save(ala.round, {"local": trained, "ala": ala.state_dict()})
