"""`fedala.run`: from a config to results."""

import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala.data import Dataset, Federation, federate, known_datasets, load
from fedala.errors import RunError, UserError, byte_size, first_line, printable
from fedala.io import files
from fedala.io.untrusted import free_memory
from fedala.lanes.cohort import Params, Task, model_state
from fedala.lanes.randomness import torch_seed
from fedala.methods import Method, WithALA, catalogue, make
from fedala.models import build_model
from fedala.options import suggest
from fedala.records import Fault, PersonalModel, Row
from fedala.runs.checkpoint import Checkpoints, FoundCheckpoints
from fedala.runs.config import Config
from fedala.runs.digests import Digests
from fedala.runs.folder import TABLES, RunFolder, nearest_existing_parent
from fedala.simulation.client_states import NOTHING, size
from fedala.simulation.rounds import Simulation
from fedala.version import __version__


@dataclass
class MethodResult:
    """What one method did, over all runs."""

    method: str
    title: str
    history: list[Row] = field(default_factory=list)
    models: dict[tuple[int, int | None], dict[str, Tensor]] = field(default_factory=dict)
    """By seed and client (None: the global model), unless they went to a run folder."""
    checkpoints: Checkpoints | None = None

    def _per_run(self, pick: Callable[[list[Row]], float]) -> np.ndarray:
        seeds = dict.fromkeys(row["seed"] for row in self.history)
        return np.array(
            [pick([row for row in self.history if row["seed"] == seed]) for seed in seeds]
        )

    @property
    def best(self) -> np.ndarray:
        """Each run's accuracy in its best round: the paper's headline, picked on test data."""
        return self._per_run(lambda rows: max(row["accuracy"] for row in rows))

    @property
    def best_joined(self) -> np.ndarray:
        """The same over the participants of the round alone, as in the paper's ρ = 0.5 column."""
        return self._per_run(lambda rows: max(row["accuracy_joined"] for row in rows))

    @property
    def final(self) -> np.ndarray:
        """Each run's accuracy after the last round."""
        return self._per_run(lambda rows: rows[-1]["accuracy"])

    @property
    def picked(self) -> np.ndarray | None:
        """Each run's accuracy in the round that the validation slice picks."""
        if "accuracy_validation" not in self.history[0]:
            return None
        return self._per_run(
            lambda rows: max(rows, key=lambda row: row["accuracy_validation"])["accuracy"]
        )

    @property
    def best_accuracy(self) -> float:
        """Mean over the runs of the best round's accuracy."""
        return float(self.best.mean())

    @property
    def seconds_per_round(self) -> float:
        """Of all runs together: evaluated rounds, without the first two, which pay for the start and for ALA's initial stage,
        and the last, which does not train."""
        seconds = [row["seconds"] for row in self.history if row["seed"] == self.history[0]["seed"]]
        return float(np.mean(seconds[2:-1] or seconds[:-1] or seconds))

    def summary(self) -> dict[str, Any]:
        def over_runs(values: np.ndarray) -> dict[str, Any]:
            return {
                "mean": float(values.mean()),
                "std": float(values.std()),
                "runs": values.tolist(),
            }

        figures = {"best": over_runs(self.best), "final": over_runs(self.final)}
        if self.picked is not None:
            figures["validation_picked"] = over_runs(self.picked)
        if any(row["accuracy"] != row["accuracy_joined"] for row in self.history):
            figures["best_joined"] = over_runs(self.best_joined)
        sent, uploaded = (max(row[key] for row in self.history) for key in ("sent", "uploaded"))
        told = {
            "title": self.title,
            "accuracy": figures,
            "seconds_per_round": self.seconds_per_round,
            "parameters_per_client_and_round": {
                "sent": sent,
                "uploaded": uploaded,
                "together": sent + uploaded,
            },
            "client_rounds_that_diverged": sum(row["diverged"] for row in self.history),
        }
        if self.checkpoints and self.checkpoints.written:
            kept = self.checkpoints
            told["checkpoints"] = {
                "written": kept.written,
                "bytes": kept.bytes,
                "seconds": kept.seconds,
            }
        return told


