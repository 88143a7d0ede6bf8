"""`fedala partition` shows and saves every kind of partition, and a run reads the same one back."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.data import federate, load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.mark.parametrize("spec", ["quantity:0.3", "extdir:3:10", "cluster:4", "cluster:2:1"])
def test_a_partition_is_shown_and_saved(tmp_path, digits, spec):
    path = tmp_path / "mine.json"
    arguments = ["--partition", spec, "--clients", "8", "--save", path]
    result = CliRunner().invoke(app, ["partition", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert f"digits, {spec}, 8 clients: 1,797 samples" in result.output
    direct = federate(digits, spec, 8)
    saved = json.loads(path.read_text())["clients"]
    assert [row["train"] for row in saved] == [rows.tolist() for rows in direct.train]
    again = federate(digits, str(path))
    for one, other in zip(again.test, direct.test, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_counts_the_same_samples(tmp_path):
    """Those of clients that cannot train, and are left out, do not count."""
    path = tmp_path / "mine.csv"
    rows = [f"{i},{i % 2},{'ab'[i % 2]}\n" for i in range(20)]
    path.write_text("x,label,client\n" + "".join(rows) + "1,1,c\n")
    shown = CliRunner().invoke(app, ["partition", "--dataset", str(path)]).output
    options = ["--method", "local", "--rounds", "1", "--device", "cpu", "--out", tmp_path / "run"]
    run = CliRunner().invoke(app, ["run", "--dataset", str(path), *map(str, options)])
    assert run.exit_code == 0, run.output
    assert ": 20 samples of 2 classes" in " ".join(shown.split())
    assert ": 20 samples of 2 classes" in " ".join(run.output.split())


def test_a_feature_shift_is_named_or_refused():
    arguments = ["partition", "--partition", "iid", "--clients", "4", "--feature-shift"]
    result = CliRunner().invoke(app, [*arguments, "rotate:90"])
    assert result.exit_code == 0
    assert "digits, iid, 4 clients, rotate:90: 1,797 samples" in result.output
    refused = CliRunner().invoke(app, [*arguments, "blur:1"])
    assert refused.exit_code == 2
