"""`fedala predict`, `evaluate` and `export` on the command line."""

import csv
import re

import numpy as np
import pytest
from safetensors import safe_open
from trained.worlds import NAMES, PIXELS, Y, images, run
from typer.testing import CliRunner

from fedala import load
from fedala.cli import app as cli
from fedala.data import Dataset
from fedala.errors import spreadsheet_safe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Run two methods on images whose classes have odd names."""
    here = tmp_path_factory.mktemp("here")
    data = images(("=ant", "[bold]bee", "cat", "dog"))
    run(here / "run", data, method="ditto,fedavg")
    np.savez(here / "new.npz", x=PIXELS[:15], y=Y[:15])
    np.savez(here / "bare.npz", x=PIXELS[:15])
    return here


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, [str(one) for one in arguments], prog_name="fedala")
    assert result.exit_code == 0, result.output
    return result.output


def test_predictions_are_shown_counted_and_written(place, tmp_path):
    out = tmp_path / "predictions.csv"
    options = ("--method", "ditto", "--client", 2, "--data", place / "bare.npz")
    said = invoke("predict", place / "run", *options, "--probabilities", "--out", out)
    trained = load(place / "run", "ditto")
    wanted = trained.predict(PIXELS[:15], 2)
    chances = trained.predict(PIXELS[:15], 2, probabilities=True)
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == [spreadsheet_safe(str(one)) for one in wanted]
    found = [[float(row[f"p({name})"]) for name in trained.class_names] for row in rows]
    assert np.abs(np.array(found) - chances).max() < 1e-5
    assert [float(row["probability"]) for row in rows] == pytest.approx(chances.max(1), abs=1e-5)
    assert "and 5 more samples" in said
    for name in np.unique(wanted):
        assert f"{name}: {(wanted == name).sum()}" in said
    assert f"Written: {out}" in said


def test_a_method_without_personal_models_needs_no_client(place):
    one = invoke("predict", place / "run", "--method", "fedavg", "--data", place / "new.npz")
    other = invoke(
        "predict", place / "run", "--method", "fedavg", "--global", "--data", place / "bare.npz"
    )
    assert one == other


def test_all_models_are_tested_or_one(place):
    trained = load(place / "run", "ditto", best=True)
    scores = trained.evaluate((PIXELS[:15], Y[:15]))
    said = invoke(
        "evaluate", place / "run", "--method", "ditto", "--best", "--data", place / "new.npz"
    )
    for one in scores:
        name = "global model" if one.client is None else f"client {one.client}"
        assert re.search(rf"{name}\s+{100 * one.score:.2f}\s+{one.loss:.4g}\s+15", said)
    mean = 100 * sum(one.score for one in scores.personal) / 3
    assert f"Personal models: accuracy {mean:.2f} % on average, from" in said
    said = invoke(
        "evaluate", place / "run", "--method", "ditto", "--client", 1, "--data", place / "new.npz"
    )
    assert "client 1" in said
    assert "client 0" not in said


def test_all_scores_are_written(place, tmp_path):
    out = tmp_path / "scores.csv"
    options = ("--method", "ditto", "--data", place / "new.npz", "--out", out)
    said = invoke("evaluate", place / "run", *options)
    assert f"Written: {out}" in said
    assert "always the most frequent class: 26.67 %" in said  # 4 of 15
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores = load(place / "run", "ditto").evaluate((PIXELS[:15], Y[:15]))
    assert [row["client"] for row in rows] == ["0", "1", "2", ""]
    assert [float(row["accuracy"]) for row in rows] == [one.score for one in scores]
    for name in ("f1", "balanced_accuracy", "auc", "ece"):
        assert [float(row[name]) for row in rows] == [one.metrics[name] for one in scores]


def test_a_model_is_exported(place, tmp_path):
    out = tmp_path / "model.safetensors"
    said = invoke("export", place / "run", "--method", "ditto", "--client", 1, "--out", out)
    assert f"Written: {out}" in said
    with safe_open(out, "pt") as file:
        assert file.metadata()["client"] == "1"


def test_clients_are_named_as_in_the_data(tmp_path):
    data = images(NAMES)
    owners = data.y // 2
    named = Dataset("n", data.x, data.y, 4, NAMES, clients=owners, client_names=("1", "0"))
    run(tmp_path / "run", named, partition=None, clients=None)
    np.savez(tmp_path / "new.npz", x=PIXELS[:8], y=Y[:8])
    for client in ("0", "1"):
        said = invoke(
            "evaluate", tmp_path / "run", "--client", client, "--data", tmp_path / "new.npz"
        )
        scores = load(tmp_path / "run").evaluate((PIXELS[:8], Y[:8]))
        assert f"{scores.personal[1 - int(client)].loss:.4g}" in said
