"""`fedala run`: train, evaluate, compare."""

import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedala.cli.config_options import config_options, given_options
from fedala.cli.jobs import choose_jobs
from fedala.cli.output import keep_lines, print_line, say
from fedala.data.natural import list_clients
from fedala.errors import RunError, UserError
from fedala.lanes.normalization import is_standard
from fedala.metrics import ACCURACY
from fedala.ranks.group import RankLost, is_started_by_torchrun
from fedala.ranks.launch import GRACE, check_devices, launch
from fedala.ranks.lead import Leader, join_ranks, serve
from fedala.records import HistoryRow
from fedala.report import loggers, page, tables
from fedala.report.gains import describe_gains
from fedala.report.headline import compare_with_majority, describe_divergence
from fedala.report.progress_bars import ProgressBars
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped, catch_stop_signals
from fedala.runs.own_code import configure, import_given
from fedala.runs.plan import Plan, plan
from fedala.runs.results import RunResult
from fedala.runs.resumable_options import change_config, is_data_path
from fedala.runs.resume import resume_advice
from fedala.runs.seconds import MEANING
from fedala.runs.sweep_results import find_sweeps

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala run
  fedala run --method fedala --rounds 50 --seeds 5 --set fedala.layers=2
  fedala run --dataset cifar10 --data-dir data --partition pathological:2
  fedala run --optimizer adamw --lr 1e-3 --schedule cosine --warmup 3 --clip 1
  fedala run --sweep lr=0.1,0.03,0.01 --validation 0.1
  fedala run --import my/fedsim.py --method fedsim,fedavg    # your own method
  fedala run --model my/net.py:make         # your own model
  fedala run --config runs/mine/config.toml --batch-size 20 --out runs/other
  fedala run --resume runs/mine             # continue it; with --rounds 500, for more rounds
  fedala run --resume runs/mine --seeds 5 --method +ditto    # add seeds and methods to it

