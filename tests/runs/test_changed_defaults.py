"""A hyperparameter whose default has changed: runs record it, and older ones keep the former."""

import numpy as np
import pytest
import torch
from small import Net

import fedala
from fedala.data import Dataset
from fedala.errors import UserError
from fedala.methods import make
from fedala.runs import changed_defaults, members
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import plan

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 1, 6, 6)).astype("f4"), RANDOM.integers(0, 3, 60)
DATA = Dataset("own", torch.from_numpy(X), torch.from_numpy(Y), 3)
KEY = "apple.scale_core"
OPTIONS = {
    "dataset": "own", "clients": 3, "partition": "iid", "device": "cpu", "lr": 0.1, "rounds": 4,
    "batch_size": 4, "checkpoint_every": 1,
}  # fmt: skip


def planned(method="apple", **options):
    return plan(Config.from_values({"method": method, **OPTIONS, **options}), DATA, Net)


def stop_after_two_rounds():
    asked = iter([False, True])
    return RunObserver(should_stop=lambda: next(asked))


def rows(folder, method="apple"):
    return [(row.score, row.loss) for row in RunFolder.open(folder).history()[method]]


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Make a whole run and half a run as versions did whose default was N·lr."""
    with monkeypatch.context() as patch:
        patch.setattr(changed_defaults, "list_changed_defaults", lambda names: {})
        patch.setattr(members, "make", lambda name, settings: make(name, {KEY: True, **settings}))
        execute(planned(), tmp_path / "whole")
        with pytest.raises(Stopped):
            execute(planned(), tmp_path / "half", observer=stop_after_two_rounds())
    for name in ("whole", "half"):
        assert "scale_core" not in (tmp_path / name / "config.toml").read_text(encoding="utf-8")
    return tmp_path


def test_an_old_run_is_resumed_with_the_default_that_it_began_with(old):
    assert RunFolder.open(old / "half").config().set == {KEY: True}
    fedala.run(resume=old / "half", dataset=DATA, model=Net)
    assert rows(old / "half") == rows(old / "whole")
    assert f'"{KEY}" = true' in (old / "half" / "config.toml").read_text(encoding="utf-8")
    # From now on it is named, and the run is still the same run.
    fedala.run(resume=old / "half", dataset=DATA, model=Net, seeds=2)
    assert len(rows(old / "half")) == 2 * len(rows(old / "whole"))
    execute(planned(), old / "new")
    assert rows(old / "new") != rows(old / "whole")


def test_an_old_run_is_not_resumed_with_another_value(old):
    before = (old / "half" / "config.toml").read_bytes()
    with pytest.raises(UserError, match=r"change set \(apple.scale_core = True → apple.scale_core"):
        fedala.run(resume=old / "half", dataset=DATA, model=Net, set={KEY: False})
    with pytest.raises(UserError, match="this would change set"):
        execute(planned(), old / "half", resume=True)  # as a federation does
    assert (old / "half" / "config.toml").read_bytes() == before


def test_a_new_run_records_the_value_and_is_resumed_with_it(tmp_path):
    execute(planned(), tmp_path / "whole")
    assert f'"{KEY}" = false' in (tmp_path / "whole" / "config.toml").read_text(encoding="utf-8")
    with pytest.raises(Stopped):
        execute(planned(), tmp_path / "half", observer=stop_after_two_rounds())
    fedala.run(resume=tmp_path / "half", dataset=DATA, model=Net)
    assert rows(tmp_path / "half") == rows(tmp_path / "whole")


def test_a_method_that_is_added_to_a_run_has_the_present_default(tmp_path):
    execute(planned("fedavg"), tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").config().set == {}
    fedala.run(resume=tmp_path / "run", dataset=DATA, model=Net, method="+apple")
    assert RunFolder.open(tmp_path / "run").config().set == {KEY: False}
    execute(planned(), tmp_path / "alone")
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")


def test_a_swept_value_is_recorded_once():
    assert planned(sweep={KEY: ["true", "false"]}).config.set == {}
