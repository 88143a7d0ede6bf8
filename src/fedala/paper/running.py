"""Runs cells of the paper's tables: each in a folder of its own, kept when it is finished, taken up again when it is not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedala.data import Dataset, Federation, federate, load
from fedala.errors import RunError, UserError
from fedala.io import files
from fedala.paper.experiments import Cell, Setting
from fedala.paper.results import about, histories, run_folders, write_about
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan, plan
from fedala.runs.provenance import versions

#: Why a cell is left to somebody else.
BUSY = "another process is running it"


@dataclass(frozen=True)
class Order:
    """How cells are to be run."""

    out: Path
    rounds: int
    seeds: int
    data_dir: Path | None = None
    eval_every: int = 1
    device: str = "auto"
    keep_checkpoints: bool = False
    """Of finished cells, so that they can get more rounds without being run again."""
    deadline: float | None = None
    """By `time.monotonic()`: no round begins after it."""
    asked: Sequence[int] = ()
    """Signals that ask to stop: with the first, the time is up."""

    def folder(self, cell: Cell) -> Path:
        return self.out / cell.setting.name / cell.name

    @property
    def left(self) -> float:
        """Seconds."""
        if self.asked:
            return 0
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


class Watch(Protocol):
    """Who follows what happens to the cells."""

    def row(self, cell: str, row: HistoryRow) -> None:
        """One seed's evaluation of a round."""

    def ended(self, cell: str, how: str, why: str = "") -> None:
        """`how`: done, kept (finished before), stopped (out of time), left out (no time), skipped or failed, and `why`."""


class Shelf:
    """The data of one setting at a time: what several cells use is loaded and divided once."""

    def __init__(self, data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self.dataset: Dataset | None = None
        self.setting: Setting | None = None
        self.federation: Federation | None = None
        self.missing: dict[str, str] = {}

    def federated(self, setting: Setting) -> Federation:
        if setting.dataset in self.missing:
            raise UserError(self.missing[setting.dataset])
        if self.dataset is None or self.dataset.name != setting.dataset:
            self.federation = self.dataset = None  # two datasets need not fit into memory
            try:
                self.dataset = load(setting.dataset, self.data_dir)
            except UserError as error:
                self.missing[setting.dataset] = str(error)
                raise
        if self.federation is None or setting != self.setting:
            self.federation = federate(self.dataset, setting.partition, setting.clients)
            self.setting = setting
        return self.federation


def carry_out(cells: Iterable[Cell], order: Order, watch: Watch) -> None:
    """Runs what is not finished, setting after setting, until the time is up.

    Where time is short, a cell that is known to take longer than there is left waits until those that fit are done; then the
    first of them begins, and is stopped between two rounds.
    """
    cells = list(dict.fromkeys(cells))
    datasets = list(dict.fromkeys(cell.setting.dataset for cell in cells))
    names = list(dict.fromkeys(cell.setting for cell in cells))
    cells.sort(key=lambda cell: (datasets.index(cell.setting.dataset), names.index(cell.setting)))
    shelf = Shelf(order.data_dir)
    waiting = []
    for cell in cells:
        if seconds_left(cell, order) > order.left > 0:
            waiting.append(cell)
        else:
            _attempt(cell, order, shelf, watch)
    for cell in waiting:
        _attempt(cell, order, shelf, watch)


def _attempt(cell: Cell, order: Order, shelf: Shelf, watch: Watch) -> None:
    """Runs a cell if it is to be run, and says what has become of it."""
    folder = order.folder(cell)
    if order.asked:
        return
    with ExitStack() as stack:
        try:
            if is_finished(cell, order):
                watch.ended(str(cell), "kept")
                return
            if order.left <= 0:
                watch.ended(str(cell), "left out")
                return
            federation = shelf.federated(cell.setting)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.lock(folder / ".lock", BUSY))
            if is_finished(cell, order):
                watch.ended(str(cell), "kept")
                return
            words = _about(folder, federation.dataset, order.device)
            for seeds in _parts(cell, order):
                target = folder / f"seeds-{seeds.start}-{seeds.stop - 1}"
                _run(cell, seeds, target, order, federation, words, watch)
            watch.ended(str(cell), "done")
        except Stopped:
            watch.ended(str(cell), "stopped")
        except UserError as error:
            watch.ended(str(cell), "skipped", str(error))
        except RunError as error:
            watch.ended(str(cell), "failed", str(error))
        except RuntimeError as error:  # a fault of the device: other cells may still run
            watch.ended(str(cell), "failed", f"{type(error).__name__}: {error}")
        except OSError as error:
            raise UserError(
                f"The results folder {order.out} cannot be written to: {error}."
            ) from None


