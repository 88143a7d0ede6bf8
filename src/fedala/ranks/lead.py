"""How a run begins and ends on several ranks: rank 0 leads, and the others serve."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.io.untrusted import free_memory
from fedala.lanes.layer_units import Layers
from fedala.methods import Method
from fedala.ranks.group import RankGroup, RankLost, is_started_by_torchrun
from fedala.ranks.transport import Failure, RankTransport, attempt
from fedala.ranks.worker import Worker
from fedala.runs.build import build_simulation, local_options
from fedala.runs.config import Config
from fedala.runs.plan import Plan, plan
from fedala.simulation import Simulation
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.transport import Setup
from fedala.simulation.variants import Variant

BEGIN, END = "begin", "end"
#: How long a rank waits for the run folder that rank 0 has made.
SECONDS_TO_SEE = 60.0


@dataclass(frozen=True)
class Beginning:
    """One method, or variants of it side by side, that rank 0 begins to run."""

    config: Config
    labels: Sequence[str]
    layers: Layers | None
    client_files: Path | None

    def apply(self, own: Plan) -> Plan:
        """Return this rank's plan of it."""
        [group] = [g for g in own.groups if [m.label for m in g.members] == list(self.labels)]
        return replace(own.for_group(group), config=self.config, layers=self.layers)


@contextmanager
def join_ranks() -> Iterator[RankGroup | None]:
    """Join the group of a rank; None if this process is not one."""
    if not is_started_by_torchrun():
        yield None
        return
    group = RankGroup()
    try:
        yield group
    except KeyboardInterrupt:
        group.is_broken = True  # in the middle of whatever it was
        raise
    finally:
        if group.rank == 0 and not group.is_broken:
            dismiss(group)
        group.leave()


def dismiss(group: RankGroup) -> None:
    """Tell the other ranks that there is nothing left to do."""
    group.share(([], END, (), False))


class Leader:
    """Rank 0: it plans, tells the others to plan, and runs the rounds."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def plan(self, config: Config) -> Plan:
        """Let all ranks plan a run. Refuse what any of them refuses."""
        self.group.share(config)
        own = attempt(lambda: plan(config))
        replies = self.group.gather(own)
        refused = [rank for rank, reply in enumerate(replies) if isinstance(reply, Failure)]
        self.group.share(not refused)
        if refused:
            rank, sentence = refused[0], replies[refused[0]].sentence
            raise UserError(f"Rank {rank} cannot take part: {sentence}" if rank else sentence)
        assert isinstance(own, Plan)
        self.group.connect_devices(own.device)
        return replace(own, ranks=self.group.size)

    def simulate(
        self,
        checked: Plan,
        method: Method,
        *,
        variants: Sequence[Variant] = (),
        client_files: Path | None = None,
        on_message: Callable[[str], None] = lambda sentence: None,
        **options: Any,
    ) -> Simulation:
        """Build the simulation of one group on all ranks: for `execute`."""
        # Without checkpoints, each rank has temporary files of its own.
        has_shared_files = client_files and checked.config.checkpoint_every != 0
        files = client_files.absolute() if client_files and has_shared_files else None
        labels = [member.label for member in checked.groups[0].members]
        beginning = Beginning(checked.config, labels, checked.layers, files)
        self.group.share(([], BEGIN, (beginning,), True))
        for rank, reply in enumerate(self.group.gather(None)):
            if isinstance(reply, Failure):
                raise UserError(f"Rank {rank} cannot take part: {reply.sentence}")

        def make(setup: Setup) -> RankTransport:
            local = LocalTransport(
                setup,
                client_files=client_files,
                on_message=on_message,
                **_share_machine(self.group, checked),
            )
            return RankTransport(self.group, local, checked.config.on_divergence)

        return build_simulation(
            checked,
            method,
            transport=make,
            on_message=on_message,
            variants=variants,
            **options,
        )


def _share_machine(group: RankGroup, own: Plan) -> dict[str, Any]:
    """Return the options of a rank's own clients. The ranks of a machine share its memory."""
    options = local_options(own)
    if options["client_memory"] is None:
        options["client_memory"] = free_memory() // 2 // group.local_size
    return options


def serve(group: RankGroup) -> None:
    """Do what rank 0 says, until it ends the run. If rank 0 is gone, end quietly."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 hears it, too, and ends the run
    try:
        _serve(group)
    except RankLost:
        os._exit(1)  # rank 0 or torchrun tells what has happened


def _serve(group: RankGroup) -> None:
    config = group.share()
    if not isinstance(config, Config):  # rank 0 has refused the run
        return
    own = attempt(lambda: plan(config))
    group.gather(own if isinstance(own, Failure) else None)
    if not group.share() or isinstance(own, Failure):
        group.share()  # the end
        return
    group.connect_devices(own.device)
    obey(group, begin=partial(_begin, group, own))


def obey(
    group: RankGroup,
    worker: Worker | None = None,
    begin: Callable[[Beginning], Worker] | None = None,
) -> None:
    """Carry out rank 0's commands until the last one; `begin` makes the worker of a method."""
    while True:
        released, name, arguments, wants_reply = group.share()
        if name == END:
            return
        if name == BEGIN:
            assert begin is not None
            worker = None  # frees the memory of the method before
            made = attempt(partial(begin, *arguments))
            group.gather(made if isinstance(made, Failure) else None)
            worker = None if isinstance(made, Failure) else made
            continue
        assert worker is not None
        worker.drop_models(released)
        command = partial(getattr(worker, name), *arguments)
        if wants_reply:
            group.gather(_answer(command, group.rank))
        else:
            command()


def _answer(command: Callable[[], Any], rank: int) -> Any:
    """Return a command's reply. An error that rank 0 does not expect is printed here, too."""
    try:
        return command()
    except RankLost:
        raise
    except Exception as error:
        failure = Failure(error)
        if failure.is_unexpected:
            print(f"Rank {rank}:", file=sys.stderr)
            traceback.print_exc()
        return failure


def _begin(group: RankGroup, own: Plan, beginning: Beginning) -> Worker:
    """Build this rank's share of a method."""
    if beginning.client_files:
        _wait_for_folder(beginning.client_files.parents[1])
    narrowed = beginning.apply(own)
    [only] = narrowed.groups
    options = _share_machine(group, narrowed)

    def make(setup: Setup) -> LocalTransport:
        return LocalTransport(setup, client_files=beginning.client_files, **options)

    simulation = build_simulation(
        narrowed,
        only.members[0].method,
        transport=make,
        variants=only.variants,
    )
    local = simulation.transport
    assert isinstance(local, LocalTransport)
    return Worker(group, local, beginning.config.on_divergence)


def _wait_for_folder(folder: Path) -> None:
    """Refuse a run folder that only rank 0 can see. A network file system may show it late."""
    end = time.monotonic() + SECONDS_TO_SEE
    while not folder.is_dir():
        if time.monotonic() > end:
            raise UserError(
                f"{folder} is not on {socket.gethostname()}: ranks write their clients' states "
                "there, so give --out a folder that all machines share, or use --checkpoint-every "
                "0 to do without checkpoints."
            )
        time.sleep(0.2)
