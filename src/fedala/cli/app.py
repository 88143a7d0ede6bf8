"""The command line. `fedala run` has one option for each field of `Config`: nothing is declared twice."""

import contextlib
import ctypes
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperGroup
except ModuleNotFoundError:
    print(
        "Error: the command line needs typer and rich: pip install 'fedala[cli]'.", file=sys.stderr
    )
    raise SystemExit(2) from None

from fedala.cli import paper
from fedala.data import federate, known, load, write_partition
from fedala.errors import RunError, UserError, printable
from fedala.methods import catalogue
from fedala.options import suggest
from fedala.records import Row
from fedala.report import loggers, page, plots, tables
from fedala.report.progress import ProgressBars
from fedala.report.runs import find_runs
from fedala.runs.config import Config
from fedala.runs.execute import (
    Result,
    RunObserver,
    Stopped,
    catch_stop_signals,
    execute,
    plan,
    resume_advice,
    versions,
)
from fedala.runs.folder import RunFolder

#: The panels of `fedala run --help`, each with the field of `Config` that it begins with.
PANELS = {
    "method": "Methods",
    "dataset": "Data and model",
    "join_ratio": "Training",
    "seeds": "Runs and evaluation",
    "device": "Machine",
    "record_weights": "Files",
}


_console = tables.console


class Commands(TyperGroup):
    """The commands, and what becomes of an error in any of them."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _say(f"Error: {error}")
            raise typer.Exit(2) from None
        except RunError as error:
            _say(f"Error: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            _say(f"Interrupted{interrupt}.")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personalised federated learning with Adaptive Local Aggregation (FedALA).",
    epilog="""Examples:
  fedala run                                  FedALA and FedAvg on embedded data
  fedala run --method fedala,ditto+ala --seeds 5      one table, mean ± std
  fedala partition --partition pathological:2 --plot split.png
  fedala methods                              what --method and --set take""",
)
app.add_typer(paper.app, name="paper")


def main() -> None:
    """The entry point `fedala`."""
    _keep_memory()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="replace"
            )  # a console that has no ρ shows a question mark instead
    app(prog_name="fedala")


def options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of `Config` (all, or those named) as options; they arrive as its `**values`.

    What was not given on the command line arrives as None. Values are text, which `Config` converts and checks, as it
    does with those of a file.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD
        ]
        kinds, panel, generated = typing.get_type_hints(Config), None, []
        for field in fields(Config):
            panel = PANELS.get(field.name, panel)
            if not names:
                generated.append(_parameter(field, kinds[field.name], panel))
            elif field.name in names:
                generated.append(_parameter(field, kinds[field.name], None))
        parameters = [*generated, *own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: "Field[Any]", kind: Any, panel: str | None) -> inspect.Parameter:
    flag, text = f"--{field.name.replace('_', '-')}", escape(field.metadata["help"])
    annotation: Any = str | None
    default = "" if field.default is None else str(field.default)
    metavar = "|".join(field.metadata.get("choices") or ()) or {
        int: "INTEGER",
        float: "NUMBER",
    }.get(_plain(kind), "TEXT")
    if kind is bool:
        annotation, metavar, flag = bool | None, "", f"{flag}/--no-{flag[2:]}"
        default = flag.split("/")[0 if field.default else 1]
    elif field.name == "set":
        annotation, metavar, default = list[str] | None, "KEY=VALUE", ""
        text += "; can be given several times"
    if default:
        text += rf" [dim]\[default: {default}][/dim]"
    option = typer.Option(
        flag, metavar=metavar, help=text, show_default=False, rich_help_panel=panel
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, option],
    )


def _plain(kind: Any) -> Any:
    """`int` of `int | None`."""
    return next((arm for arm in typing.get_args(kind) if arm is not type(None)), kind)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What stands on the command line, and nothing else."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    pairs = [text.partition("=") for text in given.get("set", ())]
    for key, equals, _ in pairs:
        if not equals:
            raise UserError(f"--set {key} lacks its value: write it as in --set fedala.eta=0.5.")
    return {**given, "set": {key.strip(): value.strip() for key, _, value in pairs}}


def _version(asked: bool) -> None:
    if asked:
        found = versions()
        print(f"fedala {found['fedala']} (torch {found['torch']}, Python {found['python']})")
        raise typer.Exit


@app.callback()
def fedala(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_version,
            is_eager=True,
            help="Show the versions and exit.",
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="""Examples:
  fedala run
  fedala run --method fedala --rounds 50 --seeds 5 --set fedala.layers=2
  fedala run --dataset cifar10 --data-dir data --partition pathological:2
  fedala run --config runs/mine/config.toml --batch-size 20 --out runs/other
  fedala run --resume runs/mine               go on where it stopped; --rounds 500: with more rounds

