"""Methods of a user's own on Flower: they are parts of the app, and a run config names no code."""

import importlib
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import InProcessGrid
from methods.test_your_own import METHOD
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.errors import UserError
from fedala.flower.experiment import read_run_config
from fedala.flower.server import serve
from fedala.methods import catalogue, registry
from fedala.runs import rehearsal
from fedala.runs.folder import RunFolder

SOURCE = METHOD.replace("@register\n", "").replace('"fedsim"', '"mine"')


@pytest.mark.parametrize(
    "options", [{"imports": "mine.py"}, {"model": "net.py:make"}, {"model": "net:make"}]
)
def test_a_run_config_cannot_make_a_node_execute_code(own_code, options):
    trap = "from pathlib import Path\nPath('executed').touch()\n"
    for name in ("mine.py", "net.py"):
        (own_code / name).write_text(trap)
    with pytest.raises(UserError, match=r"app\.py"):
        read_run_config({"method": "fedavg", "dataset": "digits", **options})
    assert not (own_code / "executed").exists()


def test_an_imported_method_becomes_a_part_of_the_app(own_code, monkeypatch):
    rehearsed = []
    monkeypatch.setattr(rehearsal, "_rehearse_rounds", lambda *given: rehearsed.append(given))
    (own_code / "mine.py").write_text(SOURCE)
    options = "--method mine --clients 2 --rounds 1 --partition iid --batch-size 200"
    command = ["flower", "new", "new-app", "--import", "mine.py", *options.split()]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    assert (own_code / "new-app" / "mine.py").read_text() == SOURCE
    assert "imports" not in (own_code / "new-app" / "pyproject.toml").read_text()
    # A node has the app, and no method of this name before it loads the app.
    del registry._own_classes()["mine"]
    catalogue.cache_clear()
    sys.path.insert(0, str(own_code / "new-app"))  # of a list that `own_code` takes back
    importlib.invalidate_caches()
    loaded = importlib.import_module("app")
    values = {"method": "mine", "dataset": "digits", "partition": "iid", "clients": 2, "rounds": 1,
              "batch_size": 200, "out": str(own_code), "experiment": "here"}  # fmt: skip
    grid = InProcessGrid(loaded.client, 2, own_code / "states", values)
    result = serve(grid, values)
    assert list(RunFolder(own_code / "here").history()) == ["mine"] == list(result.methods)
    assert len(rehearsed) == 2  # by `flower new` and by the server, and by no client


@pytest.mark.parametrize("name", ["app.py", "not-a-name.py"])
def test_files_that_an_app_cannot_import(own_code, name):
    (own_code / name).write_text(SOURCE)
    answer = CliRunner().invoke(app, ["flower", "new", "x", "--import", name, "--method", "mine"])
    assert answer.exit_code == 2
    assert "cannot be a part of an app" in answer.stderr
    assert not (own_code / "x").exists()
