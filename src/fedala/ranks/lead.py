"""How a run begins and ends on several ranks: rank 0 leads, and the others serve."""

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import UserError
from fedala.io.untrusted import free_memory
from fedala.lanes.layer_units import Layers
from fedala.lanes.task import Task
from fedala.methods import Method
from fedala.ranks.failures import Failure, attempt, collect_replies, find_failures
from fedala.ranks.group import RankGroup, RankLost, is_started_by_torchrun
from fedala.ranks.launch import GRACE, end_with_parent
from fedala.ranks.transport import RankTransport
from fedala.ranks.worker import Worker
from fedala.runs.build import build_simulation, local_options
from fedala.runs.config import Config
from fedala.runs.observer import catch_stop_signals
from fedala.runs.own_code import code_versions
from fedala.runs.plan import Plan, plan
from fedala.runs.provenance import versions
from fedala.simulation import Simulation
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.transport import Setup, Transport
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
    end_with_parent()
    with ExitStack() as stack:
        if int(os.environ["RANK"]):  # rank 0 hears the first signal, too, and ends the run
            stack.enter_context(catch_stop_signals(announce=lambda sentence: None, grace=GRACE))
        group = RankGroup()
        try:
            yield group
        except KeyboardInterrupt:
            group.is_broken = True  # in the middle of whatever it was
            raise
        finally:
            if group.rank == 0 and not group.is_broken:
                with suppress(RankLost):  # the run has its result, or its error
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
        """Let all ranks plan a run. Refuse what any of them refuses, and ranks that differ."""
        self.group.share(config)
        own = attempt(lambda: plan(config), rank=0)
        replies = self.group.gather(own)
        refusal = _find_refusal(replies)
        self.group.share(refusal is None)
        if refusal:
            refusal.throw()
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
        self.group.note_start()
        labels = [member.label for member in checked.groups[0].members]
        beginning = Beginning(checked.config, labels, checked.layers, files)
        self.group.share(([], BEGIN, (beginning,), True))

        def make(setup: Setup) -> RankTransport:
            local = LocalTransport(
                setup,
                client_files=client_files,
                on_message=on_message,
                **_share_machine(self.group, checked, setup.task),
            )
            return RankTransport(self.group, local, checked.config.on_divergence)

        def build() -> Simulation:
            return build_simulation(
                checked,
                method,
                transport=make,
                on_message=on_message,
                variants=variants,
                **options,
            )

        simulation, *others = collect_replies(self.group, build)
        assert isinstance(simulation, Simulation)
        _check_initial_models(simulation.transport, others)
        return simulation


def _find_refusal(replies: Sequence[Any]) -> Failure | None:
    """Return why a run cannot begin. Rank 0 replies with its plan, others with their code and data.

    Without the same data, the clients of a rank would not be those that rank 0 plans with.
    """
    for failure in find_failures(replies):
        if failure.rank and failure.kind is UserError:
            sentence = f"Rank {failure.rank} cannot take part: {failure.sentence}"
            return Failure(UserError(sentence), failure.rank)
        return failure
    own = _describe_sources(replies[0]) if len(replies) > 1 else {}
    for rank, other in enumerate(replies[1:], 1):
        for what in sorted(own.keys() | other.keys()):
            if own.get(what) != other.get(what):
                sentence = (
                    f"Rank {rank} has another {what} than rank 0: all machines of a run need the "
                    "same data, code and version of fedala."
                )
                return Failure(UserError(sentence), rank)
    return None


def _describe_sources(own: Plan) -> dict[str, str]:
    """Return what must be the same on all ranks, by a name for it."""
    return {
        "dataset or partition": own.federation.digest(),
        "version of fedala": versions()["fedala"],
        **code_versions(own.config),
    }


def _check_initial_models(transport: Transport, others: Sequence[Sequence[float]]) -> None:
    """Refuse a model whose initial numbers differ between ranks: clients would not start alike."""
    own = _measure_initial_models(transport)
    for rank, other in enumerate(others, 1):
        if not np.allclose(own, other, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise UserError(
                f"The initial model of rank {rank} is not that of rank 0: it must depend on "
                "torch's random numbers alone, which are seeded, and on files that all ranks have."
            )


def _measure_initial_models(transport: Transport) -> list[float]:
    """Return the mean size of each tensor: machines may round a little differently."""
    return [
        value.double().abs().mean().item()
        for model in transport.setup.initial
        for value in model.values()
    ]


def _share_machine(group: RankGroup, own: Plan, task: Task) -> dict[str, Any]:
    """Return the options of a rank's own clients. The ranks of a machine share its memory."""
    options = local_options(own, task)
    memory = options["client_memory"]
    options["client_memory"] = (
        free_memory() // 2 if memory is None else memory
    ) // group.local_size
    return options


def serve(group: RankGroup) -> None:
    """Do what rank 0 says, until it ends the run. If rank 0 is gone, end quietly."""
    warnings.simplefilter("ignore")  # rank 0 shows them
    try:
        _serve(group)
    except KeyboardInterrupt:  # the second signal
        os._exit(130)
    except RankLost as lost:
        if lost.__cause__:  # it is this rank that cannot continue
            traceback.print_exception(lost.__cause__)
        sys.stderr.flush()
        os._exit(1)  # rank 0 or torchrun tells what has happened


def _serve(group: RankGroup) -> None:
    config = group.share()
    if not isinstance(config, Config):  # rank 0 has refused the run
        return
    own = attempt(lambda: plan(config, is_rehearsed=True), group.rank)
    group.gather(own if isinstance(own, Failure) else _describe_sources(own))
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
            worker = _answer_beginning(group, partial(begin, *arguments))
            continue
        assert worker is not None
        worker.drop_models(released)
        command = partial(getattr(worker, name), *arguments)
        if wants_reply:
            group.gather(attempt(command, group.rank))
        else:
            with group.exchange():
                command()


def _answer_beginning(group: RankGroup, begin: Callable[[], Worker]) -> Worker | None:
    """Make a worker. If that fails, rank 0 hears of it, and ends the run."""
    worker = attempt(begin, group.rank)
    if isinstance(worker, Failure):
        group.gather(worker)
        return None
    group.gather(_measure_initial_models(worker.local))
    return worker


def _begin(group: RankGroup, own: Plan, beginning: Beginning) -> Worker:
    """Build this rank's share of a method."""
    if beginning.client_files:
        _wait_for_folder(beginning.client_files.parents[1])
    narrowed = beginning.apply(own)
    [only] = narrowed.groups

    def make(setup: Setup) -> LocalTransport:
        options = _share_machine(group, narrowed, setup.task)
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
