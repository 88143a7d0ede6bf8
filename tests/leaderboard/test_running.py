"""`fedala leaderboard run`: cells run once, continue after a stop, and test both models."""

import csv
from dataclasses import replace

import pytest
from board_results import call

from fedala.cells import running
from fedala.cells.curves import read_curve
from fedala.cells.progress import CellProgress
from fedala.cli.cells import _list_arguments
from fedala.data import load
from fedala.errors import UserError
from fedala.leaderboard.board import BOARD, choose_cells, choose_settings, list_published, settings
from fedala.methods import catalogue, list_methods, registry
from fedala.paper import experiments
from fedala.runs.folder import RunFolder

METHODS = "local,fedavg"


@pytest.fixture
def few_digits(monkeypatch):
    """Let runs have a sixth of the digits, so that a round takes a moment."""
    digits = load("digits")
    few = replace(digits, x=digits.x[::6], y=digits.y[::6])
    monkeypatch.setattr(running, "load", lambda name, folder: few)


def run(out, *options, method=METHODS, rounds=2):
    return call("run", "--method", method, "--rounds", rounds, "--out", out, *options)


def read_lines(out):
    """Return the lines of results.csv, without seconds, by method."""
    with (out / "results.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        del line["seconds_per_round"]
    return {line["method"]: line for line in lines}


def test_an_interrupted_command_continues_to_the_same_results(few_digits, tmp_path, monkeypatch):
    follow = CellProgress.row

    def interrupt(self, cell, row):
        follow(self, cell, row)
        if cell == "digits/fedavg" and row.round == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellProgress, "row", interrupt)
        stopped = run(tmp_path / "a")
    assert stopped.exit_code == 130
    assert "the same command continues" in stopped.stderr
    assert read_lines(tmp_path / "a")["fedavg"]["rounds"] in ("0", "1")
    again = run(tmp_path / "a")
    assert again.exit_code == 0, again.output
    assert "Cells: 1 run, 1 finished before (of 2)." in again.stdout
    assert run(tmp_path / "b", method="fedavg").exit_code == 0
    lines = read_lines(tmp_path / "a")
    assert lines["fedavg"] == read_lines(tmp_path / "b")["fedavg"]
    check_line_matches_metrics(tmp_path / "a", lines["fedavg"])
    assert call("report", tmp_path / "a").exit_code == 0


def check_line_matches_metrics(out, line):
    """Compare a line of results.csv with what the run noted about both kinds of models."""
    rows = RunFolder(out / "digits" / "fedavg" / "seeds-0-0").rows("metrics.csv")
    for kind, prefix in (("initialized", ""), ("trained", "trained_")):
        own = {row["round"]: row for row in rows if row["model"] == kind}
        column, at = ("best", "best_round") if not prefix else ("trained", "trained_round")
        best = max(own.values(), key=lambda row: row["accuracy"])
        assert float(line[column]) == pytest.approx(best["accuracy"], rel=1e-5)
        assert int(line[at]) == best["round"]
        assert float(line[f"{prefix}mean"]) == pytest.approx(best["accuracy_mean"], rel=1e-5)
        assert float(line[f"{prefix}worst"]) == pytest.approx(best["accuracy_worst"], rel=1e-5)
        curve = dict(read_curve(line[f"{prefix}curve"]))
        assert curve == {number: round(row["accuracy"], 4) for number, row in own.items()}
    assert int(line["bytes_sent"]) == 4 * int(line["sent"])
    assert int(line["bytes_uploaded"]) == 4 * int(line["uploaded"])


def test_every_method_is_a_row_with_and_without_ala():
    [digits] = choose_settings(["digits"])
    cells = choose_cells([digits], [], shuffle=False, rounds=None)
    assert [cell.method for cell in cells] == list_methods()
    assert {"ditto", "ditto+ala", "fedala", "fedavg"} <= {cell.method for cell in cells}
    assert len(choose_settings(["all"])) == len(settings())


def test_fedavg_with_ala_is_fedala():
    [cell] = choose_cells(choose_settings(["digits"]), ["FedAvg+ALA"], shuffle=False, rounds=None)
    assert cell.method == "fedala"


FEDOWN = """from dataclasses import dataclass
from fedala.methods.fedavg import FedAvg
@dataclass(frozen=True)
class FedOwn(FedAvg):
    name, title, summary = 'fedown', 'FedOwn', 'mine'
"""


