"""The run folder: what goes in comes out, and nothing of a user's is ever replaced."""

import json
import os
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch

from fedala.data import Dataset, federate
from fedala.errors import UserError
from fedala.records import HistoryRow, PersonalModel
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "deep" / "run", Config(rounds=3), force=False) as created:
        pass
    return created


def row(**values):
    required = {"seed": 0, "round": 0, "score": 0.5, "loss": 1.0, "score_joined": 0.5}
    return HistoryRow(**{**required, **values})


def test_the_config_is_kept(folder):
    assert Config.from_values(Config.read(folder.path / "config.toml")) == Config(rounds=3)


def test_history_comes_back_as_numbers(folder):
    folder.tables.add_history("fedavg", row(score=np.float64(1 / 3), loss=float("nan")))
    folder.tables.add_history("fedavg", row(round=1, loss=-2.0, metrics={"train_loss": 0.25}))
    [(method, (first, second))] = folder.history().items()
    assert method == "fedavg"
    assert first.accuracy == 1 / 3
    assert np.isnan(first.loss)
    assert second == row(round=1, loss=-2.0, metrics={"train_loss": 0.25})
    columns = (folder.path / "history.csv").read_text().splitlines()[0]
    assert columns == (
        "method,seed,round,accuracy,loss,accuracy_joined,sent,uploaded,diverged,seconds,train_loss"
    )


def test_a_method_with_more_to_say_widens_the_history(folder):
    folder.tables.add_history("fedavg", row())
    folder.tables.add_history("fedavg", row(round=1))
    folder.tables.add_history("fedala", row(metrics={"ala_epochs": 4}))
    folder.tables.add_history("fedavg", row(seed=1))
    rows = folder.rows("history.csv")
    assert [r["ala_epochs"] for r in rows] == [None, None, 4, None]
    assert [(r["method"], r["seed"], r["round"]) for r in rows] == [
        ("fedavg", 0, 0), ("fedavg", 0, 1), ("fedala", 0, 0), ("fedavg", 1, 0)
    ]  # fmt: skip
    assert (folder.path / "history.csv").read_bytes().count(b"\r") == 0


def test_clients_are_shares_of_their_samples(folder):
    scores = np.array([[3.0, 8.0, 4.0], [0.0, 0.0, 0.0]])
    folder.tables.add_clients("fedavg", row(), scores)
    lines = (folder.path / "clients.csv").read_text().splitlines()
    assert lines == [
        "method,seed,round,client,samples,accuracy,loss",
        "fedavg,0,0,0,4,0.75,2.0",
        "fedavg,0,0,1,0,nan,nan",
    ]


def test_models_come_back_by_name(folder):
    model = {"weight": torch.randn(1, 2, 3), "steps": torch.tensor([7])}
    folder.models.save("ditto+ala", PersonalModel(5, 12, model))
    folder.models.save("ditto+ala", PersonalModel(5, None, {"weight": model["weight"] + 1}))
    own = folder.model("ditto+ala", 5, 12)
    assert torch.equal(own["weight"], model["weight"][0])
    assert own["steps"] == 7
    assert torch.equal(folder.model("ditto+ala", 5)["weight"], model["weight"][0] + 1)
    assert (folder.path / "models" / "ditto+ala" / "seed-5" / "client-00012.safetensors").is_file()


def test_the_summary_is_replaced_in_one_step(folder):
    folder.write_summary({"a": 1})
    folder.write_summary({"β": 2})
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8")) == {"β": 2}
    assert sorted(entry.name for entry in folder.path.glob("[!.]*")) == [
        "config.toml",
        "digests.json",
        "summary.json",
    ]


def test_nothing_is_pickled(folder):
    folder.tables.add_history("fedavg", row())
    folder.models.save("fedavg", PersonalModel(0, None, {"weight": torch.ones(1, 2)}))
    for file in folder.path.rglob("*"):
        assert not file.is_file() or (
            not zipfile.is_zipfile(file) and not file.read_bytes().startswith(b"\x80")
        )


def refused(path, says, *, force):
    with pytest.raises(UserError, match=says), RunFolder.create(path, Config(), force=force):
        pass


def test_an_existing_folder_is_replaced_by_force_only(folder):
    folder.tables.add_history("fedavg", row())
    refused(folder.path, "exists already", force=False)
    assert len(folder.history()["fedavg"]) == 1
    with RunFolder.create(folder.path, Config(rounds=9), force=True):
        refused(folder.path, "another process is working in it", force=True)
    assert sorted(entry.name for entry in folder.path.glob("[!.]*")) == [
        "config.toml",
        "digests.json",
    ]
    assert Config.read(folder.path / "config.toml")["rounds"] == 9


