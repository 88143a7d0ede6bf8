"""The folders of jobs: what other processes write while each carries out one group of a run.

`jobs/NUMBER` is a folder of the same run, in which only one group has begun. It is made of what the
run folder has of the group, and put back in the end. Each of these steps can be repeated: if a
process is killed in between, the next one gathers the folders that it left.
"""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from fedala.io import files
from fedala.runs.batches import Batch
from fedala.runs.digests import Digests
from fedala.runs.folder import RunFolder, make_folders
from fedala.runs.members import Group
from fedala.runs.models import BEST_FOLDER
from fedala.runs.run_files import JOBS
from fedala.runs.tables import TABLES


def make_job_folder(folder: RunFolder, number: int, group: Group) -> Path:
    """Make the folder in which a process carries out a group, and return its path."""
    path = folder.path / JOBS / str(number)
    new = path.with_name(f"new-{number}")
    make_folders(new.parent)
    labels = [member.label for member in group.members]
    record = folder.record or Digests()
    methods = {
        label: deepcopy(record.methods[label]) for label in labels if label in record.methods
    }
    about = replace(record, written={}, methods=methods)
    with RunFolder.create(new, folder.config(), force=False, about=about) as job:
        job.tables.replace(job.tables.with_rows_of(folder.tables, labels, lambda *_: 0))
        _link_checkpoints(folder, number, job, 0)
        _link_models(folder, job, labels)
    new.rename(path)
    return path


def absorb_job_folder(
    folder: RunFolder, number: int, groups: Sequence[Group], batches: Sequence[Batch]
) -> None:
    """Put what a job has done into its run folder, and remove the folder of the job."""
    path = folder.path / JOBS / str(number)
    job = RunFolder.open(path)
    with job.lock():
        if job.record is None or folder.record is None or number >= len(groups):
            raise files.DamagedFile(f"{path} does not belong to the run in {folder.path}.")
        if job.record.identity != folder.record.identity:
            raise files.DamagedFile(f"{path} belongs to another run than {folder.path}.")
        for name in TABLES:
            job.rows(name)  # raises if the table is damaged
        labels = [member.label for member in groups[number].members]
        positions = {m.label: n for n, group in enumerate(groups) for m in group.members}

        def rank(label: str, seed: int) -> tuple[int, int]:
            """Return where a row stands: as if one process had run all groups in turn."""
            batch = next((one.number for one in batches if seed in one.seeds), len(batches))
            return batch, positions.get(label, len(groups))

        _link_models(job, folder, labels)
        _link_checkpoints(job, 0, folder, number)
        folder.take_over(job, labels, rank)
    old = path.with_name(f"old-{number}")
    path.rename(old)
    shutil.rmtree(old)


def gather_job_folders(
    folder: RunFolder, groups: Sequence[Group], batches: Sequence[Batch]
) -> None:
    """Put what all jobs have done into a run folder, in the order of the groups."""
    jobs = folder.path / JOBS
    if not jobs.is_dir():
        return
    paths = list(jobs.iterdir())
    for number in sorted(int(path.name) for path in paths if path.name.isdecimal()):
        absorb_job_folder(folder, number, groups, batches)
    for path in paths:
        if path.name.startswith(("new-", "old-")):  # half made, or half removed
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # not empty
        jobs.rmdir()


def _link_models(source: RunFolder, target: RunFolder, labels: Iterable[str]) -> None:
    for label in labels:
        for inner in (Path("models", label), Path("models", BEST_FOLDER, label)):
            found = sorted((source.path / inner).glob("seed-*/*.safetensors"))
            _link_files(found, source.path, target.path)


def _link_checkpoints(source: RunFolder, number: int, target: RunFolder, new: int) -> None:
    """Give the target the checkpoints of a group; what it had of them is removed."""
    root = source.checkpoint_folder(number).parent
    for folder in sorted([*root.glob(str(number)), *root.glob(f"{number}-*")]):
        place = target.path / "checkpoint" / folder.name.replace(str(number), str(new), 1)
        # A manifest comes after the files that it names, and goes before them.
        found = sorted(folder.glob("[!.]*"), key=lambda path: path.suffix != ".safetensors")
        _link_files(found, folder, place)
        names = {path.name for path in found}
        for path in sorted(place.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            if path.name not in names:
                path.unlink()


def _link_files(paths: Iterable[Path], source: Path, target: Path) -> None:
    for path in paths:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        files.link_or_copy(path, place)
