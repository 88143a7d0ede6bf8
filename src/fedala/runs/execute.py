"""Carry out a plan: from a checked config to results."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedala.errors import RunError, first_line
from fedala.options import name_option
from fedala.records import Evaluation, Fault, PersonalModel
from fedala.runs.batches import Batch, name_seeds, split_seeds
from fedala.runs.build import build_preprocessing, build_simulation
from fedala.runs.checkpoint import Checkpoints
from fedala.runs.devices import is_device_error, use_device
from fedala.runs.digests import Digests
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.folder import RunFolder
from fedala.runs.holdout import (
    NEWCOMER_CLIENTS,
    NEWCOMERS,
    list_newcomer_clients,
    list_newcomers,
)
from fedala.runs.jobs import Jobs
from fedala.runs.kept_models import BEST, LAST, KeptModels
from fedala.runs.members import Group, Member
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan
from fedala.runs.provenance import describe, keep_layers, summarize
from fedala.runs.results import MethodResult, RunResult
from fedala.runs.resume import Progress, find_checkpoints, reopen, resume_advice
from fedala.runs.room import check_room, choose_best_models
from fedala.simulation import Simulation


def execute(
    plan: Plan,
    out: Path | None,
    *,
    force: bool = False,
    resume: bool | Path | None = None,
    observer: RunObserver | None = None,
    simulate: Callable[..., Simulation] = build_simulation,
    jobs: Jobs | None = None,
) -> RunResult:
    """Carry out a plan. With `resume`, continue the run in `out`, or a copy of the folder it names.

    `simulate` makes a method's simulation. With `jobs`, other processes do the work, and only a
    run folder can collect it. If the observer asks the run to stop, it ends with `Stopped`, which
    has the results so far.
    """
    observer = observer or RunObserver()
    for sentence in (*plan.federation.notes, *plan.notes, *(() if resume else plan.blended)):
        observer.on_message(sentence)
    source = resume if isinstance(resume, Path) else out
    if source and resume:
        plan = keep_layers(plan, RunFolder.open(source).record)
    if plan.config.save_best is None:
        before = RunFolder.open(source).config().save_best if source and resume else None
        plan = choose_best_models(plan, out, before)
        if plan.config.save_models and not plan.config.save_best:
            observer.on_message(
                "Only the models of the last evaluation are saved: those of the best one take much "
                f"memory, or do not fit on the disk. {name_option('save_best', True)} saves both."
            )
    result = RunResult(plan.config, {}, out, plan.federation.client_names, plan.majority_share)
    began = time.time()
    with ExitStack() as stack:
        stack.enter_context(use_device(plan.device))
        folder, about, progress = None, Digests(), dict[tuple[int, int], Progress]()
        batches = split_seeds(plan.config, [plan.config.seeds])
        if out and source and resume:
            reopened = reopen(stack, plan, out, source, observer)
            folder, about = reopened.folder, reopened.about
            batches, progress = reopened.batches, reopened.progress
        else:
            check_room(plan, out)
            if out:
                about = describe(plan)
                creation = RunFolder.create(out, plan.config, force=force, about=about)
                folder = stack.enter_context(creation)
        _warn_of_optimistic_stops(plan, observer)
        try:
            if folder:
                folder.tables.write_split(plan.federation)
                if preprocessing := build_preprocessing(plan):
                    folder.write_preprocessing(preprocessing)
                if names := plan.federation.client_names:
                    folder.write_client_names(names)
            if jobs and folder:
                progress = jobs.carry_out(plan, folder, about, batches, progress, observer)
            for number, group in enumerate(plan.groups):
                if jobs and (number, 0) not in progress:
                    continue  # it has stopped or failed
                results = {m.label: MethodResult(m.label, m.title) for m in group.members}
                result.methods |= results
                for batch in batches:
                    narrowed = batch.narrow(plan.for_group(group))
                    which = f", {name_seeds(batch.seeds)}," if len(batches) > 1 else ""
                    one = _BatchRun(narrowed, group, group.title + which, batch, results, observer)
                    if folder:
                        one.keep_in(folder, number, about)
                    one.carry_out(progress.get((number, batch.number)), simulate)
                if jobs:
                    jobs.add_figures(results, number)
                if folder:
                    folder.write_summary(summarize(plan, result, time.time() - began))
            if jobs and folder:
                jobs.check_endings(plan, folder.path)
        except Stopped as stopped:
            begun = {label: one for label, one in result.methods.items() if one.history}
            stopped.result = replace(result, methods=begun)
            raise
        except OSError as error:
            if folder is None:
                raise
            raise RunError(
                f"{folder.path} cannot be written to any more: {error.strerror or error}. "
                f"What was finished is kept there; {resume_advice(plan.config, folder.path)}."
            ) from error
    return result


def _warn_of_optimistic_stops(plan: Plan, observer: RunObserver) -> None:
    if plan.config.patience is not None and not any(map(len, plan.federation.validation)):
        observer.on_message(
            "Runs stop by their score on test samples, so that their results are optimistic: "
            f"with {name_option('validation', 0.1)}, they stop by samples that are held out."
        )


@dataclass
class _BatchRun:
    """A batch of seeds of one method, or of variants of it that run side by side.

    It leads from the start or the last checkpoint to the last evaluation.
    """

    plan: Plan
    """Of this group and these seeds alone."""
    group: Group
    title: str
    """Of the group, as the subject of a sentence; with its seeds, if others have run before."""
    batch: Batch
    results: dict[str, MethodResult]
    """By label: the results of the methods, to which the batch adds its own."""
    observer: RunObserver
    folder: RunFolder | None = None
    checkpoints: Checkpoints | None = None
    kept: KeptModels = field(default_factory=KeptModels)
    watches: list[RunWatch] = field(default_factory=list)
    """By run: its evaluations so far."""

    def _find_member(self, run: int) -> Member:
        """Return the member of a run of the simulation: each has a run for every seed."""
        return self.group.members[run // len(self.batch.seeds)]

    def _find_result(self, run: int) -> MethodResult:
        return self.results[self._find_member(run).label]

    def keep_in(self, folder: RunFolder, number: int, about: Digests) -> None:
        """Keep tables, models and checkpoints in a folder; `number`: the group's position."""
        self.folder = folder
        self.checkpoints = Checkpoints(
            find_checkpoints(folder, number, self.batch),
            about.identity,
            every=self.plan.config.checkpoint_every,
            size=self.plan.local_clients * self.plan.count_state_bytes(self.group),
            on_message=self.observer.on_message,
        )
        self._find_result(0).checkpoints = self.checkpoints

    def carry_out(self, progress: Progress | None, simulate: Callable[..., Simulation]) -> None:
        """Run all rounds that are left."""
        if progress:
            self._take_over(progress)
        if not (progress and progress.is_finished):
            for label in self.results:
                self.observer.on_begin(label, self.batch.seeds)
                self.observer.on_earlier(label, progress.histories[label] if progress else [])
            if progress and progress.first_round:
                self.observer.on_message(
                    f"{self.title} continues after round {progress.first_round} of "
                    f"{self.plan.config.rounds}."
                )
            try:
                self._run(progress, simulate)
            except RuntimeError as error:
                if not (is_device_error(error) and self.observer.should_stop()):
                    raise
                raise self._stop_at_checkpoint(error) from error
        self._note_ends()

    def _note_ends(self) -> None:
        """Note in the results which best models are kept, and which runs have stopped early."""
        config = self.plan.config
        for label, result in self.results.items():
            first = result.history[0]
            result.picked_by = first.metric.columns.get(first.criterion, first.criterion)
            watches = self._watch_history(label)
            for seed, watch in zip(self.batch.seeds, watches, strict=True):
                best, last = watch.best, watch.last
                has_best = best and self._has_best(result, seed)
                result.best_rounds.append(best.round if best and has_best else None)
                is_early = watch.is_over(config.patience) and last and last.round != config.rounds
                result.stops.append(last.round if last and is_early else None)

    def _watch_history(self, label: str) -> list[RunWatch]:
        """Return what the history says of each run of a method in this batch."""
        seeds = self.batch.seeds
        rows = [row for row in self.results[label].history if row.seed in seeds]
        return group_runs(rows, seeds, self.plan.config.patience)

    def _has_best(self, result: MethodResult, seed: int) -> bool:
        """Tell whether the models of a run's best evaluation are there."""
        if self.folder:
            return self.folder.models.has_best(result.method, seed)
        return any(other == seed for other, _ in result.best_models)

    def _run(self, progress: Progress | None, simulate: Callable[..., Simulation]) -> None:
        simulation = self._build(progress, simulate)
        self._watch(simulation, progress)
        try:
            self._run_rounds(simulation)
        finally:
            if self.checkpoints and self.plan.config.checkpoint_every == 0:
                self.checkpoints.discard()
        if self.folder and self.checkpoints:
            self.folder.tables.flush()
            self._record(self.checkpoints.round, is_finished=True)
            self.checkpoints.finish(keep=self.plan.config.keep_checkpoint)

    def _stop_at_checkpoint(self, error: RuntimeError) -> Stopped:
        """Return how a run stops if the GPU fails in the round that it should finish first."""
        kept = (self.checkpoints.round if self.checkpoints else None) or 0
        return Stopped(
            f"Stopped after {kept} rounds of {self.group.title}: the GPU failed in a later one "
            f"({first_line(error)})"
        )

    def _take_over(self, progress: Progress) -> None:
        """Continue the history and the checkpoints of an earlier process."""
        for label, history in progress.histories.items():
            result = self.results[label]
            result.history += history
            if self.folder and self.batch.number == 0:  # the tables have the rows of all batches
                result.read_tables(self.folder.rows("clients.csv"), self.folder.rows("metrics.csv"))
                result.read_newcomers(*map(self.folder.rows, (NEWCOMERS, NEWCOMER_CLIENTS)))
        if self.checkpoints is None:
            return
        self.checkpoints.continue_from(progress.found)
        newest = progress.found.newest
        if progress.is_finished and newest and not newest.done:
            # The earlier process was killed between its results and this.
            self.checkpoints.finish(keep=self.plan.config.keep_checkpoint)

    def _record(self, checkpoint: int | None, *, is_finished: bool = False) -> None:
        """Record the newest checkpoint, and what has been written."""
        if self.folder:
            self.folder.record_progress(
                self.results,
                batch=self.batch.number,
                checkpoint=checkpoint,
                is_finished=is_finished,
            )

    def _build(self, progress: Progress | None, simulate: Callable[..., Simulation]) -> Simulation:
        """Build the simulation, with the state of the newest checkpoint if there is one."""
        variants = self.group.variants
        simulation = simulate(
            self.plan,
            self.group.members[0].method,
            **({"variants": variants} if variants else {}),
            client_files=self.checkpoints.folder if self.checkpoints else None,
            on_fault=self._add_fault,
            on_message=self.observer.on_message,
        )
        newest = progress.found.newest if progress else None
        if newest and self.checkpoints:
            restores_lanes = self.plan.config.lanes == "auto"
            self.checkpoints.restore(newest, simulation, restores_lanes=restores_lanes)
        return simulation

    def _watch(self, simulation: Simulation, progress: Progress | None) -> None:
        """Stop the runs that have stopped before, and take over the models that they keep."""
        config, newest = self.plan.config, progress.found.newest if progress else None
        self.watches = [watch for label in self.results for watch in self._watch_history(label)]
        over = [watch.is_over(config.patience) for watch in self.watches]
        simulation.stopped = {run for run, is_over in enumerate(over) if is_over}
        stops_early = config.patience is not None and config.save_models
        simulation.keeps_evaluated = bool(config.save_best) or stops_early
        self.kept = KeptModels(
            self.checkpoints.folder if self.checkpoints else None,
            writes_at_once=not self.plan.fits_best_models,
        )
        kinds = {BEST: config.save_best, LAST: config.save_models}
        if newest:
            self.kept.adopt(newest.kept, [kind for kind, is_wanted in kinds.items() if is_wanted])
        for run, watch in enumerate(self.watches):
            if config.save_best and watch.best and not self.kept.has(BEST, run):
                title, seed = self._find_member(run).title, simulation.seeds[run]
                self.observer.on_message(
                    f"{title}, seed {seed}: the models of the best round so far, "
                    f"{watch.best.round}, have not been kept; those of a better round will be."
                )

    def _run_rounds(self, simulation: Simulation) -> None:
        on_model = self._add_model if self.plan.config.save_models else None
        for evaluation in simulation.run(on_model, lambda round: self._end_round(simulation)):
            self._add_evaluation(simulation, evaluation)
        for kind, run, client, path, digest in self.kept.list_files():
            if self.folder:
                seed, best = simulation.seeds[run], kind == BEST
                name = self._find_result(run).method
                self.folder.models.link(name, seed, client, path, digest, best=best)
        for kind, models in self.kept.list_models():
            for personal in models:
                self._add_model(personal, best=kind == BEST)

    def _add_evaluation(self, simulation: Simulation, evaluation: Evaluation) -> None:
        is_last = self._follow(simulation, evaluation)
        row, result = evaluation.row, self._find_result(evaluation.run)
        name = result.method
        result.history.append(row)
        if self.folder:
            self.folder.tables.add_history(name, row)
            self.folder.tables.add_weights(name, row, evaluation.weights)
            self.folder.tables.add_metrics(name, row, evaluation.models)
        for model, figures in evaluation.models:
            result.metrics.append({"seed": row.seed, "round": row.round, "model": model, **figures})
        self._add_newcomers(result, evaluation, is_last=is_last)
        if is_last:
            result.add_clients(row.seed, evaluation.client_scores)
            if self.folder:
                names = self.plan.federation.client_names
                self.folder.tables.add_clients(name, row, evaluation.client_scores, names)
        self.observer.on_row(name, row)

    def _add_newcomers(
        self, result: MethodResult, evaluation: Evaluation, *, is_last: bool
    ) -> None:
        lines = list_newcomers(evaluation)
        names = self.plan.federation.client_names
        clients = list_newcomer_clients(evaluation, names) if is_last else []
        result.newcomers += lines
        result.newcomer_clients += clients
        if self.folder:
            self.folder.tables.add_newcomers(result.method, NEWCOMERS, lines)
            self.folder.tables.add_newcomers(result.method, NEWCOMER_CLIENTS, clients)

    def _follow(self, simulation: Simulation, evaluation: Evaluation) -> bool:
        """Keep the models of a new best evaluation. Stop a run; tell whether this is its last."""
        row, run, config = evaluation.row, evaluation.run, self.plan.config
        watch = self.watches[run]
        if watch.add(row) and config.save_best:
            self.kept.keep(BEST, run, row.round, simulation.list_models(run))
        if row.round == config.rounds or not watch.is_over(config.patience):
            return row.round == config.rounds
        simulation.stopped.add(run)
        if config.save_models:
            self.kept.keep(LAST, run, row.round, simulation.list_models(run))
        best = f"round {watch.best.round}" if watch.best else "none, no score is a number"
        self.observer.on_message(
            f"{self._find_member(run).title}, seed {row.seed}: stopped after round {row.round}; "
            f"the best is {best}."
        )
        return True

    def _add_fault(self, fault: Fault) -> None:
        name = self._find_result(fault.run).method
        if names := self.plan.federation.client_names:
            fault = replace(fault, client_name=names[fault.client])
        if self.folder:
            self.folder.tables.add_fault(name, fault, self.plan.config.on_divergence)
        self.observer.on_fault(name, fault)

    def _add_model(self, personal: PersonalModel, *, best: bool = False) -> None:
        result = self._find_result(personal.run)
        if self.folder:
            self.folder.models.save(result.method, personal, best=best)
        else:
            state = {name: value[0].to("cpu", copy=True) for name, value in personal.model.items()}
            models = result.best_models if best else result.models
            models[personal.seed, personal.client] = state

    def _end_round(self, simulation: Simulation) -> None:
        """Write a checkpoint if one is due. Stop if the observer asks for it."""
        round, config = simulation.round, self.plan.config
        is_stopping = self.observer.should_stop()
        is_last = round == config.rounds or not simulation.is_active
        is_wanted = config.checkpoint_every != 0 and (
            is_stopping or is_last or (self.checkpoints and self.checkpoints.is_due(round))
        )
        if self.folder and self.checkpoints and is_wanted:
            self.folder.tables.flush()
            self.checkpoints.write(simulation, self.kept)
            self._record(round)
        if is_stopping and not is_last:
            raise Stopped(f"Stopped after {round} rounds of {self.group.title}")
