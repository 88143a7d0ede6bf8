"""Run cells, each in a folder of its own.

Finished cells are not run again; unfinished ones continue.
"""

import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedala.cells.cell import Cell, Setting
from fedala.cells.folders import (
    list_run_folders,
    read_cell_file,
    read_histories,
    seeds_of,
    write_cell_file,
)
from fedala.cells.observer import CellObserver, Outcome
from fedala.data import Dataset, Federation, federate, load
from fedala.errors import RunError, UserError
from fedala.io import files
from fedala.io.user_code import describe_error
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.devices import choose_device, is_device_error
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan, plan
from fedala.runs.provenance import versions
from fedala.runs.resumable_options import change_config
from fedala.runs.seconds import average_seconds

#: Why a cell is skipped while another process runs it.
BUSY = "another process is running it"


@dataclass(frozen=True)
class RunOptions:
    """How to run cells."""

    out: Path
    rounds: int | None = None
    """Without it, those of the setting."""
    seeds: int | None = None
    """Without it, those of the setting."""
    data_dir: Path | None = None
    eval_every: int = 1
    device: str = "auto"
    keep_checkpoints: bool = False
    """Whether finished cells keep theirs, so that they can get more rounds later."""
    deadline: float | None = None
    """By `time.monotonic()`: no round begins after it."""
    stop_signals: Sequence[int] = ()
    """Signals that have arrived; the first one ends the time."""

    imports: str | None = None
    """Code with a user's own methods, as `Config.imports`."""

    def rounds_of(self, cell: Cell) -> int:
        return self.rounds or cell.setting.rounds

    def seeds_of(self, cell: Cell) -> int:
        return self.seeds or cell.setting.seeds

    def folder(self, cell: Cell) -> Path:
        return self.out / cell.setting.name / cell.name

    @property
    def seconds_left(self) -> float:
        if self.stop_signals:
            return 0
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


