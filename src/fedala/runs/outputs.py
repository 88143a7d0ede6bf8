"""What a command may write over: one rule for every file that a user names.

A file that is there is replaced, so that a command can be repeated. But nothing is written over
what the command reads, a file in a folder that it reads included, nor over a file of a run, and a
model only with `force`.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.options import name_option
from fedala.runs.run_files import find_run_of


def check_output(
    path: Path, suffixes: Collection[str], reads: Iterable[Any] = (), *, force: bool = True
) -> None:
    """Refuse a file that cannot be written, or that the rule protects, before work starts.

    `suffixes` are those of what is written. `reads` are the data that the command reads: paths, or
    names and objects that are none. Without `force`, a file that exists is refused.
    """
    if path.suffix.lower() not in suffixes:
        *others, last = suffixes
        endings = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"{path} must end with {endings}.")
    folder = path.absolute().parent
    if os.path.isdir(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: its folder must exist, and it must be a file.")
    check_overwriting(path, reads, force=force)


def check_overwriting(path: Path, reads: Iterable[Any] = (), *, force: bool = True) -> None:
    """Refuse a file that the rule protects."""
    place = Path(os.path.realpath(path))
    for source in reads:
        if isinstance(source, str | Path) and os.path.exists(source):
            read = Path(os.path.realpath(source))
            if place == read:
                raise UserError(f"{path} is read here, so nothing is written to it: name another.")
            if read in place.parents and place.exists():
                raise UserError(
                    f"{path} exists and lies in {source}, which is read here: name another file."
                )
    if run := find_run_of(place):
        raise UserError(
            f"{path} belongs to the run in {run}, so nothing is written to it: name another file."
        )
    if os.path.exists(path) and not force:
        raise UserError(
            f"{path} exists already: choose another file, or overwrite it with "
            f"{name_option('force', True)}."
        )