def _run(
    cell: Cell,
    seeds: range,
    folder: Path,
    order: Order,
    federation: Federation,
    words: dict[str, Any],
    watch: Watch,
) -> None:
    """Some seeds of a cell, side by side, from where they stand up to the rounds that are asked for."""
    begun = RunFolder(folder).config() if (folder / "config.toml").is_file() else None
    reached = -1

    def follow(_: str, row: HistoryRow) -> None:
        nonlocal reached
        reached = row.round
        watch.row(str(cell), row)

    write_about(folder.parent / "cell.json", words)
    observer = RunObserver(
        on_row=follow, should_stop=lambda: reached >= order.rounds or order.left <= 0
    )
    # A run that has ended and kept no checkpoint is made again: it gives the same, and more.
    ended = begun and not begun.keep_checkpoint and _rounds(folder, seeds) >= int(begun.rounds or 0)
    try:
        if begun and not ended:
            execute(
                _plan(_changed(begun, order), cell, federation),
                folder,
                resume=True,
                observer=observer,
            )
        else:
            execute(
                _plan(_new(cell, seeds, order), cell, federation),
                folder,
                force=True,
                observer=observer,
            )
    except Stopped:
        if reached < order.rounds:
            raise


def _new(cell: Cell, seeds: range, order: Order) -> Config:
    return cell.config(
        rounds=order.rounds,
        seeds=len(seeds),
        seed=seeds.start,
        eval_every=order.eval_every,
        keep_checkpoint=order.keep_checkpoints,
        **_machine(order),
    )


def _changed(begun: Config, order: Order) -> Config:
    """A run as it was begun, with at least as many rounds as are asked for."""
    return begun.with_changes(
        {"rounds": max(order.rounds, int(begun.rounds or 0)), **_machine(order)}
    )


def _machine(order: Order) -> dict[str, Any]:
    return {"device": order.device, "data_dir": str(order.data_dir) if order.data_dir else None}


def _plan(config: Config, cell: Cell, federation: Federation) -> Plan:
    checked = plan(config, federation)
    # The federation was made by what the setting says, and the run folder is to say so, too.
    return replace(checked, config=replace(checked.config, partition=cell.setting.partition))


def _parts(cell: Cell, order: Order) -> list[range]:
    """The seeds that are still to be run: those of unfinished run folders, and those that there is nothing of yet."""
    parts, missing = [], set(range(order.seeds))
    for folder in run_folders(order.folder(cell)):
        first, last = (int(number) for number in folder.name.split("-")[1:])
        held = range(first, last + 1)
        if _rounds(folder, held) < order.rounds and not missing.isdisjoint(held):
            parts.append(held)
        missing -= set(held)
    while missing:
        first = min(missing)
        last = next(seed for seed in range(first, order.seeds + 1) if seed not in missing)
        parts.append(range(first, last))
        missing -= set(range(first, last))
    return parts


def _rounds(folder: Path, seeds: range) -> int:
    """How many rounds all of these seeds have had; −1 where one has none, not even the evaluation before the first."""
    rows = histories(folder)
    return min(rows[seed][-1].round if seed in rows else -1 for seed in seeds)


