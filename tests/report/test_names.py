"""Clients that have names are named in tables, pages and sentences."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from runs.test_resume import federation
from small import Net

from fedala import run
from fedala.records import Fault, HistoryRow
from fedala.report import page
from fedala.report.gains import describe_gains
from fedala.runs.config import Config
from fedala.runs.results import MethodResult, RunResult

NAMES = ("Anna", "=Ben", "Carl", "Dora", "Emil")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(
        method="local,fedala",
        dataset=replace(federation(), client_names=NAMES),
        model=Net,
        rounds=2,
        batch_size=4,
        lr=0.1,
        device="cpu",
        record_weights=1,
        out=tmp_path_factory.mktemp("names") / "run",
    )


def test_tables_and_frames_have_names_in_their_last_column(result):
    rows = list(csv.reader((result.folder / "clients.csv").read_text().splitlines()))
    assert rows[0][-1] == "client_name"
    assert [row[-1] for row in rows[1:6]] == ["Anna", "'=Ben", "Carl", "Dora", "Emil"]
    assert list(result.clients_frame()["client_name"]) == [*NAMES, *NAMES]


def test_the_page_names_clients_in_scores_differences_and_weights(result):
    text = page.write([result.folder]).read_text()
    difference = text.index("Difference to Local by client")
    assert text.index("4 (Emil)") < difference < text.rindex("Mean of W")
    # Scores, differences, W by round and by parameter, the split; and the charts' data.
    assert text.count("4 (Emil)") >= 7


def test_without_names_there_is_no_column(tmp_path):
    options = {"rounds": 1, "batch_size": 4, "lr": 0.1, "device": "cpu"}
    found = run(method="fedavg", dataset=federation(), model=Net, out=tmp_path / "r", **options)
    assert "client_name" not in (tmp_path / "r" / "clients.csv").read_text()
    assert "client_name" not in found.clients_frame()


def test_a_fault_names_the_client():
    fault = Fault(seed=0, client=1, round=3, lane=2, step=None, client_name="VP-03")
    assert str(fault) == "client 1 (VP-03; seed 0, lane 2) diverged in round 4"


def made_up(name, scores):
    one = MethodResult(name, name, [HistoryRow(0, 1, 0.5, 1.0, 0.5)])
    one.client_means[0] = np.array(scores)
    return one


def test_gains_are_counted_and_named():
    scores = {"local": [0.5, 0.5, 0.5, np.nan], "x": [0.6, 0.5, 0.4, 0.9], "y": [0, 0, 0, 0]}
    methods = {name: made_up(name, own) for name, own in scores.items()}
    names = ("a", "b", "c", "d")
    assert describe_gains(RunResult(Config(), methods, client_names=names)) == [
        "Against local, x helps 1 of 3 clients (a), 1 equal, 1 lose.",
        "Against local, y helps 0 of 3 clients, 0 equal, 3 lose.",
    ]
    lost = {name: made_up(name, [np.nan]) for name in ("local", "x")}
    assert describe_gains(RunResult(Config(), lost)) == []
    del methods["local"]
    assert describe_gains(RunResult(Config(), methods)) == []
    many = {"fedavg": made_up("fedavg", [0] * 20), "x": made_up("x", [1] * 20)}
    [sentence] = describe_gains(RunResult(Config(), many))
    assert "20 of 20 clients (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …)" in sentence
