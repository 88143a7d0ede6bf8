"""The paper's tables with our numbers beside the paper's: as Markdown, LaTeX, HTML and csv."""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from fedala.errors import UserError, spreadsheet_safe
from fedala.io import files
from fedala.io.untrusted import read_file
from fedala.methods import catalogue
from fedala.paper.experiments import Column, Printed, Table, drawings, tables
from fedala.paper.results import Figure, Results
from fedala.report.markup import Html, escape_markdown, join, tag
from fedala.report.progress import clock
from fedala.runs.tables import csv_text

#: How far apart two accuracies are, in points, up to which we say so.
AGREEMENT = {"agrees": 1.0, "near": 3.0, "differs": float("inf")}
SIGNS = {"agrees": "●", "near": "◐", "differs": "○"}
COLOURS = {"agrees": "Green", "near": "brown", "differs": "red"}
_MEANING = {
    "agrees": "within one point of the paper, or within the two standard deviations together",
    "near": "within three points",
    "differs": "further off",
}


def legend(keys: Mapping[str, str], between: str = " ") -> str:
    """What the signs mean, or the colours."""
    return "; ".join(f"{keys[name]}{between}{meaning}" for name, meaning in _MEANING.items())


LEGEND = f"{legend(SIGNS)}; the best round is picked on test data, as in the paper"
#: Bytes of a figure, and of a page that tables are put into, at most.
_LARGEST = 2**25
#: Between these two lines of a Markdown file, `insert` puts the tables.
BEGIN, END = "<!-- begin: fedala paper report -->", "<!-- end: fedala paper report -->"


@dataclass(frozen=True)
class Ours:
    """A number of ours."""

    text: str
    difference: float | None = None
    """To the paper's, in points."""
    departures: tuple[str, ...] = ()
    spread: float = 0.0
    """The paper's standard deviation and ours together, as far as there are any: a difference within it says nothing."""

    @property
    def agreement(self) -> str | None:
        if self.difference is None:
            return None
        return next(
            name
            for name, most in AGREEMENT.items()
            if round(abs(self.difference), 2) <= max(most, self.spread)
        )