A config file is TOML with the same names (imports for --import), as in
batch_size = 10, method = ["fedala", "ditto"] or imports = ["my/fedsim.py"].
Options of the command line override it.""")
)
@config_options()
def run(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="a TOML file with any of these options", rich_help_panel="Files", metavar="FILE"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"the run folder [dim]\[default: a new one in runs][/dim]",
            rich_help_panel="Files",
            metavar="DIR",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            metavar="",
            help="replace the run folder if it exists",
            rich_help_panel="Files",
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="continue the run in this folder, exactly as if it had never stopped; "
            "with --out, in a copy of it",
            rich_help_panel="Files",
            metavar="DIR",
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            metavar="",
            help="also write TensorBoard events",
            rich_help_panel="Files",
        ),
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="log live to tensorboard, wandb or mlflow; can be given several times",
            metavar="NAME",
            rich_help_panel="Files",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="spread the clients over so many GPUs, or processes on a CPU (by torchrun)",
            metavar="N",
            rich_help_panel="Machine",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            help="processes that run methods and points of a sweep in parallel, on several GPUs if "
            r"there are several [dim]\[default: 1][/dim]",
            min=1,
            metavar="N",
            show_default=False,
            rich_help_panel="Machine",
        ),
    ] = 1,
    **values: Any,
) -> None:
    """Run one or several methods: train, evaluate, compare. A run folder keeps all results."""
    if jobs > 1 and (devices is not None or is_started_by_torchrun()):
        raise UserError(
            "--jobs runs methods in processes of their own, and --devices or torchrun spread each "
            "of them over several: use one or the other."
        )
    if devices is not None and not is_started_by_torchrun():
        given = values.get("device") or (Config.read(config).get("device") if config else None)
        check_devices(devices, str(given or "auto"))
        raise typer.Exit(launch(devices, sys.argv[1:]))
    with join_ranks() as group:
        if group and group.rank:
            serve(group)
        else:
            lead = Leader(group) if group else None
            log = [*(log or []), *(["tensorboard"] if tensorboard else [])]
            _run(values, config, out, resume, lead, force=force, log=log, jobs=jobs)


def _run(
    values: dict[str, Any],
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    leader: Leader | None,
    *,
    force: bool,
    log: list[str],
    jobs: int,
) -> None:
    """Run what the command line says, in this process or as the leader of several."""
    given, file = given_options(values), Config.read(config) if config else {}
    was_started = leader is not None and leader.group.was_started()
    if was_started and out and out.exists():  # and then ranks died
        resume, out, force, config = out, None, False, None
    if resume:
        if config or force:
            raise UserError(
                "--resume takes all options from its folder: leave out --config and --force."
            )
        chosen, folder = _resumed_config(resume, given), out or resume
    else:
        chosen = configure(given, file)
        folder = out or Path("runs") / _folder_name(chosen)
        RunFolder.check_output(folder, force=force)
    loggers.check(log)
    checked = leader.plan(chosen) if leader else plan(chosen)
    say(_description(checked, chosen))
    processes = None if leader else choose_jobs(jobs, checked)
    simulate = leader.simulate if leader else build_simulation
    how = {"resume": resume, "force": force, "jobs": processes, "simulate": simulate}
    _show(_execute(checked, folder, log, how))
    page.write_after_run(folder, say, print_line)
    print_line(f"Run folder: {folder}")


def _resumed_config(resume: Path, given: dict[str, Any]) -> Config:
    """Return the config of a run folder with the changes that the command line gives."""
    import_given(given)
    before = RunFolder.open(resume).config()
    config = change_config(before, given, resume)
    if str(given.get("method")).startswith("+") and config.method == before.method:
        say(f"The run has {', '.join(config.methods)} already: there is no method to add.")
    for name in ("model", "loss", "partition"):
        if getattr(config, name) == "own":
            raise UserError(
                f"{resume} was made in Python with its own {name}: "
                "resume it there with run(resume=…)."
            )
    if is_data_path(config.dataset):
        _check_data_are_there(config.dataset, resume)
    return config


def _check_data_are_there(dataset: str, resume: Path) -> None:
    if not Path(dataset).expanduser().exists():
        raise UserError(
            f"{dataset}, the data of the run in {resume}, is not there: if it has moved, name its "
            "new place with --dataset."
        )


def _folder_name(config: Config) -> str:
    """Return a name for a run folder: the dataset may be a path, and methods may be many."""
    dataset = Path(config.dataset).stem if Path(config.dataset).suffix else config.dataset
    time = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    parts = [
        re.sub(r"[^\w.+-]+", "-", part, flags=re.ASCII).strip("-.")[-40:]
        for part in (dataset, "-".join(config.methods))
    ]
    return "-".join([*filter(None, parts), time])


def _description(checked: Plan, chosen: Config) -> str:
    """Describe a run in one line; `chosen` has the options that the user gave."""
    spread = f" × {checked.ranks}" if checked.ranks > 1 else ""
    config, data = checked.config, checked.federation.dataset
    note = f" ({data.note})" if data.note else ""
    held_out = checked.federation.held_out
    unseen = f", {held_out} of them held out" if held_out else ""
    return (
        f"{config.dataset}{note}: {checked.federation.sizes().sum():,} samples of {data.targets}, "
        f"{config.partition} over {config.clients} clients{unseen}; {config.model}"
        f"{_describe_input(checked)}, {checked.describe_rate(is_default=chosen.lr is None)}, "
        f"rounds: {config.rounds}, runs of each method: {config.seeds}, on {checked.device}{spread}"
        f"{_describe_standardization(config, chosen)}"
    )


def _describe_input(checked: Plan) -> str:
    """Say how the model reads samples of two dimensions, which the data do not say."""
    shape = checked.federation.dataset.x.shape[1:]
    if checked.config.model == "cnn1d":
        return f" ({shape[0]} channels × {shape[1]} steps)"
    if checked.config.model == "lstm" and len(shape) == 2:
        return f" ({shape[0]} steps × {shape[1]} channels)"
    return ""


def _describe_standardization(config: Config, chosen: Config) -> str:
    if not is_standard(config.normalize):
        return ""
    default = "" if chosen.normalize else f" (default for {config.model}; --normalize none: as is)"
    return f"; features standardised by the training samples{default}"


def _execute(checked: Plan, folder: Path, log: list[str], how: dict[str, Any]) -> RunResult:
    """Run all methods with a progress display, live loggers and a clean stop on a signal.

    `how`: further arguments of `execute`.
    """
    config = checked.config
    try:
        with (
            ProgressBars(Console(stderr=True), checked) as watch,
            loggers.Loggers(log, folder, vars(config), watch.say) as live,
            catch_stop_signals(grace=GRACE if checked.ranks > 1 else 0.0) as signals,
        ):

            def show_row(method: str, row: HistoryRow) -> None:
                watch.row(method, row)
                live.row(method, row)

            observer = RunObserver(
                show_row,
                watch.fault,
                watch.say,
                lambda: bool(signals),
                watch.begin,
                watch.earlier,
            )
            return execute(checked, folder, observer=observer, **how)
    except RankLost as error:
        raise RunError(f"{error}; {resume_advice(config, folder)}.") from None
    except Stopped as stopped:
        say(f"{stopped}; {resume_advice(config, folder)}.")
        raise typer.Exit(128 + signals[0]) from None
    except KeyboardInterrupt:
        advice = f"; {resume_advice(config, folder)}" if folder.exists() else ""
        raise KeyboardInterrupt(advice) from None


def _show(result: RunResult) -> None:
    """Print the table of results and the notes that explain it."""
    config = result.config
    sweeps = find_sweeps(config.sweep, result.methods)
    decisive = {
        label: sweep.format_criterion(label)
        for sweep in sweeps
        if sweep.is_validated
        for label in sweep.results
    }
    tables.show(tables.results(result.summaries(), decisive))
    metric = next(iter(result.methods.values())).metric
    formula = "Σ correct" if metric == ACCURACY else "sum over samples"
    print(
        f"The {metric.title} is that of the initialised personal models, before they train "
        f"({formula} / Σ samples)."
    )
    for sentence in compare_with_majority(result):
        print(sentence)
    print("The best round is picked on test data, as in the paper.")
    print(MEANING)
    if config.holdout_clients is not None:
        first = next(iter(result.methods.values()))
        names = list_clients([result.name_client(number) for number in first.held_out])
        print_line(
            f"Unseen clients ({names}) took no part in training: these are their scores at the "
            "last evaluation, after so many local epochs of their own."
        )
    for sentence in describe_gains(result):
        print_line(sentence)
    for sweep in sweeps:
        for sentence in tables.describe_sweep(sweep):
            print(sentence)
    if divergence := describe_divergence(result):
        print_line(divergence)
        if config.normalize == "none":
            print(
                "The features are not scaled (--normalize none): if they are large, leave that "
                "option out, or lower --lr."
            )
    if config.join_ratio < 1:
        clients = "all clients" if config.eval_clients == "all" else "the participants of a round"
        print(
            f"With ρ = {config.join_ratio:g}, {metric.title} is that of {clients}, "
            "unless the heading says otherwise. An absent client is tested with the model that its "
            "last round left it, after training, or with the global one if it has no other."
        )
    if config.seeds > 1:
        print(
            f"Mean ± standard deviation of {config.seeds} runs; "
            "the seconds are for all of them together, without seeds that were added later."
        )
