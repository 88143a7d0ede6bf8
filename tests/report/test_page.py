"""The page of a run: right figures, no code from the folder, accessible to everybody."""

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from folders import accuracy, made_up
from jinja2 import UndefinedError

from fedala.errors import UserError
from fedala.metrics import MSE
from fedala.records import HistoryRow, ModelFigures
from fedala.report import html, page
from fedala.report.arrays import mean_std
from fedala.report.curves import find_target_rounds
from fedala.report.headline import format_figure
from fedala.report.page.models import KINDS, average_figures, view_models
from fedala.report.page.views import MOST_POINTS, Cell, Table
from fedala.report.runs import find_runs, read_run
from fedala.report.series import list_series
from fedala.runs.digests import Digests
from fedala.runs.results import MethodResult, describe_spread
from fedala.runs.seconds import sum_seconds

LAST_ROW = HistoryRow(seed=0, round=6, score=0.5, loss=1.0, score_joined=0.5)


class Parsed(HTMLParser):
    """The elements of a page with their attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {
            "tag": tag,
            "text": "",
            "inside": [e["tag"] for e in self.open],
            **dict(attributes),
        }
        self.elements.append(element)
        if tag not in ("meta", "input", "br"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


def write_and_parse(folder):
    return Parsed(page.write([folder.path]).read_text(encoding="utf-8"))


def data_of(found):
    [block] = [e for e in found.all("script") if e.get("type") == "application/json"]
    return json.loads(block["text"])


def test_accuracies_are_those_of_the_history_and_explained(tmp_path):
    found = write_and_parse(made_up(tmp_path / "run"))
    [row] = [
        e["text"] for e in found.all("tr") if e["text"].startswith("FedALA") and "±" in e["text"]
    ]
    last = [100 * accuracy("fedala", seed, 6) for seed in (0, 1)]
    assert f"{np.mean(last):.2f} ± {np.std(last):.2f}" in row
    against = np.mean(last) - np.mean([100 * accuracy("fedavg", seed, 6) for seed in (0, 1)])
    assert f"{against:+.2f}".replace("-", "−") in row
    text = " ".join(e["text"] for e in found.all("dl"))
    assert "picked on test data" in text
    assert "the last round that was evaluated" in text


def test_the_curves_are_the_history(tmp_path):
    data = data_of(write_and_parse(made_up(tmp_path / "run")))
    assert [one["label"] for one in data["series"]] == ["FedALA", "FedAvg", "Local"]
    for one, method in zip(data["series"], ("fedala", "fedavg", "local"), strict=True):
        assert one["rounds"] == list(range(7))
        for seed in (0, 1):
            wanted = [accuracy(method, seed, round) for round in range(7)]
            assert one["values"]["accuracy"][seed] == pytest.approx(wanted, rel=1e-4)


def models_of(found):
    """The tables of the section on kinds of models, by the first words of their captions."""
    tables = [e["text"] for e in found.all("table")]
    titles = [title for title, _ in KINDS.values()]
    return {title: text for text in tables for title in titles if text.startswith(title)}


def test_each_kind_of_model_has_a_table_of_its_own(tmp_path):
    folder = made_up(tmp_path / "run", ("fedala", "fedavg"), has_metrics=True)
    assert list(models_of(write_and_parse(folder))) == ["Initialised personal models"]
    for seed, value in ((0, 0.25), (1, 0.5)):
        for kind in ("trained", "global"):
            figures = {"accuracy": value, "accuracy_worst": 0.125, "bytes_sent": 2328104}
            row = replace(LAST_ROW, seed=seed)
            folder.tables.add_metrics("fedavg", row, [ModelFigures(kind, figures)])
    found = write_and_parse(folder)
    tables = models_of(found)
    assert list(tables) == [
        "Initialised personal models", "Trained personal models", "Global model",
    ]  # fmt: skip
    last = [100 * accuracy("fedala", seed, 6) for seed in (0, 1)]
    own = f"{np.mean(last):.2f} ± {np.std(last):.2f}"
    assert f"FedALA{own}" in tables["Initialised personal models"]
    assert "only clients that took part in that round count" in tables["Trained personal models"]
    for title in ("Trained personal models", "Global model"):
        assert "FedAvg37.50 ± 12.5012.50 ± 0.00–2,328,104" in tables[title]
        assert "FedALA" not in tables[title]
    assert any("Macro F1" in e["text"] and "AUC" not in e["text"] for e in found.all("dl"))
    (folder.path / "metrics.csv").unlink()  # a folder of an older version
    assert models_of(write_and_parse(folder)) == {}


def test_shares_have_their_unit_also_beside_numbers():
    def series(index, **figures):
        row = {"seed": 0, "round": 0, "model": "global", "loss": 0.5, **figures}
        result = MethodResult("a", "A", [HistoryRow(0, 0, 0.5, 1.0, 0.5)], metrics=[row])
        return SimpleNamespace(result=result, index=index, label="A")

    shares, numbers = series(0, accuracy=0.25), series(1, mse=4.0)
    for given, heads, has_unit in (
        ([shares], ["Accuracy", "Loss"], True),
        ([numbers], ["Mean squared error", "Loss"], False),
        ([shares, numbers], ["Accuracy, %", "Mean squared error", "Loss"], False),
    ):
        [table] = view_models(given).tables
        assert table.heads == ["Method", *heads]
        assert (", in %" in table.caption) == has_unit


def test_the_figures_of_runs_that_stop_in_different_rounds_are_averaged():
    ends = {0: (3, 0.25), 1: (2, 0.75)}
    history = [
        HistoryRow(seed, round, 0.5, 1.0, 0.5)
        for seed, (end, _) in ends.items()
        for round in range(end + 1)
    ]
    metrics = [
        {"seed": seed, "round": end, "model": "global", "accuracy": value}
        for seed, (end, value) in ends.items()
    ]
    result = MethodResult("fedavg", "FedAvg", history=history, metrics=metrics)
    [cell] = average_figures(SimpleNamespace(result=result), "global").values()
    assert (cell.text, cell.deviation) == ("50.00", "25.00")


def test_a_model_that_is_told_about_twice_is_damage(tmp_path):
    folder = made_up(tmp_path / "run", ("fedavg",), seeds=1, has_metrics=True)
    folder.tables.add_metrics("fedavg", LAST_ROW, [ModelFigures("initialized", {"accuracy": 0.5})])
    with pytest.raises(UserError, match=r"metrics.csv is damaged: it has two rows of the same"):
        page.write([folder.path])


def test_curves_of_further_models_can_be_chosen(tmp_path):
    """The first row has no trained model yet, and the chart leaves it out."""
    folder = made_up(tmp_path / "run", ("fedavg",), seeds=1)
    (folder.path / "history.csv").unlink()
    for round in range(7):
        metrics = {"accuracy_trained": 0.1 * round} if round else {}
        row = replace(LAST_ROW, round=round, metrics=metrics)
        folder.tables.add_history("fedavg", row)
    found = write_and_parse(folder)
    [values] = data_of(found)["series"][0]["values"]["accuracy_trained"]
    assert values == [None, *(pytest.approx(0.1 * round) for round in range(1, 7))]
    options = [e["text"] for e in found.all("option")]
    assert "test accuracy of the trained personal models" in options


def test_the_share_of_clients_below_local(tmp_path):
    """Of four clients, one is below in both runs and one in the first only."""
    folder = made_up(tmp_path / "run", ("fedala", "local"))
    (folder.path / "clients.csv").unlink()
    for seed, correct in ((0, [1, 2, 3, 4]), (1, [1, 3, 3, 4])):
        for method, own in (("fedala", correct), ("local", [2, 3, 3, 3])):
            scores = np.array([[c, 0.0, 10.0] for c in own])
            folder.tables.add_clients(method, replace(LAST_ROW, seed=seed), scores)
    found = write_and_parse(folder)
    rows = [e["text"] for e in found.all("tr") if e["text"].startswith(("FedALA", "Local"))]
    assert rows[0].endswith("37.50 ± 12.50")
    assert rows[1].endswith("–")
    heads = [e["text"] for e in found.all("th")]
    assert "Clients below Local" in heads


def test_a_long_run_shows_some_rounds_with_both_ends(tmp_path):
    data = data_of(write_and_parse(made_up(tmp_path / "run", ("fedavg",), seeds=1, rounds=1500)))
    rounds = data["series"][0]["rounds"]
    assert len(rounds) <= MOST_POINTS
    assert (rounds[0], rounds[-1]) == (0, 1500)


def test_who_gains_and_who_loses(tmp_path):
    folder = made_up(tmp_path / "run", clients=5)
    (folder.path / "clients.csv").unlink()
    for method, correct in (("fedala", [9, 8, 5, 5, 0]), ("fedavg", [5, 5, 5, 6, 0])):
        counts = np.array(
            [[c, 0.0, 10.0 if k < 4 else 0.0] for k, c in enumerate(correct)]
        )  # the last has no test data
        folder.tables.add_clients(method, LAST_ROW, counts)
    found = write_and_parse(folder)
    [table] = [e["text"] for e in found.all("table") if e["text"].startswith("Against FedAvg")]
    assert re.search(r"FedALA2" r"1" r"1" r"\+15\.00\+40\.00−10\.00", table)
    (folder.path / "clients.csv").unlink()
    for method, correct in (("fedala", 9), ("fedavg", 5)):
        folder.tables.add_clients(method, LAST_ROW, np.array([[correct, 0.0, 10.0]] * 5))
    [table] = [
        e["text"]
        for e in write_and_parse(folder).all("table")
        if e["text"].startswith("Against FedAvg")
    ]
    assert "FedALA500+40.00+40.00–" in table  # nobody loses, so nobody loses most


def test_the_facts_name_the_evaluated_clients_if_some_do_not_join(tmp_path):
    for name, options, says in (
        ("a", {"eval_clients": "joined"}, "ρ = 0.5, only the participants of a round evaluated"),
        ("b", {}, "ρ = 0.5, all clients evaluated"),
    ):
        [facts] = [
            e["text"]
            for e in write_and_parse(made_up(tmp_path / name, join_ratio=0.5, **options)).all("p")
            if e.get("class") == "facts"
        ]
        assert says in facts


def test_the_caption_counts_the_runs(tmp_path):
    made = [
        made_up(tmp_path / "one", ("fedala",), seeds=2).path,
        made_up(tmp_path / "two", ("fedala",), seeds=3).path,
    ]
    captions = [
        Parsed(page.write(given, tmp_path / "x.html").read_text(encoding="utf-8")).all("caption")[
            0
        ]["text"]
        for given in (made[1:], made)
    ]
    assert ["deviation of 3 runs;" in captions[0], "deviation of its runs;" in captions[1]] == [
        True,
        True,
    ]


def test_an_unfinished_run_is_reported_as_such(tmp_path):
    folder = made_up(tmp_path / "run", ("fedala", "fedavg"), reached=2)
    folder.path.joinpath("config.toml").write_text(
        folder.path.joinpath("config.toml")
        .read_text()
        .replace('"fedala,fedavg"', '"fedala,fedavg,ditto"')
    )
    notes = [e["text"] for e in write_and_parse(folder).all("p") if e.get("class") == "warning"]
    assert notes == [
        "run is unfinished: FedAvg 2 of 6 rounds.",
        "run has not begun with ditto.",
        "run has no digests.json, so nothing in it can be verified.",
    ]


def test_files_are_checked_against_their_digests(tmp_path):
    folder = made_up(tmp_path / "run", ("fedala", "fedavg"), sealed=True, has_metrics=True)
    sentences = []
    page.write([folder.path], say=sentences.append)
    assert sentences == []
    for name in (
        "history.csv",
        "clients.csv",
        "metrics.csv",
        "weights.csv",
        "split.csv",
        "summary.json",
        "config.toml",
    ):
        text = (folder.path / name).read_text()
        for damaged in (text[: len(text) // 2], text.replace("1", "2", 1)):
            (folder.path / name).write_text(damaged)
            with pytest.raises(UserError, match=rf"{name} is damaged"):
                page.write([folder.path])
        (folder.path / name).unlink()
        if name in ("split.csv", "summary.json"):
            page.write([folder.path], say=sentences.append)
            assert (
                sentences.pop()
                == f"{folder.path / name} is missing; a run was about to write it, or has."
            )
        else:
            with pytest.raises(UserError, match=rf"{name} is damaged|is not a run folder"):
                page.write([folder.path])
        (folder.path / name).write_text(text)


def test_rows_newer_than_the_digests_are_unverified(tmp_path):
    folder = made_up(tmp_path / "run", ("fedala", "fedavg"), sealed=True, seeds=1, reached=2)
    folder.tables.add_history("fedavg", replace(folder.history()["fedavg"][-1], round=3))
    sentences = []
    page.write([folder.path], say=sentences.append)
    assert sentences == [
        f"1 of the rows in {folder.path / 'history.csv'} came after digests.json was written, "
        "so they are not verified."
    ]
    notes = [e["text"] for e in write_and_parse(folder).all("p") if e.get("class") == "warning"]
    assert notes[-1] == (
        "1 of the rows in run/history.csv came after digests.json was written, "
        "so they are not verified."
    )


def test_diverged_clients_and_resumptions_are_shown(tmp_path):
    folder = made_up(tmp_path / "run", ("fedala", "fedavg"), seeds=1)
    text = (folder.path / "history.csv").read_text().splitlines()
    assert text[0].endswith(",diverged,seconds")
    assert text[3].endswith(",0,0.5")
    text[3] = text[3].removesuffix(",0,0.5") + ",2,0.5"
    (folder.path / "history.csv").write_text("\n".join(text) + "\n")
    folder.tables.add_resumption("rounds: 3 → 6")
    folder.write_summary({"data": "partial: a tenth of it"})
    folder.drop_rows_from({}, Digests())
    for method in ("fedala", "fedavg"):
        folder.record_progress([method], is_finished=True)
    found = write_and_parse(folder)
    assert [e["text"] for e in found.all("p") if e.get("class") == "warning"] == [
        "The data of run: partial: a tenth of it.",
        "FedALA in run: 2 client rounds diverged and did not count.",
    ]
    assert any(e["text"].endswith("(rounds: 3 → 6)") for e in found.all("dd"))


def change_loss(folder):
    """Change the first loss of a history: the folder has results of its own."""
    path = folder.path / "history.csv"
    head, first, *rest = path.read_text().splitlines()
    cells = dict(zip(head.split(","), first.split(","), strict=True))
    changed = ",".join({**cells, "loss": "1.25"}.values())
    path.write_text("\n".join([head, changed, *rest]) + "\n")


def test_several_folders_have_distinct_labels(tmp_path):
    one, two = made_up(tmp_path / "a" / "one"), made_up(tmp_path / "a" / "two", ("fedala",))
    change_loss(two)  # the same options with other results, as from another version
    for given in ([one.path, two.path], [tmp_path / "a"]):
        out = page.write(given, tmp_path / "both.html")
        labels = [s["label"] for s in data_of(Parsed(out.read_text(encoding="utf-8")))["series"]]
        assert labels == ["FedALA · one", "FedAvg", "Local", "FedALA · two"]
    with pytest.raises(UserError, match="name its file"):
        page.write([one.path, two.path])


def cells(path, *names, **options):
    """Make run folders as `fedala paper run` does: setting, cell, seeds."""
    return [
        made_up(path / setting / cell / "seeds-0-1", (cell.partition(",")[0],), **options).path
        for setting, cell in (name.split("/") for name in names)
    ]


def test_folders_are_named_by_the_different_parts_of_their_paths(tmp_path):
    made = cells(tmp_path / "paper", "mnist/fedala", "mnist/fedala,shuffled", "mnist/fedavg")
    (tmp_path / "paper" / "mnist" / "ditto" / "seeds-0-1").mkdir(parents=True)
    (tmp_path / "paper" / "mnist" / "ditto" / "seeds-0-1" / "config.toml").write_text(
        'method = "ditto"'
    )  # not begun
    for given in (made, [*made, made[0]], [tmp_path / "paper"], [tmp_path / "paper" / "mnist"]):
        assert [run.name for run in find_runs(given)] == ["fedala", "fedala,shuffled", "fedavg"]
    made += cells(tmp_path / "paper", "cifar/fedala")
    assert [run.name for run in find_runs(made[-2:])] == ["mnist/fedavg", "cifar/fedala"]
    assert [run.name for run in find_runs(made[:1])] == ["seeds-0-1"]


def test_a_unique_method_is_named_without_its_folder(tmp_path):
    alike = cells(tmp_path, "mnist/fedala", "mnist/fedavg")
    assert [one.label for one in list_series(find_runs(alike))] == ["FedALA", "FedAvg"]
    other = made_up(tmp_path / "cifar" / "local" / "seeds-0-1", ("local",))
    (other.path / "config.toml").write_text(
        (other.path / "config.toml").read_text().replace("digits", "cifar10")
    )
    labels = [one.label for one in list_series(find_runs([*alike, other.path]))]
    assert labels == [
        "FedALA, dataset=digits",
        "FedAvg, dataset=digits",
        "Local, dataset=cifar10",
    ]


def list_labels(*folders):
    return [one.label for one in list_series(find_runs([folder.path for folder in folders]))]


def test_a_baseline_that_several_folders_share_is_listed_once(tmp_path):
    one = made_up(tmp_path / "one", set={"fedala.layers": 1})
    two = made_up(tmp_path / "two", set={"fedala.layers": 2})
    change_loss(two)  # that of FedALA, the first method
    assert list_labels(one, two) == ["FedALA, layers=1", "FedAvg", "Local", "FedALA, layers=2"]
    three = made_up(tmp_path / "three", ("fedavg",), lr=0.5)  # the same figures, other options
    assert list_labels(one, three) == [
        "FedALA, lr=default",
        "FedAvg, lr=default",
        "Local, lr=default",
        "FedAvg, lr=0.5",
    ]
    more = made_up(tmp_path / "more", ("fedavg",), seeds=3)
    assert list_labels(one, more) == ["FedALA", "FedAvg, seeds=2", "Local", "FedAvg, seeds=3"]


def test_a_default_is_a_value_like_any_other(tmp_path):
    plain = made_up(tmp_path / "plain", ("fedala",))
    same = made_up(tmp_path / "same", ("fedala",), set={"fedala.layers": 1})
    assert list_labels(plain, same) == ["FedALA"]
    other = made_up(tmp_path / "other", ("fedala",), set={"fedala.layers": 2})
    assert list_labels(plain, other) == ["FedALA, layers=1", "FedALA, layers=2"]


def test_a_folder_of_an_earlier_version_is_comparable(tmp_path):
    new, old = made_up(tmp_path / "new", ("fedavg",)), made_up(tmp_path / "old", ("local",))
    config = (old.path / "config.toml").read_text()
    (old.path / "config.toml").write_text(config.replace('split = "given"\n', ""))
    [one, two] = find_runs([new.path, old.path])
    assert one.config.keys() != two.config.keys()
    assert one.is_comparable_to(two)


def test_the_rounds_of_the_best_models_and_of_early_stops(tmp_path):
    folder = made_up(tmp_path / "run", ("fedavg",), patience=2, validation=0)
    lines = (folder.path / "history.csv").read_text().splitlines()
    names = lines[0].split(",")
    kept = [lines[0]]
    for line in lines[1:]:
        cells = dict(zip(names, line.split(","), strict=True))
        if cells["seed"] == "1" and int(cells["round"]) in (3, 4):
            cells["accuracy"] = "0.1"
        if cells["seed"] == "0" or int(cells["round"]) <= 4:
            kept.append(",".join(cells.values()))
    (folder.path / "history.csv").write_text("\n".join(kept) + "\n")
    found = Parsed(page.write([folder.path]).read_text(encoding="utf-8"))
    assert "6, 2 (4)" in [e["text"] for e in found.all("td")]


def test_methods_are_compared_within_comparable_folders(tmp_path):
    """The first three folders are comparable, the last two differ in clients and in lr."""
    made = cells(tmp_path, "a/ditto", "a/fedavg", "a/local")
    made += cells(tmp_path, "b/ditto", clients=5) + cells(tmp_path, "c/ditto", lr=0.5)
    found = Parsed(page.write(made, tmp_path / "x.html").read_text(encoding="utf-8"))
    assert data_of(found)["kinds"] == [0, 0, 0, 3, 4]
    rows = [e["text"] for e in found.all("tr") if "±" in e["text"] and "lr=" in e["text"]]
    apart = 100 * np.mean(
        [accuracy("ditto", seed, 6) - accuracy("fedavg", seed, 6) for seed in (0, 1)]
    )
    assert [f"{apart:+.2f}" in row for row in rows] == [
        True,
        False,
        True,
        False,
        False,
    ]  # Local is made up as Ditto is
    against = [e["text"] for e in found.all("table") if e["text"].startswith("Against")]
    assert len(against) == 2
    assert all("clients=4, lr=default" in text for text in against)
    assert not any("clients=5" in text or "lr=0.5" in text for text in against)
    alone = Parsed(
        page.write(made[1:2] + made[3:], tmp_path / "y.html").read_text(encoding="utf-8")
    )
    assert not [
        e for e in alone.all("option") if e["text"].startswith("difference to")
    ]  # there is nothing to compare


def test_different_data_have_no_common_highest_accuracy(tmp_path):
    made = cells(tmp_path, "a/ditto", "a/fedavg")
    one = page.write(made, tmp_path / "x.html").read_text(encoding="utf-8")
    made += cells(tmp_path, "b/ditto", dataset="mnist")
    two = page.write(made, tmp_path / "y.html").read_text(encoding="utf-8")
    assert "Highest test accuracy in the best round, which is picked on test data" in one
    assert "Highest test accuracy" not in two
    assert [len(Parsed(text).all("strong")) for text in (one, two)] == [
        2,
        4,
    ]  # best and last round of each


def test_rounds_and_seconds_to_an_accuracy(tmp_path):
    """Evaluated in rounds 0, 3 and 6 at 0.5 s each: until round 3 there are four rounds, so 2 s."""
    folder = made_up(tmp_path / "run", ("fedavg",), seeds=3, rounds=6)
    lines = (folder.path / "history.csv").read_text().splitlines()
    kept = [line for line in lines if line.split(",")[2] in ("round", "0", "3", "6")]
    (folder.path / "history.csv").write_text("\n".join(kept) + "\n")
    [result] = read_run(folder.path).results.values()
    assert sum_seconds(result.history) == {0: 0.5, 3: 2.0, 6: 3.5}
    wanted = accuracy("fedavg", 1, 3)  # seed 0 is a little lower there, seed 2 a little higher
    assert find_target_rounds(result, [wanted]) == [([6, 3, 3], [3.5, 2.0, 2.0])]
    assert find_target_rounds(result, [2.0]) == [([None] * 3, [None] * 3)]


def test_means_skip_missing_values():
    mean, deviation = mean_std(np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan]]))
    np.testing.assert_array_equal(mean, [2, 4, np.nan])
    np.testing.assert_array_equal(deviation, [1, 0, np.nan])


def test_an_infinite_score_reads_the_same_everywhere(tmp_path):
    """Seed 0 ends with an infinite error, seed 1 does not: so the mean is infinite, and no spread.

    The chart draws no point there: the mean of the other run is not the method's.
    """
    folder = made_up(tmp_path / "run", ("fedavg", "local"), loss="mse")
    for name, first in (("history.csv", "fedavg,0,6,"), ("clients.csv", "fedavg,0,6,0,10,")):
        head, *lines = (folder.path / name).read_text().replace("accuracy", "mse").splitlines()
        for i, line in enumerate(lines):
            if line.startswith(first):
                rest = line.removeprefix(first).split(",", 1)[1]
                lines[i] = f"{first}inf,{rest}"
        (folder.path / name).write_text("\n".join([head, *lines]) + "\n")
    found = write_and_parse(folder)
    rows = [row["text"].strip() for row in found.all("tr")]
    assert any(row.startswith("FedAvg") and "inf––" in row for row in rows)  # the last round
    assert any(row.startswith("6inf") for row in rows)  # the curve as a table
    assert any(row.startswith("010inf") for row in rows)  # client 0 with its 10 test samples
    assert "0+inf" in rows  # its difference to Local
    assert not any("nan" in row for row in rows)
    curve = data_of(found)["series"][0]["values"]["mse"]
    assert [run[6] for run in curve] == [None, None]
    assert None not in curve[0][:6]
    figure = describe_spread(np.array([np.inf, 1.0]))
    assert format_figure(MSE, figure) == "inf"


EVIL = """</script><script>alert(1)</script><img src=x onerror="alert('2')">&amp;\u2028]]>"""


@pytest.fixture
def hostile(tmp_path):
    """Make a folder in which every string is a script."""
    folder = made_up(
        tmp_path / "run",
        (f"ala{EVIL.replace(',', '')}", "fedavg"),
        parameters=(EVIL, "b"),
        class_names=(EVIL, "x", EVIL),
        dataset=EVIL,
        partition=EVIL,
        device=EVIL,
    )
    summary = {"command": EVIL, "versions": {EVIL: EVIL}, "methods": {"fedavg": {"title": EVIL}}}
    folder.write_summary(summary)
    return folder


def test_nothing_in_a_folder_becomes_markup(hostile):
    found = write_and_parse(hostile)
    assert [e.get("type") for e in found.all("script")] == ["application/json", None]
    assert not found.all("img")
    assert not [key for e in found.elements for key in e if key.startswith("on")]
    assert "<script>alert(1)" in found.all("title")[0]["text"]
    data = data_of(found)
    assert data["series"][1]["label"] == EVIL
    assert data["weights"][0]["parameters"] == [EVIL, "b"]
    assert data["splits"][0]["classes"] == [EVIL, "x", EVIL]


def test_the_script_and_style_of_the_page_are_the_only_ones_allowed(tmp_path):
    found = write_and_parse(made_up(tmp_path / "run"))
    [policy] = [
        e["content"] for e in found.all("meta") if e.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")
    for element in (found.all("script")[-1], *found.all("style")):
        digest = base64.b64encode(hashlib.sha256(element["text"].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not [e for e in found.elements if "style" in e or e.get("src")]
    assert all(e["href"].startswith("#") for e in found.elements if "href" in e)


def test_templates_escape_every_value():
    template = html._environment("fedala.report").from_string(
        "{% from 'macros.html.j2' import table %}{{ table(view) }}{{ data | tojson }}"
    )
    cells = ['"><x', Cell("a<b", style='k"&')]
    text = template.render(view=Table("<i>&", ["'"], [cells]), data=html.replace_nan(["</", 1e999]))
    assert 'aria-label="&lt;i&gt;&amp;"' in text
    assert '<th scope="col">&#39;</th>' in text
    assert '<th scope="row">&#34;&gt;&lt;x</th>' in text
    assert '<td><span class="k&#34;&amp;">a&lt;b</span></td>' in text
    assert text.endswith('["\\u003c/",null]')


def test_a_name_that_a_template_lacks_is_an_error():
    template = html._environment("fedala.report").from_string("{{ nothing }}")
    with pytest.raises(UndefinedError):
        template.render()


def test_without_jinja_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html._environment.cache_clear()
    with pytest.raises(
        UserError, match=r"An HTML report needs Jinja2: pip install 'fedala\[cli\]'"
    ):
        page.write([made_up(tmp_path / "run").path])


def test_the_page_of_a_run_is_always_the_same(tmp_path):
    folder = made_up(tmp_path / "run")
    first, second = (page.write([folder.path]).read_bytes() for _ in range(2))
    assert first == second


def test_everything_has_a_name(tmp_path):
    found = write_and_parse(made_up(tmp_path / "run"))
    identifiers = [e["id"] for e in found.elements if "id" in e]
    assert len(identifiers) == len(set(identifiers))
    for attribute in ("aria-labelledby", "for"):
        assert {e[attribute] for e in found.elements if attribute in e} <= set(identifiers)
    assert {e["href"][1:] for e in found.all("a")} <= set(identifiers)
    for landmark in ("header", "nav", "main"):
        assert len(found.all(landmark)) == 1
    assert all(
        e["text"]
        for e in found.all("caption") + found.all("figcaption") + found.all("h1") + found.all("h2")
    )
    assert len(found.all("caption")) == len(found.all("table"))
    assert all(e.get("scope") in ("row", "col") for e in found.all("th"))
    assert all("label" in e["inside"] for e in found.all("select") + found.all("input"))
    charts = [e for e in found.elements if "data-chart" in e]
    assert len(charts) == len(found.all("figure")) == 8
    assert len([e for e in found.all("table") if "figure" in e["inside"]]) >= len(charts)
    assert all("aria-labelledby" in e for e in charts)
    assert found.all("html")[0]["lang"] == "en"
