"""Resume a run: everything is inspected, and refused if need be, before anything is changed."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from fedala.errors import UserError
from fedala.io import files
from fedala.records import HistoryRow
from fedala.runs.batches import Batch, cut_sizes, split_seeds
from fedala.runs.checkpoint import Checkpoints, FoundCheckpoints
from fedala.runs.config import Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import BatchRecord, Digests, MethodRecord
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.folder import RunFolder
from fedala.runs.job_folders import gather_job_folders
from fedala.runs.members import Group
from fedala.runs.observer import RunObserver
from fedala.runs.plan import Plan
from fedala.runs.provenance import LAYERS, describe, list_program_changes
from fedala.runs.resumable_options import (
    change_config,
    has_additions,
    has_moved,
    resume_command,
)
from fedala.runs.room import check_room
from fedala.runs.tables import TABLES
from fedala.simulation.client_states import NOTHING


@dataclass(frozen=True)
class Progress:
    """How far one batch of seeds of a group of an interrupted or finished run has got."""

    found: FoundCheckpoints
    histories: dict[str, list[HistoryRow]]
    """By label."""
    is_finished: bool
    """Whether nothing is left to do for it."""

    @property
    def first_round(self) -> int:
        """The first round to run: that of the newest checkpoint, or 0."""
        return self.found.newest.round if self.found.newest else 0


@dataclass(frozen=True)
class Reopened:
    """A run folder, ready to be continued."""

    folder: RunFolder
    about: Digests
    """What the run is."""
    batches: list[Batch]
    progress: dict[tuple[int, int], Progress]
    """By group and batch."""


def resume_advice(config: Config, folder: Path, *, own: Sequence[str] = ()) -> str:
    """Say how to resume a run that has stopped, as the end of a sentence.

    `own`: for a run of Python, the arguments that must be given again.
    """
    if config.checkpoint_every == 0 and not any((folder / "checkpoint").glob("*/*.json")):
        return "it kept no checkpoints (checkpoint_every is 0), so it cannot be resumed"
    return f"to resume it, use {resume_command(config, folder, own)}"


def reopen(
    stack: ExitStack,
    plan: Plan,
    out: Path,
    source: Path,
    observer: RunObserver,
) -> Reopened:
    """Open the folder of a run, or copy it to `out`, to resume the run there.

    The folder stays locked until `stack` closes. Everything is checked before anything is written.
    """
    folder = RunFolder.open(source)
    before = folder.config()
    options = {f.name: getattr(plan.config, f.name) for f in fields(plan.config)}
    after = change_config(before, options, source)
    if after.methods != plan.config.methods:
        raise UserError(f"method must name the methods in the order of the run: {after.method}.")
    _check_schedules(plan, before, after)
    about, batches = _describe(plan, folder, before, after)
    is_copy = out.absolute() != folder.path.absolute()
    with ExitStack() as source_lock:
        source_lock.enter_context(folder.lock())
        if folder.record and folder.record.identity == about.identity:
            gather_job_folders(folder, plan.groups, batches)  # a killed process has left them
        progress = _inspect(plan, folder, before, about, batches, observer)
        check_room(plan, out, present=0 if is_copy else folder.size())
        changes = [f"{name}: {change}" for name, change in before.differences(after).items()]
        for change in (program_changes := list_program_changes(folder.record, about)):
            observer.on_message(
                f"The run continues with another version ({change}): "
                "its results may differ from now on."
            )
        changes += program_changes
        if is_copy:
            changes.append(f"out: {folder.path} → {out}")
            folder = stack.enter_context(folder.copy_to(out))
        else:
            stack.enter_context(source_lock.pop_all())
    _drop_unfinished(folder, about, batches, progress)
    if changes or not all(one.is_finished for one in progress.values()):
        folder.tables.add_resumption("; ".join(changes))
    folder.write_config(after)  # after the record, which knows what the run was before
    return Reopened(folder, about, batches, progress)


def _describe(
    plan: Plan, folder: RunFolder, before: Config, after: Config
) -> tuple[Digests, list[Batch]]:
    """Return what the run is, by what it was when it began, and its batches of seeds."""
    record = folder.record or Digests()
    origin = record.origin
    began = dict(folder.stated_config().set)
    is_older = began != before.set
    if not origin and (is_older or has_additions(before, after) or has_moved(before, after)):
        origin = {"method": before.method, "set": began, "seeds": before.seeds}
    if has_moved(before, after):
        origin = {"dataset": before.dataset, "partition": before.partition, **origin}
    about = describe(plan, origin)
    if not record.versions.items() >= LAYERS.items():
        about.versions = {n: one for n, one in about.versions.items() if n not in LAYERS}
    with files.refuse_damage(folder.path / DIGESTS):
        sizes = cut_sizes(record.batches, before.seeds)
    if after.seeds > before.seeds:
        sizes.append(after.seeds - before.seeds)
    about.batches = sizes if len(sizes) > 1 else []
    return about, split_seeds(after, sizes)


def _drop_unfinished(
    folder: RunFolder,
    about: Digests,
    batches: list[Batch],
    progress: Mapping[tuple[int, int], Progress],
) -> None:
    """Drop the rows that come after the checkpoints, and record what is finished."""
    first_rounds: dict[tuple[str, int], int] = {}
    records: dict[str, list[BatchRecord]] = {}
    for (_, number), one in progress.items():
        for label in one.histories:
            if not one.is_finished:
                seeds = batches[number].seeds
                first_rounds |= {(label, seed): one.first_round for seed in seeds}
            if len(batches) > 1:
                entry = folder.find_method_record(label) or MethodRecord()
                record = BatchRecord(one.is_finished, entry.batch(number).checkpoint)
                records.setdefault(label, []).append(record)
    folder.drop_rows_from(first_rounds, about, records)


def _check_schedules(plan: Plan, before: Config, after: Config) -> None:
    if after.rounds == before.rounds:
        return
    for member in plan.members:
        schedule = member.config.recipe().schedule
        planner = ""
        # Without decay_every, a third of the rounds lies between two steps.
        has_own_steps = schedule.kind == "step" and member.config.decay_every is None
        if schedule.depends_on_rounds or has_own_steps:
            planner = f"The {schedule.kind} schedule"
        elif member.method.schedule_depends_on_rounds:
            planner = member.method.title
        if planner:
            raise UserError(
                f"{planner} plans its rounds ahead, so a run of {before.rounds} "
                f"cannot be resumed with {after.rounds}."
            )


def _inspect(
    plan: Plan,
    folder: RunFolder,
    before: Config,
    about: Digests,
    batches: list[Batch],
    observer: RunObserver,
) -> dict[tuple[int, int], Progress]:
    """Return how far each batch of each group has got. Refuse what cannot be resumed.

    Nothing is changed.
    """
    if folder.record is None:
        for sentence in folder.list_unverified():
            observer.on_message(sentence)
    elif folder.record.identity not in ("", about.identity):
        raise UserError(
            f"{folder.path} belongs to a run with other data: the samples of {before.dataset}, "
            "or which client has which of them, are not the ones given now. Give the dataset "
            "that it began with."
        )
    history = folder.history()
    for name in TABLES:
        if name != "history.csv":
            folder.rows(name)  # raises if the table is damaged
    progress = {}
    for number, group in enumerate(plan.groups):
        for batch in batches:
            checkpoints = Checkpoints(
                find_checkpoints(folder, number, batch),
                about.identity,
                on_message=observer.on_message,
            )
            histories = select_histories(history, group, batch)
            found = checkpoints.find()
            inspection = _Inspection(plan, group, batch, folder, before, histories, found)
            progress[number, batch.number] = inspection.locate(observer)
    return progress


def select_histories(
    history: Mapping[str, list[HistoryRow]], group: Group, batch: Batch
) -> dict[str, list[HistoryRow]]:
    """Return the rows of a batch of a group, by label."""
    return {
        member.label: [row for row in history.get(member.label, []) if row.seed in batch.seeds]
        for member in group.members
    }


def find_checkpoints(folder: RunFolder, number: int, batch: Batch) -> Path:
    """Return the folder of the checkpoints of a batch; `number`: the group's position."""
    return folder.checkpoint_folder(number, batch.seeds.start if batch.number else None)