A config file is TOML and holds the same names, such as batch_size = 10. Options of the command line win over it."""
)
@options()
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
            help="go on with the run of this folder, exactly as if it had never stopped; with --out, in a copy of it",
            rich_help_panel="Files",
            metavar="DIR",
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            metavar="",
            help="write TensorBoard events as well",
            rich_help_panel="Files",
        ),
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="log live: tensorboard, wandb or mlflow; can be given several times",
            metavar="NAME",
            rich_help_panel="Files",
        ),
    ] = None,
    **values: Any,
) -> None:
    """Run one or several methods: train, evaluate, compare. Everything is kept in a run folder."""
    given, file = _given(values), Config.read(config) if config else {}
    if resume:
        if config or force:
            raise UserError(
                "--resume takes everything from its folder: it cannot go with --config or --force."
            )
        asked, folder = RunFolder.existing(resume).config().changed(given), out or resume
        for name, what in (("model", asked.model), ("partition", asked.partition)):
            if what == "own":
                raise UserError(
                    f"{resume} was made in Python with a {name} of its own: resume it there, by run(resume=…)."
                )
    else:
        asked = Config.of({**file, **given, "set": {**file.get("set", {}), **given["set"]}})
        folder = out or Path("runs") / _name(asked)
        RunFolder.check(folder, force=force)
    log = [*(log or []), *(["tensorboard"] if tensorboard else [])]
    loggers.check(log)
    checked = plan(asked)
    resolved, data = checked.config, checked.federation.dataset
    note = f" ({data.note})" if data.note else ""
    _say(
        f"{resolved.dataset}{note}: {len(data.y):,} samples of {data.classes} classes, "
        f"{resolved.partition} over {resolved.clients} clients; {resolved.model}, "
        f"rounds: {resolved.rounds}, runs of each method: {resolved.seeds}, on {checked.device.type}"
    )
    try:
        with (
            ProgressBars(Console(stderr=True), checked) as watch,
            loggers.Loggers(log, folder, vars(resolved), watch.say) as live,
            catch_stop_signals() as asked_by,
        ):

            def follow(method: str, row: Row) -> None:
                watch.row(method, row)
                live.row(method, row)

            watcher = RunObserver(follow, watch.fault, watch.say, lambda: bool(asked_by))
            result = execute(checked, folder, force=force, resume=resume, watcher=watcher)
    except Stopped as stopped:
        _say(f"{stopped}; {resume_advice(resolved, folder)}.")
        raise typer.Exit(128 + asked_by[0]) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"; {resume_advice(resolved, folder)}" if folder.exists() else ""
        ) from None
    _show(result)
    _report(folder)
    _print(f"Run folder: {folder}")


def _show(result: Result) -> None:
    console, config = _console(), result.config
    console.print(
        tables.results({name: method.summary() for name, method in result.methods.items()})
    )
    print("The best round is picked on test data, as in the paper.")
    if any(row["diverged"] for method in result.methods.values() for row in method.history):
        print(
            f"Clients diverged: their rounds do not count (--on-divergence {config.on_divergence}); see faults.csv."
        )
    if config.join_ratio < 1:
        whom = "all clients" if config.eval_clients == "all" else "the participants of a round"
        print(
            f"With ρ = {config.join_ratio:g}, accuracy is that of {whom}, where the heading does not say otherwise."
        )
    if config.seeds > 1:
        print(
            f"Mean ± standard deviation of {config.seeds} runs; the seconds are those of all of them together."
        )


def _report(folder: Path) -> None:
    """The page of a run that is done; whatever is wrong with the page, the run is not lost."""
    try:
        _print(f"Report: {page.write([folder], say=_say)}")
    except Exception as error:
        _say(
            f"The report could not be written ({error}); try again with: fedala report {shlex.quote(str(folder))}"
        )


def _name(config: Config) -> str:
    """A name for a run folder: the dataset may be a path, and methods may be many."""
    dataset = Path(config.dataset).stem if Path(config.dataset).suffix else config.dataset
    time = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    parts = [
        re.sub(r"[^\w.+-]+", "-", part, flags=re.ASCII).strip("-.")[-40:]
        for part in (dataset, "-".join(config.methods))
    ]
    return "-".join([*filter(None, parts), time])


@app.command(
    epilog="""Examples:
  fedala partition --partition dir:0.1 --plot split.png
  fedala partition --dataset mnist --data-dir data --partition pathological:2 --save mine.json
  fedala run --dataset mnist --data-dir data --partition mine.json"""
)
@options("dataset", "data_dir", "partition", "partition_seed", "clients", "validation")
def partition(
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="draw classes × clients into this .png, .pdf or .svg file", metavar="FILE"
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="write the partition to this .json file, for --partition", metavar="FILE"
        ),
    ] = None,
    **values: Any,
) -> None:
    """Show who holds what: divide a dataset among clients, without running anything."""
    given = _given(values)
    config = Config.of(given)
    if plot:
        plots.check(plot)
    data = load(config.dataset, Path(config.data_dir) if config.data_dir else None)
    # Only a number that was asked for is held against that of a partition file.
    federation = federate(
        data, config.partition, config.clients, config.partition_seed, config.validation
    )
    if save:
        write_partition(federation, save)
    counts = federation.counts()
    title = f"{config.dataset}, {config.partition}, {len(counts)} clients"
    if plot:
        plots.save(plots.draw_split(counts, data.class_names, title), plot)
    _console().print(tables.clients(federation))
    sizes = counts.sum(1)
    note = f" ({data.note})" if data.note else ""
    print(
        f"{title}{note}: {sizes.sum():,} samples of {data.classes} classes, "
        f"{sizes.min():,} to {sizes.max():,} per client"
    )
    for path in filter(None, (save, plot)):
        _print(f"Written: {path}")


@app.command(
    epilog="""Examples:
  fedala report runs/mine                     writes runs/mine/report.html, also while it runs
  fedala report runs/one runs/two --out both.html
  fedala report runs --out all.html           every run folder in runs
  fedala report runs/mine --plots figures     .png and .pdf for a paper"""
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="run folders, or a folder that holds some", metavar="DIR")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"the page [dim]\[default: report.html in the only folder][/dim]", metavar="FILE"
        ),
    ] = None,
    plots_: Annotated[
        Path | None,
        typer.Option(
            "--plots", help="draw it for print as well, as .png and .pdf in here", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Make one HTML page of one or several runs, finished or not: figures, curves, clients, split, W, cost, set-up."""
    if plots_:
        plots.check_folder(plots_)
    _print(f"Written: {page.write(folders, out, say=_say)}")
    if plots_:
        _print(f"Written: {len(plots.write_all(find_runs(folders), plots_))} plots in {plots_}")