def is_finished(cell: Cell, order: Order) -> bool:
    return not _parts(cell, order)


def seconds_left(cell: Cell, order: Order) -> float:
    """How long a cell will take by what was measured of it, or of its method in the same setting; 0 where nothing was."""
    parts = _parts(cell, order)
    if not parts:
        return 0
    here = order.folder(cell)
    for folder in (here, *sorted(here.parent.glob(f"{cell.method},*")), here.parent / cell.method):
        for part in run_folders(folder):
            rows = next(iter(histories(part).values()), [])
            seconds = [row.seconds for row in rows][2:-1]
            if seconds:
                per_seed = float(np.mean(seconds)) / len(histories(part))
                done = [max(0, _rounds(here / f"seeds-{p.start}-{p.stop - 1}", p)) for p in parts]
                return sum(
                    per_seed * len(p) * (order.rounds - d) for p, d in zip(parts, done, strict=True)
                )
    return 0


def _about(folder: Path, dataset: Dataset, device: str) -> dict[str, Any]:
    """What a run folder does not say, and the results do. A cell that was begun with other data is not gone on with."""
    path, samples = folder / "cell.json", len(dataset.y)
    if path.is_file() and about(path)["samples"] != samples:
        raise UserError(
            f"it was begun with {about(path)['samples']} samples, and now there are {samples}; "
            "use another results folder (--out)"
        )
    return {
        "samples": samples,
        "data": dataset.note,
        "device": _device(device),
        "version": _version(),
    }


def _device(name: str) -> str:
    on_gpu = name != "cpu" and torch.cuda.is_available()
    threads = torch.get_num_threads()
    return (
        torch.cuda.get_device_name() if on_gpu else f"CPU, {threads} thread{'s' * (threads != 1)}"
    )


def _version() -> str:
    return f"fedala {versions()['fedala']}, torch {versions()['torch']}"


# --- several processes ---------------------------------------------------------------------------------------------


class Relay:
    """Hands on what happens, line by line, to the process that started this one.

    That one asks to stop by closing the pipe that it holds, which its death does as well. Its signals are not for this one:
    one that is sent to all processes would count twice.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        os.read(0, 1)
        self.asked.append(signal.SIGTERM)

    def row(self, cell: str, row: HistoryRow) -> None:
        print(json.dumps({"cell": cell, "row": row.columns()}), flush=True)

    def ended(self, cell: str, how: str, why: str = "") -> None:
        print(json.dumps({"cell": cell, "how": how, "why": why}), flush=True)


def side_by_side(
    arguments: list[str],
    jobs: int,
    watch: Watch,
    environment: dict[str, str],
    asked: Sequence[int] = (),
) -> None:
    """The same command in several processes: each takes the next cell that nobody is running. `asked` as in `Order`."""
    command = [sys.executable, "-m", "fedala.cli.app", "paper", "run", *arguments, "--relay"]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # out of a terminal's reach
        )
        for _ in range(jobs)
    ]
    guard = threading.Lock()

    def listen(process: "subprocess.Popen[str]") -> None:
        for line in process.stdout or ():
            event = json.loads(line)
            with guard:
                if "row" in event:
                    watch.row(event["cell"], HistoryRow.from_columns(event["row"]))
                else:
                    watch.ended(event["cell"], event["how"], event["why"])

    listeners = [threading.Thread(target=listen, args=[process]) for process in processes]
    for listener in listeners:
        listener.start()
    try:
        while any(listener.is_alive() for listener in listeners):
            time.sleep(0.1)
            for process in processes if asked else ():
                process.stdin.close()  # type: ignore[union-attr]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process, listener in zip(processes, listeners, strict=True):
            listener.join()
            with process:
                process.wait()
    for process in processes:
        if process.returncode and not asked:
            raise RunError(
                f"One of the {jobs} processes ended with exit code {process.returncode}."
            )
