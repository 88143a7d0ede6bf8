"""Sheets as Markdown and as LaTeX. Text from outside shows as text."""

import html
import re

from fedala.errors import printable
from fedala.paper.comparison import SIGNS, OwnNumber, Sheet, SheetCell

_MEANINGS = {
    "agrees": "within one point of the paper, or within the two standard deviations together",
    "near": "within three points",
    "differs": "further off",
}


def _explain(keys: dict[str, str], separator: str) -> str:
    return "; ".join(f"{keys[name]}{separator}{text}" for name, text in _MEANINGS.items())


LEGEND = (
    f"In every cell: the paper above, ours below, with the difference. {_explain(SIGNS, ' ')}; "
    "the best round is picked on test data, as in the paper."
)
_COLOUR_LEGEND = _explain({"agrees": "Green", "near": "brown", "differs": "red"}, ": ")

#: Characters that Markdown takes for more than text, in addition to those of HTML. `//`, `www.`
#: and `@` make links of addresses.
_MARKDOWN = re.compile(r"[\\`*_\[\]|~$]|(?<=:)//|(?i:(?<=www)\.)|@")


def escape_markdown(text: str) -> str:
    """Return one line of Markdown that shows exactly `text`, in a table or elsewhere."""

    def escape(match: re.Match[str]) -> str:
        return "&#64;" if match[0] == "@" else f"\\{match[0]}"

    return _MARKDOWN.sub(escape, html.escape(printable(text, 1000), quote=False))


def to_markdown(sheet: Sheet) -> str:
    """Return a heading, a table and its notes."""
    heads = [f"{group}<br>{name}" for group, name in sheet.heads]
    lines = [
        f"### {sheet.title}",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for method, cells in sheet.rows:
        texts = [_markdown_cell(sheet, cell) for cell in cells]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    lines.append("")
    for note, letter in sheet.notes.items():
        lines.append(f"<sup>{letter}</sup> {escape_markdown(note)}<br>")
    return "\n".join([*lines, ""])


def _markdown_cell(sheet: Sheet, cell: SheetCell | None) -> str:
    if cell is None:
        return "—"
    lines = [cell.paper]
    for own in cell.ours:
        mark = f"<sup>{sheet.mark(own)}</sup>" if own.departures else ""
        change = f" {own.change}" if own.change else ""
        lines.append(f"**{escape_markdown(own.text)}**{mark}{change}")
    return "<br>".join(lines)


#: The packages and colours that the LaTeX tables need.
PREAMBLE = r"""% \usepackage{booktabs,graphicx,xcolor}
\definecolor{agrees}{HTML}{1A7F37}
\definecolor{near}{HTML}{9A6700}
\definecolor{differs}{HTML}{B3261E}
"""


def to_latex(sheet: Sheet) -> str:
    """Return a booktabs table, at most as wide as the page; it needs `PREAMBLE`."""
    spec = "|".join(["l", *("c" * size for _, size in sheet.spans)])
    spans = [f"\\multicolumn{{{size}}}{{c}}{{{_tex(name)}}}" for name, size in sheet.spans]
    body = []
    for group in sheet.groups:
        body.append("\\midrule")
        for method, cells in group:
            texts = [_tex(method), *(_latex_cell(sheet, cell) for cell in cells)]
            body.append(" & ".join(texts) + " \\\\")
    notes = "; ".join(f"$^{{{letter}}}$ {_tex(note)}" for note, letter in sheet.notes.items())
    caption = f"{_tex(sheet.table.title)}. Above: the paper; below: ours, with the difference. "
    caption += f"{_COLOUR_LEGEND}. {notes}"
    lines = [
        "\\begin{table*}[ht]",
        "\\centering",
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
        f"\\begin{{tabular}}{{{spec}}}",
        "\\toprule",
        f" & {' & '.join(spans)} \\\\",
        "Methods & " + " & ".join(_tex(name) for _, name in sheet.heads) + " \\\\",
        *body,
        "\\bottomrule",
        "\\end{tabular}}",
        f"\\caption{{{caption}}}",
        f"\\label{{ours:{sheet.table.name}}}",
        "\\end{table*}",
        "",
    ]
    return "\n".join(lines)


def _latex_cell(sheet: Sheet, cell: SheetCell | None) -> str:
    if cell is None:
        return "---"
    if not cell.ours:
        return _tex(cell.paper)
    lines = [_tex(cell.paper), *(_latex_number(sheet, own) for own in cell.ours)]
    inner = " \\\\ ".join(lines)
    return f"\\begin{{tabular}}[t]{{@{{}}c@{{}}}}{inner}\\end{{tabular}}"


def _latex_number(sheet: Sheet, own: OwnNumber) -> str:
    mark = f"$^{{{sheet.mark(own)}}}$" if own.departures else ""
    text = f"{_tex(own.text)}{mark}"
    if own.agreement is None:
        return text
    return f"\\textcolor{{{own.agreement}}}{{{text} (${own.difference:+.2f}$)}}"


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
    return re.sub("|".join(map(re.escape, _TEX)), lambda match: _TEX[match[0]], text)
