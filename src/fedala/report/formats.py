"""Tables as Markdown and as LaTeX. Text from outside shows as text."""

import html
import re
from collections.abc import Iterable, Sequence

from fedala.errors import printable

#: Characters that Markdown takes for more than text, in addition to those of HTML. `//`, `www.`
#: and `@` make links of addresses.
_MARKDOWN = re.compile(r"[\\`*_\[\]|~$]|(?<=:)//|(?i:(?<=www)\.)|@")


def escape_markdown(text: str) -> str:
    """Return one line of Markdown that shows exactly `text`, in a table or elsewhere."""

    def escape(match: re.Match[str]) -> str:
        return "&#64;" if match[0] == "@" else f"\\{match[0]}"

    return _MARKDOWN.sub(escape, html.escape(printable(text, 1000), quote=False))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The first cell of a row names it; all cells are Markdown."""
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


_LATEX = {
    "±": r"$\pm$",
    "ρ": r"$\rho$",
    "Σ": r"$\Sigma$",
    "α_f": r"$\alpha_f$",
    "·": r"$\cdot$",
    "−": "$-$",
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


def escape_latex(text: str) -> str:
    """Return LaTeX that prints exactly `text`, as one line."""
    line = printable(text, 10_000)
    return re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match[0]], line)


#: The first line of a file with such tables: the packages that they need.
LATEX_PACKAGES = "% \\usepackage{booktabs,graphicx}"


def latex_table(
    spec: str,
    heads: Iterable[Sequence[str]],
    groups: Iterable[Iterable[Sequence[str]]],
    *,
    caption: str,
    label: str,
) -> str:
    """Return a booktabs table, at most as wide as the page. All cells are LaTeX.

    `heads` are the rows above the first rule, `groups` the rows between two rules.
    """
    body = []
    for group in groups:
        body += ["\\midrule", *map(_latex_row, group)]
    lines = [
        "\\begin{table*}[ht]",
        "\\centering",
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
        f"\\begin{{tabular}}{{{spec}}}",
        "\\toprule",
        *map(_latex_row, heads),
        *body,
        "\\bottomrule",
        "\\end{tabular}}",
        f"\\caption{{{caption}}}",
        f"\\label{{{label}}}",
        "\\end{table*}",
        "",
    ]
    return "\n".join(lines)


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join(cells) + " \\\\"
    # After a line break, LaTeX would take a bracket for the height of the line.
    return f"{{}}{row}" if row.startswith(("[", "*")) else row
