"""The folder of a cell: cell.json, and a run folder for each group of seeds (seeds-0-4)."""

import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedala.cells.cell import Cell
from fedala.cells.collection import Collection
from fedala.errors import UserError
from fedala.io import files
from fedala.io.untrusted import check_accuracies, parse_json, read_json, require_file
from fedala.methods import list_changed_defaults
from fedala.options import convert
from fedala.records import HistoryRow
from fedala.report.runs import read_titles
from fedala.runs.changed_defaults import name_former_defaults
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.resumable_options import CHANGEABLE, FIRST_OPTIONS

#: What cell.json says about the data and the machine.
CELL_FACTS = {"samples": int, "data": str, "device": str, "version": str}
_LARGEST_CELL_FILE = 2**16
_SEEDS = re.compile(r"seeds-(\d{1,9})-(\d{1,9})", re.ASCII)


def write_cell_file(path: Path, facts: Mapping[str, Any]) -> None:
    """Write cell.json: the facts about data and machine, and their checksum."""
    files.write_file(path, json.dumps({**facts, "checksum": _checksum(facts)}, indent=2).encode())


def _checksum(facts: Mapping[str, Any]) -> str:
    return files.sha256(json.dumps({name: facts[name] for name in CELL_FACTS}).encode())


def read_cell_file(path: Path, notes: list[str] | None = None) -> dict[str, Any]:
    """Read cell.json. `notes` gets a sentence if it is unverified."""
    try:
        facts = read_json(path, _LARGEST_CELL_FILE)
        if not isinstance(facts, dict):
            raise TypeError("it is not a JSON object")
        if "checksum" not in facts and notes is not None:
            notes.append(f"{path} has no checksum, so it is unverified.")
        if facts.get("checksum", _checksum(facts)) != _checksum(facts):
            raise ValueError("its checksum is wrong")
        return {name: convert(facts[name], kind, name) for name, kind in CELL_FACTS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or missing: {error}.") from None


def is_run_folder(path: Path, collections: Sequence[Collection]) -> bool:
    """Tell whether a folder's name is that of a group of seeds in a setting of a collection."""
    setting = path.parent.parent.name
    is_setting = any(setting in collection.settings for collection in collections)
    return is_setting and bool(_SEEDS.fullmatch(path.name))


def list_run_folders(cell_folder: Path) -> list[Path]:
    """Return the run folders of a cell."""
    folders = (path.parent for path in cell_folder.glob("seeds-*/config.toml"))
    return sorted(folder for folder in folders if _SEEDS.fullmatch(folder.name))


def seeds_of(folder: Path) -> range:
    """Return the seeds that a run folder is named after."""
    first, last = folder.name.split("-")[1:]
    return range(int(first), int(last) + 1)


def read_cell_config(folder: Path, collections: Sequence[Collection]) -> Config:
    """Read the config of a cell's run folder.

    It must state every value, as a run writes it: a default instead of a missing value would be
    another experiment. It must also be the config of the cell whose folder it lies in.
    """
    try:
        RunFolder(folder).read_verified("config.toml")
        values = Config.read(folder / "config.toml")
        config = name_former_defaults(Config.from_values(values))
    except UserError as error:
        raise UserError(f"{folder} is not the run of a cell: {error}") from None
    missing = [name for name in _required_options() if name not in values]
    # A digest would show that a run wrote the file.
    if missing and RunFolder(folder).record is None:
        raise UserError(
            f"{folder} is not the run of a cell: its config.toml does not state "
            f"{', '.join(missing)}. A run writes every value; restore the file, or remove the "
            "folder and run the cell again."
        )
    cell, seeds = _find_cell(folder, collections, config.rounds), seeds_of(folder)
    # In older runs, trained models were not tested.
    free = (*CHANGEABLE, "eval_every", "evaluate")
    own = {name: getattr(config, name) for name in free}
    expected = cell.config(**own, seed=seeds.start, seeds=len(seeds))
    # With a default that has changed since, it is the same cell: `CellResult.departures` says so.
    changed = {key: config.set[key] for key in list_changed_defaults([config.method])}
    expected = replace(expected, set={**expected.set, **changed})
    differences = [f"{name} ({change})" for name, change in expected.differences(config).items()]
    if differences:
        raise UserError(
            f"{folder} is not the run of {cell}: its config.toml differs in "
            f"{', '.join(differences)}."
        )
    return config


@cache
def _required_options() -> list[str]:
    """Return the options that have had a value in every run's config from the beginning."""
    resolved = ("model", "clients", "rounds", "lr")
    kinds = typing.get_type_hints(Config)
    return [
        name
        for name in kinds
        if name in resolved
        or (name in FIRST_OPTIONS and type(None) not in typing.get_args(kinds[name]))
    ]


def _find_cell(folder: Path, collections: Sequence[Collection], rounds: int | None) -> Cell:
    setting, name = folder.parent.parent.name, folder.parent.name
    for collection in collections:
        if setting in collection.settings:
            cell = collection.find_cell(setting, name, rounds)
            if cell:
                return cell
    raise UserError(
        f"{folder} is not the run of a cell: there is no cell {setting}/{name} "
        f"with {rounds} rounds."
    )


def read_histories(folder: Path) -> dict[int, list[HistoryRow]]:
    """Return the rows of a run folder of one method by seed; none if there is no history yet."""
    return _group_by_seed(RunFolder(folder).history())


def read_title(folder: Path, method: str) -> str:
    """Return what a finished run calls its method, which need not be installed here, or nothing."""
    run, name = RunFolder(folder), "summary.json"
    if not run.has(name):
        return ""
    title = read_titles(parse_json(run.read_verified(name), str(folder / name))).get(method)
    return title if isinstance(title, str) else ""


def _group_by_seed(history: Mapping[str, list[HistoryRow]]) -> dict[int, list[HistoryRow]]:
    rows: dict[int, list[HistoryRow]] = {}
    for own in history.values():
        for row in own:
            rows.setdefault(row.seed, []).append(row)
    return rows


def read_checked_tables(
    folder: Path, config: Config, notes: list[str]
) -> tuple[dict[int, list[HistoryRow]], list[dict[str, Any]]]:
    """Return the rows of the history by seed, and the lines of metrics.csv.

    Refuse rows that do not belong to the config or are impossible.
    """
    run = RunFolder(folder)
    history, lines = run.history(), run.rows("metrics.csv")
    histories = _group_by_seed(history)
    if histories:
        notes += run.list_unverified()
    problem = ""
    for method in history:
        if method != config.method:
            problem = f"its history.csv is of {method}, and its config.toml of {config.method}"
    if not histories and require_file(folder / "summary.json").exists():
        problem = "it has a summary.json but no history.csv"
    for seed, rows in histories.items():
        if seed not in seeds_of(folder):
            problem = f"its history.csv has a seed {seed}"
        for row in rows:
            problem = problem or _find_problem(row)
        if any(before.round >= after.round for before, after in pairwise(rows)):
            problem = problem or "the rounds in its history.csv are not in order"
    if problem:
        raise UserError(f"{folder} is not the run of a cell: {problem}.")
    return histories, lines


def _find_problem(row: HistoryRow) -> str:
    """Return what is wrong with a row of the history, or nothing."""
    accuracies = {"accuracy": row.accuracy, "accuracy_joined": row.accuracy_joined}
    try:
        check_accuracies(accuracies, allow_nan=False)
    except ValueError as error:
        return f"in round {row.round} of its history.csv, {error}"
    return ""
