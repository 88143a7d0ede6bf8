"""The examples, and the Python of the README, do what they say."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedala.cli.app import app as cli

ROOT = Path(__file__).parent.parent
#: Fewer steps than by default: what is shown is of the same kind.
QUICK = 'batch_size=100, set={"fedala.max_epochs": 2}'


def test_ala_in_your_own_loop_beats_the_global_model(capsys):
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "examples" / "own_loop.py")
    own_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_loop)
    with torch.random.fork_rng():
        results = own_loop.main(rounds=5)
    assert results["personal"] > results["global"] + 0.2
    assert "personal models" in capsys.readouterr().out


def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.read(ROOT / "examples" / "fedala_in_a_notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    given, small = "ROUNDS, CLIENTS, SEEDS = 10, 8, 2", "ROUNDS, CLIENTS, SEEDS = 1, 4, 1"
    assert given in cells[0].source
    cells[0].source = cells[0].source.replace(given, small)
    assert "    rounds=ROUNDS,\n" in cells[2].source
    cells[2].source = cells[2].source.replace("rounds=ROUNDS,", f"rounds=ROUNDS, {QUICK},")
    cells[-1].source += "\nassert 0 <= by_class.min() < by_class.max() <= 1"
    cells[-2].source += "\nassert len(says) == len(own) and set(says) <= set(digits.class_names)"
    cells[-3].source += "\nassert cube[:, 0, :, :, 0].min() == 1  # W starts at ones"
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    shown = [[dict(output.get("data", {})) for output in cell.outputs] for cell in cells]
    bars, table = shown[2][0], shown[2][-1]
    assert bars["text/plain"].splitlines()[-1] == "Report: runs/notebook/report.html"
    assert bars["text/html"].count('<progress value="1" max="1">') == 2
    assert "FedALA has the highest accuracy" in table["text/html"]
    assert "image/png" in shown[3][-1]
    assert "<table" in shown[4][-1]["text/html"]
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    first, second, third = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    scope = {
        "F": nn.functional,
        "local_model": nn.Linear(3, 2),
        "received_model": nn.Linear(3, 2),
        "x": torch.randn(20, 3),
        "y": torch.randint(0, 2, (20,)),
        "train": lambda model: None,
    }
    exec(first, scope)
    assert scope["report"].epochs >= 11
    assert set(scope["ala"].weights) == {"weight", "bias"}
    exec(second.replace("rounds=10", f"rounds=1, {QUICK}"), scope)
    assert set(scope["result"].models) >= {(0, None), (0, 7)}
    monkeypatch.chdir(tmp_path)
    exec(third.replace("rounds=10", f"rounds=1, clients=8, {QUICK}"), scope)
    assert len(scope["trained"].predict("new.npz", client=7)) == 200
    assert Path("model.safetensors").is_file()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    after = text.split("## After training")[1].split("\n## ")[0]
    first, *commands = re.findall(r"^    fedala (.*)$", after, re.MULTILINE)
    quick = "--rounds 1 --clients 8 --batch-size 100 --set fedala.max_epochs=2"
    assert len(commands) == 4
    for command in (f"{first} {quick}", *commands):
        found = CliRunner().invoke(cli, shlex.split(command), prog_name="fedala")
        assert found.exit_code == 0, found.output
