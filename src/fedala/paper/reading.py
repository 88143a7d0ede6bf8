"""Read a results folder: its csv files, and the run folders of its cells."""

import csv
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedala.errors import UserError, first_line
from fedala.io import files
from fedala.io.untrusted import read_file
from fedala.methods import make
from fedala.options import build
from fedala.paper import cell_folders
from fedala.paper.experiments import format_value, settings
from fedala.paper.results import COLUMNS, CSV, Results, SeedResult
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests
from fedala.runs.results import best_row
from fedala.runs.seconds import average_seconds

#: In bytes; a csv of all the paper's cells is far smaller.
_LARGEST_CSV = 2**25
_LONGEST_TEXT = 300


def read_results(folder: Path) -> Results:
    """Read the csv files of a results folder, and then the run folders in it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a results folder: fedala paper run makes one.")
    seeds: list[SeedResult] = []
    for path in sorted(folder.glob("*.csv")):
        seeds += read_csv(path)
    notes = _verify_csv(folder)
    seeds += _read_run_folders(folder, notes)
    return Results(seeds, notes)


def _verify_csv(folder: Path) -> list[str]:
    """Check results.csv against its digest; return a sentence if that is impossible."""
    path = folder / CSV
    record, exists = Digests.read(folder), os.path.lexists(path)
    if record is None:
        return [f"{path} has no {DIGESTS} in its folder, so it is unverified."] if exists else []
    if not exists:
        lost = f"{path} is missing. Its lines on folders that no longer exist are lost."
        return [lost] if CSV in record.written else []
    if not record.expects(CSV, read_file(path, _LARGEST_CSV)):
        raise files.DamagedFile(
            f"{path} is not what fedala paper run wrote. Restore it, or give it another name, "
            "such as other.csv, to have its lines counted as they are."
        )
    return []


def read_csv(path: Path) -> Iterator[SeedResult]:
    """Read a csv file of results; refuse other columns and impossible numbers."""
    try:
        rows = csv.DictReader(io.StringIO(read_file(path, _LARGEST_CSV).decode(), newline=""))
        if list(rows.fieldnames or ()) != COLUMNS:
            raise UserError(
                f"{path} is not a csv of results: its first line must be {','.join(COLUMNS)}."
            )
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: it must have {len(COLUMNS)} columns.")
            yield make_seed_result(row, where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from None


def make_seed_result(values: Mapping[str, Any], where: str) -> SeedResult:
    """Make a result of names and values within their bounds. `where` is for messages."""
    result = build(SeedResult, values, f"{where}: ")
    try:
        _check_values(result)
        _check_cell(result)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(result, where=where)


def _check_values(result: SeedResult) -> None:
    for name in ("data", "device", "version"):
        text = getattr(result, name)
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise UserError(f"{name} must be printable text of at most {_LONGEST_TEXT} characters.")
    for low, high in (("best_round", "rounds"), ("rounds", "planned"), ("final", "best")):
        values = getattr(result, low), getattr(result, high)
        if values[0] > values[1]:
            raise UserError(
                f"{low} must not be greater than {high}; they are {values[0]} and {values[1]}."
            )
    if result.diverged > result.rounds + 1:
        raise UserError(
            f"diverged is {result.diverged}, and there are only {result.rounds} rounds."
        )


def _check_cell(result: SeedResult) -> None:
    if result.setting not in settings():
        raise UserError(f"there is no setting {result.setting}.")
    if result.cell not in cell_folders.paper_cells():
        make(result.method)  # refuses an unknown method with a suggestion
        options = f" with {result.set}" if result.set else ""
        raise UserError(f"the paper has no cell of {result.method}{options} in {result.setting}.")


def _read_run_folders(folder: Path, notes: list[str]) -> Iterator[SeedResult]:
    """Read the folders setting/cell/seeds-…; `notes` gets sentences on what is unverified."""
    for run_folder in sorted(folder.glob("*/*/seeds-*")):
        # A run that is killed as it begins leaves neither file. A broken link counts as a file.
        names = ("config.toml", "history.csv")
        has_begun = any(os.path.lexists(run_folder / name) for name in names)
        if has_begun and cell_folders.is_run_folder(run_folder):
            facts = cell_folders.read_cell_file(run_folder.parent / "cell.json", notes)
            yield from _read_seeds(run_folder, facts, notes)


def _read_seeds(folder: Path, facts: dict[str, Any], notes: list[str]) -> Iterator[SeedResult]:
    """Read each seed of a run folder, finished or not."""
    config = cell_folders.read_cell_config(folder)
    try:
        histories = cell_folders.read_checked_histories(folder, config, notes)
        for seed, rows in histories.items():
            values = {**_summarize(config, rows), **facts, "setting": folder.parent.parent.name}
            yield make_seed_result({**values, "seed": seed}, f"{folder}, seed {seed}")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{folder} is not the run of a cell: its history.csv lacks {error}."
        ) from None


def _summarize(config: Config, rows: list[HistoryRow]) -> dict[str, Any]:
    """Return the columns of a result that config and history give."""
    best, joined = (best_row(rows, column) or rows[0] for column in ("score", "score_joined"))
    return {
        "method": config.method,
        "set": " ".join(f"{key}={format_value(value)}" for key, value in config.set.items()),
        "shuffle": config.shuffle,
        "rounds": rows[-1].round,
        "planned": config.rounds,
        "eval_every": config.eval_every,
        "best": best.accuracy,
        "best_round": best.round,
        "best_joined": joined.accuracy_joined,
        "final": rows[-1].accuracy,
        "seconds_per_round": average_seconds(rows),
        "together": config.seeds,
        "diverged": sum(row.diverged > 0 for row in rows),
        "sent": max(row.sent for row in rows),
        "uploaded": max(row.uploaded for row in rows),
    }
