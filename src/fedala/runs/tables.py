"""The csv tables of a run folder: rows are appended one by one, and verified when read."""

import csv
import io
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime
from itertools import chain
from typing import IO, Any

import numpy as np

from fedala.data.dataset import PARTS
from fedala.data.federation import Federation
from fedala.errors import printable, spreadsheet_safe
from fedala.io import files
from fedala.io.untrusted import check_memory, require_file
from fedala.metrics import SHARES, find_metric
from fedala.records import Fault, HistoryRow, ModelFigures, WeightSummary
from fedala.runs.digests import NAME as DIGESTS
from fedala.runs.digests import RowHash
from fedala.runs.holdout import NEWCOMER_CLIENTS, NEWCOMERS
from fedala.runs.sweep import list_labels
from fedala.runs.verified_files import RunRecord
from fedala.simulation.metrics import list_figures

#: Tables to which a run appends rows. Each row has its method and its round.
TABLES = (
    "history.csv", "clients.csv", "metrics.csv", "weights.csv", "faults.csv", NEWCOMERS,
    NEWCOMER_CLIENTS,
)  # fmt: skip

#: Columns of `metrics.csv`: of which model and evaluation a line tells. Figures follow.
METRICS_KEYS = ("method", "seed", "round", "model")

#: Columns that are not numbers.
_TEXT_COLUMNS = {
    "method", "model", "parameter", "name", "client_name", "time", "changed", "policy",
}  # fmt: skip

Lines = list[dict[str, str]]


