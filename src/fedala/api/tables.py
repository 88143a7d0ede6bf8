"""A result as a small table, in text and in HTML."""

import html
from collections.abc import Sequence
from pathlib import Path

from fedala.errors import printable
from fedala.report.headline import (
    HEADLINES,
    SCORES,
    compare_with_majority,
    count_things,
    describe_divergence,
    format_figure,
    join_few,
)
from fedala.runs.leaders import find_leaders
from fedala.runs.results import RunResult

#: The most methods of a table, and letters of a name.
_MOST_ROWS, _MOST_LETTERS = 8, 40


def _describe(result: RunResult) -> str:
    """Return what was run, in one line."""
    config = result.config
    dataset = printable(Path(str(config.dataset)).name, _MOST_LETTERS)
    parts = [count_things(config.clients, "client"), count_things(config.rounds, "round")]
    if config.seeds > 1:
        parts.append(f"{config.seeds} runs of each method")
    folder = f"; in {printable(str(result.folder), 80)}" if result.folder else ""
    return f"{dataset}: {', '.join(parts)}{folder}"


def _make_rows(result: RunResult) -> list[list[str]]:
    """Return the heads of the table, and a row for each method that has been evaluated."""
    shown = [one for one in result.methods.values() if one.history]
    scores = [one.scores() for one in shown]
    known = [key for key in SCORES if any(key in own for own in scores)]
    metric = shown[0].metric if shown else None
    heads = [SCORES[key].replace("\n", " ") for key in known]
    rows = [[metric.heading if metric else "", *heads, "s/round", "seconds"]]
    for one, own in zip(shown[:_MOST_ROWS], scores, strict=False):
        figures = [format_figure(one.metric, own.get(key)) for key in known]
        times = [f"{one.seconds_per_round:.3g}", f"{one.total_seconds:.3g}"]
        rows.append([printable(one.title, _MOST_LETTERS), *figures, *times])
    return rows


def _list_sentences(result: RunResult, notes: Sequence[str], message: str) -> list[str]:
    """Return the sentences below the table; the notes of the run are only counted."""
    sentences = []
    if len(result.methods) > _MOST_ROWS:
        sentences.append(f"… and {len(result.methods) - _MOST_ROWS} more in result.methods.")
    key, leaders = find_leaders(list(result.methods.values()))
    if leaders and len(result.methods) > 1:
        meaning = next(one.meaning for one in HEADLINES.values() if one.key == key)
        metric = leaders[0].metric
        names = [printable(one.title, _MOST_LETTERS) for one in leaders]
        titles = join_few(names)
        best = f"the {metric.superlative} {metric.title} {meaning}"
        is_tie = len(leaders) > 1
        sentences.append(f"{titles} are equal: {best}." if is_tie else f"{titles} has {best}.")
    sentences += compare_with_majority(result)
    if notes:
        sentences.append(f"{count_things(len(notes), 'note')} on this run: result.notes.")
    return [*filter(None, [*sentences, describe_divergence(result), message])]


def make_text(result: RunResult, notes: Sequence[str] = (), message: str = "") -> str:
    """Return a result as a table of text; `message` is below it, and how many `notes` there are."""
    rows = _make_rows(result)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_describe(result)]
    if len(rows) > 1:
        for first, *rest in rows:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([*lines, *_list_sentences(result, notes, message)])


def make_html(result: RunResult, notes: Sequence[str] = (), message: str = "") -> str:
    """Return a result as an HTML table without scripts; all text is escaped."""
    heads, *rows = _make_rows(result)
    parts = [f"<p>{html.escape(_describe(result))}</p>"]
    if rows:
        cells = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>")
        for first, *rest in rows:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
            parts.append(f"<tr><th>{html.escape(first)}</th>{cells}</tr>")
        parts.append("</tbody></table>")
    parts += [f"<p>{html.escape(one)}</p>" for one in _list_sentences(result, notes, message)]
    return f"<div>{''.join(parts)}</div>"
