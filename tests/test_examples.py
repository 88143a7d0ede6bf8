"""The examples, and the Python of the README, do what they say."""

import importlib.util
import re
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parent.parent


def test_ala_in_your_own_loop_beats_the_global_model(capsys):
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "examples" / "own_loop.py")
    own_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_loop)
    with torch.random.fork_rng():
        results = own_loop.main(rounds=5)
    assert results["personal"] > results["global"] + 0.2
    assert "personal models" in capsys.readouterr().out


def test_the_walk_through_runs_and_w_is_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples" / "walkthrough.py").read_text(encoding="utf-8")
    scope = {}
    exec(text.replace("ROUNDS, CLIENTS = 10, 8", "ROUNDS, CLIENTS = 2, 4"), scope)
    assert scope["rounds"] == [0, 1, 2]
    assert scope["cube"][:, 0, :, :, 0].min() == 1  # W starts at ones
    assert 0 <= scope["by_class"].min() < scope["by_class"].max() <= 1
    assert scope["report"].losses[-1] < scope["report"].losses[0]
    assert (tmp_path / "runs" / "walkthrough" / "report.html").is_file()
    assert "points against FedAvg" in capsys.readouterr().out


def test_the_python_of_the_readme_runs():
    first, second = re.findall(
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
    exec(second.replace("rounds=10", "rounds=1"), scope)
    assert set(scope["result"].models) >= {(0, None), (0, 7)}
