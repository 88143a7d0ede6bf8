"""Read run folders for reports. They may be unfinished, and come from anywhere."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError, first_line, printable
from fedala.io.untrusted import check_accuracies, read_json
from fedala.methods import make
from fedala.metrics import Metric, find_metric
from fedala.records import HistoryRow
from fedala.report.arrays import Array, Rows, to_array
from fedala.runs.config import Config
from fedala.runs.config_values import flatten_sweep
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.folder import RunFolder
from fedala.runs.holdout import NEWCOMER_CLIENTS, NEWCOMERS
from fedala.runs.results import MethodResult
from fedala.runs.resumable_options import CHANGEABLE
from fedala.runs.run_files import JOBS
from fedala.runs.sweep import label_of, split_label
from fedala.runs.sweep_results import Sweep, find_sweeps

_REQUIRED_COLUMNS = {
    "history.csv": (
        *("method", "seed", "round", "score", "score_joined", "loss"),
        *("sent", "uploaded", "seconds"),
    ),
    "clients.csv": ("method", "seed", "round", "client", "samples", "score"),
    NEWCOMERS: ("method", "seed", "round", "epochs", "clients", "score"),
    NEWCOMER_CLIENTS: ("method", "seed", "round", "epochs", "client", "score"),
    "metrics.csv": ("method", "seed", "round", "model"),
    "split.csv": ("client", "class", "name", "train", "validation", "test"),
    "resumed.csv": ("time", "changed"),
    "weights.csv": (
        *("method", "seed", "round", "client", "parameter", "mean"),
        *(f"bin{k}" for k in range(10)),
    ),
}
_WHOLE_NUMBERS = {
    *("seed", "round", "client", "samples", "class", "train", "validation", "test"),
    *("sent", "uploaded", "diverged", "epochs", "clients", "bytes_sent", "bytes_uploaded"),
}

#: Options in which two runs may differ while their scores can still be compared.
FREE_TO_DIFFER = {*CHANGEABLE, "method", "set", "seed", "seeds", "eval_every", "evaluate"}
#: The options' defaults. Folders of earlier versions lack the newer options.
DEFAULTS = {one.name: one.default for one in fields(Config)}


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    path: Path
    name: str
    """The folder's name; among other folders, the part of its path that sets it apart."""
    config: dict[str, Any]
    config_text: str
    results: dict[str, MethodResult]
    """By method, in the order in which they ran."""
    clients: Rows
    split: Rows
    weights: Rows
    resumed: Rows = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    unverified: list[str] = field(default_factory=list)
    """Sentences about files that no digest covers."""
    client_names: dict[int, str] = field(default_factory=dict)
    """By number; empty if clients have no names."""

    preprocessing: Preprocessing | None = None
    """What the models are fed; None if an older version wrote the folder."""

    def name_client(self, number: int) -> str:
        """Return a client's number, and its name if it has one: `4 (VP-07)`."""
        name = self.client_names.get(number)
        return f"{number} ({name})" if name else str(number)

    @property
    def rounds(self) -> int:
        """Return the number of rounds that the run was started with."""
        rounds = self.config.get("rounds")
        if isinstance(rounds, int):
            return rounds
        return max(self.last_round(name) for name in self.results)

    @property
    def metric(self) -> Metric:
        """What the scores of all methods measure."""
        return next(iter(self.results.values())).metric

    @property
    def majority_share(self) -> float | None:
        """Return the share of the most frequent class in the test samples, if it is recorded."""
        share = self.summary.get("majority_share")
        return share if isinstance(share, float) and 0 <= share <= 1 else None

    def last_round(self, method: str) -> int:
        """Return the last round of a method that was evaluated, in all of its runs."""
        last: dict[int, int] = {}
        for row in self.results[method].history:
            last[row.seed] = max(row.round, last.get(row.seed, 0))
        return min(last.values())

    def missing_seeds(self, method: str) -> int:
        """Return how many runs of a method have not begun: seeds that are being added."""
        seeds = self.config.get("seeds")
        begun = len(self.results[method].seeds)
        return max(0, seeds - begun) if isinstance(seeds, int) else 0

    def find_missing_rounds(self, method: str) -> int | None:
        """Return the round that a method has got to if its rounds are not finished, else None.

        Runs that have stopped early are finished.
        """
        watches = self.watch(method)
        last = [w.last.round for w in watches if w.last and not w.is_over(self.patience)]
        return min(last) if last and min(last) < self.rounds else None

    @property
    def patience(self) -> int | None:
        """After how many evaluations without a better one a run stops; None if it does not."""
        patience = self.config.get("patience")
        return patience if isinstance(patience, int) else None

    def watch(self, method: str) -> list[RunWatch]:
        """Return the best and the last evaluation of each run of a method."""
        result = self.results[method]
        try:
            return group_runs(result.history, result.seeds, self.patience)
        except ValueError:  # a row after the end: the folder's own reader refuses it
            return group_runs(result.history, result.seeds, None)

    @property
    def pending_methods(self) -> list[str]:
        """Return the methods in the config that have not begun."""
        names = [name.strip() for name in str(self.config.get("method", "")).split(",")]
        begun = {split_label(label)[0] for label in self.results}
        return [name for name in names if name and name.lower() not in begun]

    @property
    def sweeps(self) -> list[Sweep]:
        """The sweeps of its methods."""
        swept = self.config.get("sweep")
        return find_sweeps(flatten_sweep(swept), self.results) if swept else []

    def is_comparable_to(self, other: "Run") -> bool:
        """Tell whether only methods, seeds and rounds differ, and clients hold the same samples."""
        if self is other:
            return True
        own, others = (
            {
                key: value
                for key, value in run.config.items()
                if key not in FREE_TO_DIFFER and value != DEFAULTS.get(key)
            }
            for run in (self, other)
        )
        return own == others and self.split == other.split

    def count_samples(self) -> tuple[Array, list[int], list[str]]:
        """Return samples as [client, class], the clients' numbers and the classes' names."""
        names = {row["class"]: row["name"] for row in self.split}
        rows = [
            {**row, "samples": row["train"] + row["validation"] + row["test"]} for row in self.split
        ]
        counts, (clients, classes) = to_array(rows, ("client", "class"), "samples")
        return np.nan_to_num(counts[..., 0]), clients, [names[label] for label in classes]

    def client_scores(self, method: str) -> Array:
        """Return [seed, client]: scores at the method's last evaluation; empty before it."""
        rows = [row for row in self.clients if row["method"] == method]
        return to_array(rows, ("seed", "client"), self.metric.name)[0][..., 0]

    def test_samples(self) -> Array:
        """Return the number of test samples of each client."""
        return to_array(self.clients, ("client",), "samples")[0][..., 0]

    def recorded_weights(self, method: str) -> tuple[Array, list[list[Any]]] | None:
        """Return recorded W as [seed, round, client, parameter, mean and shares of ten bins].

        Its second part has the keys of the first four axes. None if nothing was recorded.
        """
        rows = [row for row in self.weights if row["method"] == method]
        if not rows:
            return None
        axes = ("seed", "round", "client", "parameter")
        return to_array(rows, axes, "mean", *(f"bin{k}" for k in range(10)))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the run folders, each once; a folder of run folders stands for all that have begun."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"There is no folder {path}.")
        inner = [path] if (path / "config.toml").is_file() else _find_folders(path)
        if not inner:
            raise UserError(
                f"{path} is not a run folder, and contains none with an evaluated round."
            )
        folders |= {folder.resolve(): folder for folder in inner}
    names = name_folders(list(folders))
    return [
        replace(read_run(folder), name=name)
        for folder, name in zip(folders.values(), names, strict=True)
    ]


