"""Read a results folder: its csv files, and the run folders of its cells."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedala.cells import folders
from fedala.cells.cell import is_known
from fedala.cells.collection import Collection
from fedala.cells.curves import read_curve
from fedala.cells.results import COLUMNS, CSV, OLD_COLUMNS, OPTIONAL, Results, SeedResult
from fedala.cells.summary import summarize
from fedala.errors import UserError, first_line
from fedala.io import files
from fedala.io.untrusted import read_file
from fedala.options import build, suggest
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import Digests

#: In bytes; a csv of all cells is far smaller.
_LARGEST_CSV = 2**25
_LONGEST_TEXT = 300


def read_results(
    places: Iterable[Path], collections: Sequence[Collection], shown: Collection | None = None
) -> Results:
    """Read the csv files of results folders, and then the run folders in them.

    Refuse a cell that none of `collections` has. With `shown`, leave out those of the others, and
    say so of a method that is not installed: its name may be misspelt.
    """
    seeds: list[SeedResult] = []
    notes: list[str] = []
    for folder in places:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a results folder: {_name_commands(collections)} make one."
            )
        for path in sorted(folder.glob("*.csv")):
            seeds += read_csv(path, collections)
        notes += _verify_csv(folder)
        seeds += _read_run_folders(folder, collections, notes)
    if shown is None:
        return Results(seeds, notes)
    others = [seed for seed in seeds if not shown.has(seed)]
    return Results(filter(shown.has, seeds), notes, _name_unknown_methods(others))


def _name_unknown_methods(left_out: Iterable[SeedResult]) -> list[str]:
    """Return a sentence on each method that is not installed here."""
    places: dict[str, list[str]] = {}
    for seed in left_out:
        if not is_known(seed.method):
            places.setdefault(seed.method, []).append(seed.where)
    sentences = []
    for method, where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        sentences.append(
            f"{where[0]}{more}: left out, because there is no method {method} here. "
            "If its name is misspelt, correct it: fedala methods lists all names."
        )
    return sentences


def _name_commands(collections: Sequence[Collection]) -> str:
    return " and ".join(f"fedala {collection.command} run" for collection in collections)


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
            f"{path} is not what fedala wrote. Restore it, or give it another name, such as "
            "other.csv, to have its lines counted as they are."
        )
    return []


def read_csv(path: Path, collections: Sequence[Collection]) -> Iterator[SeedResult]:
    """Read a csv file of results; refuse other columns and impossible numbers."""
    try:
        rows = csv.DictReader(io.StringIO(read_file(path, _LARGEST_CSV).decode(), newline=""))
        columns = list(rows.fieldnames or ())
        if columns not in (COLUMNS, OLD_COLUMNS):
            raise UserError(
                f"{path} is not a csv of results: its first line must be {','.join(COLUMNS)}."
            )
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: it must have {len(columns)} columns.")
            known = {name: text or (None if name in OPTIONAL else "") for name, text in row.items()}
            yield _make_result(collections, known, where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from None


def _make_result(
    collections: Sequence[Collection], values: Mapping[str, Any], where: str
) -> SeedResult:
    """Make a result of names and values within their bounds. `where` is for messages."""
    result = build(SeedResult, values, f"{where}: ")
    try:
        _check_values(result)
        _check_cell(result, collections)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(result, where=where)


def _check_values(result: SeedResult) -> None:
    for name in ("data", "device", "version", "title"):
        text = getattr(result, name)
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise UserError(f"{name} must be printable text of at most {_LONGEST_TEXT} characters.")
    ordered = {
        "best_round": "rounds",
        "rounds": "planned",
        "final": "best",
        "trained_round": "rounds",
        "trained_final": "trained",
    }
    for low, high in ordered.items():
        values = getattr(result, low), getattr(result, high)
        if None not in values and values[0] > values[1]:
            raise UserError(
                f"{low} must not be greater than {high}; they are {values[0]} and {values[1]}."
            )
    if result.diverged > result.rounds + 1:
        raise UserError(
            f"diverged is {result.diverged}, and there are only {result.rounds} rounds."
        )
    for text in (result.curve, result.trained_curve):
        curve = read_curve(text)
        if curve and curve[-1][0] > result.rounds:
            raise UserError(
                f"a curve ends in round {curve[-1][0]}, and there are {result.rounds} rounds."
            )


def _check_cell(result: SeedResult, collections: Sequence[Collection]) -> None:
    """Refuse the result of a cell that no collection has."""
    settings = [name for collection in collections for name in collection.settings]
    if result.setting not in settings:
        hint = suggest(result.setting, dict.fromkeys(settings))
        raise UserError(f"there is no setting {result.setting}{hint}.")
    if not any(collection.has(result) for collection in collections):
        options = f" with {result.set}" if result.set else ""
        raise UserError(f"there is no cell of {result.method}{options} in {result.setting}.")


def _read_run_folders(
    folder: Path, collections: Sequence[Collection], notes: list[str]
) -> Iterator[SeedResult]:
    """Read the folders setting/cell/seeds-…; `notes` gets sentences on what is unverified."""
    for run_folder in sorted(folder.glob("*/*/seeds-*")):
        # A run that is killed as it begins leaves neither file. A broken link counts as a file.
        names = ("config.toml", "history.csv")
        has_begun = any(os.path.lexists(run_folder / name) for name in names)
        if has_begun and folders.is_run_folder(run_folder, collections):
            facts = folders.read_cell_file(run_folder.parent / "cell.json", notes)
            yield from _read_seeds(run_folder, collections, facts, notes)


def _read_seeds(
    folder: Path, collections: Sequence[Collection], facts: dict[str, Any], notes: list[str]
) -> Iterator[SeedResult]:
    """Read each seed of a run folder, finished or not."""
    config = folders.read_cell_config(folder, collections)
    try:
        histories, lines = folders.read_checked_tables(folder, config, notes)
        title = "" if is_known(config.method) else folders.read_title(folder, config.method)
        for seed, rows in histories.items():
            values = summarize(config, seed, rows, lines)
            values |= {**facts, "setting": folder.parent.parent.name, "title": title}
            yield _make_result(collections, values, f"{folder}, seed {seed}")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{folder} is not the run of a cell: its history.csv or metrics.csv lacks {error}."
        ) from None
