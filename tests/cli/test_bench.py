"""`fedala bench` measures on the data that it says it measures on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedala.bench import cases
from fedala.cli import app as cli
from fedala.cli import bench

SMALL = cases.Case("small", "mnist", (1, 28, 28), 10, 120, clients=2, method="fedavg", lr=0.1)
OTHER = replace(SMALL, name="other", dataset="fashion-mnist")
CROWD = replace(
    SMALL, name="crowd", clients=1001, join_ratio=0.002, samples=60, has_plain_loop=False
)


def call(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)], prog_name="fedala")


@pytest.fixture
def measured(monkeypatch):
    """Replace the cases by small ones; return the list of cases that are then measured."""
    names = []

    def measure(case, **options):
        names.append(case.name)
        return real_measure(case, **options)

    real_measure = bench.measure
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "CASES", (SMALL, OTHER, CROWD))
    return names


@pytest.fixture
def data(tmp_path):
    """A folder with a part of MNIST."""
    folder = tmp_path / "data"
    folder.mkdir()
    y = np.arange(120) % 10
    x = np.random.default_rng(0).integers(0, 256, (120, 28, 28), dtype=np.uint8)
    np.savez(folder / "mnist.npz", x=x, y=y)
    return folder


def data_column(text: str) -> dict[str, str]:
    """Read the columns case and data of a Markdown table."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0][:2] == ["case", "data"]
    return {row[0]: row[1] for row in rows[2:]}


def test_without_a_folder_the_table_says_random(measured, tmp_path):
    out = tmp_path / "table.md"
    result = call("--case", "small", "--rounds", 4, "--device", "cpu", "--out", out)
    assert result.exit_code == 0, result.output
    assert measured == ["small"]
    assert data_column(out.read_text(encoding="utf-8")) == {"small": "random"}
    assert "random" in next(line for line in result.stdout.splitlines() if "small" in line)


def test_the_table_names_the_data_of_every_case(measured, data, tmp_path):
    """Fashion-MNIST has no copy there, and very many clients always get random samples."""
    out = tmp_path / "table.md"
    arguments = ("--rounds", 4, "--device", "cpu", "--no-plain", "--data-dir", data, "--out", out)
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert data_column(out.read_text(encoding="utf-8")) == {
        "small": "real (partial: 120 of 70000 samples)",
        "other": "random",
        "crowd": "random",
    }
    assert "random data is used instead: There is no copy of fashion-mnist in" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "small", "--data-dir", "nowhere"], "nowhere is not a folder"),
        (["--data-dir", "empty"], "There is no copy of mnist in empty"),
        (["--case", "other", "--data-dir", "data"], "There is no copy of fashion-mnist in data"),
        (["--case", "crowd", "--data-dir", "data"], "random data only: leave out --data-dir"),
    ],
)
def test_a_folder_without_the_data_is_refused_before_anything_is_measured(
    measured, data, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    result = call(*arguments, "--out", "table.md")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert measured == []
    assert not Path("table.md").exists()