def _find_folders(path: Path) -> list[Path]:
    """Find the run folders below a folder that have begun."""
    folders = set()
    # Cells, as of `fedala paper run`, lie three levels deep: setting, cell, seeds.
    for level in (1, 2, 3):
        for sign in ("config.toml", "history.csv", "digests.json"):  # one of them may be missing
            folders |= {file.parent for file in path.glob("*/" * level + sign)}
    return sorted(folder for folder in folders if RunFolder(folder).has_begun())


def name_folders(paths: Sequence[Path]) -> list[str]:
    """Name folders by their paths without the first and last parts that all of them share."""
    parts = [path.parts for path in paths]
    most = min(map(len, parts)) - 1
    before = _count_shared(parts, most)
    after = _count_shared([part[::-1] for part in parts], most - before)
    return [printable("/".join(part[before : len(part) - after]), 200) for part in parts]


def _count_shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """Count the first parts that all have in common, up to `most`."""
    return next((k for k in range(most) if len({part[k] for part in parts}) > 1), most)


def distinct_splits(runs: Sequence[Run]) -> list[Run]:
    """Return the first run of each split."""
    distinct: list[Run] = []
    for run in runs:
        if run.split and all(run.split != other.split for other in distinct):
            distinct.append(run)
    return distinct


