"""`fedala.run`: from options to results."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from fedala.api.display import announce, choose_progress, describe_plan, is_interactive
from fedala.api.result import Result
from fedala.data import Dataset, Federation, make_dataset
from fedala.data.holdout import check_tested
from fedala.errors import Caution, RunWarning, UserError
from fedala.lanes.losses import LossFunction
from fedala.records import HistoryRow
from fedala.report import page
from fedala.report.headline import describe_divergence
from fedala.report.progress import RunProgress
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.losses import REGRESSIONS
from fedala.runs.observer import RunObserver, Stopped, catch_stop_signals
from fedala.runs.own_code import configure, import_given
from fedala.runs.plan import Plan, plan
from fedala.runs.resumable_options import change_config
from fedala.runs.resume import resume_advice

#: Options that say what the columns of a table are.
COLUMN_OPTIONS = ("label_column", "clients_by", "drop_columns")


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
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Run one or several methods: `run(method="fedala", dataset="digits", rounds=50)`.

    Options are those of `fedala run`. Instead of a dataset's name, give data of your own: arrays or
    tensors `(x, y)`, a torch `Dataset`, a pandas `DataFrame`, a list or dict with one of these for
    each client, `{"train": …, "test": …}` (see `fedala.data.make_dataset`), a `Dataset`, or a
    `Federation`, which says which client has which samples. With `(x, y)`, `clients` may be a list
    that says whose sample each one is; a number is the number of clients, as always. With a
    `DataFrame`, `label_column`, `clients_by` and `drop_columns` name columns. Instead of a model's
    name, give a function that builds an `nn.Module`; instead of a loss's name, a function
    (output, y) that returns the mean loss of a batch. `imports` names files or modules with methods
    of your own, and executes them.

    With `out`, everything is kept in that folder, with its page, report.html. `resume` names the
    folder of a run that was interrupted, or shall have more rounds, further seeds (`seeds=5`) or
    further methods (`method="+ditto"`); give data, model and loss of your own again.

    What is likely to make the results wrong is a `RunWarning`, and all that the run says is in the
    `notes` of the result.

    `progress` shows the rounds as they come, on stderr or below the cell of a notebook; by default,
    if stderr is a terminal, or in IPython and Jupyter. `on_row` gets every evaluation.
    Ctrl-C, or a notebook's stop button, ends the run after its round: a notebook gets the result so
    far, a program a KeyboardInterrupt. Once more interrupts at once.
    """
    data = str(dataset) if isinstance(dataset, Path) else dataset
    data = _convert_data(data, options, _find_columns(config, loss, resume, options))
    checked = _plan(config, data, model, loss, resume, options)
    chosen = out or resume
    folder = Path(chosen) if chosen else None
    _warn(filter(_is_caution, (*checked.federation.notes, *checked.notes)))
    display = choose_progress(checked, progress)
    with display or nullcontext():
        if display:
            display.say(describe_plan(checked, options))
        observer = _make_observer(display, on_row)
        source = Path(resume) if resume else None
        given = {"dataset": data, "model": model, "loss": loss}
        own = [name for name, value in given.items() if not isinstance(value, str | None)]
        result = _carry_out(checked, folder, force=force, resume=source, observer=observer, own=own)
        if folder and result.is_complete:
            page.write_after_run(folder, observer.on_message, observer.on_message)
    _warn(filter(None, [describe_divergence(result)]))
    return result


def _is_caution(sentence: str) -> bool:
    return isinstance(sentence, Caution)


def _warn(sentences: Iterable[str]) -> None:
    """Warn the caller of `run`."""
    for sentence in sentences:
        warnings.warn(sentence, RunWarning, stacklevel=3)


