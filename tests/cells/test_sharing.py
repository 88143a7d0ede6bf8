"""A cell that is run once counts in the paper's tables and on the leaderboard."""

import csv
from dataclasses import replace
from itertools import permutations

import board_results
import numpy as np
import paper_results
import pytest
from board_results import make_result, write_table
from paper_results import read_csv

from fedala.cells import running
from fedala.cells.cell import Cell
from fedala.cells.observer import Outcome
from fedala.cells.results import OLD_COLUMNS, Results
from fedala.cli.cells import read_folders
from fedala.leaderboard.board import BOARD
from fedala.paper.experiments import PAPER
from fedala.runs.folder import RunFolder

BOTH = {"paper": paper_results.call, "leaderboard": board_results.call}
BASE = make_result()
SETTING = "cifar10-dir"


def list_cells(results):
    return {seed.cell[:3] for seed in results.seeds}


def read_lines(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_line_counts_in_both_reports(tmp_path):
    write_table(tmp_path / "gpu.csv", BASE)
    for _ in range(2):  # a report is not read as results
        for command, call in BOTH.items():
            answer = call("report", tmp_path)
            assert answer.exit_code == 0, answer.output
            assert f"Written: {tmp_path / 'report' / command}" in answer.stdout
    [own] = read_lines(tmp_path / "report" / "paper" / "tables.csv")[:1]
    assert (own["method"], own["ours"], own["trained"]) == ("fedala", "56.0", "57.0")
    lines = read_lines(tmp_path / "report" / "leaderboard" / "leaderboard.csv")
    [own] = [line for line in lines if line["accuracy"]]
    assert (own["method"], own["accuracy"], own["trained"]) == ("fedala", "56.0", "57.0")


def test_an_older_csv_lacks_trained_models_and_curves(tmp_path):
    path = write_table(tmp_path / "old.csv", BASE, columns=OLD_COLUMNS)
    [result] = read_csv(path)
    assert (result.best, result.version) == (BASE.best, BASE.version)
    assert result.trained is result.mean is result.bytes_sent is None
    assert result.curve == result.trained_curve == ""
    for call in BOTH.values():
        assert call("report", tmp_path).exit_code == 0
    assert {row["trained"] for row in read_lines(tmp_path / "report/paper/tables.csv")} == {""}


@pytest.mark.parametrize(
    "columns", [OLD_COLUMNS[:-1], [*OLD_COLUMNS, "mean"], [*OLD_COLUMNS[1:], OLD_COLUMNS[0]]]
)
def test_other_columns_are_refused(tmp_path, columns):
    write_table(tmp_path / "x.csv", BASE, columns=columns)
    for call in BOTH.values():
        answer = call("report", tmp_path)
        assert (answer.exit_code, "is not a csv of results" in answer.stderr) == (2, True)


def test_cells_that_only_one_has_are_left_out_of_the_other(tmp_path):
    shared = replace(BASE, method="ditto+ala")
    of_paper = [
        replace(BASE, setting="tiny-dir", set="fedala.layers=2"),
        replace(BASE, setting="mnist-dir"),
    ]
    of_board = [
        replace(BASE, setting="digits"),
        replace(BASE, method="fedcp"),
        replace(BASE, setting=SETTING, method="ditto+ala"),
        replace(BASE, method="elsewhere"),
    ]
    write_table(tmp_path / "all.csv", shared, *of_paper, *of_board)
    everything = Results([shared, *of_paper, *of_board])
    assert list_cells(read_folders(tmp_path)) == list_cells(everything)
    for collection, own in ((PAPER, of_paper), (BOARD, of_board)):
        found = read_folders(tmp_path, shown=collection)
        assert list_cells(found) == list_cells(Results([shared, *own]))
    assert call_report(tmp_path, "paper").startswith("3 of the paper's")
    write_table(tmp_path / "all.csv", *of_board)
    assert BOTH["paper"]("report", tmp_path).exit_code == 2
    write_table(tmp_path / "all.csv", *of_paper)
    assert "no result to report" in BOTH["leaderboard"]("report", tmp_path).stderr


def test_a_line_of_an_unknown_method_is_left_out_of_the_papers_tables_and_named(tmp_path):
    misspelt = replace(BASE, method="fedavgg")
    write_table(tmp_path / "x.csv", BASE, misspelt, replace(BASE, method="fedcp"))
    write_table(tmp_path / "y.csv", replace(misspelt, seed=1))
    sentence = (
        f"Note: {tmp_path / 'x.csv'}, line 3 and 1 more: left out, because there is no method "
        "fedavgg here. If its name is misspelt, correct it: fedala methods lists all names.\n"
    )
    answer = BOTH["paper"]("report", tmp_path)
    # FedCP is left out without a word: only the leaderboard has it.
    assert [line for line in answer.stderr.splitlines(keepends=True) if "left out" in line] == [
        sentence
    ]
    board = BOTH["leaderboard"]("report", tmp_path)
    assert "left out" not in board.stderr
    assert "fedavgg" in board.stdout
    write_table(tmp_path / "x.csv", misspelt)
    (tmp_path / "y.csv").unlink()
    refused = BOTH["paper"]("report", tmp_path)
    assert (refused.exit_code, "line 2: left out" in refused.stderr) == (2, True)


def call_report(folder, command):
    """Return the text of the Markdown file of a report."""
    answer = BOTH[command]("report", folder)
    assert answer.exit_code == 0, answer.output
    [path] = (folder / "report" / command).glob("*.md")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"setting": "cifar100-dirr"}, "there is no setting cifar100-dirr (did you mean cifar100-"),
        ({"setting": "mnist-dir", "method": "fedcp"}, "there is no cell of fedcp in mnist-dir"),
        ({"setting": "digits", "set": "fedala.layers=2"}, "there is no cell of fedala with fedala"),
        ({"trained": 1.5}, "trained must be at most 1"),
        ({"trained_round": 201}, "trained_round must not be greater than rounds"),
        ({"trained_final": 0.58}, "trained_final must not be greater than trained"),
    ],
)
@pytest.mark.parametrize("command", BOTH)
def test_what_neither_has_is_refused(tmp_path, command, changes, sentence):
    write_table(tmp_path / "x.csv", {**vars(BASE), **changes})
    answer = BOTH[command]("report", tmp_path)
    assert answer.exit_code == 2
    assert f"x.csv, line 2: {sentence}" in answer.stderr


