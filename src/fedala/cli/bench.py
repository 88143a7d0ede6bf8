"""`fedala bench`: measure this machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedala.bench.cases import CASES, QUICK, load_real_data
from fedala.bench.measure import Measurement, format_markdown, measure
from fedala.cli.output import keep_lines, print_line, say
from fedala.errors import UserError
from fedala.io.files import write_output
from fedala.options import suggest
from fedala.report import plots, tables
from fedala.runs.config import Config
from fedala.runs.devices import NAMES, choose_device
from fedala.runs.outputs import check_output

app = typer.Typer()


@app.command(
    epilog=keep_lines("""Examples:
  fedala bench --quick                      # a minute, small data
  fedala bench --case "mnist, fedala" --data-dir data --precision tf32
  fedala bench --out results.md --plot results.png""")
)
def bench(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="small cases that finish in about a minute")
    ] = False,
    case: Annotated[
        list[str] | None, typer.Option(help="measure this case only; can be given several times")
    ] = None,
    device: Annotated[str, typer.Option(help=NAMES)] = "auto",
    precision: Annotated[str, typer.Option(help="float32, tf32, bf16 or float64")] = "float32",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="measure on the datasets in this folder; without it, on random data",
            metavar="DIR",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds to measure, at least 4", min=4)] = 6,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="also measure the plain loop")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="write the table to this .md file", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw it into this .png, .pdf or .svg file", metavar="FILE")
    ] = None,
) -> None:
    """Measure this machine: seconds per round, compared with the plain per-client loop."""
    known_cases = {c.name: c for c in (QUICK if quick else CASES)}
    for name in case or ():
        if name not in known_cases:
            raise UserError(f"There is no case {name!r}{suggest(name, known_cases)}.")
    chosen_cases = [known_cases[name] for name in case or known_cases]
    if plot:
        plots.check(plot)
    if out:
        check_output(out, [".md"])
    choose_device(device)
    Config.from_values({"precision": precision})
    loaded, reasons = load_real_data(chosen_cases, data_dir) if data_dir else ({}, {})
    for reason in reasons.values():
        say(f"Note: random data is used instead: {reason}")
    measurements = []
    for chosen in chosen_cases:
        say(f"{chosen.name} …")
        measurements.append(
            measure(
                chosen,
                real=loaded.get(chosen.dataset),
                device=device,
                precision=precision,
                rounds=rounds,
                plain=plain,
            )
        )
        tables.show(_table(measurements[-1:]))
    tables.show(_table(measurements))
    if out:
        write_output(out, format_markdown(measurements).encode())
    if plot:
        plots.save(plots.draw_bench(measurements), plot)
    for path in filter(None, (out, plot)):
        print_line(f"Written: {path}")


def _table(measurements: Iterable[Measurement]) -> Table:
    """Build the table of seconds per round, and how much faster than the plain loop."""
    table = Table("case", "data", "device", "precision", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "until the first\nround is done",
        "round of the\ninitial stage",
        "steady round",
        "plain loop",
        "faster",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measurements:
        plain = "" if m.plain is None else f"{m.plain:.3g} s"
        faster = "" if m.speedup is None else f"{m.speedup:.1f} ×"
        seconds = (f"{value:.3g} s" for value in (m.start, m.initial, m.steady))
        table.add_row(
            escape(m.case), escape(m.data), escape(m.device), m.precision, *seconds, plain, faster
        )
    return table
