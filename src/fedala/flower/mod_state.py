"""What a client of `ala_mod` keeps between rounds: its local model and its weights W.

Both are in files of the client's node. Flower's context holds a counter of the rounds that were
saved. So a client notices if its files are gone, or are on another machine.
"""

from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from torch import Tensor

from fedala.ala import ALA
from fedala.errors import UserError
from fedala.flower.client_store import ClientStore, StoredClient, choose_state_dir, name_client
from fedala.flower.experiment import is_simulated

log = getLogger("flwr")

#: The counter's record in `context.state`.
COUNTER = "fedala.ala"


class ModState:
    """The local model and W of one client, in files on its node.

    With `read_only`, nothing is written: no file, no folder, no counter.
    """

    def __init__(
        self,
        context: Context,
        experiment: str | None,
        state_dir: str | Path | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self.context = context
        self.experiment = experiment or f"run-{context.run_id}"
        #: Whether files of earlier rounds are missing or damaged, and whether there were none.
        self.is_lost = self.is_new = False
        self.store = (StoredClient if read_only else ClientStore)(
            find_state_dir(context, state_dir), self.experiment, name_client(context)
        )
        if not read_only and COUNTER not in context.state:
            self._warn_of_node_id()

    def load(self, ala: ALA) -> dict[str, Tensor] | None:
        """Return the arrays of the last local model, and load W into `ala`. None if there are none.

        The arrays have the names that the app's training gave them.
        """
        rounds, counted = self.store.list_rounds(), self._read_counter()
        last = rounds[-1] if rounds else 0
        state = self.store.load(last) if rounds else None
        self.is_lost = counted > last or (state is None and last > 0)
        self.is_new = state is None
        if counted > last:
            self._report_loss(last, counted)
        if state is not None:
            try:
                ala.load_state_dict(state["ala"])
            except UserError as error:
                log.error(
                    "%s This client has LOST its weights W and learns them from the start.", error
                )
                self.is_lost = True
        # Rounds that are lost still count. Otherwise, two machines that train the client in turn
        # would count the same rounds, and not notice each other.
        ala.round = max(last, counted)
        return None if state is None else dict(state["local"])

    def save(self, ala: ALA, trained: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """Save the arrays that training returned as the local model, and W.

        `names` has the parameter or buffer of each array, for arrays that have other names.
        """
        assert isinstance(self.store, ClientStore)
        are_equal = all(names[key] == key for key in trained)
        about: dict[str, Any] = {} if are_equal else {"names": [names[key] for key in trained]}
        self.store.save(ala.round, {"local": trained, "ala": ala.state_dict()}, **about)
        self.context.state[COUNTER] = ConfigRecord(
            {"experiment": self.experiment, "round": ala.round}
        )

    def _read_counter(self) -> int:
        """Return the last round that this client has saved, as far as Flower's context knows.

        The context lasts as long as the run, in a SuperNode as long as its process.
        """
        record = self.context.state.config_records.get(COUNTER)
        if record is None or record["experiment"] != self.experiment:
            return 0
        return int(str(record["round"]))

    def _report_loss(self, last: int, counted: int) -> None:
        found = f"only that of round {last}" if last else "none"
        log.error(
            "This client has LOST its state of round %d: %s has %s. If several machines train the "
            "clients, as in a Ray cluster, they must share this folder: name a shared one with "
            "ala_mod(…, state_dir=…). Otherwise, somebody has deleted or replaced its files.",
            counted,
            self.store.folder,
            found,
        )

    def _warn_of_node_id(self) -> None:
        """Warn of an identity that may not survive a restart.

        The context does not tell whether a node is authenticated, so this cannot be refused.
        """
        if self.context.node_config.get("partition-id") is not None:
            return
        folder = self.store.folder
        others = [other for other in folder.parent.glob("node-*") if other != folder]
        lost = ""
        if others and not self.store.list_rounds():
            lost = (
                f" {folder.parent} has the states of {len(others)} other nodes. If one of them was "
                "this client, it has LOST its state."
            )
        log.warning(
            "This client is known by its node id, because its node config has no partition-id. A "
            "SuperNode without a registered key gets a new id whenever it starts, and then the "
            'client starts over: start it with --node-config "partition-id=…", a number of its '
            "own, or with --auth-supernode-private-key.%s",
            lost,
        )


def find_state_dir(context: Context, given: str | Path | None = None) -> Path:
    """Return the folder of all states.

    That is `state-dir` of the node config, or else `given`. Nodes of Flower's simulation engine
    have no config of their own, so that of the run may name the folder. On a real node, it may not:
    it comes from elsewhere.
    """
    if context.node_config.get("state-dir"):
        return choose_state_dir(context.node_config)
    if is_simulated():
        given = str(context.run_config.get("state-dir") or "") or given
    return check_state_dir(given) or choose_state_dir(context.node_config)


def check_state_dir(given: str | Path | None) -> Path | None:
    """Return the folder, or refuse one that depends on where Flower starts the app."""
    if given is None:
        return None
    folder = Path(given).expanduser()
    if not folder.is_absolute():
        raise UserError(
            f"state_dir must be an absolute path, not {str(given)!r}: Flower starts clients in "
            "folders of its own."
        )
    return folder