def test_an_error_in_a_users_method_ends_its_cell_alone(few_digits, own_code, tmp_path):
    path = own_code / "fedown.py"
    path.write_text(f"{FEDOWN}    def train(self, *_):\n        raise KeyError('c')\n")
    result = run(tmp_path / "out", "--import", path, method="fedown,fedavg", rounds=1)
    assert result.exit_code == 1
    assert "KeyError: 'c' (fedown.py, line 7)" in result.output
    assert "Traceback" not in result.output
    assert read_lines(tmp_path / "out")["fedavg"]["rounds"] == "1"


def test_a_users_own_method_is_a_row(few_digits, own_code, tmp_path):
    path = own_code / "fedown.py"
    path.write_text(FEDOWN)
    result = run(tmp_path / "out", "--import", path, method="fedown", rounds=1)
    assert result.exit_code == 0, result.output
    assert read_lines(tmp_path / "out").keys() == {"fedown"}
    before = (tmp_path / "out" / "results.csv").read_bytes()
    registry._own_classes().pop("fedown")  # as on another machine
    catalogue.cache_clear()
    answer = call("report", tmp_path / "out")
    assert answer.exit_code == 0, answer.output
    assert " FedOwn " in answer.stdout
    assert "FedOwn" in (tmp_path / "out/report/leaderboard/index.html").read_text()
    assert (tmp_path / "out" / "results.csv").read_bytes() == before


def test_the_list_has_a_users_own_method(own_code):
    (own_code / "fedown.py").write_text(FEDOWN)
    answer = call("list", "--import", own_code / "fedown.py")
    assert answer.exit_code == 0, answer.output
    methods = answer.stdout.rpartition("methods: ")[2].strip().split(", ")
    assert {"fedown", "fedown+ala", "fedala"} <= set(methods)


def test_imports_can_be_given_several_times(few_digits, own_code, tmp_path):
    """Processes of --jobs get all of them, too."""
    for name in ("fedown", "fedtoo"):
        text = FEDOWN.replace("FedOwn", name.title()).replace("fedown", name)
        (own_code / f"{name}.py").write_text(text)
    imports = [word for name in ("fedown", "fedtoo") for word in ("--import", f"{name}.py")]
    result = run(tmp_path / "out", *imports, method="fedown,fedtoo", rounds=1)
    assert result.exit_code == 0, result.output
    assert read_lines(tmp_path / "out").keys() == {"fedown", "fedtoo"}
    order = running.RunOptions(tmp_path / "out", imports="fedown.py,fedtoo.py")
    assert "--import=fedown.py,fedtoo.py" in _list_arguments(order)


def test_settings_are_the_papers():
    for name, paper in experiments.settings().items():
        if name in settings():
            assert replace(settings()[name], title="") == paper
    assert len(settings().keys() & experiments.settings().keys()) == 5
    for setting in settings().values():
        assert setting.data.name == setting.dataset
        assert choose_cells([setting], ["fedala"], shuffle=False, rounds=None)


def test_published_numbers_are_the_papers_and_those_of_later_publications():
    published = list_published("cifar100-dir")
    ahead = {name for name, one in published.items() if one.accuracy > 55.92 and "+" not in name}
    assert published["fedala"].accuracy == 55.92
    assert published["fedavg"].accuracy == 31.89
    assert published["ditto+ala"].accuracy == 56.33
    assert ahead == {"fedcp", "gpfl", "feddbe"}
    assert "table 2" in published["fedala"].source
    assert all(one.source and one.note for one in published.values())
    assert list_published("digits") == {}


@pytest.mark.parametrize(
    ("name", "rounds", "found"),
    [
        ("fedala", 10, "fedala"),
        ("fedphp,rounds=10", 10, "fedphp"),
        ("fedphp", 10, None),
        ("elsewhere,shuffled", 10, "elsewhere"),
        ("elsewhere,rounds=10", 10, "elsewhere"),
        ("elsewhere,rounds=9", 10, None),
        ("../fedala", 10, None),
    ],
)
def test_a_folder_name_says_which_cell_it_is(name, rounds, found):
    cell = BOARD.find_cell("digits", name, rounds)
    assert (cell and cell.method) == found


def test_unknown_names_are_refused_with_a_suggestion(tmp_path):
    with pytest.raises(UserError, match=r"no setting cifar100 \(did you mean cifar100-dir"):
        choose_settings(["cifar100"])
    refused = call("run", "--method", "fedalla", "--out", tmp_path / "out")
    assert (refused.exit_code, "did you mean fedala" in refused.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