def test_of_two_equally_long_runs_the_one_with_trained_models_counts():
    old = replace(BASE, trained=None, where="old")
    for both in permutations([old, BASE]):
        results = Results(both)
        assert [seed.trained for seed in results.seeds] == [BASE.trained]
        assert not results.contradictions
    [sentence] = Results([BASE, replace(old, best=0.58)]).contradictions
    assert sentence.endswith("and of 58.00 % in old; the former is shown.")
    assert Results([BASE, replace(BASE, trained=0.6)]).contradictions


def test_a_longer_run_has_trained_models_from_a_shorter_one():
    longer = replace(BASE, trained=None, trained_final=None, trained_curve="", rounds=201)
    shorter = replace(BASE, rounds=100, best_round=90, trained=0.5)
    cell = Cell(BOARD.settings[BASE.setting], BASE.method)
    for order in permutations([BASE, longer, shorter]):
        results = Results(order)
        assert results.seeds == [longer]
        found = results.find(cell)
        [seed] = found.seeds
        assert (seed.rounds, seed.best, seed.trained) == (201, longer.best, BASE.trained)
        assert (seed.trained_final, seed.trained_curve) == (BASE.trained_final, BASE.trained_curve)
        assert f"trained models tested in {BASE.rounds} rounds" in found.changes
    assert not any("trained" in change for change in Results([BASE]).find(cell).changes)


LONGER = replace(BASE, trained=None, trained_final=None, trained_curve="", rounds=201, planned=201)


@pytest.mark.parametrize("difference", [{"data": "partial: 9 of 10"}, {"eval_every": 10}])
def test_trained_models_from_other_data_or_rarer_tests_do_not_count(difference):
    """A table says how the longer run differs from its setting, not how the shorter one does."""
    cell = Cell(BOARD.settings[BASE.setting], BASE.method)
    other = replace(BASE, **difference)
    for order in permutations([LONGER, other]):
        [seed] = Results(order).find(cell).seeds
        assert seed == LONGER
    assert Results([replace(LONGER, **difference), other]).find(cell).trained == 100 * BASE.trained


