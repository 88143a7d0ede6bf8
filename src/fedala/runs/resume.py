"""Resume a run: everything is inspected, and refused if need be, before anything is changed."""

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from fedala.errors import UserError
from fedala.io import files
from fedala.methods import Method
from fedala.records import HistoryRow
from fedala.runs.checkpoint import Checkpoints, FoundCheckpoints
from fedala.runs.config import Config
from fedala.runs.digests import Digests
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver
from fedala.runs.plan import Plan, check_room
from fedala.runs.provenance import list_program_changes
from fedala.runs.resumable_options import change_config
from fedala.runs.tables import TABLES
from fedala.simulation.client_states import NOTHING


@dataclass(frozen=True)
class Progress:
    """How far one method of an interrupted or finished run has got."""

    found: FoundCheckpoints
    history: list[HistoryRow]
    is_finished: bool
    """Whether nothing is left to do for it."""

    @property
    def first_round(self) -> int:
        """The first round to run: that of the newest checkpoint, or 0."""
        return self.found.newest.round if self.found.newest else 0


def resume_advice(config: Config, folder: Path) -> str:
    """Say how to resume a run that has stopped, as the end of a sentence."""
    if config.checkpoint_every == 0 and not any((folder / "checkpoint").glob("*/*.json")):
        return "it kept no checkpoints (checkpoint_every is 0), so it cannot be resumed"
    return f"to resume it, use fedala run --resume {shlex.quote(str(folder))}"


def reopen(
    stack: ExitStack,
    plan: Plan,
    out: Path,
    source: Path,
    about: Digests,
    observer: RunObserver,
) -> tuple[RunFolder, dict[str, Progress]]:
    """Open the folder of a run, or copy it to `out`, to resume the run there.

    The folder stays locked until `stack` closes. Everything is checked before anything is written.
    """
    folder = RunFolder.open(source)
    before = folder.config()
    options = {f.name: getattr(plan.config, f.name) for f in fields(plan.config)}
    after = change_config(before, options)
    _check_schedules(plan, before, after)
    is_copy = out.absolute() != folder.path.absolute()
    with ExitStack() as source_lock:
        source_lock.enter_context(folder.lock())
        progress = _inspect(plan, folder, before, about, observer)
        check_room(plan, out, present=0 if is_copy else folder.size())
        changes = [f"{name}: {change}" for name, change in before.differences(after).items()]
        for change in (program_changes := list_program_changes(folder.record, about)):
            observer.on_message(
                f"This run began with another version ({change}); "
                "its results may differ from now on."
            )
        changes += program_changes
        if is_copy:
            changes.append(f"out: {folder.path} → {out}")
            folder = stack.enter_context(folder.copy_to(out))
        else:
            stack.enter_context(source_lock.pop_all())
    unfinished = {name: one.first_round for name, one in progress.items() if not one.is_finished}
    folder.drop_rows_from(unfinished, about)
    folder.tables.add_resumption("; ".join(changes))
    folder.write_config(after)
    return folder, progress


def _check_schedules(plan: Plan, before: Config, after: Config) -> None:
    for method in plan.methods:
        if method.schedule_depends_on_rounds and after.rounds != before.rounds:
            raise UserError(
                f"{method.title} plans its rounds ahead, so a run of {before.rounds} "
                f"cannot be resumed with {after.rounds}."
            )


def _inspect(
    plan: Plan, folder: RunFolder, before: Config, about: Digests, observer: RunObserver
) -> dict[str, Progress]:
    """Return how far each method has got. Refuse what cannot be resumed, and change nothing."""
    if folder.record is None:
        for sentence in folder.list_unverified():
            observer.on_message(sentence)
    elif folder.record.identity not in ("", about.identity):
        raise UserError(
            f"{folder.path} belongs to a run with another configuration: "
            "its options or its data are not the ones given now."
        )
    history = folder.history()
    for name in TABLES:
        if name != "history.csv":
            folder.rows(name)  # raises if the table is damaged
    progress = {}
    for number, method in enumerate(plan.methods):
        checkpoints = Checkpoints(
            folder.checkpoint_folder(number), about.identity, on_message=observer.on_message
        )
        inspection = _Inspection(
            plan, method, folder, before, history.get(method.name, []), checkpoints.find()
        )
        progress[method.name] = inspection.locate(observer)
    return progress


