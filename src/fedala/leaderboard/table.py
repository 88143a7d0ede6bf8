"""The leaderboard of one setting: a row for each method, independent of any format."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np

from fedala.cells.cell import Cell, Setting, is_known
from fedala.cells.curves import Curve
from fedala.cells.results import CellResult, Results, SeedResult
from fedala.leaderboard.board import list_published, settings
from fedala.leaderboard.published import Published
from fedala.methods.registry import ALIASES
from fedala.paper.comparison import title_of
from fedala.report.headline import count_things, format_spread, join_words


@dataclass(frozen=True)
class Row:
    """A method in a setting: our numbers, and the published one."""

    method: str
    title: str
    result: CellResult | None = None
    """None if it has not been run."""
    published: Published | None = None
    partner: CellResult | None = None
    """Of the same method with ALA, or without it if this one has it."""

    @property
    def has_ala(self) -> bool:
        return self.method in ALIASES.values() or self.method.endswith("+ala")

    @property
    def seeds(self) -> tuple[SeedResult, ...]:
        return self.result.seeds if self.result else ()

    def average(self, name: str) -> float | None:
        """Return the mean of a column over the seeds that have it."""
        return self.result.average(name) if self.result else None

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy of initialised models in the best round, in percent."""
        return self.result.accuracy if self.result else None

    @property
    def with_ala(self) -> float | None:
        """Return the accuracy of the same method with ALA; None if this one has it."""
        return self.partner.accuracy if self.partner and not self.has_ala else None

    @property
    def gain(self) -> float | None:
        """Return what ALA adds, in points.

        Runs of different lengths compare if all best rounds lie in what both have run. Otherwise,
        or if one of the two is missing, it is None.
        """
        if self.result is None or self.partner is None:
            return None
        common = min(self.result.rounds, self.partner.rounds)
        if any(seed.best_round > common for seed in (*self.seeds, *self.partner.seeds)):
            return None
        difference = self.result.accuracy - self.partner.accuracy
        return difference if self.has_ala else -difference

    @property
    def difference(self) -> float | None:
        """Return our accuracy minus the published one, in points."""
        if self.accuracy is None or self.published is None:
            return None
        return self.accuracy - self.published.accuracy

    @property
    def seconds(self) -> float | None:
        """Return the seconds per round on the device that ran the most seeds."""
        if not self.seeds:
            return None
        device = Counter(seed.device for seed in self.seeds).most_common(1)[0][0]
        own = [seed.seconds_per_round for seed in self.seeds if seed.device == device]
        return float(np.mean(own))

    @property
    def is_rising(self) -> bool:
        """Tell whether a seed has its best round among the last tenth of its rounds."""
        return any(seed.best_round > 0.9 * seed.rounds for seed in self.seeds)

    @property
    def facts(self) -> list[str]:
        """List how the number came about: rounds, seeds, best round, machine, version."""
        if self.result is None:
            return ["not run"]
        best = f"best round {self.result.best_round:.4g}"
        together = max(seed.together for seed in self.seeds)
        return [
            count_things(self.result.rounds, "round"),
            count_things(len(self.seeds), "seed"),
            best + (", still rising" if self.is_rising else ""),
            *(f"{together} seeds side by side" for _ in range(together > 1)),
            *self._compare_rounds(),
            *self.result.changes,
            *dict.fromkeys(seed.device for seed in self.seeds),
            *dict.fromkeys(seed.version for seed in self.seeds),
        ]

    def _compare_rounds(self) -> list[str]:
        """Say if the run with ALA and the one without it differ in length."""
        if not self.result or not self.partner or self.result.rounds == self.partner.rounds:
            return []
        other = "without" if self.has_ala else "with"
        return [f"{other} ALA: {count_things(self.partner.rounds, 'round')}"]

    def curve(self, name: str) -> list[Curve]:
        """Return a curve of each seed that has it: `curve` or `trained_curve`."""
        return self.result.curves(name) if self.result else []


