"""The documentation has every column of a run folder's tables, and no other."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

import fedala
from fedala.methods import catalogue, make
from fedala.records import HistoryRow

DOCS = Path(__file__).parents[2] / "docs"


def documented(page: str, heading: str) -> set[str]:
    """Return the columns in the first cells of the tables under a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    [section] = re.findall(rf"(?ms)^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text)
    first_cells = re.findall(r"(?m)^\|([^|]*)\|", section)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def make_table(path: Path) -> Path:
    """Write clients with names: one whose training diverges, and one that is held out."""
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "a", "b", "label"])
        for user in ("ann", "bob", "cem", "dan", "eve"):
            for row in range(40):
                a, b = random.normal(size=2) * (1e30 if user == "bob" else 1)
                writer.writerow([user, a, b, f"class {row % 3}"])
    return path


OPTIONS = {
    "rounds": 2, "model": "mlp", "normalize": "none", "validation": 0.2,
    "evaluate": "trained,received,global", "record_weights": 1, "lanes": "all", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of two runs that write every table, and of one that was resumed."""
    path = tmp_path_factory.mktemp("runs")
    data = make_table(path / "people.csv")
    held_out = {"holdout_clients": "last:1", "holdout_epochs": "0,1"}
    methods = {"method": "fedala,fedavg,ifca", "set": {"ifca.clusters": 2}}
    with pytest.warns(fedala.RunWarning, match="Some clients diverged"):
        fedala.run(dataset=data, out=path / "classes", **methods, **held_out, **OPTIONS)
    with pytest.warns(fedala.RunWarning, match="Some clients diverged"):
        fedala.run(resume=path / "classes", rounds=3)
    numbers = np.random.default_rng(1).normal(size=(160, 3)).astype(np.float32)
    fedala.run(
        dataset=(numbers[:, :2], numbers[:, 2]), clients=4, partition="iid", loss="mse",
        method="fedala", out=path / "numbers", **OPTIONS,
    )  # fmt: skip
    return [path / "classes", path / "numbers"]


def written(folders: list[Path], name: str) -> set[str]:
    """Return the columns that the runs have written; those of a metric as those of accuracy."""
    columns = set[str]()
    for folder, metric in zip(folders, ("accuracy", "mse"), strict=True):
        if (folder / name).exists():
            with (folder / name).open(newline="") as file:
                columns |= {
                    re.sub(f"^{metric}(?=_|$)", "accuracy", one) for one in next(csv.reader(file))
                }
    return columns


TABLES = (
    "clients.csv", "weights.csv", "faults.csv", "newcomers.csv", "newcomer_clients.csv",
    "split.csv", "resumed.csv",
)  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_every_column_of_a_table_is_documented(folders, name):
    assert written(folders, name) == documented("results.md", name)


def test_every_column_of_the_detailed_metrics_is_documented(folders):
    assert written(folders, "metrics.csv") == documented("evaluation.md", "Detailed metrics")


def test_every_column_of_the_history_is_documented(folders):
    """A federation alone has `asked` and `answered`, and pick_by alone the validation loss."""
    row = HistoryRow(0, 0, 0.5, 1.0, 0.5, asked=4, answered=3, loss_validation=1.0)
    columns = written(folders, "history.csv") | row.columns().keys()
    assert columns == documented("results.md", "history.csv")
    for method in catalogue():
        settings = {"ifca.clusters": 2} if method.startswith("ifca") else None
        assert make(method, settings).metrics <= columns


def test_every_table_has_a_section(folders):
    present = {path.name for folder in folders for path in folder.glob("*.csv")}
    assert present == {*TABLES, "history.csv", "metrics.csv"}


def test_a_row_tells_about_the_evaluation_and_the_training_after_it(folders):
    """Bob diverges in every training, so in round t + 1 of row t, and in none after the last."""
    with (folders[0] / "history.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedavg"]
    assert [row["round"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["train_loss"] == "" for row in rows] == [False, False, False, True]
    assert [row["uploaded"] == "0" for row in rows] == [False, False, False, True]
    assert [row["accuracy_trained"] == "" for row in rows] == [True, False, False, False]
    with (folders[0] / "faults.csv").open(newline="") as file:
        faults = [row for row in csv.DictReader(file) if row["method"] == "fedavg"]
    assert {row["client_name"] for row in faults} == {"bob"}
    found = [sum(fault["round"] == row["round"] for fault in faults) for row in rows]
    assert found == [int(row["diverged"]) for row in rows]
    assert found[0] == 1