@dataclass(frozen=True)
class _Inspection:
    """One method of a run folder, looked at to decide where it continues."""

    plan: Plan
    method: Method
    folder: RunFolder
    before: Config
    rows: list[HistoryRow]
    found: FoundCheckpoints

    def locate(self, observer: RunObserver) -> Progress:
        """Return where the method continues: at its newest checkpoint, its start, or nowhere."""
        self._check_rounds()
        self._check_presence()
        newest = self.found.newest
        if self._is_finished() and not self._must_write_models_again(observer):
            history = self._complete(self.rows, self._rounds, evaluates_last=True)
            return Progress(self.found, history, is_finished=True)
        if newest is None:
            self._check_fresh_start()
            return Progress(self.found, [], is_finished=False)
        if newest.server == NOTHING:
            raise UserError(
                f"{self.method.title} is finished and its checkpoint was not kept, "
                "so it cannot get more rounds."
            )
        rows = [row for row in self.rows if row.round < newest.round]
        return Progress(self.found, self._complete(rows, newest.round), is_finished=False)

    @property
    def _rounds(self) -> int:
        return int(self.plan.config.rounds or 1)

    def _is_finished(self) -> bool:
        """Tell whether the method has all of its rounds, by the record if there is one."""
        entry = self.folder.find_method_record(self.method.name)
        newest = self.found.newest
        if self._have_all_stopped():
            return entry.finished if entry else newest is not None and newest.done
        if entry:
            return entry.finished and self._rounds == self.before.rounds
        return newest is not None and newest.done and newest.round == self._rounds

    def _have_all_stopped(self) -> bool:
        """Tell whether every run has stopped before the last of its planned rounds."""
        patience, planned = self.before.patience, int(self.before.rounds or 0)
        return all(
            watch.is_over(patience) and watch.last is not None and watch.last.round < planned
            for watch in self._group_runs(self.rows)
        )

    def _group_runs(self, rows: list[HistoryRow]) -> list[RunWatch]:
        seeds = range(self.before.seed, self.before.seed + self.before.seeds)
        try:
            return group_runs(rows, seeds, self.before.patience)
        except ValueError as error:
            path = self.folder.path / "history.csv"
            raise files.DamagedFile(f"{path} is damaged: {error}.") from None

    def _check_rounds(self) -> None:
        """Refuse fewer rounds than the method has been trained for."""
        entry, newest = self.folder.find_method_record(self.method.name), self.found.newest
        trained = newest.round if newest else 0
        if entry and entry.finished and not self._have_all_stopped():
            trained = int(self.before.rounds or 0)
        if trained > self._rounds:
            raise UserError(
                f"{self.method.title} has been trained for {trained} rounds already, "
                f"which is more than {self._rounds}."
            )

    def _check_presence(self) -> None:
        """Refuse a folder that has lost its checkpoints: it would look like a new run's."""
        entry = self.folder.find_method_record(self.method.name)
        if self.found.newest is None and entry and entry.checkpoint is not None:
            raise files.DamagedFile(
                f"The checkpoints of {self.method.title} are gone from {self.folder.path}: "
                "nothing can be resumed."
            )

    def _must_write_models_again(self, observer: RunObserver) -> bool:
        """Tell whether a saved model is damaged. Refuse if no checkpoint can give it back."""
        if not (self.plan.config.save_models or self.plan.config.save_best):
            return False
        damaged = self.folder.models.find_damaged(self.method.name)
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
        """Refuse to start a method again that has results and no checkpoint."""
        entry = self.folder.find_method_record(self.method.name)
        if entry and entry.finished:
            raise UserError(
                f"{self.method.title} is finished and kept no checkpoint, "
                "so it cannot get more rounds."
            )
        if self.rows and (self.folder.record is None or self.before.checkpoint_every == 0):
            config = shlex.quote(str(self.folder.path / "config.toml"))
            raise UserError(
                f"{self.folder.path} has no checkpoint of {self.method.title}, so it cannot be "
                f"resumed: run it again, with --config {config} and another --out."
            )

    def _complete(
        self, rows: list[HistoryRow], rounds: int, *, evaluates_last: bool = False
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
                f"{expected} rows of {self.method.title} that belong to {rounds} rounds."
            )
        return rows
