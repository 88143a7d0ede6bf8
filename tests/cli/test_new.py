"""`fedala new method`: what it writes can be tested and run at once."""

import importlib.util
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import fedala
from fedala.cli.app import app
from fedala.methods import catalogue, make


def call(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments], prog_name="fedala")


def test_the_tests_that_it_writes_pass_and_can_fail(own_code, tmp_path, monkeypatch):
    answer = call("new", "method", "Fed-Mine", "--out", "mine")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.startswith("Written: mine/fed_mine.py, mine/test_fed_mine.py\n")
    monkeypatch.syspath_prepend(own_code / "mine")
    path = own_code / "mine" / "test_fed_mine.py"
    spec = importlib.util.spec_from_file_location("test_fed_mine", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tests.test_a_client_starts_between_the_received_model_and_its_own()
    tests.test_lanes_are_independent()
    tests.test_a_resumed_run_is_the_same_to_the_bit(tmp_path)
    assert len([name for name in vars(tests) if name.startswith("test_")]) == 3
    assert make("fed-mine", {"fed-mine.keep": 0.25}).keep == 0.25
    assert catalogue()["fed-mine"].takes_ala
    # It does not matter whether a round depends on the number of rounds.
    method = sys.modules["fed_mine"].FedMine
    with monkeypatch.context() as patch:
        patch.setattr(method, "schedule_depends_on_rounds", True)
        (tmp_path / "scheduled").mkdir()
        tests.test_a_resumed_run_is_the_same_to_the_bit(tmp_path / "scheduled")
    # A method whose lanes depend on each other is found out.
    initialize = method.initialize

    def mix_lanes(self, cohort, received, state):
        model, state = initialize(self, cohort, received, state)
        return {name: value + 0.001 * value.mean(0) for name, value in model.items()}, state

    monkeypatch.setattr(method, "initialize", mix_lanes)
    with pytest.raises(AssertionError):
        tests.test_lanes_are_independent()


def test_an_error_in_code_of_ones_own_is_shown_from_there_on(own_code):
    assert call("new", "method", "FedMine").exit_code == 0
    path = own_code / "fedmine.py"
    broken = path.read_text().replace("cohort.fit(", "cohort.fitt(")
    assert "fitt" in broken
    path.write_text(broken)
    arguments = ["--clients", 3, "--rounds", 1, "--partition", "iid", "--out", "run"]
    result = call("run", "--import", "fedmine.py", "--method", "fedmine", *arguments)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert "fedmine.py" in lines[start + 1]
    assert lines[start + 1].endswith(", in train")
    assert "AttributeError: 'Cohort' object has no attribute 'fitt'" in result.stderr
    assert lines[-1].startswith("Error: code of your own failed")
    assert "typer" not in result.stderr


@pytest.mark.parametrize(
    ("given", "name", "title"),
    [("FedMine", "fedmine", "FedMine"), ("my-thing", "my-thing", "MyThing"), ("x2", "x2", "X2")],
)
def test_names(own_code, given, name, title):
    assert call("new", "method", given).exit_code == 0
    text = (own_code / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    assert f'name = "{name}"' in text
    assert f"class {title}(Method):" in text
    again = call("new", "method", given)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_the_method_that_it_writes_can_refuse_ala_as_its_comment_says(own_code):
    """With ALA, `keep` has no effect, because only `initialize` uses it."""
    data = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    assert call("new", "method", "FedMine").exit_code == 0
    options = {"clients": 2, "partition": "iid", "rounds": 2, "device": "cpu"}
    options |= {"dataset": (data, np.arange(40) % 2), "imports": "fedmine.py"}

    def find_losses(method, keep):
        result = fedala.run(method=method, set={"fedmine.keep": keep}, **options)
        return [row.loss for row in result.history]

    assert find_losses("fedmine+ala", 0.1) == find_losses("fedmine+ala", 0.9)
    assert find_losses("fedmine", 0.1) != find_losses("fedmine", 0.9)
    path = own_code / "fedmine.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("    # refuses_ala = ", "    refuses_ala = "), encoding="utf-8")
    answer = call("run", "--import", path, "--method", "fedmine+ala", "--dataset", "digits")
    assert answer.exit_code == 2
    assert "it replaces the mixture, which is all that FedMine is." in answer.stderr


@pytest.mark.parametrize("name", ["a b", "2x", "fedala", "all", "class", "json", "ä", "-x"])
def test_names_that_are_refused(own_code, name):
    assert call("new", "method", "--", name).exit_code == 2
    assert not list(own_code.iterdir())