@dataclass(frozen=True)
class Board:
    """The rows of a setting, the best first; those that have not been run come last."""

    setting: Setting
    rows: list[Row]

    @property
    def has_results(self) -> bool:
        return any(row.result for row in self.rows)

    @property
    def columns(self) -> list["Column"]:
        """Return the columns in which a row has something; that of the accuracy always."""
        return [c for c in COLUMNS if c.name == "accuracy" or any(map(c.text, self.rows))]

    def describe(self) -> list[str]:
        """Say in sentences where FedALA stands, in published numbers and in ours.

        Shuffled runs do not count: a published number stands for their method once.
        """
        sentences = []
        rows = [row for row in self.rows if not any(seed.shuffle for seed in row.seeds)]
        published = {row.title: row.published.accuracy for row in rows if row.published}
        if published:
            sentences.append(_describe_rank("Among the published numbers", published))
        ours = {row.title: row.accuracy for row in rows if row.accuracy is not None}
        if ours:
            sentences.append(_describe_rank("Among ours", ours))
        return [sentence for sentence in sentences if sentence]


def _describe_rank(where: str, accuracies: dict[str, float]) -> str:
    """Return a sentence on FedALA's rank; empty if it is not there, or alone."""
    own = accuracies.get("FedALA")
    if own is None or len(accuracies) < 2:
        return ""
    ahead = sorted(
        (title for title, accuracy in accuracies.items() if accuracy > own),
        key=lambda title: -accuracies[title],
    )
    if not ahead:
        return f"{where}, FedALA ({own:.2f}) is first of {len(accuracies)}."
    named = [f"{title} ({accuracies[title]:.2f})" for title in ahead[:5]]
    if len(ahead) > len(named):
        named.append(f"{len(ahead) - len(named)} more")
    verb = "is" if len(ahead) == 1 else "are"
    return f"{where}, FedALA ({own:.2f}) is not first: {join_words(named)} {verb} ahead."


def make_boards(results: Results) -> list[Board]:
    """Return the settings for which there is a result of ours or a published number."""
    boards = []
    for setting in settings().values():
        rows = _list_rows(setting, results)
        if rows:
            boards.append(Board(setting, rows))
    return boards


def _list_rows(setting: Setting, results: Results) -> list[Row]:
    published = list_published(setting.name)
    cells: dict[str, CellResult] = {}
    shuffled: dict[str, CellResult] = {}
    own = [seed for seed in results.seeds if seed.setting == setting.name]
    for method, shuffle in dict.fromkeys((seed.method, seed.shuffle) for seed in own):
        found = results.find(Cell(setting, method, shuffle=shuffle))
        if found:
            (shuffled if shuffle else cells)[method] = found
    rows = []
    for method in dict.fromkeys((*cells, *published)):
        title, number = _find_title(method, published, own), published.get(method)
        partner = cells.get(find_partner(method))
        rows.append(Row(method, title, cells.get(method), number, partner))
    for method, result in shuffled.items():
        title = f"{_find_title(method, published, own)}, shuffled"
        partner = shuffled.get(find_partner(method))
        rows.append(Row(method, title, result, published.get(method), partner))
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, float, str]:
    """Return the sort key of a row: our accuracy, otherwise the published one."""
    if row.accuracy is not None:
        return False, -row.accuracy, row.title
    return True, -row.published.accuracy if row.published else 0.0, row.title


def find_partner(method: str) -> str:
    """Return the method with ALA, or without it if this one has it."""
    bases = {name: alias.removesuffix("+ala") for alias, name in ALIASES.items()}
    if method in bases:
        return bases[method]
    if method.endswith("+ala"):
        return method.removesuffix("+ala")
    return ALIASES.get(f"{method}+ala", f"{method}+ala")


def _find_title(method: str, published: dict[str, Published], seeds: Iterable[SeedResult]) -> str:
    """Return the title of a method, which need not be installed here."""
    if is_known(method):
        return title_of(method)
    if method in published:
        return published[method].title
    titles = (seed.title for seed in seeds if seed.method == method and seed.title)
    return next(titles, method)