def _find_columns(
    config: Config | None, loss: Any, resume: Path | str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `make_dataset` for a frame: as given, or as the run has them."""
    if config is None and resume:
        config = RunFolder.open(Path(resume)).config()
    given = Config() if config is None else config
    values = {name: options.get(name) or getattr(given, name) for name in COLUMN_OPTIONS}
    name = loss if isinstance(loss, str) else given.loss
    return {**values, "is_regression": name in REGRESSIONS}


def _convert_data(
    data: Any, options: dict[str, Any], columns: dict[str, Any]
) -> str | Dataset | Federation | None:
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
        if isinstance(data, Dataset | Federation):
            _check_no_columns(options)
        return data
    return make_dataset(data, clients=owners, **columns)


def _plan(
    config: Config | None,
    dataset: str | Dataset | Federation | None,
    model: str | Callable[[], nn.Module] | None,
    loss: str | LossFunction | None,
    resume: Path | str | None,
    options: dict[str, Any],
) -> Plan:
    """Check what was given to `run`, and plan it."""
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
        check_tested(dataset)
    if isinstance(dataset, str):
        options["dataset"] = dataset
    elif dataset is not None and not resume:
        options["dataset"] = (dataset.dataset if isinstance(dataset, Federation) else dataset).name
    if resume:
        import_given(options)
        before = RunFolder.open(Path(resume)).config()
        if before.dataset == "own" and dataset is None:
            raise UserError(
                f"The data of {resume} came from a program: give them again, as dataset=…."
            )
        own = {} if model is None or isinstance(model, str) else {"model": "own"}
        config = change_config(before, {**options, **own}, Path(resume))
    return plan(
        config or configure(options),
        None if isinstance(dataset, str) else dataset,
        None if isinstance(model, str) else model,
        None if isinstance(loss, str) else loss,
    )


def _make_observer(
    display: RunProgress | None, on_row: Callable[[str, HistoryRow], None] | None
) -> RunObserver:
    """Return an observer that shows what happens, and passes the rows on.

    A caution is not shown once more: it has been a warning.
    """
    if display is None:
        return RunObserver(on_row) if on_row else RunObserver()

    def show_sentence(sentence: str) -> None:
        if not _is_caution(sentence):
            display.say(sentence)

    def show_row(method: str, row: HistoryRow) -> None:
        display.row(method, row)
        if on_row:
            on_row(method, row)

    return RunObserver(
        show_row, display.fault, show_sentence, on_begin=display.begin, on_earlier=display.earlier
    )


def _carry_out(
    checked: Plan,
    folder: Path | None,
    *,
    force: bool,
    resume: Path | None,
    observer: RunObserver,
    own: Sequence[str],
) -> Result:
    """Carry out the plan. If it is interrupted in a notebook, return the results so far.

    `own`: the arguments that a run must be given again to be resumed.
    """
    notes: list[str] = []

    def keep_note(sentence: str) -> None:
        notes.append(str(sentence))
        show(sentence)

    show = observer.on_message
    try:
        with _catch_interrupt() as signals:
            observer = replace(observer, should_stop=lambda: bool(signals), on_message=keep_note)
            found = execute(checked, folder, force=force, resume=resume, observer=observer)
        if signals and not is_interactive():
            raise KeyboardInterrupt  # in its last round
        return Result(**vars(found), notes=tuple(notes))
    except Stopped as stopped:
        advice = "without a folder (out=…), it cannot be resumed"
        if folder:
            advice = resume_advice(checked.config, folder, own=own)
        message = f"{stopped}; {advice}."
        if not is_interactive() or stopped.result is None:
            raise KeyboardInterrupt(message) from None
        show(message)
        return Result(**vars(stopped.result), message=message, notes=tuple(notes))


@contextmanager
def _catch_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C, if it would raise a KeyboardInterrupt here: another handler stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with catch_stop_signals([signal.SIGINT], announce) as signals:
            yield signals
    else:
        yield []


def _check_no_partition(options: dict[str, Any]) -> None:
    for name in ("partition", "partition_seed", "clients", "validation", "split"):
        if name in options:
            raise UserError(f"A Federation is divided already: do not give {name} with it.")


def _check_no_columns(options: dict[str, Any]) -> None:
    for name in ("label_column", "clients_by"):
        if options.get(name) is not None:
            raise UserError(f"A Dataset or Federation has no columns: do not give {name} with it.")
