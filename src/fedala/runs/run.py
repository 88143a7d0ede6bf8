"""`fedala.run`: from options to results."""

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from fedala.data import Dataset, Federation, make_dataset
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
from fedala.runs.resumable_options import change_config, check_code_is_named


def run(
    config: Config | None = None,
    *,
    dataset: Any = None,
    model: str | Callable[[], nn.Module] | None = None,
    loss: str | LossFunction | None = None,
    out: Path | str | None = None,
    force: bool = False,
    resume: Path | str | None = None,
    on_row: Callable[[str, HistoryRow], None] | None = None,
    **options: Any,
) -> Result:
    """Run one or several methods: `run(method="fedala", dataset="digits", rounds=50)`.

    Options are those of `fedala run`. Instead of a dataset's name, give data of your own: arrays or
    tensors `(x, y)`, a torch `Dataset`, a pandas `DataFrame`, a list or dict with one of these for
    each client, `{"train": …, "test": …}` (see `fedala.data.make_dataset`), a `Dataset`, or a
    `Federation`, which says which client has which samples. With `(x, y)`, `clients` may be a list
    that says whose sample each one is; a number is the number of clients, as always. With a
    `DataFrame`, `label_column` and `clients_by` name its columns. Instead of a model's name, give a
    function that builds an `nn.Module`; instead of a loss's name, a function (output, y) that
    returns the mean loss of a batch. `imports` names files or modules with methods of your own,
    and executes them.
    With `out`, everything is kept in that folder. `resume` names the folder of a run that was
    interrupted, or shall have more rounds, further seeds (`seeds=5`) or further methods
    (`method="+ditto"`); give data, model and loss of your own again.
    """
    if isinstance(dataset, Path):
        dataset = str(dataset)
    dataset = _convert_data(dataset, options)
    for name, value in (("model", model), ("loss", loss)):
        if isinstance(value, str):
            options[name] = value
    if config is not None and (options or resume or isinstance(dataset, str)):
        raise UserError(
            "Give run either a Config or options, not both: what it should do would not be clear."
        )
    if isinstance(dataset, Federation):
        _check_no_partition(options)
        dataset.check()
    if isinstance(dataset, str):
        options["dataset"] = dataset
    elif dataset is not None and not resume:
        options["dataset"] = (dataset.dataset if isinstance(dataset, Federation) else dataset).name
    if resume:
        before = RunFolder.open(Path(resume)).config()
        names = options if model is None else {**options, "model": model}
        check_code_is_named(before, names, Path(resume))
        import_given(options)
        config = change_config(before, options)
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


def _convert_data(data: Any, options: dict[str, Any]) -> str | Dataset | Federation | None:
    """Make a dataset of data of a program; take what describes the data out of the options."""
    clients = options.get("clients")
    owners = None
    if clients is not None and not isinstance(clients, Integral | str | float):
        owners = options.pop("clients")
    if data is None or isinstance(data, str | Dataset | Federation):
        if owners is not None:
            raise UserError(
                "clients with a name for each sample goes with a pair (x, y) of your own; here, it "
                "must be the number of clients."
            )
        return data
    columns: dict[str, Any] = {name: options.get(name) for name in ("label_column", "clients_by")}
    for name in columns.keys() - {field.name for field in fields(Config)}:
        options.pop(name, None)
    return make_dataset(data, clients=owners, **columns)


def _check_no_partition(options: dict[str, Any]) -> None:
    for name in ("partition", "partition_seed", "clients", "validation"):
        if name in options:
            raise UserError(f"A Federation is divided already: do not give {name} with it.")