def test_a_table_says_of_how_many_seeds_the_trained_models_were_tested():
    cell = Cell(BOARD.settings[BASE.setting], BASE.method)
    others = [replace(LONGER, seed=seed, rounds=100) for seed in (1, 2)]
    for first in (LONGER, BASE):
        found = Results([BASE, first, *others]).find(cell)
        assert found.trained == 100 * BASE.trained
        assert f"trained models tested in {BASE.rounds} rounds of 1 seed" in found.changes
    found = Results([BASE, replace(BASE, seed=1, rounds=100)]).find(cell)
    assert not any("trained" in change for change in found.changes)
    assert not any("trained" in change for change in Results(others).find(cell).changes)


def test_the_accuracy_from_a_shorter_run_is_kept_in_the_csv(tmp_path):
    """Its folder may be gone when a command writes the csv again."""
    cell = Cell(BOARD.settings[BASE.setting], BASE.method)
    shortest = replace(BASE, rounds=100, best_round=90, trained=0.5)
    path = tmp_path / "results.csv"
    Results([BASE, LONGER, shortest]).write(path)
    assert [seed.rounds for seed in read_csv(path)] == [BASE.rounds, 201]
    [seed] = Results(read_csv(path)).find(cell).seeds
    assert (seed.rounds, seed.trained, seed.trained_rounds) == (201, BASE.trained, BASE.rounds)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Make a folder with a very small CIFAR-10."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    y = np.arange(240) % 10
    x = random.integers(0, 255, (240, 3, 32, 32)).astype(np.uint8)
    np.savez(folder / "cifar10.npz", x=x, y=y)
    return folder


def run(command, data, out, method):
    names = ["table2", "--columns"] if command == "paper" else ["--settings"]
    options = ("--method", method, "--rounds", 1, "--seeds", 1, "--data-dir", data, "--out", out)
    answer = BOTH[command]("run", *names, SETTING, *options)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


@pytest.mark.parametrize("commands", list(permutations(BOTH)))
def test_a_finished_cell_of_one_command_is_not_run_by_the_other(data, tmp_path, commands):
    first, second = commands
    extra = {"paper": "fedprox", "leaderboard": "local"}
    assert "Cells: 2 run (of 2)." in run(first, data, tmp_path, f"fedavg,{extra[first]}")
    said = run(second, data, tmp_path, f"fedavg,{extra[second]}")
    assert "Cells: 1 run, 1 finished before (of 2)." in said
    lines = read_lines(tmp_path / "results.csv")  # the lines of both commands
    assert [line["method"] for line in lines] == ["fedavg", "fedprox", "local"]
    assert all(line["trained"] and line["trained_curve"] for line in lines)
    assert "2 of the paper's" in call_report(tmp_path, "paper")
    assert "3 cells in 1 setting have been run" in call_report(tmp_path, "leaderboard")


class EndRecorder:
    """Notes how cells end."""

    def __init__(self):
        self.ends = []

    def row(self, cell, row):
        pass

    def end(self, cell, outcome, reason=""):
        self.ends.append(outcome)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_an_older_run_folder_is_read_and_gets_more_rounds(
    data, tmp_path, monkeypatch, has_checkpoint
):
    """With its checkpoint, it continues as it began; without, it runs again and tests both."""
    cell = BOARD.find_cell(SETTING, "fedavg", None)
    make_config = running._new_config

    def run_cell(rounds):
        options = running.RunOptions(tmp_path, rounds, 1, data, device="cpu")
        observer = EndRecorder()
        running.run_cells([cell], replace(options, keep_checkpoints=has_checkpoint), observer)
        return observer.ends

    with monkeypatch.context() as patch:
        patch.setattr(
            running, "_new_config", lambda *a: replace(make_config(*a), evaluate="initialized")
        )
        run_cell(1)
    for collection in (PAPER, BOARD):
        [old] = read_folders(tmp_path, shown=collection).seeds
        assert (old.rounds, old.trained, old.trained_curve) == (1, None, "")
        assert old.curve.startswith("0:")
    assert run_cell(1) == [Outcome.FINISHED_BEFORE]
    assert run_cell(2) == [Outcome.DONE]
    [longer] = read_folders(tmp_path, shown=PAPER).seeds
    assert (longer.rounds, longer.trained is None) == (2, has_checkpoint)
    config = RunFolder(tmp_path / SETTING / "fedavg" / "seeds-0-0").config()
    assert config.evaluate == ("initialized" if has_checkpoint else "initialized,trained")