def read_run(path: Path) -> Run:
    """Read one run folder. Tables that do not exist yet are empty."""
    folder = RunFolder(path)
    text, config, summary = _read_config_and_summary(folder)
    history = _read_table(folder, "history.csv")
    if not history:
        reason = "no round has been evaluated"
        if (path / JOBS).is_dir():
            reason = f"no job is finished; each has a folder that can be reported, {path / JOBS}/…"
        raise UserError(f"{path} has nothing to report yet: {reason}.")
    titles = read_titles(summary)
    results: dict[str, MethodResult] = {}
    for row in history:
        name = row["method"]
        if name not in results:
            results[name] = MethodResult(name, str(titles.get(name) or _default_title(name)))
        results[name].history.append(HistoryRow.from_columns(row))
    clients, metrics = _read_table(folder, "clients.csv"), _read_table(folder, "metrics.csv")
    newcomers = [_read_table(folder, name) for name in (NEWCOMERS, NEWCOMER_CLIENTS)]
    for result in results.values():
        result.read_tables(clients, metrics)
        result.read_newcomers(*newcomers)
    split = _read_table(folder, "split.csv")
    return Run(
        path=path,
        name=path.resolve().name,
        config=config,
        config_text=text,
        results=results,
        clients=clients,
        split=split,
        weights=_read_table(folder, "weights.csv"),
        resumed=_read_table(folder, "resumed.csv"),
        summary=summary,
        client_names=_read_names(folder, split),
        preprocessing=folder.preprocessing(),
        unverified=folder.list_unverified(),  # after all tables have been read
    )


def _read_names(folder: RunFolder, split: Rows) -> dict[int, str]:
    """Return the names of the clients; older folders have them in the split alone."""
    names = dict(enumerate(folder.client_names()))
    if not names:
        names = {row["client"]: row["client_name"] for row in split if row.get("client_name")}
    return {client: printable(name, 60) for client, name in names.items()}


def _read_config_and_summary(folder: RunFolder) -> tuple[str, dict[str, Any], dict[str, Any]]:
    path = folder.path
    try:
        text = folder.read_verified("config.toml").decode()
        config = tomllib.loads(text)
        summary = read_json(path / "summary.json", 2**28) if folder.has("summary.json") else {}
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The run folder {path} cannot be read: {first_line(error)}.") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path / 'summary.json'} is not a run's summary.")
    return text, config, summary


def read_titles(summary: Any) -> dict[str, Any]:
    """Return the titles of the methods, as far as a summary from anywhere has them."""
    methods = summary.get("methods") if isinstance(summary, dict) else None
    if not isinstance(methods, dict):
        return {}
    return {
        name: method.get("title") for name, method in methods.items() if isinstance(method, dict)
    }


def _default_title(name: str) -> str:
    method, point = split_label(name)
    try:
        return label_of(make(method).title, point)
    except UserError:
        return name  # a method from outside the package


def _read_table(folder: RunFolder, name: str) -> Rows:
    path = folder.path / name
    try:
        rows = folder.rows(name)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from None
    for row in rows:
        names = find_metric(row).columns
        required = [names.get(column, column) for column in _REQUIRED_COLUMNS[name]]
        missing = [column for column in required if row.get(column) is None]
        if missing:
            raise UserError(f"{path} is not the table of a run: a line lacks {missing[0]}.")
        try:
            check_accuracies(row)
            for column, value in row.items():
                _check_number(column, value)
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}.") from None
    return rows


def _check_number(column: str, value: Any) -> None:
    """Raise a ValueError if a run cannot have written such a number."""
    if value is None or isinstance(value, str):
        return
    problem = ""
    if isinstance(value, int) and abs(value) >= 2**63:
        problem = "which has more than 64 bits"
    elif column in _WHOLE_NUMBERS and not isinstance(value, int):
        problem = "which is not a whole number"
    elif column in _WHOLE_NUMBERS and value < 0:
        problem = "which is less than 0"
    elif column == "seconds" and not 0 <= value < math.inf:
        problem = "which is not a time"
    if problem:
        raise ValueError(f"{column} is {printable(str(value), 40)}, {problem}")