@app.command()
def methods() -> None:
    """List the methods and their hyperparameters."""
    console, entries = _console(), list(catalogue().values())
    console.print(tables.methods(entries))
    console.print(tables.hyperparameters(entries))
    print(
        "A hyperparameter is set by --set, such as --set fedala.eta=0.5; for x+ala, those of ALA are ala.eta and so on."
    )


@app.command()
def datasets() -> None:
    """List the datasets that are known by name."""
    _console().print(tables.datasets(known()))
    print(
        "Your own data: --dataset with the path of a .npz, a .csv or an image folder, or hub:owner/name."
    )


@app.command(
    epilog="""Examples:
  fedala bench --quick                        a minute, small data
  fedala bench --case "mnist, fedala" --data-dir data --precision tf32
  fedala bench --out results.md --plot results.png"""
)
def bench(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="small cases that finish in about a minute")
    ] = False,
    case: Annotated[
        list[str] | None, typer.Option(help="measure this case only; can be given several times")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, tf32, bf16 or float64")] = "float32",
    data_dir: Annotated[
        Path | None, typer.Option(help="real samples from here, where there are any")
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds to measure, from 4 on", min=4)] = 6,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="measure the plain loop as well")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="write the table to this .md file", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw it into this .png, .pdf or .svg file", metavar="FILE")
    ] = None,
) -> None:
    """Measure this machine: seconds per round, against the plain per-client loop in the same run."""
    from fedala.bench import measure as benchmark

    known_cases = {c.name: c for c in (benchmark.QUICK if quick else benchmark.CASES)}
    for name in case or ():
        if name not in known_cases:
            raise UserError(f"There is no case {name!r}{suggest(name, known_cases)}.")
    if plot:
        plots.check(plot)
    if out and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserError(
            f"The table {out} cannot be written: there is no folder {out.absolute().parent}, or it is one."
        )
    Config.of({"device": device, "precision": precision})
    figures = []
    for chosen in [known_cases[name] for name in case] if case else known_cases.values():
        _say(f"{chosen.name} …")
        figures.append(
            benchmark.measure(
                chosen,
                device=device,
                precision=precision,
                data_dir=data_dir,
                rounds=rounds,
                plain=plain,
            )
        )
        _console().print(tables.bench(figures[-1:]))
    _console().print(tables.bench(figures))
    if out:
        out.write_text(benchmark.markdown(figures), encoding="utf-8")
    if plot:
        plots.save(plots.draw_bench(figures), plot)
    for path in filter(None, (out, plot)):
        _print(f"Written: {path}")


