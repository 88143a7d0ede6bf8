"""A resumed run equals one that was never interrupted: history and models, to the bit."""

import os
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from small import EACH_KIND, QUICK, Net

from fedala import run
from fedala.data import Dataset, Federation
from fedala.errors import RunError, UserError
from fedala.io import files, tensor_files
from fedala.methods import make
from fedala.report.progress import RunProgress
from fedala.runs.checkpoint import Checkpoint
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import plan
from fedala.runs.tables import Tables
from fedala.simulation.client_states import File

SIZES = [9, 5, 7, 12, 3]


def federation(sizes=SIZES) -> Federation:
    random = np.random.default_rng(0)
    tests = [max(1, size // 3) for size in sizes]
    y = torch.from_numpy(random.integers(0, 3, sum(sizes) + sum(tests)))
    y[:3] = torch.arange(3)
    x = torch.from_numpy(random.normal(size=(len(y), 1, 6, 6))).float() + y.view(-1, 1, 1, 1) * 0.5
    parts = np.split(np.arange(len(y)), np.cumsum([*sizes, *tests]))
    none = tuple(np.arange(0) for _ in sizes)
    return Federation(
        Dataset("own", x, y, 3), tuple(parts[: len(sizes)]), tuple(parts[len(sizes) : -1]), none
    )


def planned(method="fedala", sizes=SIZES, **options):
    settings = {
        "rounds": 4,
        "batch_size": 4,
        "lr": 0.1,
        "set": QUICK.get(method, {}),
        "device": "cpu",
        **options,
    }
    return plan(Config.from_values({"method": method, **settings}), federation(sizes), Net)


def stop_after(rounds):
    """Asked after every round of every method, says so the given number of times later."""
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return asked == rounds

    return RunObserver(should_stop=should_stop)


def rows_of(path):
    """Everything that the history says but for the seconds, which differ from run to run."""
    return [
        {k: repr(v) for k, v in row.items() if k != "seconds"}
        for row in RunFolder(path).rows("history.csv")
    ]


def seconds_of(path):
    return [row["seconds"] for row in RunFolder(path).rows("history.csv")]


def models_of(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted((path / "models").rglob("*.safetensors"))
    }


def same(a, b):
    assert rows_of(a) == rows_of(b)
    assert models_of(a) == models_of(b)
    assert models_of(a)
    for name in ("clients.csv", "metrics.csv", "faults.csv", "weights.csv", "split.csv"):
        assert lines_of(a / name) == lines_of(b / name)


def lines_of(table):
    """A table of a resumed run may have lost all its rows, and be there still."""
    lines = table.read_text().splitlines() if table.exists() else []
    return lines if len(lines) > 1 else []


def interrupted(path, rounds, /, method="fedala", observer=None, **options):
    """A run that stops after some rounds, and goes on."""
    with pytest.raises(Stopped, match="after"):
        execute(planned(method, **options), path, observer=observer or stop_after(rounds))
    return execute(planned(method, **options), path, resume=True)


#: Optimisers that remember earlier rounds, as far as a method takes them.
ADAM = {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True, "schedule": "cosine"}
SETTINGS = {
    "all lanes": {"lanes": "all"},
    "adamw": {"lanes": "all", "seeds": 2, **ADAM},
    "two lanes, files": {
        "lanes": "2", "join_ratio": 0.5, "eval_every": 2, "seeds": 2, "client_memory": 0.0,
    },
}  # fmt: skip
#: Methods that treat the optimiser's state in different ways.
OPTIMIZED = ("fedavg", "ditto", "fedrep", "fedavg-c", "fedbabu", "per-fedavg", "pfedme", "apple")
OPTIMIZED += ("apfl", "feddbe", "fedala", "ditto+ala", "pfedme+ala")
#: The first setting has nothing that the other two have not, but for its single seed.
RESUMED = [
    *((method, "two lanes, files") for method in EACH_KIND),
    *((method, "adamw") for method in OPTIMIZED),
    *((method, "all lanes") for method in ("fedala", "fedavg", "partialfed+ala")),
]


@pytest.mark.parametrize(("method", "name"), RESUMED)
def test_resumed_is_uninterrupted(method, name, tmp_path):
    """It stops after two of three rounds: ALA has learned its weights by then."""
    settings = {"rounds": 3, **SETTINGS[name]}
    if method.startswith(("partialfed", "scaffold")):
        settings = {name: value for name, value in settings.items() if name not in ADAM}
    if make(method).requires_all_clients and "join_ratio" in settings:
        settings = {**settings, "join_ratio": 1.0}
    whole = execute(planned(method, **settings), tmp_path / "whole")
    parts = interrupted(tmp_path / "parts", 2, method, **settings)
    same(tmp_path / "whole", tmp_path / "parts")
    assert parts.methods[method].best.tolist() == whole.methods[method].best.tolist()
    assert parts.methods[method].final.tolist() == whole.methods[method].final.tolist()


def test_a_comparison_goes_on_in_the_method_where_it_stopped(tmp_path):
    methods = "fedala,fedavg,ditto"
    execute(planned(methods), tmp_path / "whole")
    result = interrupted(tmp_path / "parts", 6, methods)
    same(tmp_path / "whole", tmp_path / "parts")
    assert list(result.methods) == ["fedala", "fedavg", "ditto"]
    assert [len(method.history) for method in result.methods.values()] == [5, 5, 5]
    again = execute(planned(methods), tmp_path / "parts", resume=True)  # nothing is left to do
    same(tmp_path / "whole", tmp_path / "parts")
    assert [m.best.tolist() for m in again.methods.values()] == [
        m.best.tolist() for m in result.methods.values()
    ]


DETAILED = {"evaluate": "trained,received,global", "metrics_every": 2, "join_ratio": 0.5}


@pytest.fixture(scope="module")
def detailed(tmp_path_factory):
    return execute(planned("fedala,local", **DETAILED), tmp_path_factory.mktemp("detailed") / "run")


@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_further_models_and_detailed_metrics_are_resumed(rounds, detailed, tmp_path):
    """The trained models of the round before the stop are in the first row after it."""
    whole = detailed
    parts = interrupted(tmp_path / "parts", rounds, "fedala,local", **DETAILED)
    same(whole.folder, tmp_path / "parts")
    for method in ("fedala", "local"):
        found, expected = parts.methods[method], whole.methods[method]
        assert found.metrics == expected.metrics
        assert found.metrics[-1]["round"] == 4
    summaries = parts.summaries(), whole.summaries()
    found, expected = (one["fedala"]["clients_below_local"] for one in summaries)
    assert found == expected


def test_more_rounds_with_detailed_metrics(tmp_path):
    """What was detailed because it was the last evaluation is so no longer."""
    options = {"evaluate": "trained", "join_ratio": 0.5}
    execute(planned(rounds=6, **options), tmp_path / "whole")
    execute(planned(rounds=3, **options), tmp_path / "parts")
    assert [row["round"] for row in RunFolder(tmp_path / "parts").rows("metrics.csv") if row["auc"]]
    execute(planned(rounds=6, **options), tmp_path / "parts", resume=True)
    same(tmp_path / "whole", tmp_path / "parts")


def test_metrics_are_in_the_result_with_and_without_a_folder(tmp_path):
    options = {"rounds": 2, "evaluate": "global", "set": {"fedala.max_epochs": 2}}
    found = execute(planned(**options), None).methods["fedala"].metrics
    assert [(row["round"], row["model"]) for row in found] == [
        (round, kind) for round in range(3) for kind in ("initialized", "global")
    ]
    execute(planned(**options), tmp_path / "run")
    rows = RunFolder(tmp_path / "run").rows("metrics.csv")
    assert found == [
        {name: value for name, value in row.items() if value is not None and name != "method"}
        for row in rows
    ]


def test_a_folder_without_metrics_is_read_and_resumed(tmp_path):
    """Folders of older versions have no metrics.csv, and their checkpoints nothing for it."""
    path = tmp_path / "run"
    execute(planned(rounds=3), path)
    (path / "metrics.csv").unlink()
    (path / "digests.json").unlink()
    for file in (path / "checkpoint").rglob("server-*.safetensors"):
        state, _ = tensor_files.load(file)
        del state["last_round"]
        digest = tensor_files.save(file, state)
        [manifest] = file.parent.glob("*.json")
        checkpoint = Checkpoint.unpack(manifest)
        new = replace(checkpoint, server=File(file.name, digest))
        manifest.write_bytes(new.pack())
    result = execute(planned(rounds=3), path, resume=True)
    assert result.methods["fedala"].metrics == []
    result = execute(planned(rounds=4), path, resume=True)
    assert [row["round"] for row in result.methods["fedala"].metrics] == [4]


@pytest.mark.parametrize("keep", [True, False])
def test_more_rounds(keep, tmp_path):
    execute(planned(rounds=6), tmp_path / "whole")
    execute(planned(rounds=3, keep_checkpoint=keep), tmp_path / "parts")
    if keep:
        execute(planned(rounds=6), tmp_path / "parts", resume=True)
        same(tmp_path / "whole", tmp_path / "parts")
        assert "rounds: 3 → 6" in (tmp_path / "parts" / "resumed.csv").read_text(encoding="utf-8")
        assert RunFolder(tmp_path / "parts").config().rounds == 6
    else:
        before = rows_of(tmp_path / "parts")
        with pytest.raises(UserError, match="checkpoint was not kept"):
            execute(planned(rounds=6), tmp_path / "parts", resume=True)
        assert not list((tmp_path / "parts").rglob("checkpoint/0/*.safetensors"))
        assert rows_of(tmp_path / "parts") == before


@pytest.mark.parametrize("method", ["fedphp", "apple", "fedphp+ala"])
def test_no_more_rounds_for_a_schedule_that_depends_on_them(method, tmp_path):
    execute(planned(method, rounds=2), tmp_path / "run")
    with pytest.raises(
        UserError, match="plans its rounds ahead, so a run of 2 cannot be resumed with 3"
    ):
        execute(planned(method, rounds=3), tmp_path / "run", resume=True)


def test_fewer_rounds_than_there_are(tmp_path):
    execute(planned(rounds=3), tmp_path / "run")
    with pytest.raises(UserError, match="trained for 3 rounds already"):
        execute(planned(rounds=2), tmp_path / "run", resume=True)


def test_what_a_run_is_cannot_change(tmp_path):
    execute(planned(rounds=2), tmp_path / "run")
    before = rows_of(tmp_path / "run")
    with pytest.raises(UserError, match=r"would change batch_size \(4 → 5\), lr \(0\.1 → 0\.2\)"):
        execute(planned(rounds=2, batch_size=5, lr=0.2), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match=r"would change seed \(0 → 3\)"):
        run(resume=tmp_path / "run", seed=3)
    other = federation()
    other.dataset.x[0, 0, 0, 0] += 1
    with pytest.raises(UserError, match="a run with other data"):
        run(resume=tmp_path / "run", dataset=other, model=Net)
    assert rows_of(tmp_path / "run") == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run, which tests may copy and may not change."""
    return execute(planned(), tmp_path_factory.mktemp("whole") / "run").folder


def test_another_folder(whole, tmp_path):
    with pytest.raises(Stopped):
        execute(planned(), tmp_path / "first", observer=stop_after(2))
    before = {p: p.read_bytes() for p in (tmp_path / "first").rglob("[!.]*") if p.is_file()}
    result = run(
        resume=tmp_path / "first", out=tmp_path / "second", dataset=federation(), model=Net
    )
    assert result.folder == tmp_path / "second"
    same(whole, tmp_path / "second")
    assert before == {p: p.read_bytes() for p in (tmp_path / "first").rglob("[!.]*") if p.is_file()}
    with pytest.raises(UserError, match="exists already"):
        run(resume=tmp_path / "first", out=tmp_path / "second", dataset=federation(), model=Net)


def test_no_run_folder(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        run(resume=tmp_path)


def test_one_at_a_time(tmp_path):
    execute(planned(rounds=1), tmp_path / "run")
    with RunFolder(tmp_path / "run").lock(), pytest.raises(UserError, match="is in use"):
        execute(planned(rounds=2), tmp_path / "run", resume=True)


# --- faults --------------------------------------------------------------------------------------


#: A file is flushed under another name and then renamed, so the folder left by a failed flush is
#: that left by a failed rename. The long form of the kill tests lets flushes fail, too.
FLUSHES_FAIL = "FEDALA_KILLS" in os.environ


def failing(monkeypatch, at):
    """Let the disk fail from some write, flush or rename on; return what counts them."""
    calls = 0

    def guard(function):
        def guarded(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(28, "No space left on device")
            return function(*arguments, **options)

        return guarded

    if FLUSHES_FAIL:
        monkeypatch.setattr(files, "flush", guard(files.flush))
    monkeypatch.setattr(os, "replace", guard(os.replace))
    monkeypatch.setattr(Tables, "append", guard(Tables.append))
    return lambda: calls


@pytest.mark.parametrize("method", ["fedala", "fedavg"])
def test_a_disk_that_fails_anywhere_loses_nothing(method, tmp_path, monkeypatch):
    """A run for each write and rename, which fails there; all resume to the same end."""
    options = {"rounds": 2, "checkpoint_every": 1, "join_ratio": 0.5, "sizes": SIZES[:3]}
    if method == "fedala":
        options["set"] = {"fedala.max_epochs": 2}
    options["save_best"] = method == "fedavg"  # its models are fewer files
    execute(planned(method, **options), tmp_path / "whole")
    at, faults = 1, 0
    while True:
        path = tmp_path / str(at)
        with monkeypatch.context() as patch:
            count = failing(patch, at)
            said = ""
            try:
                execute(planned(method, **options), path)
            except (RunError, UserError) as error:
                said = str(error)
            if count() < at:
                break
        faults += 1
        assert "No space left on device" in said
        if (path / "config.toml").exists():
            execute(planned(method, **options), path, resume=True)
            same(tmp_path / "whole", path)
            assert not list(path.rglob(".*.new"))
        at += 1
    assert faults > 20


def damaged(path, how):
    data = path.read_bytes()
    path.write_bytes(
        {
            "shorter": data[:-1],
            "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "empty": b"",
        }[how]
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with a checkpoint of every round: once whole, once stopped after three of four."""
    path, options = tmp_path_factory.mktemp("stopped"), {"checkpoint_every": 1}
    execute(planned(**options), path / "whole")
    with pytest.raises(Stopped):
        execute(planned(**options), path / "run", observer=stop_after(3))
    return path


def resume_copy(stopped, tmp_path, damage):
    """Resume a copy of the stopped run, after damage to the folder of its checkpoints."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint" / "0")
    said = []
    observer = RunObserver(on_message=said.append)
    execute(planned(checkpoint_every=1), tmp_path / "run", resume=True, observer=observer)
    same(stopped / "whole", tmp_path / "run")
    return said


def test_a_resumed_run_says_after_which_round_it_continues(tmp_path):
    """Each method says it when its turn comes, unless it is finished or has not begun."""
    path = tmp_path / "run"

    def resume(**options):
        said = []
        observer = RunObserver(on_message=said.append)
        execute(planned("fedavg,local", **options), path, resume=True, observer=observer)
        return said

    with pytest.raises(Stopped):
        execute(planned("fedavg,local"), path, observer=stop_after(3))
    assert resume() == ["FedAvg continues after round 3 of 4."]
    assert resume() == []
    assert resume(rounds=6) == [
        "FedAvg continues after round 4 of 6.", "Local continues after round 4 of 6.",
    ]  # fmt: skip
    assert resume(rounds=6, seeds=3) == []
    assert resume(rounds=7, seeds=3) == [
        f"{method}, {seeds}, continues after round 6 of 7."
        for method in ("FedAvg", "Local")
        for seeds in ("seed 0", "seeds 1 to 2")
    ]


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_begins_again(tmp_path):
    class Killed(Exception):
        """Stands for the kill."""

    def kill(method, row):
        if row.round == 2:
            raise Killed

    with pytest.raises(Killed):
        execute(planned(checkpoint_every=3), tmp_path / "run", observer=RunObserver(kill))
    said = []
    observer = RunObserver(on_message=said.append)
    execute(planned(checkpoint_every=3), tmp_path / "run", resume=True, observer=observer)
    assert said == ["FedALA has no checkpoint yet: it begins again."]
    execute(planned(checkpoint_every=3), tmp_path / "whole")
    same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("how", ["shorter", "flipped", "empty", "gone"])
@pytest.mark.parametrize("which", ["manifest", "server", "client"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(which, how, stopped, tmp_path):
    def damage(folder):
        newest, _ = sorted(folder.glob("*.json"), reverse=True)
        client = max(folder.glob("0-*"), key=lambda path: int(path.stem.split("-")[2]))
        server = folder / "server-3.safetensors"
        victim = {"manifest": newest, "server": server, "client": client}[which]
        victim.unlink() if how == "gone" else damaged(victim, how)

    said = resume_copy(stopped, tmp_path, damage)
    if not (which == "manifest" and how == "gone"):
        assert "Looking for an earlier checkpoint" in said[0]


def test_a_damaged_manifest_before_the_last_harms_nothing(stopped, tmp_path):
    def damage(folder):
        _, older = sorted(folder.glob("*.json"), reverse=True)
        damaged(older, "shorter")

    assert resume_copy(stopped, tmp_path, damage) == ["FedALA continues after round 3 of 4."]


def test_no_checkpoint_left(tmp_path):
    options = {"checkpoint_every": 1}
    with pytest.raises(Stopped):
        execute(planned(**options), tmp_path / "run", observer=stop_after(2))
    for manifest in (tmp_path / "run" / "checkpoint" / "0").glob("*.json"):
        manifest.write_text("{}")
    with pytest.raises(UserError, match="are damaged, so nothing can be resumed"):
        execute(planned(**options), tmp_path / "run", resume=True)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path):
    from dataclasses import replace

    from fedala.runs.checkpoint import Checkpoint
    from fedala.simulation.client_states import File

    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=2), tmp_path / "run", observer=stop_after(2))
    [manifest] = (tmp_path / "run" / "checkpoint" / "0").glob("*.json")
    found = Checkpoint.unpack(manifest)
    for name in (
        "../../../secret.safetensors",
        "/etc/passwd",
        "0-0-1.safetensors\n",
        "server-1.safetensors/../x",
    ):
        manifest.write_bytes(replace(found, server=File(name, found.server.digest)).pack())
        with pytest.raises(files.DamagedFile, match="it refers to"):
            Checkpoint.unpack(manifest)


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    seen = []

    def look(method, row):
        folder = tmp_path / "run" / "checkpoint" / "0"
        seen.append(sorted(path.name for path in folder.glob("*")) if folder.exists() else [])

    execute(
        planned(rounds=5, checkpoint_every=1, save_best=False),
        tmp_path / "run",
        observer=RunObserver(on_row=look),
    )
    assert max(map(len, seen)) == 2 * (2 + len(SIZES))
    final = list((tmp_path / "run" / "checkpoint" / "0").iterdir())
    assert len(final) == 2 + len(SIZES)


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path):
    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=0), tmp_path / "run", observer=stop_after(2))
    assert not (tmp_path / "run" / "checkpoint").exists()
    before = content(tmp_path / "run")
    with pytest.raises(UserError, match="has no checkpoint of FedALA, so it cannot be resumed"):
        execute(planned(checkpoint_every=0), tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == before


def test_a_finished_run_without_checkpoints_stays_as_it_is(tmp_path):
    whole = execute(planned(checkpoint_every=0), tmp_path / "run")
    rows, models = rows_of(tmp_path / "run"), models_of(tmp_path / "run")
    again = execute(planned(checkpoint_every=0), tmp_path / "run", resume=True)
    assert again.history[-1].accuracy == whole.history[-1].accuracy
    assert (rows_of(tmp_path / "run"), models_of(tmp_path / "run")) == (rows, models)
    before = content(tmp_path / "run")
    with pytest.raises(UserError, match="kept no checkpoint, so it cannot get more rounds"):
        execute(planned(checkpoint_every=0, rounds=9), tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == before


# --- what is read is verified --------------------------------------------------------------------


def content(path):
    """Every file of a folder, but for the lock, which says nothing."""
    return {
        p.relative_to(path): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def drop_line(text, number):
    lines = text.splitlines(keepends=True)
    del lines[number]
    return "".join(lines)


EDITS = {
    "last row dropped": lambda text: drop_line(text, -1),
    "middle row dropped": lambda text: drop_line(text, 2),
    "row twice": lambda text: text + text.splitlines(keepends=True)[-1],
    "cut in half": lambda text: text[: len(text) // 2],
    "a digit": lambda text: text.replace("0.", "0.9", 1),
    "empty": lambda text: "",
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A comparison of two methods, finished; and one that stopped in the second method."""
    path = tmp_path_factory.mktemp("comparison")
    execute(planned("fedala,ditto", metrics_every=1), path / "finished")
    work = planned("fedala,ditto", metrics_every=1, checkpoint_every=1)
    with pytest.raises(Stopped):
        execute(work, path / "stopped", observer=stop_after(6))
    return path


@pytest.mark.parametrize("edit", [*EDITS, "gone"])
@pytest.mark.parametrize("name", ["history.csv", "weights.csv", "clients.csv", "metrics.csv"])
@pytest.mark.parametrize("kind", ["finished", "stopped"])
def test_a_damaged_table_is_refused_and_nothing_is_changed(kind, name, edit, comparison, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(comparison / kind, path)
    if edit == "gone":
        (path / name).unlink()
    else:
        (path / name).write_text(EDITS[edit]((path / name).read_text()))
    before = content(path)
    with pytest.raises(files.DamagedFile, match=rf"{name}.* is damaged"):
        execute(planned("fedala,ditto"), path, resume=True)
    assert content(path) == before


def test_a_changed_config_is_refused(tmp_path):
    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    (path / "config.toml").write_text(
        (path / "config.toml").read_text().replace("rounds = 2", "rounds = 9")
    )
    with pytest.raises(
        files.DamagedFile, match=r"config\.toml is damaged: it is not what the run wrote"
    ):
        run(resume=path, dataset=federation(), model=Net)


@pytest.mark.parametrize("how", ["gone", "flipped", "another client's"])
def test_a_damaged_model_is_noticed_and_written_again(how, whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    model = path / "models" / "fedala" / "seed-0" / "client-00001.safetensors"
    if how == "gone":
        model.unlink()
    elif how == "flipped":
        damaged(model, how)
    else:
        model.write_bytes(model.with_name("client-00002.safetensors").read_bytes())
    with pytest.raises(files.DamagedFile, match=r"client-00001\.safetensors"):
        RunFolder(path).model("fedala", 0, 1)
    said = []
    execute(planned(), path, resume=True, observer=RunObserver(on_message=said.append))
    assert "client-00001.safetensors is gone or damaged" in said[0]
    same(whole, path)


def test_a_damaged_model_without_a_checkpoint_is_told(tmp_path):
    path = tmp_path / "run"
    execute(planned(keep_checkpoint=False), path)
    (path / "models" / "fedala" / "seed-0" / "client-00001.safetensors").unlink()
    before = content(path)
    with pytest.raises(
        files.DamagedFile, match="no checkpoint was kept from which it could be written again"
    ):
        execute(planned(keep_checkpoint=False), path, resume=True)
    assert content(path) == before


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder of a run of two rounds that got a third one."""
    path = tmp_path_factory.mktemp("resumed") / "run"
    execute(planned(rounds=2), path)
    return execute(planned(rounds=3), path, resume=True).folder


@pytest.mark.parametrize("name", ["split.csv", "summary.json", "resumed.csv", "preprocessing.json"])
@pytest.mark.parametrize("how", ["shorter", "empty", "gone"])
def test_what_can_be_written_again_is(name, how, resumed, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(resumed, path)
    split = (path / "split.csv").read_text()
    (path / name).unlink() if how == "gone" else damaged(path / name, how)
    execute(planned(rounds=4), path, resume=True)
    assert (path / "split.csv").read_text() == split
    assert RunFolder(path).read_verified("summary.json")
    notes = [row["changed"] for row in RunFolder(path).rows("resumed.csv")]
    lost = (
        "missing: if it said anything before, it"
        if how == "gone"
        else "damaged: what it said before"
    )
    first = f"resumed.csv was {lost} is lost" if name == "resumed.csv" else "rounds: 2 → 3"
    assert notes == [first, "rounds: 3 → 4"]


def test_a_folder_without_digests_is_resumed_and_said_to_be_unverified(whole, tmp_path):
    """As those of versions that wrote none."""
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        execute(planned(), path, observer=stop_after(2))
    (path / "digests.json").unlink()
    said = []
    execute(planned(), path, resume=True, observer=RunObserver(on_message=said.append))
    assert said == [
        f"{path} has no digests.json, so nothing in it can be verified.",
        "FedALA continues after round 2 of 4.",
    ]
    same(whole, path)
    assert RunFolder(path).list_unverified() == []


def test_a_run_in_which_clients_diverged_is_resumed(tmp_path):
    options = {"lr": 1e9, "checkpoint_every": 1}
    execute(planned("fedavg", **options), tmp_path / "whole")
    interrupted(tmp_path / "parts", 2, "fedavg", **options)
    assert (tmp_path / "parts" / "faults.csv").is_file()
    same(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_is_resumed_without_checkpoints_is_finished_all_the_same(tmp_path):
    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    execute(planned(rounds=4, checkpoint_every=0), path, resume=True)
    rows, seconds = rows_of(path), seconds_of(path)
    execute(planned(rounds=4, checkpoint_every=0), path, resume=True)
    assert rows_of(path) == rows
    assert seconds_of(path) == seconds  # nothing was trained again
    with pytest.raises(UserError, match="trained for 4 rounds already, which is more than 3"):
        execute(planned(rounds=3), path, resume=True)
    execute(planned(rounds=6), path, resume=True)
    assert len(rows_of(path)) == 7


def test_a_kill_between_the_results_and_the_last_word_of_the_checkpoint(tmp_path, monkeypatch):
    options = {"rounds": 2, "checkpoint_every": 1, "keep_checkpoint": False}
    path = tmp_path / "run"

    def killed(self, **_):
        (self.folder / ".0000002.json.new").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedala.runs.checkpoint.Checkpoints.finish", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(planned(**options), path)
    rows = rows_of(path)
    execute(planned(**options), path, resume=True)
    assert rows_of(path) == rows
    assert sorted(file.name for file in (path / "checkpoint" / "0").iterdir()) == ["0000002.json"]


def test_two_kills_in_the_same_place_are_no_damage(tmp_path, monkeypatch):
    """Each is killed after the record of a new config is written, and before the config is."""
    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    write_file = files.write_file
    for rounds in (3, 4):

        def killed(target, *arguments, **options):
            if target.name == "config.toml":
                raise KeyboardInterrupt
            write_file(target, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(files, "write_file", killed)
            with pytest.raises(KeyboardInterrupt):
                execute(planned(rounds=rounds), path, resume=True)
    assert RunFolder(path).config().rounds == 2
    execute(planned(rounds=5), path, resume=True)
    assert len(rows_of(path)) == 6


def test_who_looks_on_sees_a_resumed_run_as_it_is_now(tmp_path):
    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    onlooker = RunFolder(path)
    assert len(onlooker.history()["fedala"]) == 3
    execute(
        planned(rounds=4), path, resume=True
    )  # which writes the last row of before once more, with other seconds
    assert len(onlooker.history()["fedala"]) == 5
    assert b"rounds = 4" in onlooker.read_verified("config.toml")


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_run_without_digests_stays_finished(keep, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala,fedavg", rounds=2, keep_checkpoint=keep), path)
    (path / "digests.json").unlink()
    rows, models = rows_of(path), models_of(path)
    for _ in range(2):
        execute(planned("fedala,fedavg", rounds=2, keep_checkpoint=keep), path, resume=True)
        assert (rows_of(path), models_of(path)) == (rows, models)


@pytest.mark.parametrize("how", ["shorter", "flipped", "empty"])
def test_damaged_digests_are_refused(how, tmp_path):
    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    damaged(path / "digests.json", how)
    before = content(path)
    with pytest.raises(files.DamagedFile, match=r"digests\.json is damaged"):
        execute(planned(rounds=2), path, resume=True)
    assert content(path) == before


def test_checkpoints_that_are_gone_are_not_taken_for_a_new_run(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        execute(planned(), path, observer=stop_after(2))
    shutil.rmtree(path / "checkpoint")
    before = content(path)
    with pytest.raises(files.DamagedFile, match="The checkpoints of FedALA are gone"):
        execute(planned(), path, resume=True)
    assert content(path) == before


def test_another_model_or_version_is_noted(tmp_path, monkeypatch):
    class Other(Net):
        def forward(self, x):
            return super().forward(x).tanh()

    path = tmp_path / "run"
    execute(planned(rounds=2), path)
    other = plan(
        Config.from_values(
            {"method": "fedala", "rounds": 3, "batch_size": 4, "lr": 0.1, "device": "cpu"}
        ),
        federation(),
        Other,
    )
    monkeypatch.setattr("fedala.runs.provenance.__version__", "99")
    said = []
    execute(other, path, resume=True, observer=RunObserver(on_message=said.append))
    assert any("fedala: " in sentence and "→ 99" in sentence for sentence in said)
    assert any("it computes something else" in sentence for sentence in said)
    [row] = RunFolder(path).rows("resumed.csv")
    assert "→ 99" in row["changed"]
    assert "it computes something else" in row["changed"]


def test_a_resume_asks_for_the_room_that_is_missing_only(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=1), path, observer=stop_after(3))
    free = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    execute(planned(checkpoint_every=1), tmp_path / "copy")
    free.free = 10_000
    with pytest.raises(
        UserError, match=r"takes \d+\.\d kB of disk, and there is room for 10\.0 kB"
    ):
        execute(planned(checkpoint_every=1), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    execute(planned(checkpoint_every=1), path, resume=True)
    same(tmp_path / "copy", path)


def test_clients_that_never_joined_share_one_file(tmp_path):
    execute(planned(join_ratio=0.2, rounds=1), tmp_path / "run")
    saved = sorted((tmp_path / "run" / "models" / "fedala").rglob("client-*.safetensors"))
    assert len(saved) == len(SIZES)
    assert len({path.stat().st_ino for path in saved}) < len(SIZES) - 1
    for client in range(len(SIZES)):
        RunFolder(tmp_path / "run").model("fedala", 0, client)


def test_states_beyond_the_memory_limit_are_removed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = {"checkpoint_every": 0, "client_memory": 0.0, "join_ratio": 0.5}
    seen = set()

    def look(method, row):
        """A kill now would leave them in the run folder, where the user can delete them."""
        seen.update(
            path.parent
            for path in tmp_path.rglob("*-*-*.safetensors")
            if "models" not in path.parts
        )

    execute(planned(**options), tmp_path / "run", observer=RunObserver(on_row=look))
    assert seen == {tmp_path / "run" / "checkpoint" / "0"}
    assert not (tmp_path / "run" / "checkpoint").exists()
    with pytest.raises(Stopped):
        execute(planned(**options), tmp_path / "stopped", observer=stop_after(2))
    assert not (tmp_path / "stopped" / "checkpoint").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "stopped"]


def test_by_default_checkpoints_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    """A round takes 3 s, a checkpoint 1: due after 10 s, then after 100 times its seconds."""
    from fedala.runs import checkpoint

    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    kept = checkpoint.Checkpoints(tmp_path, "x")
    written = []
    for round in range(1, 200):
        now += 3
        if kept.is_due(round):
            written.append(now)
            kept._last_end, kept._last_seconds = now + 1, 1.0
            now += 1
    assert written[0] == 12
    assert [b - a for a, b in pairwise(written[1:])] == [103.0] * (len(written) - 2)
    large = checkpoint.Checkpoints(tmp_path, "x", size=2**30)  # eight seconds, by a guess
    now += 799
    assert not large.is_due(1)
    now += 2
    assert large.is_due(1)


def test_progress_knows_the_rounds_before_a_resume(tmp_path, capsys):
    execute(planned(rounds=3, seeds=2), tmp_path / "run")
    more = planned(rounds=4, seeds=2)
    with RunProgress(more) as progress:
        observer = RunObserver(progress.row, on_begin=progress.begin, on_earlier=progress.earlier)
        result = execute(more, tmp_path / "run", resume=True, observer=observer)
    best = result.methods["fedala"].best.mean()
    assert f"best {100 * best:.2f} %" in capsys.readouterr().err
