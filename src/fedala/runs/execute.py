"""`fedala.run`: from a config to results."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedala.data import Dataset, Federation
from fedala.errors import RunError, UserError
from fedala.lanes.losses import LossFunction
from fedala.records import Evaluation, Fault, HistoryRow, PersonalModel
from fedala.runs.batches import Batch, split_seeds
from fedala.runs.build import build_simulation
from fedala.runs.checkpoint import Checkpoints
from fedala.runs.config import Config
from fedala.runs.digests import Digests
from fedala.runs.folder import RunFolder
from fedala.runs.members import Group
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan, check_room, plan
from fedala.runs.provenance import describe, summarize
from fedala.runs.results import MethodResult, Result
from fedala.runs.resumable_options import change_config
from fedala.runs.resume import Progress, find_checkpoints, reopen, resume_advice
from fedala.simulation import Simulation


def run(
    config: Config | None = None,
    *,
    dataset: str | Path | Dataset | Federation | None = None,
    model: str | Callable[[], nn.Module] | None = None,
    loss: str | LossFunction | None = None,
    out: Path | str | None = None,
    force: bool = False,
    resume: Path | str | None = None,
    on_row: Callable[[str, HistoryRow], None] | None = None,
    **options: Any,
) -> Result:
    """Run one or several methods: `run(method="fedala", dataset="digits", rounds=50)`.

    Options are those of `fedala run`. Instead of a dataset's name, give a `Dataset` or a
    `Federation` of your own; instead of a model's name, a function that builds an `nn.Module`;
    instead of a loss's name, a function (output, y) that returns the mean loss of a batch.
    With `out`, everything is kept in that folder. `resume` names the folder of a run that was
    interrupted, or shall have more rounds, further seeds (`seeds=5`) or further methods
    (`method="+ditto"`); give data, model and loss of your own again.
    """
    if isinstance(dataset, Path):
        dataset = str(dataset)
    for name, value in (("model", model), ("loss", loss)):
        if isinstance(value, str):
            options[name] = value
    if config is not None and (options or resume or isinstance(dataset, str)):
        raise UserError(
            "Give run either a Config or options, not both: what it should do would not be clear."
        )
    if isinstance(dataset, Federation):
        _check_no_partition(options)
    if isinstance(dataset, str):
        options["dataset"] = dataset
    elif dataset is not None and not resume:
        options["dataset"] = (dataset.dataset if isinstance(dataset, Federation) else dataset).name
    if resume:
        config = change_config(RunFolder.open(Path(resume)).config(), options)
    checked = plan(
        config or Config.from_values(options),
        None if isinstance(dataset, str) else dataset,
        None if isinstance(model, str) else model,
        None if isinstance(loss, str) else loss,
    )
    folder = out or resume
    return execute(
        checked,
        Path(folder) if folder else None,
        force=force,
        resume=Path(resume) if resume else None,
        observer=RunObserver(on_row=on_row) if on_row else None,
    )


def _check_no_partition(options: dict[str, Any]) -> None:
    for name in ("partition", "partition_seed", "clients", "validation"):
        if name in options:
            raise UserError(f"A Federation is divided already: do not give {name} with it.")


def execute(
    plan: Plan,
    out: Path | None,
    *,
    force: bool = False,
    resume: bool | Path | None = None,
    observer: RunObserver | None = None,
    simulate: Callable[..., Simulation] = build_simulation,
) -> Result:
    """Carry out a plan. With `resume`, continue the run in `out`, or a copy of the folder it names.

    `simulate` makes a method's simulation.
    """
    observer = observer or RunObserver()
    result = Result(plan.config, {}, out)
    began = time.time()
    devices = [plan.device] if plan.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        folder, about, progress = None, Digests(), dict[tuple[int, int], Progress]()
        batches = split_seeds(plan.config, [plan.config.seeds])
        if out and resume:
            source = resume if isinstance(resume, Path) else out
            reopened = reopen(stack, plan, out, source, observer)
            folder, about = reopened.folder, reopened.about
            batches, progress = reopened.batches, reopened.progress
        else:
            check_room(plan, out)
            if out:
                about = describe(plan)
                creation = RunFolder.create(out, plan.config, force=force, about=about)
                folder = stack.enter_context(creation)
        try:
            if folder:
                folder.tables.write_split(plan.federation)
            for number, group in enumerate(plan.groups):
                results = {m.label: MethodResult(m.label, m.title) for m in group.members}
                result.methods |= results
                for batch in batches:
                    narrowed = batch.narrow(plan.for_group(group))
                    one = _BatchRun(narrowed, group, batch, results, observer)
                    if folder:
                        one.keep_in(folder, number, about)
                    one.carry_out(progress.get((number, batch.number)), simulate)
                if folder:
                    folder.write_summary(summarize(plan, result, time.time() - began))
        except OSError as error:
            if folder is None:
                raise
            raise RunError(
                f"{folder.path} cannot be written to any more: {error.strerror or error}. "
                f"What was finished is kept there; {resume_advice(plan.config, folder.path)}."
            ) from error
    return result


@dataclass
class _BatchRun:
    """A batch of seeds of one method, or of variants of it that run side by side.

    It leads from the start or the last checkpoint to the last evaluation.
    """

    plan: Plan
    """Of this group and these seeds alone."""
    group: Group
    batch: Batch
    results: dict[str, MethodResult]
    """By label: the results of the methods, to which the batch adds its own."""
    observer: RunObserver
    folder: RunFolder | None = None
    checkpoints: Checkpoints | None = None

    def _find_result(self, variant: int) -> MethodResult:
        return self.results[self.group.members[variant].label]

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
            if progress.is_finished:
                return
        for label in self.results:
            self.observer.on_begin(label, self.batch.seeds)
        simulation = self._build(progress, simulate)
        try:
            self._run_rounds(simulation)
        finally:
            if self.checkpoints and self.plan.config.checkpoint_every == 0:
                self.checkpoints.discard()
        if self.folder and self.checkpoints:
            self.folder.tables.flush()
            self._record(self.checkpoints.round, is_finished=True)
            self.checkpoints.finish(keep=self.plan.config.keep_checkpoint)

    def _take_over(self, progress: Progress) -> None:
        """Continue the history and the checkpoints of an earlier process."""
        for label, history in progress.histories.items():
            result = self.results[label]
            result.history += history
            if self.folder and self.batch.number == 0:  # the tables have the rows of all batches
                result.read_tables(self.folder.rows("clients.csv"), self.folder.rows("metrics.csv"))
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

    def _run_rounds(self, simulation: Simulation) -> None:
        on_model = self._add_model if self.plan.config.save_models else None
        for evaluation in simulation.run(on_model, lambda round: self._end_round(simulation)):
            self._add_evaluation(evaluation)

    def _add_evaluation(self, evaluation: Evaluation) -> None:
        row, result = evaluation.row, self._find_result(evaluation.variant)
        name = result.method
        result.history.append(row)
        if self.folder:
            self.folder.tables.add_history(name, row)
            self.folder.tables.add_weights(name, row, evaluation.weights)
            self.folder.tables.add_metrics(name, row, evaluation.models)
        for model, figures in evaluation.models:
            result.metrics.append({"seed": row.seed, "round": row.round, "model": model, **figures})
        if row.round == self.plan.config.rounds:
            result.add_clients(row.seed, evaluation.client_scores)
            if self.folder:
                self.folder.tables.add_clients(name, row, evaluation.client_scores)
        self.observer.on_row(name, row)

    def _add_fault(self, fault: Fault) -> None:
        name = self._find_result(fault.variant).method
        if self.folder:
            self.folder.tables.add_fault(name, fault, self.plan.config.on_divergence)
        self.observer.on_fault(name, fault)

    def _add_model(self, personal: PersonalModel) -> None:
        result = self._find_result(personal.variant)
        if self.folder:
            self.folder.models.save(result.method, personal)
        else:
            state = {name: value[0].to("cpu", copy=True) for name, value in personal.model.items()}
            result.models[personal.seed, personal.client] = state

    def _end_round(self, simulation: Simulation) -> None:
        """Write a checkpoint if one is due. Stop if the observer asks for it."""
        round, config = simulation.round, self.plan.config
        is_stopping, is_last = self.observer.should_stop(), round == config.rounds
        is_wanted = config.checkpoint_every != 0 and (
            is_stopping or is_last or (self.checkpoints and self.checkpoints.is_due(round))
        )
        if self.folder and self.checkpoints and is_wanted:
            self.folder.tables.flush()
            self.checkpoints.write(simulation)
            self._record(round)
        if is_stopping and not is_last:
            raise Stopped(f"Stopped after {round} rounds of {self.group.title}")
