"""The snippets of docs/notebooks.md run, one after another."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fedala.data import Dataset

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"


def test_the_snippets_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    text = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    assert text.count("rounds=") == 2
    small = Dataset("small", torch.randn(90, 6), torch.arange(90) % 3, 3)
    scope = {"small": small, "make_model": lambda: nn.Linear(6, 3)}
    text = re.sub(r"rounds=\d+", "rounds=1, clients=2, partition='iid'", text)
    text = text.replace('dataset="digits"', "dataset=small, model=make_model")
    exec(text.replace("seeds=2", "seeds=2, dataset=small, model=make_model"), scope)
    assert scope["result"].methods["fedala"].seeds == [0, 1]
    assert scope["curves"].shape == (2, 2)
    assert "fedavg 1 " in capsys.readouterr().out
    assert (tmp_path / "accuracy.pdf").is_file()
    assert (tmp_path / "page.html").is_file()
