"""The paper's tables with our numbers and how well they agree, independent of any format."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from fedala.cells.results import CellResult, Results
from fedala.methods import catalogue
from fedala.paper.experiments import Column, PrintedNumber, Table, tables
from fedala.report.headline import format_spread
from fedala.report.progress import format_duration

#: The largest difference between two accuracies, in points, for each kind of agreement.
AGREEMENT = {"agrees": 1.0, "near": 3.0, "differs": float("inf")}
SIGNS = {"agrees": "●", "near": "◐", "differs": "○"}


@dataclass(frozen=True)
class OwnNumber:
    """A number of ours."""

    text: str
    difference: float | None = None
    """To the paper's number, in points."""
    departures: tuple[str, ...] = ()
    spread: float = 0.0
    """The sum of both standard deviations, if known. A smaller difference means nothing."""

    @property
    def agreement(self) -> str | None:
        if self.difference is None:
            return None
        distance = round(abs(self.difference), 2)
        return next(name for name, most in AGREEMENT.items() if distance <= max(most, self.spread))

    @property
    def change(self) -> str:
        """Return the difference and its sign, such as `(+0.08) ●`; empty if there is none."""
        if self.difference is None or self.agreement is None:
            return ""
        return f"({self.difference:+.2f}) {SIGNS[self.agreement]}".replace("-", "−")