@dataclass
class Result:
    """What a run gave: one `MethodResult` per method. With a single method, its figures are the result's own."""

    config: Config
    methods: dict[str, MethodResult]
    folder: Path | None = None

    @property
    def _only(self) -> MethodResult:
        if len(self.methods) != 1:
            raise AttributeError(
                f"This result holds several methods: use result.methods[{next(iter(self.methods))!r}]."
            )
        return next(iter(self.methods.values()))

    @property
    def history(self) -> list[Row]:
        return self._only.history

    @property
    def best_accuracy(self) -> float:
        return self._only.best_accuracy

    @property
    def models(self) -> dict[tuple[int, int | None], dict[str, Tensor]]:
        return self._only.models


@dataclass(frozen=True)
class Plan:
    """A run that has been checked from end to end: everything that can be refused has been refused."""

    config: Config
    federation: Federation
    model: Callable[[], nn.Module]
    methods: tuple[Method, ...]
    device: torch.device
    state_bytes: Mapping[str, int]
    """By method: how much a client keeps between rounds."""
    here: bool = True
    """Whether the clients are on this machine, and what they keep is kept here."""

    @property
    def lanes(self) -> int:
        """The clients of all runs that keep something here."""
        return int(self.config.clients or 0) * self.config.seeds * self.here


