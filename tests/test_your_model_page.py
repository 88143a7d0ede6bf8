"""The snippets of docs/your-model.md run, one after another."""

import re
import warnings
from pathlib import Path

import pytest

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
