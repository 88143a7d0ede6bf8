"""The snippets of docs/your-model.md run, one after another."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedala.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"


def test_the_snippets_run(capsys):
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if "peft" in code:
            pytest.importorskip("peft")
            pytest.importorskip("transformers")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="(transformers|peft).*")
            exec(compile(code, PAGE.name, "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"^ *1 +[\d,]+ +[\d,]+ +([\d,]+)  .*modules_to_save\.default", said, re.M)


def test_the_model_in_a_file_runs(own_code):
    page = PAGE.read_text(encoding="utf-8")
    [(name, code)] = re.findall(r'```python title="(.*?)"\n(.*?)```', page, re.DOTALL)
    [command] = re.findall(r"```sh\nfedala (.*?)\n```", page)
    (own_code / name).write_text(code, encoding="utf-8")
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16), np.uint8)
    np.savez("d.npz", x=images, y=np.arange(60) % 3)
    quick = command.replace("--rounds 10", "--rounds 1")
    small = "--dataset d.npz --clients 3 --partition iid --device cpu"
    answer = CliRunner().invoke(app, f"{quick} {small}".split())
    assert answer.exit_code == 0, answer.output