flower = typer.Typer(
    no_args_is_help=True, help="The same methods on Flower: real clients, on machines of their own."
)
app.add_typer(flower, name="flower")


@flower.command(
    epilog="""Examples:
  fedala flower new my-app --method fedala --dataset mnist --data-dir data --clients 10
  flwr run my-app                             simulated by Flower, with fedala[flower-simulation]
  flwr run my-app my-superlink                on the nodes of a SuperLink: see docs/deployment.md"""
)
@options()
def new(
    *,
    folder: Annotated[Path, typer.Argument(help="the folder to write", metavar="DIR")],
    **values: Any,
) -> None:
    """Write a folder for flwr run: an app that runs a method, with every option in its pyproject.toml."""
    from fedala.flower.experiment import LOCAL, Deployment
    from fedala.flower.new import check, write

    check(folder)
    given = _given(values)
    for name in LOCAL:
        if name in given:
            raise UserError(
                f"--{name.replace('_', '-')} has no meaning where every client has its own machine."
            )
    config = Config.of({"method": "fedala", **given})
    if len(config.methods) > 1:
        raise UserError(f"A federation runs one method at a time, not {config.method}.")
    resolved = plan(config).config
    write(folder, resolved, Deployment())
    _print(f"Written: {folder / 'pyproject.toml'}, {folder / 'app.py'}")
    if resolved.dataset != "digits":
        print("Each node reads the data that its own node config names: see docs/deployment.md.")


@flower.command(
    epilog="""Examples:
  fedala flower demo
  fedala flower demo --method ditto+ala --clients 4 --rounds 5 --out runs/demo"""
)
@options(
    "method",
    "set",
    "dataset",
    "data_dir",
    "model",
    "partition",
    "clients",
    "rounds",
    "batch_size",
    "lr",
    "seed",
)
def demo(
    *,
    out: Annotated[
        Path | None, typer.Option(help="keep the server's run folder here", metavar="DIR")
    ] = None,
    **values: Any,
) -> None:
    """Run a federation with TLS and node authentication on this machine: a SuperLink, SuperNodes, one run."""
    from fedala.flower.demo import demo as show

    given = _given(values)
    checked = plan(
        Config.of({"method": "fedala", "clients": 2, "rounds": 3, "partition": "dir:0.5", **given})
    )
    if len(checked.methods) > 1:
        raise UserError(f"A federation runs one method at a time, not {checked.config.method}.")
    if out:
        RunFolder.check(out, force=False)
    with ProgressBars(Console(stderr=True), checked) as watch:
        summary = show(checked, out, row=watch.row, say=watch.say)
    _console().print(tables.results(summary["methods"]))
    _print("SuperLink and SuperNodes are stopped." + (f" Run folder: {out}" if out else ""))


def _keep_memory() -> None:
    """Asks glibc to keep freed memory: otherwise every step's gradients are fetched from the system anew, page by page."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            library = ctypes.CDLL(None)
            trim_threshold, mmap_threshold = -1, -3
            library.mallopt(mmap_threshold, 32 * 2**20)
            library.mallopt(trim_threshold, 2**30)


def _say(sentence: str) -> None:
    """To stderr, as it is: no markup, no line breaks."""
    print(printable(sentence, 2000), file=sys.stderr)


def _print(sentence: str) -> None:
    """Print one line; a path in it may hold any character."""
    print(printable(sentence, 10_000))


if __name__ == "__main__":
    main()
