"""Sheets as Markdown and as LaTeX. Text from outside shows as text."""

from fedala.paper.comparison import SIGNS, OwnNumber, Sheet, SheetCell
from fedala.report.formats import escape_latex, escape_markdown, latex_table, markdown_table

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


def to_markdown(sheet: Sheet) -> str:
    """Return a heading, a table and its notes."""
    heads = [f"{group}<br>{name}" for group, name in sheet.heads]
    rows = []
    for method, cells in sheet.rows:
        rows.append([method, *(_markdown_cell(sheet, cell) for cell in cells)])
    lines = [f"### {sheet.title}", "", *markdown_table(heads, rows), ""]
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
    spans = [f"\\multicolumn{{{size}}}{{c}}{{{escape_latex(name)}}}" for name, size in sheet.spans]
    groups = []
    for group in sheet.groups:
        rows = []
        for method, cells in group:
            texts = [_latex_cell(sheet, cell) for cell in cells]
            rows.append([escape_latex(method), *texts])
        groups.append(rows)
    notes = [f"$^{{{letter}}}$ {escape_latex(note)}" for note, letter in sheet.notes.items()]
    caption = f"{escape_latex(sheet.table.title)}. Above: the paper; below: ours, "
    caption += f"with the difference. {_COLOUR_LEGEND}. {'; '.join(notes)}"
    return latex_table(
        "|".join(["l", *("c" * size for _, size in sheet.spans)]),
        [["", *spans], ["Methods", *(escape_latex(name) for _, name in sheet.heads)]],
        groups,
        caption=caption,
        label=f"ours:{sheet.table.name}",
    )


def _latex_cell(sheet: Sheet, cell: SheetCell | None) -> str:
    if cell is None:
        return "---"
    if not cell.ours:
        return escape_latex(cell.paper)
    lines = [escape_latex(cell.paper), *(_latex_number(sheet, own) for own in cell.ours)]
    inner = " \\\\ ".join(lines)
    return f"\\begin{{tabular}}[t]{{@{{}}c@{{}}}}{inner}\\end{{tabular}}"


def _latex_number(sheet: Sheet, own: OwnNumber) -> str:
    mark = f"$^{{{sheet.mark(own)}}}$" if own.departures else ""
    text = f"{escape_latex(own.text)}{mark}"
    if own.agreement is None:
        return text
    return f"\\textcolor{{{own.agreement}}}{{{text} (${own.difference:+.2f}$)}}"