@dataclass(frozen=True)
class Column:
    """A column of the leaderboard."""

    name: str
    heading: str
    meaning: str
    number: Callable[[Row], float | None]
    """What it is sorted by."""
    text: Callable[[Row], str]
    is_signed: bool = False


def _percent(name: str) -> tuple[Callable[[Row], float | None], Callable[[Row], str]]:
    """Return number and text of a column of shares."""

    def number(row: Row) -> float | None:
        mean = row.average(name)
        return None if mean is None else 100 * mean

    def text(row: Row) -> str:
        mean = number(row)
        if mean is None or row.result is None:
            return ""
        deviation = row.result.deviation(name)
        return format_spread(mean, None if deviation is None else 100 * deviation)

    return number, text


def format_points(value: float | None) -> str:
    """Return a signed difference in points; empty if it is not known."""
    if value is None:
        return ""
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # zero has one sign


def _format(value: float | None, template: str = "{:.2f}") -> str:
    return "" if value is None else template.format(value)


def format_bytes(count: float | None) -> str:
    """Return a number of bytes with three digits and its unit."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _accuracy_text(row: Row) -> str:
    return format_spread(row.result.accuracy, row.result.std) if row.result else ""


def _published_number(row: Row) -> float | None:
    return row.published.accuracy if row.published else None


COLUMNS = (
    Column(
        "accuracy",
        "Initialised",
        "accuracy of the models that clients start a round with, before training; best round, "
        "picked on test data: Σ correct / Σ samples over all clients",
        lambda row: row.accuracy,
        _accuracy_text,
    ),
    Column(
        "with_ala",
        "With ALA",
        "the same, for this method with ALA",
        lambda row: row.with_ala,
        lambda row: _format(row.with_ala),
    ),
    Column(
        "gain",
        "ALA adds",
        "points that ALA adds to the method without it, if both had their best rounds in what both "
        "have run",
        lambda row: row.gain,
        lambda row: format_points(row.gain),
        is_signed=True,
    ),
    Column(
        "published",
        "Published",
        "what a publication prints for this setting; its source is below the table",
        _published_number,
        lambda row: _format(_published_number(row)),
    ),
    Column(
        "difference",
        "Ours − published",
        "in points",
        lambda row: row.difference,
        lambda row: format_points(row.difference),
        is_signed=True,
    ),
    Column(
        "trained",
        "Trained",
        "accuracy of the models that local training ends with, in the round in which it is best",
        *_percent("trained"),
    ),
    Column(
        "mean",
        "Mean of clients",
        "mean of the clients' accuracies, initialised models, best round",
        *_percent("mean"),
    ),
    Column(
        "worst",
        "Worst tenth",
        "mean of the tenth of the clients with the lowest accuracy, at least one; initialised "
        "models, best round",
        *_percent("worst"),
    ),
    Column(
        "final",
        "Last round",
        "accuracy of initialised models after the last round",
        *_percent("final"),
    ),
    Column(
        "seconds",
        "s / round",
        "seconds per round of all seeds that ran side by side, with the tests of the models, on "
        "the device that ran the most seeds",
        lambda row: row.seconds,
        lambda row: _format(row.seconds, "{:.3g}"),
    ),
    Column(
        "down",
        "Down",
        "bytes that a client receives in a round",
        lambda row: row.average("bytes_sent"),
        lambda row: format_bytes(row.average("bytes_sent")),
    ),
    Column(
        "up",
        "Up",
        "bytes that a client uploads in a round",
        lambda row: row.average("bytes_uploaded"),
        lambda row: format_bytes(row.average("bytes_uploaded")),
    ),
)


def list_sources(boards: Iterable[Board]) -> dict[str, str]:
    """Return a letter for each source and note of published numbers."""
    kinds: dict[str, None] = {}
    for board in boards:
        for row in board.rows:
            if row.published:
                kinds[describe_source(row.published)] = None
    return dict(zip(kinds, ascii_lowercase, strict=False))


def describe_source(published: Published) -> str:
    """Return where a number is printed, and what was measured."""
    return f"{published.source}: {published.note}"