@dataclass(frozen=True)
class Box:
    """What stands in one place of a table: the paper's number, and ours with the paper's presets and with shuffling."""

    paper: str
    ours: tuple[Ours, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """A table, ready to be written in any format."""

    table: Table
    heads: list[tuple[str, str]]
    """Of each column: its group and its title."""
    groups: list[list[tuple[str, list[Box | None]]]]

    @property
    def boxes(self) -> Iterator[Box]:
        return (box for group in self.groups for _, boxes in group for box in boxes if box)

    @property
    def notes(self) -> dict[str, str]:
        """A letter for every way in which a number of ours is not the paper's experiment."""
        kinds = dict.fromkeys(
            ", ".join(ours.departures) for box in self.boxes for ours in box.ours if ours.departures
        )
        return {kind: _letters(i) for i, kind in enumerate(kinds)}

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The groups of columns, and how many each has."""
        return [
            (name, len(list(members)))
            for name, members in groupby(group for group, _ in self.heads)
        ]


def sheets(results: Results) -> list[Sheet]:
    """The tables of which there is something to show: results, or the number of ALA's parameters, which is counted."""
    every = [
        _costs(table, results) if table.cost else _accuracies(table, results)
        for table in tables().values()
    ]
    return [sheet for sheet in every if any(box.ours for box in sheet.boxes)]


def _accuracies(table: Table, results: Results) -> Sheet:
    heads = []
    for column in table.columns:
        heads.append((column.group, column.title))
        if column.with_ala:
            heads.append((column.group, "improvement"))

    def boxes(method: str) -> Iterator[Box | None]:
        for column in table.columns:
            printed = table.printed(column, method)
            if printed is None:
                yield from [None] * (2 if column.with_ala else 1)
                continue
            found = figures(column, method, results)
            yield Box(
                spread(printed.accuracy, printed.std), tuple(_ours(f, printed) for f in found)
            )
            if column.with_ala:
                yield _improvement(column, method, printed, found, results)

    groups = [[(title(method), list(boxes(method))) for method in group] for group in table.groups]
    if any(column.parameters for column in table.columns):
        counted = [
            Box(column.parameters, (Ours(table.parameters(column)),)) for column in table.columns
        ]
        groups.append([("ALA's parameters", list(counted))])
    return Sheet(table, heads, groups)


def _ours(figure: Figure, printed: Printed) -> Ours:
    return Ours(
        spread(figure.accuracy, figure.std),
        figure.accuracy - printed.accuracy,
        tuple(figure.departures),
        (printed.std or 0) + (figure.std or 0),
    )


def _improvement(
    column: Column, method: str, printed: Printed, found: list[Figure], results: Results
) -> Box:
    """What ALA adds to a method, where we have it with and without."""
    ours = []
    base = Column(column.name, column.title, column.group, column.setting)
    for figure in found:
        without = [
            f for f in figures(base, method, results) if f.runs[0].shuffle == figure.runs[0].shuffle
        ]
        for f in without:
            gain = figure.accuracy - f.accuracy
            both = [", ".join(one.departures) or "as in the paper" for one in (figure, f)]
            departures = (
                figure.departures
                if both[0] == both[1]
                else [f"with ALA: {both[0]}; without: {both[1]}"]
            )
            ours.append(Ours(f"{gain:.2f}", gain - (printed.improvement or 0), tuple(departures)))
    return Box("" if printed.improvement is None else f"{printed.improvement:.2f}", tuple(ours))


def _costs(table: Table, results: Results) -> Sheet:
    """Time until the best round, time per round, and parameters per client and round."""
    heads = [
        ("Computation", "time to the best round"),
        ("Computation", "time per round"),
        ("Communication", "parameters"),
    ]
    [column] = table.columns

    def boxes(method: str) -> list[Box | None]:
        printed, found = table.cost_of(method), figures(column, method, results)
        total, each = [], []
        for f in found:
            first = f.runs[0]
            departures = (*f.departures, f"{first.together} seeds side by side")
            where = f"{f.best_round:.0f} rounds, {first.device}"
            total.append(
                Ours(f"{clock(f.seconds_per_round * f.best_round)} ({where})", None, departures)
            )
            each.append(Ours(f"{f.seconds_per_round:.3g} s", None, departures))
        return [
            Box(f"{printed.total_minutes} min", tuple(total)),
            Box(f"{printed.minutes_per_iteration} min", tuple(each)),
            Box(
                printed.parameters,
                tuple(Ours(f"{f.runs[0].sent + f.runs[0].uploaded:,}") for f in found[:1]),
            ),
        ]

    return Sheet(
        table,
        heads,
        [[(title(method), boxes(method)) for method in group] for group in table.groups],
    )


def figures(column: Column, method: str, results: Results) -> list[Figure]:
    """What was run of a cell, in the fixed order and shuffled."""
    found = [results.figure(column.cell(method, shuffle=shuffle)) for shuffle in (False, True)]
    return [figure for figure in found if figure]


def title(method: str) -> str:
    base, plus, _ = method.partition("+")
    return catalogue()[base].title + ("+ALA" if plus else "")


# --- formats -------------------------------------------------------------------------------------------------------


def markdown(sheet: Sheet) -> str:
    heads = [f"{group}<br>{name}" for group, name in sheet.heads]
    lines = [
        f"### {_name(sheet)}",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]

    def ours(o: Ours) -> str:
        return f"**{escape_markdown(o.text)}**{_mark(sheet, o, '<sup>{}</sup>')}{_change(o)}"

    for method, boxes in _rows(sheet):
        cells = ["<br>".join([box.paper, *map(ours, box.ours)]) if box else "—" for box in boxes]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    notes = [
        f"<sup>{letter}</sup> {escape_markdown(what)}<br>" for what, letter in sheet.notes.items()
    ]
    return "\n".join([*lines, "", *notes, ""])


def latex(sheet: Sheet) -> str:
    """A booktabs table, as wide as the page at most; needs the packages and colours of `_PREAMBLE`."""
    spec = "|".join(["l", *("c" * size for _, size in sheet.spans)])
    spans = " & ".join(
        f"\\multicolumn{{{size}}}{{c}}{{{_tex(name)}}}" for name, size in sheet.spans
    )

    def ours(o: Ours) -> str:
        text = f"{_tex(o.text)}{_mark(sheet, o, '$^{{{}}}$')}"
        return (
            f"\\textcolor{{{o.agreement}}}{{{text} (${o.difference:+.2f}$)}}"
            if o.agreement
            else text
        )

    def cell(box: Box | None) -> str:
        if box is None or not box.ours:
            return _tex(box.paper) if box else "---"
        lines = " \\\\ ".join([_tex(box.paper), *map(ours, box.ours)])
        return f"\\begin{{tabular}}[t]{{@{{}}c@{{}}}}{lines}\\end{{tabular}}"

    body = []
    for group in sheet.groups:
        body.append("\\midrule")
        body += [
            f"{_tex(method)} & " + " & ".join(map(cell, boxes)) + " \\\\" for method, boxes in group
        ]
    notes = "; ".join(f"$^{{{letter}}}$ {_tex(what)}" for what, letter in sheet.notes.items())
    colours = legend(COLOURS, ": ")
    caption = f"{_tex(sheet.table.title)}. Above: the paper; below: ours, with the difference. {colours}. {notes}"
    fitting = "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"
    return "\n".join(
        [
            "\\begin{table*}[ht]", "\\centering", fitting, f"\\begin{{tabular}}{{{spec}}}", "\\toprule", f" & {spans} \\\\",
            "Methods & " + " & ".join(_tex(name) for _, name in sheet.heads) + " \\\\", *body, "\\bottomrule",
            "\\end{tabular}}", f"\\caption{{{caption}}}", f"\\label{{ours:{sheet.table.name}}}", "\\end{table*}", "",
        ]
    )  # fmt: skip


_PREAMBLE = r"""% \usepackage{booktabs,graphicx,xcolor}
\definecolor{agrees}{HTML}{1A7F37}
\definecolor{near}{HTML}{9A6700}
\definecolor{differs}{HTML}{B3261E}
"""


def page(sheet: Sheet) -> Html:
    """A section of the HTML page."""

    def ours(o: Ours) -> Html:
        what = "; ".join(filter(None, [o.agreement, *o.departures]))
        mark = Html(_mark(sheet, o, "<sup>{}</sup>"))
        change = tag("small", _change(o)) if _change(o) else None
        return tag("span", o.text, mark, change, class_=f"ours {o.agreement or ''}", title=what)

    def cell(box: Box | None) -> Html:
        return (
            tag("td", tag("span", box.paper, class_="paper"), *map(ours, box.ours))
            if box
            else tag("td", "—")
        )

    name, corner = sheet.table.name, tag("td")
    spans = [tag("th", text, scope="colgroup", colspan=size) for text, size in sheet.spans]
    names = [tag("th", text, scope="col") for _, text in sheet.heads]
    bodies = [
        tag(
            "tbody",
            [
                tag("tr", tag("th", method, scope="row"), *map(cell, boxes))
                for method, boxes in group
            ],
        )
        for group in sheet.groups
    ]
    whole = tag("table", tag("thead", tag("tr", corner, spans), tag("tr", corner, names)), bodies)
    notes = [tag("li", tag("sup", letter), " ", what) for what, letter in sheet.notes.items()]
    return tag(
        "section",
        tag("h2", _name(sheet), id=f"{name}-title"),
        tag(
            "div", whole, class_="wide", role="region", tabindex=0, aria_labelledby=f"{name}-title"
        ),
        tag("ul", notes, class_="notes"),
        id=name,
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>FedALA: the paper and ours</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --back: #fff;
  --agrees: #1a7f37; --near: #9a6700; --differs: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117;
  --agrees: #3fb950; --near: #d29922; --differs: #ff7b72 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 96rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2.5rem 0 .6rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { padding: .3rem .7rem; text-align: right; vertical-align: top; white-space: nowrap }
tbody th { text-align: left; font-weight: 500; position: sticky; left: 0; background: var(--back) }
thead th { font-weight: 600; border-bottom: 1px solid var(--line) } thead th[colspan] { text-align: center }
thead tr:first-child th + th { border-left: .6rem solid var(--back) } sup { font-size: .7em; line-height: 0 }
tbody { border-bottom: 1px solid var(--line) }
td span { display: block } .paper { color: var(--soft) } .ours { font-weight: 600 } small { font-weight: 400 }
.agrees { color: var(--agrees) } .near { color: var(--near) } .differs { color: var(--differs) }
figure { margin: 2.5rem 0 } figcaption { margin-bottom: .6rem }
.notes { list-style: none; padding: 0; color: var(--soft); font-size: .85rem } img { max-width: 100%; background: #fff }
</style></head><body><main><h1>FedALA: the paper and ours</h1>
"""


def write(results: Results, folder: Path, pictures: Iterable[Path] = ()) -> list[Path]:
    """The tables in every format; the page also shows `pictures` (.png)."""
    shown = sheets(results)
    if not results.runs:
        raise UserError("There is no result to report: fedala paper run makes some.")
    intro = [
        tag("p", f"In every cell: the paper above, ours below, with the difference. {LEGEND}."),
        tag("p", overview(results)),
    ]
    inside = join([*intro, *map(page, shown), *map(_picture, pictures)])
    texts = {
        "tables.md": body(results),
        "tables.tex": _PREAMBLE + "\n" + "\n".join(map(latex, shown)),
        "tables.csv": _long(results),
        "index.html": f"{_PAGE}{inside}</main></body></html>\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            files.write_file(folder / name, text.encode(), durable=False)
    except OSError as error:
        raise UserError(f"The report cannot be written to {folder}: {error.strerror}.") from None
    return [folder / name for name in texts]


def _picture(path: Path) -> Html:
    """A figure with its title, which says in words what is to be seen."""
    what = next(
        (drawing.title for name, drawing in drawings().items() if path.stem.startswith(name)), ""
    )
    text = f"{path.stem}: {what}" if what else path.stem
    try:
        image = base64.b64encode(read_file(path, _LARGEST)).decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    return tag(
        "figure",
        tag("figcaption", text),
        tag("img", alt=text, src=f"data:image/png;base64,{image}"),
    )


def body(results: Results) -> str:
    """All tables as Markdown."""
    intro = f"{overview(results)}\n\nIn every cell: the paper above, ours below, with the difference. {LEGEND}."
    return f"{intro}\n\n" + "\n".join(map(markdown, sheets(results)))


def around(path: Path) -> tuple[str, str]:
    """What stands before and after the tables in a Markdown file, up to the two marks and with them."""
    try:
        text = read_file(path, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(
            f"{path} has no place for the tables: it lacks the lines {BEGIN} and {END}."
        )
    return before + begin, end + after


def insert(results: Results, path: Path) -> None:
    """Puts the Markdown tables between the two marks of a file, in the place of what stands there."""
    before, after = around(path)
    try:
        files.write_file(path.resolve(), f"{before}\n\n{body(results)}\n{after}".encode())
    except OSError as error:
        raise UserError(f"The tables cannot be written to {path}: {error.strerror}.") from None


def overview(results: Results) -> str:
    """How much there is, and how much of it agrees."""
    counts = dict.fromkeys(AGREEMENT, 0)
    seen = {}
    for _, column, method, printed in _printed():
        for figure in figures(column, method, results):
            seen[figure] = _ours(figure, printed)
    for ours in seen.values():
        counts[str(ours.agreement)] += 1
    every = len({column.cell(method) for _, column, method, _ in _printed()})
    shuffled = sum(figure.runs[0].shuffle for figure in seen)
    besides = f", and {shuffled} with shuffling" if shuffled else ""
    twice = len(results.contradictions)
    doubts = f" {twice} of the seeds are given twice, with different accuracies." if twice else ""
    if results.unverified:
        doubts += " Not all of them are verified: the command that makes this report says which."
    return (
        f"{len(seen) - shuffled} of the paper's {every} cells have been run{besides}. Of these results, {counts['agrees']} "
        f"agree with the paper (●), {counts['near']} are near it (◐), {counts['differs']} further off (○).{doubts}"
    )


def comparison(results: Results) -> list[dict[str, Any]]:
    """Every result of ours beside the paper's number, in all tables that show it."""
    rows = []
    for table, column, method, printed in _printed():
        for figure in figures(column, method, results):
            ours = _ours(figure, printed)
            rows.append(
                {
                    "table": table.name,
                    "column": column.name,
                    "method": column.cell(method).method,
                    "paper": printed.accuracy,
                    "paper_std": printed.std,
                    "ours": round(figure.accuracy, 2),
                    "ours_std": None if figure.std is None else round(figure.std, 2),
                    "difference": round(ours.difference or 0, 2),
                    "agreement": ours.agreement,
                    "final": round(figure.final, 2),
                    "rounds": figure.rounds,
                    "best_round": figure.best_round,
                    "seeds": len(figure.runs),
                    "departures": "; ".join(figure.departures),
                }
            )
    return rows


def _long(results: Results) -> str:
    rows = [
        {key: spreadsheet_safe(value) for key, value in row.items()} for row in comparison(results)
    ]
    return csv_text(list(rows[0]), rows, header=True) if rows else ""


def _printed() -> Iterator[tuple[Table, Column, str, Printed]]:
    for table in tables().values():
        for column, method in table.entries():
            printed = table.printed(column, method)
            if printed:
                yield table, column, method, printed


def _rows(sheet: Sheet) -> Iterator[tuple[str, list[Box | None]]]:
    return (row for group in sheet.groups for row in group)


def _name(sheet: Sheet) -> str:
    name = sheet.table.name
    return (
        f"{name[:5].capitalize()} {name[5:]}: {sheet.table.title}"
        if name[5:].isdigit()
        else sheet.table.title
    )


def spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _mark(sheet: Sheet, ours: Ours, form: str) -> str:
    return form.format(sheet.notes[", ".join(ours.departures)]) if ours.departures else ""


def _change(ours: Ours) -> str:
    """The difference to the paper and its sign, to stand behind a number."""
    if ours.difference is None or ours.agreement is None:
        return ""
    return f" ({ours.difference:+.2f}) {SIGNS[ours.agreement]}".replace("-", "−")


def _letters(number: int) -> str:
    """a … z, aa, ab, …"""
    most, least = divmod(number, 26)
    return (_letters(most - 1) if most else "") + ascii_lowercase[least]


_TEX = {
    "±": r"$\pm$",
    "ρ": r"$\rho$",
    "Σ": r"$\Sigma$",
    "α_f": r"$\alpha_f$",
    "·": r"$\cdot$",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def _tex(text: str) -> str:
    return re.sub("|".join(map(re.escape, _TEX)), lambda found: _TEX[found[0]], text)