class Tables:
    """The tables of one run folder."""

    def __init__(self, record: RunRecord) -> None:
        self.path, self._record = record.path, record
        self._hashes: dict[tuple[str, str], RowHash] = {}  # by table and method
        self._unrecorded: dict[str, int] = {}  # by table: rows that the record does not cover

    # --- writing --------------------------------------------------------------------------------

    def add_history(self, method: str, row: HistoryRow) -> None:
        """Append an evaluation, so that a later fault does not lose it."""
        self.append("history.csv", [{"method": method, **row.columns()}])

    def add_clients(
        self, method: str, row: HistoryRow, scores: np.ndarray, names: Sequence[str] = ()
    ) -> None:
        """Append each client's score and loss, and its name if clients have names.

        `scores`: [client, (summed score, summed loss, samples)].
        """
        lines = []
        for client, (score, loss, samples) in enumerate(scores):
            shares = (score / samples, loss / samples) if samples else (np.nan, np.nan)
            line = {"method": method, "seed": row.seed, "round": row.round, "client": client}
            line |= {"samples": int(samples), row.metric.name: shares[0], "loss": shares[1]}
            if names:
                line["client_name"] = spreadsheet_safe(names[client])
            lines.append(line)
        self.append("clients.csv", lines)

    def add_metrics(self, method: str, row: HistoryRow, models: Sequence[ModelFigures]) -> None:
        """Append what each kind of model scores, if the round recorded it."""
        columns = (*list_figures(row.metric), "bytes_sent", "bytes_uploaded")
        lines = []
        for model, figures in models:
            line = {"method": method, "seed": row.seed, "round": row.round, "model": model}
            lines.append({**line, **{name: figures.get(name) for name in columns}})
        if lines:
            self.append("metrics.csv", lines)

    def add_weights(self, method: str, row: HistoryRow, weights: Sequence[WeightSummary]) -> None:
        """Append how the W of each participant is spread, if the round recorded it."""
        lines = []
        for client, parameter, mean, shares in weights:
            line = {"method": method, "seed": row.seed, "round": row.round, "client": client}
            line |= {"parameter": parameter, "mean": round(mean, 6)}
            line |= {f"bin{k}": round(share, 6) for k, share in enumerate(shares)}
            lines.append(line)
        if lines:
            self.append("weights.csv", lines)

    def add_newcomers(self, method: str, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append what held-out clients score, together or each, if they were tested."""
        if lines:
            self.append(name, [{"method": method, **line} for line in lines])

    def add_fault(self, method: str, fault: Fault, policy: str) -> None:
        """Append a client that diverged, and what follows from it."""
        line = {"method": method, "round": fault.round, **asdict(fault), "policy": policy}
        del line["run"]  # method and seed say which it is
        if name := line.pop("client_name"):
            line["client_name"] = spreadsheet_safe(name)
        self.append("faults.csv", [line])

    def append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines of the same columns to a table. Columns that it does not have are added."""
        texts = [{column: _cell(value) for column, value in line.items()} for line in lines]
        (self.path / name).touch()
        with self._open(name, "r+") as file:
            columns = next(csv.reader(file), [])
            new = [column for column in texts[0] if column not in columns]
            if not new:
                file.seek(0, os.SEEK_END)
                file.write(csv_text(columns, texts))
            else:  # the rows before have empty cells there
                file.seek(0)
                table = [*csv.DictReader(file), *texts]
        if new:
            text = csv_text([*columns, *new], table, header=True)
            files.write_file(self.path / name, text.encode())
        for line in texts:
            self._hashes.setdefault((name, line["method"]), RowHash()).add(line)

    def write_split(self, federation: Federation) -> None:
        """Write how many samples of each class each client holds, if any.

        If the clients have names, these are a further column.
        """
        names, owners = federation.count_names, federation.client_names
        counts = {part: federation.counts(part) for part in PARTS}
        columns = ["client", "class", "name", *counts, *(["client_name"] if owners else [])]
        lines = [
            {"client": client, "class": label, "name": spreadsheet_safe(names[label])}
            | {part: count[client, label] for part, count in counts.items()}
            | ({"client_name": spreadsheet_safe(owners[client])} if owners else {})
            for client, label in np.argwhere(federation.counts()).tolist()
        ]
        if federation.held_out:
            known = len(federation.train) - federation.held_out
            original = federation.original or range(len(federation.train))
            columns += ["original", "held_out"]
            for line in lines:
                client = line["client"]
                line |= {"original": original[client], "held_out": int(client >= known)}
        self._record.replace("split.csv", csv_text(columns, lines, header=True))

    def add_resumption(self, changes: str) -> None:
        """Note that the run is resumed, and what is different from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        lost = ""
        columns, lines = ["time", "changed"], Lines()
        digests = self._record.digests
        if (self.path / "resumed.csv").exists():
            try:
                self._record.read_verified("resumed.csv")
                columns, lines = self._read_lines("resumed.csv")
            except files.DamagedFile:
                lost = "resumed.csv was damaged: what it said before is lost"
        elif digests and "resumed.csv" in digests.written:
            lost = "resumed.csv was missing: if it said anything before, it is lost"
        if lost:
            lines = [{"time": now, "changed": lost}]
        lines.append({"time": now, "changed": printable(changes, 10_000)})
        self._record.replace("resumed.csv", csv_text(columns, lines, header=True))

    def flush(self) -> None:
        """Wait until the tables are on the disk."""
        for name in TABLES:
            if (self.path / name).is_file():
                with (self.path / name).open("rb") as file:
                    files.flush(file.fileno())

    # --- digests of rows, and fewer rows --------------------------------------------------------

    @property
    def methods(self) -> set[str]:
        """The methods that have rows."""
        return {method for _, method in self._hashes}

    def row_digests(self, method: str) -> dict[str, tuple[int, str]]:
        """Return, by table, the number of a method's rows, and their digest."""
        hashes = self._hashes.items()
        return {table: rows.value for (table, other), rows in hashes if other == method}

    def without_rows_from(self, first_rounds: Mapping[tuple[str, int], int]) -> dict[str, str]:
        """Return the text of each table without rows from a given round on, by method and seed.

        The digests of rows become those of these texts. Nothing is written.
        """
        present = [name for name in TABLES if (self.path / name).is_file()]
        ends = {(method, str(seed)): round for (method, seed), round in first_rounds.items()}
        self._hashes, texts = {}, {}
        for name in present:
            columns, lines = self._read_lines(name)
            kept = Lines()
            for line in lines:
                if int(line["round"]) < ends.get((line["method"], line["seed"]), 2**63):
                    self._hashes.setdefault((name, line["method"]), RowHash()).add(line)
                    kept.append(line)
            texts[name] = csv_text(columns, kept, header=True)
        return texts

    def with_rows_of(
        self, other: "Tables", methods: Container[str], rank: Callable[[str, int], Any]
    ) -> dict[str, str]:
        """Return the text of each table with the rows that another folder has of some methods.

        They replace the rows that are here of these methods. All are sorted by the `rank` of their
        method and seed. The digests of rows become those of these texts. Nothing is written.
        """
        self._hashes, texts = {}, {}

        def order(line: Mapping[str, str]) -> Any:
            return rank(line["method"], int(line["seed"]))

        for name in TABLES:
            found = []
            for table in (self, other):
                columns, lines = table._read_lines(name) if table._has(name) else ([], [])
                own = [line for line in lines if (line["method"] in methods) == (table is other)]
                found.append((columns, sorted(own, key=order)))
            # The columns stand in the order in which the rows have brought them.
            found.sort(key=lambda one: [order(line) for line in one[1][:1]])
            columns = list(dict.fromkeys(chain(*(own for own, _ in found))))
            rows = sorted(chain(*(own for _, own in found)), key=order)
            for line in rows:
                self._hashes.setdefault((name, line["method"]), RowHash()).add(line)
            if rows or self._has(name):
                texts[name] = csv_text(columns, rows, header=True)
        return texts

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def replace(self, texts: Mapping[str, str]) -> None:
        """Write tables, each in one step, if they differ from those on the disk."""
        for name, text in texts.items():
            path = self.path / name
            if not path.is_file() or path.read_bytes() != text.encode():
                files.write_file(path, text.encode())

    # --- reading --------------------------------------------------------------------------------

    def history(self) -> dict[str, list[HistoryRow]]:
        """Return the rows of history.csv by method."""
        histories: dict[str, list[HistoryRow]] = {}
        for cells in self.rows("history.csv"):
            if problem := _find_problem(cells):
                raise files.DamagedFile(f"{self.path / 'history.csv'} is damaged: a row {problem}.")
            row = HistoryRow.from_columns(cells)
            histories.setdefault(cells["method"], []).append(row)
        return histories

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table, verified, with numbers as numbers and empty cells as None."""
        return self._record.read_again_if_stale(lambda: self._read_rows(name))

    def _read_rows(self, name: str) -> list[dict[str, Any]]:
        digests = self._record.digests  # before the table, which may grow meanwhile
        if name not in TABLES and not self._record.has(name):
            return []
        lines = self._read_lines(name)[1] if require_file(self.path / name).exists() else []
        if name in TABLES and digests:
            self._unrecorded[name] = digests.check_rows(self.path / name, lines)
        try:
            if name == "metrics.csv":
                _check_unique(lines)
            return [_values(line) for line in lines]
        except ValueError as error:
            raise files.DamagedFile(f"{self.path / name} is damaged: {error}.") from None

    def list_unrecorded(self) -> list[str]:
        """Say, in sentences, which rows that have been read are newer than the record."""
        return [
            f"{count} of the rows in {self.path / name} came after {DIGESTS} was written, "
            "so they are not verified."
            for name, count in self._unrecorded.items()
            if count
        ]

    def _read_lines(self, name: str) -> tuple[list[str], Lines]:
        """Return a table's columns and lines, without a last line that was being written."""
        columns, lines, is_cut = self._parse(name)
        if is_cut and not self._may_be_growing():
            raise files.DamagedFile(
                f"{self.path / name} is damaged: it ends in the middle of a row."
            )
        return columns, lines

    def _may_be_growing(self) -> bool:
        """Tell whether a row may be half written: as long as a method is not finished."""
        digests = self._record.digests
        if digests is None or not (self.path / "config.toml").is_file():
            return True
        finished = {name for name, method in digests.methods.items() if method.finished}
        return not finished.issuperset(list_labels(self._record.read_config()))

    def _parse(self, name: str) -> tuple[list[str], Lines, bool]:
        """Return a table's columns, its complete lines, and whether an incomplete one follows."""
        with self._open(name) as file:
            reader = csv.DictReader(file, restkey="", restval=None)
            lines, broken = [], 0
            for line in reader:
                if broken:
                    raise ValueError(f"line {broken} has not as many columns as the first")
                if "" in line or None in line.values():
                    broken = reader.line_num
                else:
                    lines.append(line)
            for line in lines if name in TABLES else ():
                line["method"], line["seed"], int(line["round"])  # raise if this is another table
            return list(reader.fieldnames or ()), lines, bool(broken)

    @contextmanager
    def _open(self, name: str, mode: str = "r") -> Iterator[IO[str]]:
        """Open a table. Content that is not a table's is damage."""
        path = self.path / name
        try:
            check_memory(require_file(path).stat().st_size, str(path))
            with path.open(mode, newline="", encoding="utf-8") as file:
                yield file
        except (ValueError, KeyError, csv.Error) as error:
            raise files.DamagedFile(
                f"{path} is damaged, or not the table of a run: {error}."
            ) from None


def csv_text(
    columns: Sequence[str], lines: Iterable[Mapping[str, Any]], *, header: bool = False
) -> str:
    """Return lines of a table as text; with `header`, the column names first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cell(value: Any) -> str:
    """Return the text of a value in a table; a float can be read back exactly."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _values(line: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a table's line. An accuracy must be from 0 to 1, or NaN."""
    values: dict[str, Any] = {
        column: text if column in _TEXT_COLUMNS else _number(text) for column, text in line.items()
    }
    for name in SHARES:
        accuracy = values.get(name)
        if accuracy is not None and (accuracy < 0 or accuracy > 1):
            raise ValueError(f"an accuracy of {accuracy} is not from 0 to 1")
    return values


def _check_unique(lines: Lines) -> None:
    """Raise a ValueError if two lines of `metrics.csv` tell about the same model."""
    keys = [tuple(line.get(name) for name in METRICS_KEYS) for line in lines]
    if len(set(keys)) < len(keys):
        raise ValueError("it has two rows of the same method, seed, round and model")


def _find_problem(cells: Mapping[str, Any]) -> str:
    """Say what keeps cells from being a row of the history, or nothing."""
    names = find_metric(cells).columns
    for column in fields(HistoryRow):
        name = names.get(column.name, column.name)
        value = cells.get(name)
        is_required = column.default is MISSING and column.default_factory is MISSING
        if value is None and is_required:
            return f"lacks {name!r}"
        if column.type is int and not isinstance(value, int | None):
            return f"has {name} = {value}, which is not a whole number"
    return ""


def _number(text: str) -> float | int | None:
    if not text:
        return None
    if not text.lstrip("-").isdecimal():
        return float(text)
    if len(text) > 19:
        raise ValueError(f"{text[:19]}… is a number of more than 64 bits")
    return int(text)