@dataclass(frozen=True)
class SheetCell:
    """The paper's number, and ours in fixed order and shuffled."""

    paper: str
    ours: tuple[OwnNumber, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """A table, ready to be written in any format."""

    table: Table
    heads: list[tuple[str, str]]
    """The group and title of each column."""
    groups: list[list[tuple[str, list[SheetCell | None]]]]
    """Groups of rows: the method's title, and a cell for each column, None if there is none."""

    @property
    def title(self) -> str:
        name = self.table.name
        if not name[5:].isdigit():
            return self.table.title
        return f"{name[:5].capitalize()} {name[5:]}: {self.table.title}"

    @property
    def rows(self) -> list[tuple[str, list[SheetCell | None]]]:
        return [row for group in self.groups for row in group]

    @property
    def cells(self) -> list[SheetCell]:
        return [cell for _, cells in self.rows for cell in cells if cell]

    @property
    def notes(self) -> dict[str, str]:
        """Return a letter for each way in which our experiment differs from the paper's."""
        kinds: dict[str, None] = {}
        for cell in self.cells:
            kinds |= {", ".join(own.departures): None for own in cell.ours if own.departures}
        return {kind: _letters(i) for i, kind in enumerate(kinds)}

    def mark(self, own: OwnNumber) -> str:
        """Return the letter of a number's note; empty if there is none."""
        return self.notes[", ".join(own.departures)] if own.departures else ""

    @property
    def spans(self) -> list[tuple[str, int]]:
        """Return the groups of columns, and how many columns each has."""
        groups = groupby(group for group, _ in self.heads)
        return [(name, len(list(members))) for name, members in groups]


def _letters(number: int) -> str:
    """Return a … z, aa, ab, … for 0, 1, …"""
    most, least = divmod(number, 26)
    return (_letters(most - 1) if most else "") + ascii_lowercase[least]


def make_sheets(results: Results) -> list[Sheet]:
    """Return the tables for which there is a number of ours: a result, or a parameter count."""
    sheets = []
    for table in tables().values():
        sheet = _compare_costs(table, results) if table.cost else _compare(table, results)
        if any(cell.ours for cell in sheet.cells):
            sheets.append(sheet)
    return sheets


def _compare(table: Table, results: Results) -> Sheet:
    """Return a sheet of accuracies."""
    heads = []
    for column in table.columns:
        heads.append((column.group, column.title))
        if column.with_ala:
            heads.append((column.group, "improvement"))
    groups = []
    for group in table.groups:
        rows = [(title_of(m), list(_compare_row(table, m, results))) for m in group]
        groups.append(rows)
    if any(column.parameters for column in table.columns):
        counts: list[SheetCell | None] = []
        for column in table.columns:
            counts.append(SheetCell(column.parameters, (OwnNumber(table.parameters(column)),)))
        groups.append([("ALA's parameters", counts)])
    return Sheet(table, heads, groups)


def _compare_row(table: Table, method: str, results: Results) -> Iterator[SheetCell | None]:
    for column in table.columns:
        printed = table.printed(column, method)
        if printed is None:
            yield from [None] * (2 if column.with_ala else 1)
            continue
        own = find_results(column, method, results)
        paper = format_spread(printed.accuracy, printed.std)
        yield SheetCell(paper, tuple(_compare_accuracy(result, printed) for result in own))
        if column.with_ala:
            yield _compare_improvement(column, method, printed, results)


def _compare_accuracy(result: CellResult, printed: PrintedNumber) -> OwnNumber:
    return OwnNumber(
        format_spread(result.accuracy, result.std),
        result.accuracy - printed.accuracy,
        tuple(result.departures),
        (printed.std or 0) + (result.std or 0),
    )


def _compare_improvement(
    column: Column, method: str, printed: PrintedNumber, results: Results
) -> SheetCell:
    """Return what ALA adds to a method, if there are results with and without it."""
    ours = []
    without_ala = Column(column.name, column.title, column.group, column.setting)
    for own in find_results(column, method, results):
        for base in find_results(without_ala, method, results):
            if base.seeds[0].shuffle == own.seeds[0].shuffle:
                gain = own.accuracy - base.accuracy
                difference = gain - (printed.improvement or 0)
                ours.append(OwnNumber(f"{gain:.2f}", difference, _join_departures(own, base)))
    paper = "" if printed.improvement is None else f"{printed.improvement:.2f}"
    return SheetCell(paper, tuple(ours))


def _join_departures(own: CellResult, base: CellResult) -> tuple[str, ...]:
    if own.departures == base.departures:
        return tuple(own.departures)
    both = [", ".join(result.departures) or "as in the paper" for result in (own, base)]
    return (f"with ALA: {both[0]}; without: {both[1]}",)


def _compare_costs(table: Table, results: Results) -> Sheet:
    """Return a sheet of time to the best round, time per round, and parameters."""
    heads = [
        ("Computation", "time to the best round, at the time per round"),
        ("Computation", "time per round, without the first two"),
        ("Communication", "parameters"),
    ]
    groups = []
    for group in table.groups:
        groups.append([(title_of(method), _cost_row(table, method, results)) for method in group])
    return Sheet(table, heads, groups)


def _cost_row(table: Table, method: str, results: Results) -> list[SheetCell | None]:
    [column] = table.columns
    printed, own = table.cost_of(method), find_results(column, method, results)
    total, each, parameters = [], [], []
    for result in own:
        first, pace = result.seeds[0], result.seconds_per_round
        departures = (*result.departures, f"{first.together} seeds side by side")
        text = f"{format_duration(pace * result.best_round)} "
        text += f"({result.best_round:.0f} rounds, {first.device})"
        total.append(OwnNumber(text, None, departures))
        each.append(OwnNumber(f"{pace:.3g} s", None, departures))
        parameters.append(OwnNumber(f"{first.sent + first.uploaded:,}"))
    return [
        SheetCell(f"{printed.total_minutes} min", tuple(total)),
        SheetCell(f"{printed.minutes_per_iteration} min", tuple(each)),
        SheetCell(printed.parameters, tuple(parameters[:1])),
    ]


def find_results(column: Column, method: str, results: Results) -> list[CellResult]:
    """Return the results of a cell, in fixed order and shuffled."""
    both = [results.find(column.cell(method, shuffle=shuffle)) for shuffle in (False, True)]
    return [result for result in both if result]


def title_of(method: str) -> str:
    """Return the title of a method of a row, such as `Ditto+ALA`."""
    base, plus, _ = method.partition("+")
    return catalogue()[base].title + ("+ALA" if plus else "")


def describe(results: Results) -> str:
    """Return in sentences how many cells were run and how many of them agree."""
    counts = dict.fromkeys(AGREEMENT, 0)
    ours = {}
    cells = set()
    for _, column, method, printed in _list_printed():
        cells.add(column.cell(method))
        for result in find_results(column, method, results):
            ours[result] = _compare_accuracy(result, printed)
    for own in ours.values():
        counts[str(own.agreement)] += 1
    shuffled = sum(result.seeds[0].shuffle for result in ours)
    more = f", and {shuffled} with shuffling" if shuffled else ""
    twice = len(results.contradictions)
    doubts = f" {twice} of the seeds are given twice, with different accuracies." if twice else ""
    if results.unverified:
        doubts += " Not all of them are verified: the command that makes this report says which."
    return (
        f"{len(ours) - shuffled} of the paper's {len(cells)} cells have been run{more}. "
        f"Of these results, {counts['agrees']} agree with the paper (●), {counts['near']} are "
        f"near it (◐), {counts['differs']} further off (○).{doubts}"
    )


def list_comparisons(results: Results) -> list[dict[str, Any]]:
    """Return a row for every result of ours and every table that shows it."""
    rows = []
    for table, column, method, printed in _list_printed():
        for result in find_results(column, method, results):
            own = _compare_accuracy(result, printed)
            rows.append(
                {
                    "table": table.name,
                    "column": column.name,
                    "method": column.cell(method).method,
                    "paper": printed.accuracy,
                    "paper_std": printed.std,
                    "ours": round(result.accuracy, 2),
                    "ours_std": None if result.std is None else round(result.std, 2),
                    "difference": round(own.difference or 0, 2),
                    "agreement": own.agreement,
                    "final": round(result.final, 2),
                    "trained": None if result.trained is None else round(result.trained, 2),
                    "rounds": result.rounds,
                    "best_round": result.best_round,
                    "seeds": len(result.seeds),
                    "departures": "; ".join(result.departures),
                }
            )
    return rows


def _list_printed() -> Iterator[tuple[Table, Column, str, PrintedNumber]]:
    """Yield every cell for which the paper prints an accuracy."""
    for table in tables().values():
        for column, method in table.entries():
            printed = table.printed(column, method)
            if printed:
                yield table, column, method, printed