@dataclass(frozen=True)
class _Inspection:
    """One batch of a group of a run folder, looked at to decide where it continues."""

    plan: Plan
    group: Group
    batch: Batch
    folder: RunFolder
    before: Config
    histories: dict[str, list[HistoryRow]]
    found: FoundCheckpoints

    def locate(self, observer: RunObserver) -> Progress:
        """Return where the group continues: at its newest checkpoint, its start, or nowhere."""
        self._check_rounds()
        self._check_presence()
        newest = self.found.newest
        if self._is_finished() and not self._must_write_models_again(observer):
            histories = {
                label: self._complete(label, rows, self._rounds, evaluates_last=True)
                for label, rows in self.histories.items()
            }
            return Progress(self.found, histories, is_finished=True)
        if newest is None:
            self._check_fresh_start()
            if any(self.histories.values()):
                observer.on_message(f"{self.group.title} has no checkpoint yet: it begins again.")
            return Progress(self.found, {label: [] for label in self.histories}, is_finished=False)
        if newest.server == NOTHING:
            raise UserError(
                f"{self.group.title} is finished and its checkpoint was not kept, "
                "so it cannot get more rounds."
            )
        histories = {}
        for label, rows in self.histories.items():
            earlier = [row for row in rows if row.round < newest.round]
            histories[label] = self._complete(label, earlier, newest.round)
        return Progress(self.found, histories, is_finished=False)

    def _title_of(self, label: str) -> str:
        return next(member.title for member in self.group.members if member.label == label)

    @property
    def _records(self) -> list[BatchRecord]:
        """The records of the batch, of those members that have one."""
        found = (self.folder.find_method_record(label) for label in self.histories)
        return [record.batch(self.batch.number) for record in found if record]

    @property
    def _rounds(self) -> int:
        return int(self.plan.config.rounds or 1)

    def _is_finished(self) -> bool:
        """Tell whether the group has all of its rounds, by the record if there is one."""
        newest, records = self.found.newest, self._records
        are_finished = len(records) == len(self.histories) and all(
            record.finished for record in records
        )
        if self._have_all_stopped():
            return are_finished if records else newest is not None and newest.done
        if records:
            return are_finished and self._rounds == self.before.rounds
        return newest is not None and newest.done and newest.round == self._rounds

    def _have_all_stopped(self) -> bool:
        """Tell whether every run has stopped before the last of its planned rounds."""
        patience, planned = self.before.patience, int(self.before.rounds or 0)
        return all(
            watch.is_over(patience) and watch.last is not None and watch.last.round < planned
            for rows in self.histories.values()
            for watch in self._group_runs(rows)
        )

    def _group_runs(self, rows: list[HistoryRow]) -> list[RunWatch]:
        try:
            return group_runs(rows, self.batch.seeds, self.before.patience)
        except ValueError as error:
            path = self.folder.path / "history.csv"
            raise files.DamagedFile(f"{path} is damaged: {error}.") from None

    def _check_rounds(self) -> None:
        """Refuse fewer rounds than the group has been trained for."""
        newest = self.found.newest
        trained = newest.round if newest else 0
        are_finished = any(record.finished for record in self._records)
        if are_finished and not self._have_all_stopped():
            trained = int(self.before.rounds or 0)
        if trained > self._rounds:
            raise UserError(
                f"{self.group.title} has been trained for {trained} rounds already, "
                f"which is more than {self._rounds}."
            )

    def _check_presence(self) -> None:
        """Refuse a folder that has lost its checkpoints: it would look like a new run's."""
        has_recorded = any(record.checkpoint is not None for record in self._records)
        if self.found.newest is None and has_recorded:
            raise files.DamagedFile(
                f"The checkpoints of {self.group.title} are gone from {self.folder.path}: "
                "nothing can be resumed."
            )

    def _must_write_models_again(self, observer: RunObserver) -> bool:
        """Tell whether a saved model is damaged. Refuse if no checkpoint can give it back."""
        if not (self.plan.config.save_models or self.plan.config.save_best):
            return False
        found = (
            self.folder.models.find_damaged(label, self.batch.seeds) for label in self.histories
        )
        damaged = next((path for path in found if path), None)
        if damaged is None:
            return False
        newest = self.found.newest
        is_late = newest and (newest.round >= self._rounds or self._have_all_stopped())
        if newest is None or newest.server == NOTHING or not is_late:
            raise files.DamagedFile(
                f"{damaged} is gone or damaged, "
                "and no checkpoint was kept from which it could be written again."
            )
        observer.on_message(
            f"{damaged} is gone or damaged: the last evaluation is done again to write it."
        )
        return True

    def _check_fresh_start(self) -> None:
        """Refuse to start a group again that has results and no checkpoint."""
        if any(record.finished for record in self._records):
            raise UserError(
                f"{self.group.title} is finished and kept no checkpoint, "
                "so it cannot get more rounds."
            )
        has_rows = any(self.histories.values())
        if has_rows and (self.folder.record is None or self.before.checkpoint_every == 0):
            raise UserError(
                f"{self.folder.path} has no checkpoint of {self.group.title}, so it cannot be "
                "resumed: run it again, with the options of its config.toml, in another folder."
            )

    def _complete(
        self, label: str, rows: list[HistoryRow], rounds: int, *, evaluates_last: bool = False
    ) -> list[HistoryRow]:
        """Return the rows of so many rounds if none is missing; a finished run has one more.

        A run that has stopped early has fewer.
        """
        evaluations = -(-rounds // self.before.eval_every) + evaluates_last
        expected = sum(
            watch.evaluations if watch.is_over(self.before.patience) else evaluations
            for watch in self._group_runs(rows)
        )
        if len(rows) != expected:
            raise files.DamagedFile(
                f"{self.folder.path / 'history.csv'} is damaged: it has {len(rows)} of the "
                f"{expected} rows of {self._title_of(label)} that belong to {rounds} rounds."
            )
        return rows
