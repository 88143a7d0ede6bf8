"""What the server of a run in a folder knows: its state after the last round, without the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedala.errors import UserError
from fedala.io import files, tensor_files
from fedala.lanes import State
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, matches, tree_map
from fedala.methods import Method, ServerRound
from fedala.methods.wrapper import unwrap
from fedala.runs.batches import Batch, cut_sizes, split_seeds
from fedala.runs.checkpoint import Checkpoints
from fedala.runs.config import Config
from fedala.runs.digests import Digests
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.folder import RunFolder
from fedala.runs.holdout import count_known
from fedala.runs.members import Group, Member, group_members, make_members
from fedala.runs.resume import find_checkpoints
from fedala.simulation.client_states import NOTHING
from fedala.simulation.participation import draw_participants

MOST_CLASSES, MOST_CLIENTS = 2**20, 10**7


class SplitRow(NamedTuple):
    """How many training samples of a class a client has."""

    client: int
    label: int
    name: str
    train: int


@dataclass(frozen=True)
class FinishedRun:
    """One method and seed of a run folder, as its server left it."""

    folder: RunFolder
    config: Config
    member: Member
    group: Group
    number: int
    """The group's position."""
    seed: int

    @property
    def population(self) -> int:
        """How many clients took part in training."""
        return count_known(self.config)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of the run, as far as any client has samples of them."""
        names = {row.label: row.name for row in self._split}
        return tuple(names.get(k, str(k)) for k in range(max(names, default=-1) + 1))

    def count_by_class(self) -> dict[int, int]:
        """Count the training samples of each class, of all clients that took part."""
        counts: dict[int, int] = {}
        for row in self._split:
            if row.client < self.population:
                counts[row.label] = counts.get(row.label, 0) + row.train
        return counts

    @cached_property
    def _split(self) -> list[SplitRow]:
        """The rows of split.csv."""
        path = self.folder.path / "split.csv"
        with files.refuse_damage(path):
            rows = [
                SplitRow(int(row["client"]), int(row["class"]), str(row["name"]), int(row["train"]))
                for row in self.folder.rows("split.csv")
            ]
            if not all(0 <= row.label < MOST_CLASSES for row in rows):
                raise ValueError("a class is not a number of a class")
            return rows

    def load_server(self, task: Task, initial: Params) -> tuple[int, State]:
        """Return how many rounds the server has been trained for, and its state.

        That is in the last checkpoint. Without one, the saved global model does for a method whose
        server has nothing else.
        """
        method, watch = self.member.method, self._watch()
        everybody = ServerRound(self.seed, 0, 1, range(self.population), self._list_sizes())
        template = method.init_server(task, method.shared_part(task, initial), everybody)
        found = None
        last = watch.last.round if watch.last else 0
        has_stopped = watch.is_over(self.config.patience) and last < int(self.config.rounds or 0)
        if not has_stopped:  # the checkpoint of a run that has stopped is of a later round
            found = self._load_checkpoint(self._find_batch())
        if found is None:
            found = last, self._load_global_model(task, template)
        round, server = found
        if not matches(server, template):
            raise UserError(
                f"The new data do not fit the model of {self.folder.path}: its samples or its "
                "classes are others."
            )
        placed: State = tree_map(lambda t: t.to(task.device), server)
        return round, placed

    def server_round(self, round: int) -> ServerRound:
        """Return a round after the last one, as the server sees it."""
        config = self.config
        joined = draw_participants(self.seed, round, self.population, config.join_ratio)
        return ServerRound(self.seed, round, int(config.rounds or 1), joined, self._list_sizes())

    def _list_sizes(self) -> Sequence[int]:
        """Return the training samples of every client; with several labels, those of all labels."""
        sizes = [0] * self.population
        for row in self._split:
            if 0 <= row.client < self.population:
                sizes[row.client] += row.train
        return sizes

    def _watch(self) -> RunWatch:
        rows = self.folder.history().get(self.member.label, [])
        own = [row for row in rows if row.seed == self.seed]
        if not own:
            raise UserError(
                f"{self.folder.path} has no evaluation of {self.member.title}, seed {self.seed}, "
                "yet: run it first."
            )
        path = self.folder.path / "history.csv"
        with files.refuse_damage(path):
            return group_runs(own, [self.seed], self.config.patience)[0]

    def _find_batch(self) -> Batch:
        record = self.folder.record or Digests()
        with files.refuse_damage(self.folder.path):
            sizes = cut_sizes(record.batches, self.config.seeds)
        batches = split_seeds(self.config, sizes)
        return next(batch for batch in batches if self.seed in batch.seeds)

    def _load_checkpoint(self, batch: Batch) -> tuple[int, State] | None:
        folder, record = self.folder, self.folder.record
        if record is None:
            return None
        checkpoints = Checkpoints(find_checkpoints(folder, self.number, batch), record.identity)
        newest = checkpoints.find().newest
        if newest is None or newest.server == NOTHING:
            return None
        path = checkpoints.folder / newest.server.name
        state, _ = tensor_files.load(path, newest.server.digest)
        run = self.group.members.index(self.member) * len(batch.seeds)
        run += self.seed - batch.seeds.start
        with files.refuse_damage(path):
            servers: Mapping[str, State] = state["servers"]
            return newest.round, servers[str(run)]

    def _load_global_model(self, task: Task, template: State) -> State:
        """Return a server with the saved global model; all else of it is never sent."""
        method = self.member.method
        base = unwrap(method)
        if (type(base).init_server, type(base).send) != (Method.init_server, Method.send):
            raise UserError(
                f"The server of {method.title} has more than a global model, and {self.folder.path}"
                " has no checkpoint of its last evaluation: run it with keep_checkpoint, and "
                "without patience."
            )
        names = template["global"].keys() - task.transient
        if not names:
            return template
        if not (self.folder.path / "models").exists():
            raise UserError(
                f"{self.folder.path} has neither a checkpoint nor a global model of "
                f"{method.title}: run it with keep_checkpoint or save_models."
            )
        model = self.folder.model(self.member.label, self.seed)
        saved = {name: model[name][None] for name in names if name in model}
        transient = {n: value for n, value in template["global"].items() if n not in names}
        return {**template, "global": {**transient, **saved}}


def find_run(path: RunFolder, method: str | None, seed: int | None) -> FinishedRun:
    """Find a method of a run folder by its name or label, the only one by default, and a seed."""
    config = path.config()
    if not 0 < int(config.clients or 0) <= MOST_CLIENTS:
        raise UserError(f"{path.path} does not say how many clients it has, or too many.")
    members = make_members(config)
    labels = [member.label for member in members]
    if method is None and len(members) > 1:
        raise UserError(f"{path.path} holds several methods: choose one of {', '.join(labels)}.")
    if method is not None and method not in labels:
        raise UserError(f"{path.path} has no method {method!r}; it has {', '.join(labels)}.")
    member = members[labels.index(method) if method else 0]
    seeds = range(config.seed, config.seed + config.seeds)
    chosen = seeds.start if seed is None else seed
    if chosen not in seeds:
        raise UserError(
            f"{path.path} has no seed {chosen}; it has {seeds.start} to {seeds.stop - 1}."
        )
    for number, group in enumerate(group_members(members)):
        if member in group.members:
            return FinishedRun(path, config, member, group, number, chosen)
    raise AssertionError("every member is in a group")
