"""What the models of a run are fed lies beside them in the run folder."""

import re
from pathlib import Path

import pytest
import torch
from runs.test_images import BYTES, OPTIONS, Y, go
from runs.test_resume import interrupted, planned

import fedala
from fedala.data import Dataset
from fedala.data.preprocessing import PREPROCESSING
from fedala.data.text import encode_texts
from fedala.io import files
from fedala.runs.build import build_task
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.plan import plan


def test_it_turns_raw_samples_into_those_of_the_run(tmp_path):
    go(normalize="0.4/0.3", out=tmp_path / "run")
    config = Config.from_values({**OPTIONS, "normalize": "0.4/0.3", "model": "cnn"})
    large = Dataset("own", BYTES.repeat(1, 1, 3, 3), Y, 3)
    found = RunFolder.open(tmp_path / "run").preprocessing()
    task, _ = build_task(plan(config, large))
    wanted = task.inputs(torch.arange(60))[:, :, :6, :6]
    assert torch.equal(found.prepare(BYTES), wanted)


def test_the_words_of_texts_are_kept(tmp_path):
    texts = [f"word{i % 7} and word{i % 11}" for i in range(60)]
    ids, tokens = encode_texts(texts)
    data = Dataset("t", ids, Y, 3, vocabulary=len(tokens) + 1, tokens=tokens)
    fedala.run(dataset=data, out=tmp_path / "run", **{**OPTIONS, "method": "fedavg", "rounds": 1})
    found = RunFolder.open(tmp_path / "run").preprocessing()
    assert torch.equal(found.prepare(texts), ids)


def test_a_run_that_saves_no_models_has_none_and_an_older_folder_gets_it(tmp_path):
    go(save_models=False, save_best=False, out=tmp_path / "none")
    assert RunFolder.open(tmp_path / "none").preprocessing() is None
    path = tmp_path / "run"
    interrupted(path, 2)
    wanted = (path / PREPROCESSING).read_bytes()
    (path / PREPROCESSING).unlink()
    execute(planned(), path, resume=True)
    assert (path / PREPROCESSING).read_bytes() == wanted


def test_damage_is_noticed(tmp_path):
    go(out=tmp_path / "run")
    path = tmp_path / "run" / PREPROCESSING
    path.write_text(path.read_text().replace('"classes": 3', '"classes": 4'))
    with pytest.raises(files.DamagedFile, match=PREPROCESSING):
        RunFolder.open(tmp_path / "run").preprocessing()


def test_the_python_of_the_page_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    windows, people = re.findall(
        r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(windows, {})
    assert capsys.readouterr().out == "cnn1d 0.1 standard\n"
    scope = {}
    exec(people, scope)
    assert scope["inputs"].abs().max() < 3
    assert scope["preprocessing"].class_names == ("no", "yes")