def plan(
    config: Config,
    dataset: Dataset | Federation | None = None,
    model: Callable[[], nn.Module] | None = None,
) -> Plan:
    """Checks a config and loads what it names; nothing is written. The plan's config has every value resolved."""
    names = [name for name in known_datasets() if name.name == config.dataset]
    values: dict[str, Any] = {"rounds": 2000, "lr": 0.005, "model": "cnn"}
    if names:
        values |= {"rounds": names[0].rounds, "lr": names[0].lr, "model": names[0].model}
    _check_settings(config)
    methods = tuple(make(name, config.set) for name in config.methods)
    for method in methods:
        if sum(other.name == method.name for other in methods) > 1:
            raise UserError(f"method names {method.title} twice: {config.method}.")
        if method.everyone and config.join_ratio < 1:
            raise UserError(
                f"{method.title} needs every client in every round: it cannot run with join_ratio < 1."
            )
    device = _device(config.device)

    if isinstance(dataset, Federation):
        federation = dataset
        config = replace(
            config, partition="own", validation=0.0
        )  # as it was handed over, whatever the options say
    else:
        data = dataset or load(config.dataset, Path(config.data_dir) if config.data_dir else None)
        federation = federate(
            data, config.partition, config.clients, config.partition_seed, config.validation
        )
    if not names and federation.dataset.vocabulary is not None:
        values |= {"model": "fasttext", "lr": 0.1}
    if config.model in ("resnet18", "fasttext"):
        values["lr"] = 0.1
    chosen = {key: value for key, value in values.items() if getattr(config, key) is None}
    config = replace(config, clients=len(federation.train), **chosen)
    if config.record_weights is None:
        config = replace(config, record_weights=-(-int(config.rounds or 1) // 20))
    if model is not None:
        config = replace(config, model="own")
    name = str(config.model)
    make_model = model or (lambda: build_model(name, federation.dataset))
    skeleton = _skeleton(make_model, is_own=model is not None)
    for method in methods:
        if isinstance(method, WithALA):
            method.governed(skeleton, method.ala.layers)
    if model is not None:
        _try_model(skeleton, federation.dataset)
    state_bytes = _rehearse(methods, make_model(), federation)
    checked = Plan(config, federation, make_model, methods, device, state_bytes)
    _check_memory(checked)
    return checked


class Stopped(RunError):
    """A run that was asked to stop, and did so between two rounds."""


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Signals that ask to stop are noted, so that the round can be finished and kept; a second one is obeyed at once."""
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        # Past Python's buffers, which the program may be writing to at this very moment.
        os.write(2, b"Finishing this round, then stopping; once more to stop at once.\n")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class RunObserver:
    """Who follows a run: each function is called as things happen."""

    row: Callable[[str, Row], None] = lambda method, row: None
    fault: Callable[[str, Fault], None] = lambda method, fault: None
    say: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], bool] = lambda: False
    """Asked after every round whether to stop there."""


def run(
    config: Config | None = None,
    *,
    dataset: str | Path | Dataset | Federation | None = None,
    model: str | Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    force: bool = False,
    resume: Path | str | None = None,
    on_row: Callable[[str, Row], None] | None = None,
    **options: Any,
) -> Result:
    """Runs one or several methods: `run(method="fedala", dataset="digits", rounds=50)`.

    Options are those of `fedala run`. A `Dataset` or a `Federation` of your own may stand for the dataset's name, and a
    function that builds an `nn.Module` for the model's. With `out`, everything is kept in that folder. `resume` names the
    folder of a run that was interrupted, or that shall have more rounds; data and model of your own are given again.
    """
    if config is not None and (
        options or resume or isinstance(dataset, str) or isinstance(model, str)
    ):
        raise UserError(
            "Give run either a Config or options, not both: what it should do would not be clear."
        )
    if isinstance(dataset, Path):
        dataset = str(dataset)
    if isinstance(dataset, Federation):
        for name in ("partition", "partition_seed", "clients", "validation"):
            if name in options:
                raise UserError(
                    f"A Federation is divided already: {name} has no meaning beside it."
                )
    if isinstance(dataset, str):
        options["dataset"] = dataset
    elif dataset is not None and not resume:
        options["dataset"] = (dataset.dataset if isinstance(dataset, Federation) else dataset).name
    if isinstance(model, str):
        options["model"] = model
    own_data = None if isinstance(dataset, str) else dataset
    own_model = None if isinstance(model, str) else model
    if resume:
        config = RunFolder.existing(Path(resume)).config().changed(options)
    checked = plan(config or Config.of(options), own_data, own_model)
    watcher = RunObserver(row=on_row) if on_row else RunObserver()
    where = Path(out) if out else Path(resume) if resume else None
    return execute(
        checked, where, force=force, resume=Path(resume) if resume else None, watcher=watcher
    )


def execute(
    plan: Plan,
    out: Path | None,
    *,
    force: bool = False,
    resume: bool | Path | None = None,
    watcher: RunObserver | None = None,
    simulate: Callable[..., Simulation] | None = None,
) -> Result:
    """Carries out a plan. With `resume`, it goes on where the run in `out` stopped, or in a copy of the folder that it names.

    `simulate` makes a method's simulation where `prepare` does not.
    """
    watcher = watcher or RunObserver()
    config = plan.config
    result = Result(config, {}, out)
    began = time.time()
    devices = [plan.device] if plan.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        about = _describe(plan) if out else Digests()
        folder, progress = None, dict[str, Progress]()
        if out and resume:
            folder, progress = _reopen(stack, plan, out, resume, about, watcher)
        else:
            _check_room(plan, out)
            if out:
                folder = stack.enter_context(
                    RunFolder.create(out, config, force=force, about=about)
                )
        try:
            if folder:
                folder.write_split(plan.federation)
            for number, method in enumerate(plan.methods):
                outcome = result.methods[method.name] = MethodResult(method.name, method.title)
                if folder:
                    outcome.checkpoints = Checkpoints(
                        folder.checkpoints(number),
                        about.identity,
                        every=config.checkpoint_every,
                        size=plan.lanes * plan.state_bytes[method.name],
                        say=watcher.say,
                    )
                _carry_out(
                    plan,
                    method,
                    outcome,
                    folder,
                    progress.get(method.name),
                    watcher,
                    simulate or build_simulation,
                )
                if folder:
                    folder.write_summary(_summary(plan, result, time.time() - began))
        except OSError as error:
            if folder is None:
                raise
            raise RunError(
                f"{folder.path} cannot be written to any more: {error.strerror or error}. "
                f"What was finished is kept there; {resume_advice(config, folder.path)}."
            ) from error
    return result


def resume_advice(config: Config, folder: Path) -> str:
    """Say how to go on with a run that has stopped, as the end of a sentence."""
    if config.checkpoint_every == 0 and not any((folder / "checkpoint").glob("*/*.json")):
        return "it kept no checkpoints (checkpoint_every is 0), so it cannot be resumed"
    return f"to go on, use fedala run --resume {shlex.quote(str(folder))}"


def _carry_out(
    plan: Plan,
    method: Method,
    outcome: MethodResult,
    folder: RunFolder | None,
    progress: "Progress | None",
    watcher: RunObserver,
    simulate: Callable[..., Simulation],
) -> None:
    """One method, from its start or from its last checkpoint."""
    config, rounds, checkpoints = plan.config, int(plan.config.rounds or 1), outcome.checkpoints
    if progress:
        outcome.history = progress.history
        if checkpoints:
            checkpoints.take_up(progress.found)
        if progress.is_finished:
            if checkpoints and progress.found.newest and not progress.found.newest.done:
                checkpoints.finish(
                    keep=config.keep_checkpoint
                )  # a kill came between the results and this
            return
    found = progress.found.newest if progress else None

    def note(fault: Fault) -> None:
        if folder:
            folder.add(
                "faults.csv",
                method.name,
                fault.round,
                {**asdict(fault), "policy": config.on_divergence},
            )
        watcher.fault(method.name, fault)

    simulation = simulate(
        plan,
        method,
        client_files=checkpoints.folder if checkpoints else None,
        on_fault=note,
        say=watcher.say,
    )
    if found and checkpoints:
        checkpoints.restore(found, simulation, anew=config.lanes != "auto")

    def keep(personal: PersonalModel) -> None:
        if folder:
            folder.save_model(outcome.method, personal)
        else:
            state = {name: value[0].to("cpu", copy=True) for name, value in personal.model.items()}
            outcome.models[personal.seed, personal.client] = state

    def after(round: int) -> None:
        stop = watcher.stop()
        wanted = config.checkpoint_every != 0 and (
            stop or round == rounds or (checkpoints and checkpoints.due(round))
        )
        if folder and checkpoints and wanted:
            folder.flush()
            checkpoints.write(simulation)
            folder.seal(method.name, checkpoint=round)
        if stop and round < rounds:
            raise Stopped(f"Stopped after {round} rounds of {method.title}")

    try:
        for row in simulation.run(keep if config.save_models else None, after):
            outcome.history.append(row)
            if folder:
                folder.add_history(method.name, [row])
                folder.add_weights(method.name, row)
            row.pop("weights", None)
            if row["round"] < rounds:
                row.pop("clients")  # every client's part is kept of the last evaluation only
            elif folder:
                folder.add_clients(method.name, row)
            watcher.row(method.name, row)
    finally:
        if checkpoints and config.checkpoint_every == 0:
            checkpoints.discard()
    if folder and checkpoints:
        folder.flush()
        folder.seal(method.name, checkpoint=checkpoints.round, finished=True)
        checkpoints.finish(keep=config.keep_checkpoint)


@dataclass(frozen=True)
class Progress:
    """How far one method of an interrupted or finished run has got."""

    found: FoundCheckpoints
    history: list[Row]
    is_finished: bool
    """Whether there is nothing left to do for it."""


def _reopen(
    stack: ExitStack,
    plan: Plan,
    out: Path,
    source: bool | Path,
    about: Digests,
    watcher: RunObserver,
) -> tuple[RunFolder, dict[str, Progress]]:
    """Open the folder of a run to go on with it, or a copy of it. Everything is checked before anything is written."""
    folder = RunFolder.existing(source if isinstance(source, Path) else out)
    before = folder.config()
    after = before.changed({f.name: getattr(plan.config, f.name) for f in fields(plan.config)})
    for method in plan.methods:
        if method.schedule_depends_on_rounds and after.rounds != before.rounds:
            raise UserError(
                f"{method.title} plans its rounds ahead, so a run of {before.rounds} cannot be resumed with {after.rounds}."
            )
    elsewhere = out.absolute() != folder.path.absolute()
    with ExitStack() as held:
        held.enter_context(folder.held())
        progress = _inspect(plan, folder, before, about, watcher)
        _check_room(plan, out, there=0 if elsewhere else folder.size())
        changes = [f"{name}: {change}" for name, change in before.differences(after).items()]
        other = _other_program(folder.record, about)
        for change in other:
            watcher.say(
                f"This run began with another version ({change}); its results may differ from now on."
            )
        changes += other
        if elsewhere:
            changes.append(f"out: {folder.path} → {out}")
            folder = stack.enter_context(folder.copied(out))
        else:
            stack.enter_context(held.pop_all())
    rounds = {
        name: found.found.newest.round if found.found.newest else 0
        for name, found in progress.items()
    }
    folder.shorten(
        {name: round for name, round in rounds.items() if not progress[name].is_finished}, about
    )
    folder.add_resumption("; ".join(changes))
    folder.write_config(after)
    return folder, progress


def _inspect(
    plan: Plan, folder: RunFolder, before: Config, about: Digests, watcher: RunObserver
) -> dict[str, Progress]:
    """Find out how far each method has got. Refuse what cannot be resumed, and change nothing."""
    for sentence in folder.unverified() if folder.record is None else ():
        watcher.say(sentence)
    if folder.record and folder.record.identity not in ("", about.identity):
        raise UserError(
            f"{folder.path} belongs to a run with another configuration: its options or its data are not the ones given now."
        )
    tables = {name: folder.rows(name) for name in TABLES}
    progress = {}
    for number, method in enumerate(plan.methods):
        rows = [
            {key: value for key, value in row.items() if key != "method" and value is not None}
            for row in tables["history.csv"]
            if row["method"] == method.name
        ]
        checkpoints = Checkpoints(folder.checkpoints(number), about.identity, say=watcher.say)
        progress[method.name] = _locate(
            plan, method, folder, before, rows, checkpoints.find(), watcher
        )
    return progress


def _locate(
    plan: Plan,
    method: Method,
    folder: RunFolder,
    before: Config,
    rows: list[Row],
    found: FoundCheckpoints,
    watcher: RunObserver,
) -> Progress:
    """Decide where a method continues: at its newest checkpoint, at its start, or nowhere because it is finished."""
    rounds, newest = int(plan.config.rounds or 1), found.newest
    entry = folder.recorded(method.name)
    is_finished = newest is not None and newest.done and newest.round == rounds
    if entry:
        is_finished = entry.finished and rounds == before.rounds
    trained = before.rounds if entry and entry.finished else newest.round if newest else 0
    if trained is not None and trained > rounds:
        raise UserError(
            f"{method.title} has been trained for {trained} rounds already, which is more than {rounds}."
        )
    if newest is None and entry and entry.checkpoint is not None:
        raise files.DamagedFile(
            f"The checkpoints of {method.title} are gone from {folder.path}: nothing can be resumed."
        )
    can_continue = newest is not None and newest.server != NOTHING
    if is_finished and plan.config.save_models and (damaged := folder.damaged_model(method.name)):
        sentence = f"{damaged} is gone or damaged"
        if newest is None or not can_continue or newest.round < rounds:
            raise files.DamagedFile(
                f"{sentence}, and no checkpoint was kept from which it could be written again."
            )
        watcher.say(f"{sentence}: the last evaluation is done again to write it.")
        is_finished = False
    if is_finished:
        return Progress(
            found,
            _complete(folder, method, before, rows, rounds, is_finished=True),
            is_finished=True,
        )
    if newest is None:
        if entry and entry.finished:
            raise UserError(
                f"{method.title} is finished and kept no checkpoint, so it cannot get more rounds."
            )
        if rows and (folder.record is None or before.checkpoint_every == 0):
            raise UserError(
                f"{folder.path} has no checkpoint of {method.title}, so it cannot be resumed: "
                f"run it again, with --config {shlex.quote(str(folder.path / 'config.toml'))} and another --out."
            )
        return Progress(found, [], is_finished=False)
    if not can_continue:
        raise UserError(
            f"{method.title} is finished and its checkpoint was not kept, so it cannot get more rounds."
        )
    history = [row for row in rows if row["round"] < newest.round]
    return Progress(
        found, _complete(folder, method, before, history, newest.round), is_finished=False
    )


def _complete(
    folder: RunFolder,
    method: Method,
    before: Config,
    rows: list[Row],
    rounds: int,
    *,
    is_finished: bool = False,
) -> list[Row]:
    """Return the rows of so many rounds, if all of them are there; a finished run has one evaluation more."""
    evaluations = -(-rounds // before.eval_every) + is_finished
    if len(rows) != evaluations * before.seeds:
        raise files.DamagedFile(
            f"{folder.path / 'history.csv'} is damaged: it has {len(rows)} of the {evaluations * before.seeds} rows "
            f"of {method.title} that belong to {rounds} rounds."
        )
    return rows


def _other_program(record: Digests | None, about: Digests) -> list[str]:
    """Say in what the program or the model is not the one that the run began with."""
    if record is None:
        return []
    changes = [
        f"{name}: {record.versions[name]} → {version}"
        for name, version in about.versions.items()
        if record.versions.get(name, version) != version
    ]
    same = len(record.probe) == len(about.probe) and np.allclose(
        record.probe, about.probe, rtol=1e-3, atol=1e-5, equal_nan=True
    )
    if record.probe and not same:
        changes.append("model: it computes something else from the same initial state")
    return changes


def _describe(plan: Plan) -> Digests:
    """Say what a run is, for its record."""
    return Digests(identity=_identity(plan), versions=versions(), probe=_probe(plan))


def _probe(plan: Plan) -> list[float]:
    """Return what the initial model of the first seed computes from the first samples, as far as it can be run alone."""
    data = plan.federation.dataset
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(plan.config.seed, "initial model"))
        model = plan.model()
    try:
        return [
            round(value, 6) for value in _first_output(model, data).double().flatten()[:16].tolist()
        ]
    except Exception:  # a model of the user's, which may want other samples than these
        return []


def _identity(plan: Plan) -> str:
    """The digest of what a run is: its options, but for those that may change, and its data."""
    what = {
        **plan.config.identity(),
        "set": dict(plan.config.set),
        "data": plan.federation.digest(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def build_task(plan: Plan) -> tuple[Task, Callable[[int], Params]]:
    """The task, and the initial model Θ⁰ of every seed."""
    config, federation = plan.config, plan.federation
    task = Task(
        _skeleton(plan.model, is_own=config.model == "own"),
        federation.dataset.x,
        federation.dataset.y,
        federation.train,
        federation.test,
        federation.validation,
        batch_size=config.batch_size,
        lr=float(config.lr or 0),
        epochs=config.local_epochs,
        shuffle=config.shuffle,
        device=plan.device,
        precision=config.precision,
        feature_memory=None
        if config.feature_memory is None
        else int(config.feature_memory * 2**30),
    )

    def start(seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "initial model"))
            state = model_state(plan.model())
        return {
            name: value.to(plan.device, task.dtype if value.is_floating_point() else value.dtype)
            for name, value in state.items()
        }

    return task, start


def build_simulation(plan: Plan, method: Method, **options: Any) -> Simulation:
    """One method's simulation, ready for its first round."""
    config = plan.config
    task, start = build_task(plan)
    return Simulation(
        method,
        task,
        start,
        seeds=range(config.seed, config.seed + config.seeds),
        rounds=int(config.rounds or 1),
        join_ratio=config.join_ratio,
        lanes=_lanes(config.lanes, plan.device),
        threads=torch.get_num_threads()
        if config.lanes == "auto" and plan.device.type == "cpu"
        else 1,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        client_memory=None if config.client_memory is None else int(config.client_memory * 2**30),
        record_weights=int(config.record_weights or 0),
        on_divergence=config.on_divergence,
        **options,
    )


def _rehearse(
    methods: tuple[Method, ...], model: nn.Module, federation: Federation
) -> dict[str, int]:
    """Lets methods refuse the model before any work is done: server and client are made up once, with two samples.

    Returns the bytes of a client's state, by method.
    """
    data, rows = federation.dataset, [np.arange(2)]
    start = model_state(model)
    task = Task(model, data.x[:2], data.y[:2], rows, rows)
    found = {}
    for method in methods:
        method.serve(task, method.shared(task, start), [2])
        found[method.name] = size(method.fresh(task, start))
    return found


def _skeleton(make_model: Callable[[], nn.Module], *, is_own: bool) -> nn.Module:
    """Make a model for its structure alone. One of the user's own may need real tensors to be made, or to run."""
    if is_own:
        return make_model()
    with torch.device("meta"):
        return make_model()


def _first_output(model: nn.Module, data: Dataset) -> Any:
    """Run a model, as it is evaluated, on the first two samples."""
    task = Task(model, data.x[:2], data.y[:2], [np.arange(2)])
    with torch.no_grad(), task.mode(training=False):
        return model(task.inputs(torch.arange(len(data.y[:2]))))


def _try_model(model: nn.Module, data: Dataset) -> None:
    """Refuse a model that does not turn samples into a score for each class."""
    try:
        output = _first_output(model, data)
    except Exception as error:  # whatever the user's own code may raise
        raise UserError(
            f"The model cannot be run on samples of shape {tuple(data.x.shape[1:])}: {first_line(error)}."
        ) from error
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or shape[1] < data.classes:
        found = (
            f"a {type(output).__name__}" if shape is None else f"a tensor of shape {tuple(shape)}"
        )
        raise UserError(
            f"The model turns {len(data.y[:2])} samples into {found}; "
            f"it must give a score for each of the {data.classes} classes: ({len(data.y[:2])}, {data.classes})."
        )


def _model_bytes(plan: Plan) -> int:
    return size(model_state(_skeleton(plan.model, is_own=plan.config.model == "own")))


def _check_memory(plan: Plan) -> None:
    """Refuses a run of which not even one client at a time fits into memory."""
    data = plan.federation.dataset.x
    # A client that trains: its model, what it received, what it keeps, gradients, and what a step needs besides.
    need = 6 * _model_bytes(plan)
    if plan.device.type == "cuda":
        need += data.numel() * data.element_size()
        room, where = torch.cuda.get_device_properties(plan.device).total_memory, "the GPU has"
    else:
        room, where = free_memory(), "there is free memory of"
    if need > room:
        raise UserError(
            f"One client at a time takes about {need / 2**30:.1f} GiB with this model and data, and {where} "
            f"{room / 2**30:.1f}: use a smaller model, or a larger machine."
        )


def _check_room(plan: Plan, out: Path | None, there: int = 0) -> None:
    """Refuse to keep more than there is room for: every client's model and state, of every method and run.

    `there` bytes of it are on the disk already.
    """
    config, lanes = plan.config, plan.lanes
    models = lanes * sum(method.personal for method in plan.methods) if config.save_models else 0
    need, what = models * _model_bytes(plan), f"Keeping {models} models takes"
    advice = "use --no-save-models, or save_models=False"
    if out is None:
        room, where = free_memory() // 2, "memory"
    else:
        room, where = shutil.disk_usage(nearest_existing_parent(out)).free, "disk"
        if config.checkpoint_every != 0:
            # Two checkpoints are kept and a third is written; they share the files of clients that took no part in between.
            changed = min(1.0, config.join_ratio * (config.checkpoint_every or 10))
            states = [lanes * plan.state_bytes[method.name] for method in plan.methods]
            need += int(sum(states) + 2 * changed * max(states))
            what = f"Keeping {models} models and the state of {lanes} clients takes"
            advice += ", or --checkpoint-every 0 to do without checkpoints"
    need = max(0, need - there)
    if need > room:
        more = "another " if there else ""
        raise UserError(
            f"{what} {more}{byte_size(need)} of {where}, and there is room for {byte_size(room)}: {advice}."
        )


def _lanes(lanes: str, device: torch.device) -> int | None:
    """How many clients are one tensor program; None: all. On a CPU, a client per thread is faster than lanes."""
    if lanes == "auto":
        return None if device.type == "cuda" else 1
    return None if lanes == "all" else int(lanes)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device is cuda, and there is no CUDA device here: use --device cpu or auto."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _check_settings(config: Config) -> None:
    """Every hyperparameter belongs to a method of this run: a setting that would be ignored is a mistake."""
    owners = {part for name in config.methods for part in name.split("+")}
    owners |= {"ala"} if "fedala" in owners else set()
    owners |= {"fedala"} if "fedavg+ala" in config.methods else set()
    for key in config.set:
        owner, dot, name = key.partition(".")
        if owner != "ala" and owner not in catalogue():
            raise UserError(
                f"set {key}: there is no method {owner!r}{suggest(owner, [*catalogue(), 'ala'])}."
            )
        if not dot or not name:
            raise UserError(f"set {key}: write it as method.option=value, such as fedala.eta=0.5.")
        if owner not in owners:
            raise UserError(
                f"set {key}: {owner} is not among the methods of this run ({', '.join(config.methods)})."
            )


def _summary(plan: Plan, result: Result, seconds: float) -> Mapping[str, Any]:
    return {
        "methods": {name: outcome.summary() for name, outcome in result.methods.items()},
        "note": "best: the best round, picked on test data as in the paper; final: the last round",
        "rounds": result.config.rounds,
        "seeds": result.config.seeds,
        "seconds": seconds,
        "command": _command(),
        "data": plan.federation.dataset.note,
        "versions": {**versions(), "commit": _commit(), "device": _device_name(plan.device)},
    }


def _command() -> str:
    """What is running, as one would type it."""
    program = Path(sys.argv[0])
    is_own = program.stem == "fedala" or program.parts[-2:] in (
        ("cli", "app.py"),
        ("fedala", "__main__.py"),
    )
    return printable(shlex.join(["fedala" if is_own else sys.argv[0], *sys.argv[1:]]), 100_000)


def _device_name(device: torch.device) -> str:
    """What the seconds were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "fedala": __version__,
    }


def _commit() -> str | None:
    """The git commit of the source tree that runs, where it is one."""
    here = Path(__file__).resolve().parent
    if not (here.parents[2] / "pyproject.toml").is_file():
        return None  # installed: a repository around it would be somebody else's
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
