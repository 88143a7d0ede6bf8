"""The snippets of docs/after-training.md and the example run, in the order of the page."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from trained.worlds import NAMES, PIXELS, run
from typer.testing import CliRunner

from fedala import load
from fedala.cli import app as cli
from fedala.data import load as load_data

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "after-training.md").read_text(encoding="utf-8")

QUICK = 'rounds=1, batch_size=100, checkpoint_every=0, set={"fedala.max_epochs": 1}'


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    monkeypatch.chdir(tmp_path)
    digits = load_data("digits")
    np.savez("new.npz", x=digits.x[:20].numpy(), y=digits.y[:20].numpy())
    scope = {}
    for language, text in re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL):
        if language == "python":
            exec(text.replace("rounds=10", QUICK), scope)
            continue
        for line in text.splitlines():
            found = CliRunner().invoke(cli.app, shlex.split(line)[1:], prog_name="fedala")
            assert found.exit_code == 0, found.output
    said = re.search(r"^    (TrainedFederation.*)", PAGE, re.MULTILINE)[1]
    assert capsys.readouterr().out.splitlines()[0] == said
    prepared = scope["trained"].preprocessing.prepare(digits.x[:5])
    wanted = scope["model"](prepared).detach().numpy()
    assert np.abs(scope["outputs"].detach().numpy() - wanted).max() < 1e-6
    evaluator = reference.ReferenceEvaluator("model.onnx")
    [found] = evaluator.run(["outputs"], {"samples": digits.x[:5].numpy()})
    assert np.abs(found - wanted).max() < 1e-6
    assert scope["chances"].shape == (5, 10)
    rows = (tmp_path / "runs" / "mine" / "clients.csv").read_text().splitlines()
    accuracy = scope["trained"].evaluate(scope["federation"])[7].score
    assert float(rows[-1].split(",")[rows[0].split(",").index("accuracy")]) == accuracy


def test_the_example_answers(tmp_path, capsys):
    run(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=PIXELS[:3])
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples/serve_personal.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    serve.main(str(tmp_path / "run"), "1", str(tmp_path / "new.npz"))
    wanted = load(tmp_path / "run", best=True).predict(PIXELS[:3], 1)
    assert set(wanted) <= set(NAMES)
    assert capsys.readouterr().out == f"{tmp_path / 'new.npz'}: {', '.join(wanted)}\n"