def test_force_keeps_away_from_what_is_not_a_run(folder, tmp_path):
    (folder.path / "thesis.tex").write_text("years of work")
    refused(folder.path, r"holds thesis\.tex, which is not part of a run", force=True)
    assert (folder.path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a folder", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "link", "exists already", force=False)
    refused(tmp_path / "link", "is not a folder", force=True)


def test_places_where_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file" / "run", "cannot be", force=False)
    refused(tmp_path / ("x" * 300), "cannot be", force=False)
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        refused(tmp_path / "closed" / "run", "cannot be written to", force=False)


def test_the_links_of_a_logger_do_not_keep_a_run_from_being_resumed_or_replaced(folder, tmp_path):
    (folder.path / "wandb" / "offline-run").mkdir(parents=True)
    (folder.path / "wandb" / "offline-run" / "data").write_text("x")
    (folder.path / "wandb" / "latest-run").symlink_to("offline-run")
    assert RunFolder.open(folder.path).config() == Config(rounds=3)
    with RunFolder.create(folder.path, Config(), force=True):
        assert (folder.path / "wandb" / "offline-run" / "data").read_text() == "x"


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "split.csv", "preprocessing.json"])
def test_force_deletes_nothing_that_no_run_wrote(name, folder, tmp_path):
    (folder.path / name).write_text("[tool]\nmine = true\n")
    refused(folder.path, "is not what the run wrote, so force=True does not replace it", force=True)
    other = tmp_path / "mine"
    other.mkdir()
    (other / name).write_text("[tool]\nmine = true\n")
    refused(other, "is not empty and has no digests.json", force=True)
    assert (other / name).read_text() == (folder.path / name).read_text() == "[tool]\nmine = true\n"


def test_a_run_of_an_older_version_is_replaced_by_force(folder):
    folder.tables.write_split(
        federate(Dataset("x", torch.zeros(8, 2), torch.arange(8) % 2, 2), "iid", 2)
    )
    (folder.path / "digests.json").unlink()
    with RunFolder.create(folder.path, Config(rounds=9), force=True) as created:
        assert created.config().rounds == 9


def test_a_folder_in_which_a_run_was_killed_at_its_first_write_is_replaced(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".digests.json.new").write_text("{")
    with RunFolder.create(tmp_path / "run", Config(rounds=5), force=True) as folder:
        assert folder.config().rounds == 5


def test_a_kill_while_a_folder_is_replaced_leaves_one_that_can_be_replaced(tmp_path, monkeypatch):
    """A run that is replaced, killed at each of its file operations in turn."""
    at = 0
    while True:
        path = tmp_path / str(at)
        with RunFolder.create(path, Config(rounds=3, method="fedavg"), force=False) as folder:
            folder.tables.add_history("fedavg", row())
            folder.models.save("fedavg", PersonalModel(0, None, {"weight": torch.ones(1, 2)}))
            folder.record_progress(["fedavg"], is_finished=True)
            folder.write_summary({"a": 1})
        calls = []

        def counted(function, at=at, calls=calls):
            def call(*arguments, **options):
                calls.append(function)
                if len(calls) == at:
                    raise KeyboardInterrupt
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("unlink", "rmdir", "replace"):
                patch.setattr(os, name, counted(getattr(os, name)))
            with RunFolder.create(path, Config(rounds=4), force=True):
                pass
        if (path / "config.toml").exists():
            assert RunFolder.open(path).config().rounds in (3, 4)
            RunFolder(path).history()
        with RunFolder.create(path, Config(rounds=5), force=True) as again:
            assert again.config().rounds == 5
            assert again.history() == {}
        if at > len(calls):
            break
        at += 1
    assert at > 8


def test_a_saved_model_that_nothing_vouches_for_is_said_to_be_unverified(folder):
    folder.models.save("fedavg", PersonalModel(0, None, {"weight": torch.ones(1, 2)}))
    with pytest.warns(UserWarning, match="cannot be verified"):
        RunFolder(folder.path).model("fedavg", 0)
    folder.record_progress(["fedavg"], is_finished=True)
    assert RunFolder(folder.path).model("fedavg", 0)["weight"].tolist() == [1, 1]


def test_class_names_are_no_formulas(folder):
    dataset = Dataset(
        "x", torch.zeros(8, 2), torch.arange(8) % 2, 2, ("=cmd|'/c calc'!A1", "plain")
    )
    folder.tables.write_split(federate(dataset, "iid", 2))
    assert {row["name"] for row in folder.rows("split.csv")} == {"'=cmd|'/c calc'!A1", "plain"}


def test_a_folder_many_levels_down(tmp_path):
    deep = tmp_path.joinpath(*["d"] * 1500)
    with RunFolder.create(deep, Config(), force=False):
        assert (deep / "config.toml").is_file()
    (tmp_path / "stays").touch()
    for file in deep.iterdir():
        file.unlink()
    os.removedirs(deep)  # pytest's own way of cleaning up would call itself 1500 times


def test_a_number_that_no_run_writes(folder):
    folder.tables.add_history("fedavg", row())
    text = (folder.path / "history.csv").read_text()
    (folder.path / "history.csv").write_text(text.replace(",0.5", "," + "9" * 400))
    with pytest.raises(UserError, match="a number of more than 64 bits"):
        folder.history()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("accuracy_joined", "accuracy_joint", "a row lacks 'accuracy_joined'"),
        ("fedavg,0,0", "fedavg,nan,0", "a row has seed = nan, which is not a whole number"),
        ("fedavg,0,0,0.5", "fedavg,0,0,7", "an accuracy of 7 is not from 0 to 1"),
    ],
)
def test_a_row_that_no_run_writes(old, new, says, folder):
    folder.tables.add_history("fedavg", row())
    text = (folder.path / "history.csv").read_text()
    (folder.path / "history.csv").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=says):
        folder.history()


def test_the_config_is_read_once(folder, monkeypatch):
    names = []

    def read_bytes(path, most):
        names.append(path.name)
        return path.read_bytes()

    monkeypatch.setattr("fedala.runs.verified_files.read_file", read_bytes)
    monkeypatch.setattr("fedala.runs.config.read_file", read_bytes)
    assert folder.config() == Config(rounds=3)
    assert names == ["config.toml"]
