"""Tell a run's files from others, so that `--force` never deletes what a run did not write."""

import os
import re
from pathlib import Path

from fedala.errors import UserError
from fedala.io import files
from fedala.io.untrusted import read_file
from fedala.options import name_option
from fedala.runs.config import Config
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.tables import TABLES
from fedala.runs.verified_files import LARGEST, WHOLE_FILES, RunRecord

JOBS = "jobs"
REPORT = "report.html"
#: Files that lie directly in a run folder.
_FILES = {*TABLES, REPORT, "lock", "log-id", *WHOLE_FILES, DIGESTS}
_FOLDERS = ("models", "checkpoint", "tensorboard", JOBS)
#: Files that lie in its sub-folders.
_INNER_FILES = re.compile(
    r"models/(best/)?[^/]+/seed-\d+/(global|client-\d+)\.safetensors"
    r"|checkpoint/\d+(-\d+)?/(\d+\.(json|damaged)|(server-\d+|\d+-\d+-\d+"
    r"|(best|last)-\d+-(\d+|global)-\d+)\.safetensors)"
    r"|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+",
    re.ASCII,
)

#: Folders in which other processes carry out groups; each has the files of a run folder.
JOB_FOLDER = re.compile(rf"{JOBS}/((new|old)-)?\d+/", re.ASCII)

#: A logger's own folder. It may hold links. It is never read here, and never deleted.
LOGGER_FOLDER = "wandb"


def find_run_of(path: Path) -> Path | None:
    """Return the folder of the run that a file belongs to by its name; None if it is no run's.

    A page does not belong to it: whoever makes another one replaces it.
    """
    for folder in path.parents:
        has_begun = (folder / DIGESTS).is_file() or (folder / "history.csv").is_file()
        if has_begun and (folder / "config.toml").is_file():
            inner = path.relative_to(folder)
            return folder if _is_run_file(inner) and inner.name != REPORT else None
    return None


def check_no_links(path: Path) -> None:
    """Refuse a run folder with links, or with other things in the place of its files."""
    entries, folders = _walk(path)
    misplaced = [folder for folder in folders if _is_run_file(folder.relative_to(path))]
    for entry in (*entries, *misplaced):
        if entry.is_symlink() or not entry.is_file():
            raise UserError(f"{entry} is a link, or not a file: such a run folder is not used.")


def list_run_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a run folder, and its folders, the deepest first. Refuse any others."""
    entries, folders = _walk(path)
    for entry in sorted((*entries, *folders)):
        inner = entry.relative_to(path)
        is_own = inner.parts[0] in _FOLDERS if entry in folders else _is_run_file(inner)
        if not is_own:
            raise UserError(
                f"{path} holds {inner}, which is not part of a run, so "
                f"{name_option('force', True)} does not replace it."
            )
    record = RunRecord(path)
    unfinished = {".lock", f".{DIGESTS}.new"}
    has_content = any(entry.name not in unfinished for entry in path.iterdir())
    if record.digests is None and has_content and not _is_older_run(path):
        raise UserError(
            f"{path} is not empty and has no {DIGESTS}, so {name_option('force', True)} cannot "
            "tell that a run wrote it: remove it yourself, or choose another folder."
        )
    for name in WHOLE_FILES:
        if (path / name).exists():
            try:
                record.read_verified(name)
            except files.DamagedFile:
                raise UserError(
                    f"{path / name} is not what the run wrote, so {name_option('force', True)} "
                    "does not replace it: move it away first."
                ) from None
    return entries, folders


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Return everything in a run folder but folders, and the folders, the deepest first.

    Links are not followed.
    """
    entries: list[Path] = []
    folders: list[Path] = []
    try:
        for folder, below, names in os.walk(path, topdown=False, onerror=_fail):
            links = [name for name in below if Path(folder, name).is_symlink()]
            entries += [Path(folder, name) for name in (*names, *links)]
            folders += [Path(folder, name) for name in below if name not in links]
    except RecursionError:
        raise UserError(f"{path} has folders in it too deep to be those of a run.") from None
    logger = path / LOGGER_FOLDER
    return (
        [entry for entry in entries if not entry.is_relative_to(logger)],
        [folder for folder in folders if not folder.is_relative_to(logger)],
    )


def _fail(error: OSError) -> None:
    raise error


def _is_older_run(path: Path) -> bool:
    """Tell whether a run wrote a folder without digests: its config is written as a run does."""
    try:
        data = read_file(path / "config.toml", LARGEST)
        config = Config.from_values(Config.parse(data, path / "config.toml"))
        # An older version wrote the same lines for the options that it had.
        lines = set(config.text().splitlines())
        return (path / "split.csv").is_file() and lines.issuperset(data.decode().splitlines())
    except (OSError, ValueError):
        return False


def _is_run_file(inner: Path) -> bool:
    """Tell whether a run writes a file there; it may be half written."""
    whole = inner.parent / inner.name.removeprefix(".").removesuffix(".new")
    whole = Path(JOB_FOLDER.sub("", whole.as_posix(), count=1))
    return str(whole) in _FILES or _INNER_FILES.fullmatch(whole.as_posix()) is not None
