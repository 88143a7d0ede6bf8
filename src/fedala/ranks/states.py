"""What the clients of all ranks keep between rounds, as rank 0 sees it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fedala.lanes import State
from fedala.ranks.assignment import assign_lanes
from fedala.simulation.client_states import NOTHING, File, Lane, States, next_serial


class RankStates(States):
    """The states of clients, each with the rank that trained it. They come here if asked for."""

    def __init__(self, ranks: int, load: Callable[[Lane], int], call: Callable[..., Any]) -> None:
        """`call` gives a command to all ranks, and returns their replies."""
        self.ranks, self.load, self.call = ranks, load, call
        #: The rank that has trained a lane last.
        self.places: dict[Lane, int] = {}
        #: The same for lanes with a state. Others can be trained anywhere.
        self.owners: dict[Lane, int] = {}

    def note(self, places: Mapping[Lane, int], with_state: Collection[Lane]) -> None:
        """Note where lanes have been trained, and which of them have a state now."""
        self.places |= places
        self.owners |= {lane: places[lane] for lane in with_state}

    def settle(self) -> None:
        pass  # the ranks do it when the round ends

    def undo(self) -> None:
        pass

    def write(self) -> dict[Lane, File]:
        found: dict[Lane, File] = {}
        for rank, files in enumerate(self.call("write_states")):
            found |= {lane: file for lane, file in files.items() if self.places[lane] == rank}
        return found

    def hold(self, names: Collection[str]) -> None:
        own: list[list[str]] = [[] for _ in range(self.ranks)]
        for name in names:
            run, client, *rest = name.split("-")
            if run.isdecimal() and rest and (int(run), int(client)) in self.places:
                own[self.places[int(run), int(client)]].append(name)
        self.call("hold_files", own)

    def adopt(self, found: Mapping[Lane, File], serial: int = 0) -> None:
        shares = assign_lanes(list(found), self.ranks, self.load, {})
        self.places = {lane: rank for rank, lanes in enumerate(shares) for lane in lanes}
        self.owners = {lane: self.places[lane] for lane in found if found[lane] != NOTHING}
        own = [{lane: found[lane] for lane in lanes} for lanes in shares]
        self.call("adopt_states", own, max(serial, next_serial(found)))

    def __getitem__(self, lane: Lane) -> State:
        rank = self.places[lane]
        state: State = self.call("get_state", lane, rank)[rank]
        return state

    def __contains__(self, lane: object) -> bool:
        return lane in self.places

    def __iter__(self) -> Iterator[Lane]:
        yield from self.places

    def __len__(self) -> int:
        return len(self.places)
