"""`fedala.run`: from options to results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fedala.data import Dataset, Federation
from fedala.errors import UserError
from fedala.lanes.losses import LossFunction
from fedala.records import HistoryRow
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver
from fedala.runs.own_code import configure, import_given
from fedala.runs.plan import plan
from fedala.runs.results import Result
from fedala.runs.resumable_options import change_config


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
    `imports` names files or modules with methods of your own, and executes them.
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
        import_given(options)
        before = RunFolder.open(Path(resume)).config()
        own = {} if model is None or isinstance(model, str) else {"model": "own"}
        config = change_config(before, {**options, **own}, Path(resume))
    checked = plan(
        config or configure(options),
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