class DataCache:
    """The data of one setting at a time, so that cells share what is loaded and divided."""

    def __init__(self, data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self.dataset: Dataset | None = None
        self.setting: Setting | None = None
        self.federation: Federation | None = None
        self.missing: dict[str, str] = {}
        """Datasets that cannot be loaded, and why."""

    def load(self, setting: Setting) -> Federation:
        """Return the dataset of a setting, divided among its clients."""
        if setting.dataset in self.missing:
            raise UserError(self.missing[setting.dataset])
        if self.dataset is None or self.dataset.name != setting.dataset:
            self.federation = self.dataset = None  # memory may not hold two datasets
            try:
                self.dataset = load(setting.dataset, self.data_dir)
            except UserError as error:
                self.missing[setting.dataset] = str(error)
                raise
        if self.federation is None or setting != self.setting:
            self.federation = federate(self.dataset, setting.partition, setting.clients)
            self.setting = setting
        return self.federation


def run_cells(cells: Iterable[Cell], options: RunOptions, observer: CellObserver) -> None:
    """Run the unfinished cells, setting by setting, until the time is up.

    A cell that is known to need more time than there is waits for those that fit. Then the first
    such cell begins, and stops between two rounds.
    """
    cells = list(dict.fromkeys(cells))
    datasets = list(dict.fromkeys(cell.setting.dataset for cell in cells))
    names = list(dict.fromkeys(cell.setting for cell in cells))
    cells.sort(key=lambda cell: (datasets.index(cell.setting.dataset), names.index(cell.setting)))
    cache = DataCache(options.data_dir)
    waiting = []
    for cell in cells:
        if estimate_seconds(cell, options) > options.seconds_left > 0:
            waiting.append(cell)
        else:
            _attempt(cell, options, cache, observer)
    for cell in waiting:
        _attempt(cell, options, cache, observer)


def _attempt(cell: Cell, options: RunOptions, cache: DataCache, observer: CellObserver) -> None:
    """Run a cell if it is unfinished and there is time, and report how it ended."""
    if options.stop_signals:
        return
    outcome, reason = Outcome.FAILED, ""
    try:
        outcome = _run_cell(cell, options, cache, observer)
    except Stopped:
        outcome = Outcome.STOPPED
    except UserError as error:
        outcome, reason = Outcome.SKIPPED, str(error)
    except RunError as error:
        reason = str(error)
    except OSError as error:
        raise UserError(
            f"The results folder {options.out} cannot be written to: {error}."
        ) from None
    except Exception as error:  # of the device, or of a user's method: other cells may still run
        reason = _describe_fault(error)
        if options.stop_signals and is_device_error(error):  # after it was asked to stop
            outcome = Outcome.STOPPED
    observer.end(str(cell), outcome, reason)


def _describe_fault(error: Exception) -> str:
    """Return an error and where it was raised: `KeyError: 'c' (fedmine.py, line 7)`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{describe_error(error)} ({Path(place.filename).name}, line {place.lineno})"


def _run_cell(cell: Cell, options: RunOptions, cache: DataCache, observer: CellObserver) -> Outcome:
    if is_finished(cell, options):
        return Outcome.FINISHED_BEFORE
    if options.seconds_left <= 0:
        return Outcome.NOT_STARTED
    federation, folder = cache.load(cell.setting), options.folder(cell)
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / ".lock", BUSY):
        if is_finished(cell, options):  # by another process, meanwhile
            return Outcome.FINISHED_BEFORE
        facts = _collect_facts(folder, federation.dataset, options.device)
        for seeds in _list_unfinished(cell, options):
            write_cell_file(folder / "cell.json", facts)
            _run_seeds(cell, seeds, options, federation, observer)
    return Outcome.DONE


def _run_seeds(
    cell: Cell, seeds: range, options: RunOptions, federation: Federation, observer: CellObserver
) -> None:
    """Run some seeds of a cell side by side, from their last round to the last in the options."""
    folder = options.folder(cell) / f"seeds-{seeds.start}-{seeds.stop - 1}"
    earlier = RunFolder(folder).config() if (folder / "config.toml").is_file() else None
    last_round, rounds = -1, options.rounds_of(cell)

    def follow(_: str, row: HistoryRow) -> None:
        nonlocal last_round
        last_round = row.round
        observer.row(str(cell), row)

    def is_over() -> bool:
        return last_round >= rounds or options.seconds_left <= 0

    run_observer = RunObserver(on_row=follow, should_stop=is_over)
    # A finished run without a checkpoint runs again from the start: it gives the same rows first.
    if earlier and (
        earlier.keep_checkpoint or _last_round(folder, seeds) < int(earlier.rounds or 0)
    ):
        config, resumes = _continue_config(earlier, options, rounds, folder), True
    else:
        config, resumes = _new_config(cell, seeds, options), False
    try:
        checked = _plan(config, cell, federation)
        execute(checked, folder, resume=resumes, force=not resumes, observer=run_observer)
    except Stopped:
        if last_round < rounds:
            raise


def _new_config(cell: Cell, seeds: range, options: RunOptions) -> Config:
    return cell.config(
        rounds=options.rounds_of(cell),
        seeds=len(seeds),
        seed=seeds.start,
        eval_every=options.eval_every,
        keep_checkpoint=options.keep_checkpoints,
        **_machine_options(options),
    )


def _continue_config(earlier: Config, options: RunOptions, rounds: int, folder: Path) -> Config:
    """Return the config of an earlier run, with at least so many rounds."""
    most = max(rounds, int(earlier.rounds or 0))
    return change_config(earlier, {"rounds": most, **_machine_options(options)}, folder)


def _machine_options(options: RunOptions) -> dict[str, Any]:
    data_dir = str(options.data_dir) if options.data_dir else None
    code = {"imports": options.imports} if options.imports else {}
    return {"device": options.device, "data_dir": data_dir, **code}


def _plan(config: Config, cell: Cell, federation: Federation) -> Plan:
    checked = plan(config, federation)
    # The federation was divided as the setting says, and the run folder must say so, too.
    return replace(checked, config=replace(checked.config, partition=cell.setting.partition))


def _list_unfinished(cell: Cell, options: RunOptions) -> list[range]:
    """Return the seeds to run: those of unfinished run folders, and those without one."""
    unfinished, seeds_to_run = [], options.seeds_of(cell)
    missing = set(range(seeds_to_run))
    for folder in list_run_folders(options.folder(cell)):
        seeds = seeds_of(folder)
        is_wanted = not missing.isdisjoint(seeds)
        if is_wanted and _last_round(folder, seeds) < options.rounds_of(cell):
            unfinished.append(seeds)
        missing -= set(seeds)
    while missing:
        first = min(missing)
        last = next(seed for seed in range(first, seeds_to_run + 1) if seed not in missing)
        unfinished.append(range(first, last))
        missing -= set(range(first, last))
    return unfinished


def _last_round(folder: Path, seeds: range) -> int:
    """Return the last round that all of these seeds have; −1 if one has no evaluation yet."""
    rows = read_histories(folder)
    return min(rows[seed][-1].round if seed in rows else -1 for seed in seeds)


def is_finished(cell: Cell, options: RunOptions) -> bool:
    """Tell whether all seeds of a cell have all rounds."""
    return not _list_unfinished(cell, options)


def estimate_seconds(cell: Cell, options: RunOptions) -> float:
    """Estimate how long the rest of a cell takes.

    From its own rounds, or from those of its method in the same setting; 0 if there are none.
    """
    unfinished = _list_unfinished(cell, options)
    if not unfinished:
        return 0
    folder = options.folder(cell)
    per_seed = _measure_round(folder, cell.method)
    seconds = 0.0
    for seeds in unfinished:
        done = _last_round(folder / f"seeds-{seeds.start}-{seeds.stop - 1}", seeds)
        seconds += per_seed * len(seeds) * (options.rounds_of(cell) - max(0, done))
    return seconds


def _measure_round(folder: Path, method: str) -> float:
    """Return the seconds of a steady round of one seed; 0 if they are unknown."""
    similar = [*sorted(folder.parent.glob(f"{method},*")), folder.parent / method]
    for cell_folder in (folder, *similar):
        for run_folder in list_run_folders(cell_folder):
            histories = read_histories(run_folder)
            rows = next(iter(histories.values()), [])
            if len(rows) > 3:  # some of them are steady
                return average_seconds(rows) / len(histories)
    return 0.0


def _collect_facts(folder: Path, dataset: Dataset, device: str) -> dict[str, Any]:
    """Return the facts for cell.json. Refuse to continue a cell with other data."""
    path, samples = folder / "cell.json", len(dataset.y)
    before = read_cell_file(path)["samples"] if path.is_file() else samples
    if before != samples:
        raise UserError(
            f"it was begun with {before} samples, and now there are {samples}; "
            "use another results folder (--out)"
        )
    version = f"fedala {versions()['fedala']}, torch {versions()['torch']}"
    name = _device_name(device)
    return {"samples": samples, "data": dataset.note, "device": name, "version": version}


def _device_name(name: str) -> str:
    device = choose_device(name)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"
