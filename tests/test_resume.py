"""A run that was interrupted and resumed is the run that never was: its history and its models, to the bit."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from small import QUICK, Net

from fedala import files, run
from fedala.config import Config
from fedala.data import Dataset, Federation
from fedala.errors import RunError, UserError
from fedala.methods import everything
from fedala.running import Stopped, Watcher, execute, plan
from fedala.store import RunFolder

SIZES = [9, 5, 7, 12, 3]


def federation() -> Federation:
    random = np.random.default_rng(0)
    tests = [max(1, size // 3) for size in SIZES]
    y = torch.from_numpy(random.integers(0, 3, sum(SIZES) + sum(tests)))
    y[:3] = torch.arange(3)
    x = torch.from_numpy(random.normal(size=(len(y), 1, 6, 6))).float() + y.view(-1, 1, 1, 1) * 0.5
    parts = np.split(np.arange(len(y)), np.cumsum([*SIZES, *tests]))
    none = tuple(np.arange(0) for _ in SIZES)
    return Federation(Dataset("own", x, y, 3), tuple(parts[: len(SIZES)]), tuple(parts[len(SIZES) : -1]), none)


def planned(method="fedala", **options):
    settings = {"rounds": 4, "batch_size": 4, "lr": 0.1, "set": QUICK.get(method, {}), "device": "cpu", **options}
    return plan(Config.of({"method": method, **settings}), federation(), Net)


def stop_after(rounds):
    """Asked after every round of every method, says so the given number of times later."""
    asked = 0

    def stop():
        nonlocal asked
        asked += 1
        return asked == rounds

    return Watcher(stop=stop)


def rows_of(path):
    """Everything that the history says but for the seconds, which differ from run to run."""
    return [{k: repr(v) for k, v in row.items() if k != "seconds"} for row in RunFolder(path).history()]


def models_of(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted((path / "models").rglob("*.safetensors"))}


def same(a, b):
    assert rows_of(a) == rows_of(b)
    assert models_of(a) == models_of(b)
    assert models_of(a)
    for name in ("clients.csv", "faults.csv", "weights.csv", "split.csv"):
        assert (a / name).exists() == (b / name).exists()
        if (a / name).exists():
            assert (a / name).read_text() == (b / name).read_text()


def interrupted(path, rounds, method="fedala", watcher=None, **options):
    """A run that stops after some rounds, and goes on."""
    with pytest.raises(Stopped, match="after"):
        execute(planned(method, **options), path, watcher=watcher or stop_after(rounds))
    return execute(planned(method, **options), path, resume=True)


SETTINGS = [
    {"lanes": "1"},
    {"lanes": "all", "seeds": 2},
    {"lanes": "2", "join_ratio": 0.5, "eval_every": 2, "seeds": 2},
    {"lanes": "auto", "join_ratio": 0.5, "client_memory": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["one lane", "all lanes", "two lanes", "files"])
@pytest.mark.parametrize("method", everything())
def test_resumed_is_uninterrupted(method, settings, tmp_path):
    if planned(method).methods[0].everyone and "join_ratio" in settings:
        settings = {**settings, "join_ratio": 1.0}
    whole = execute(planned(method, **settings), tmp_path / "whole")
    parts = interrupted(tmp_path / "parts", 1 + len(method) % 3, method, **settings)
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
    assert [m.best.tolist() for m in again.methods.values()] == [m.best.tolist() for m in result.methods.values()]


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
        assert rows_of(tmp_path / "parts")[:3] == before[:3]


@pytest.mark.parametrize("method", ["fedphp", "apple", "fedphp+ala"])
def test_no_more_rounds_for_a_schedule_that_depends_on_them(method, tmp_path):
    execute(planned(method, rounds=2), tmp_path / "run")
    with pytest.raises(UserError, match="plans its rounds ahead, so a run of 2 cannot be resumed with 3"):
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
    with pytest.raises(UserError, match="another configuration"):
        run(resume=tmp_path / "run", dataset=other, model=Net)
    assert rows_of(tmp_path / "run") == before


def test_another_folder(tmp_path):
    execute(planned(), tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(planned(), tmp_path / "first", watcher=stop_after(2))
    before = {p: p.read_bytes() for p in (tmp_path / "first").rglob("[!.]*") if p.is_file()}
    result = run(resume=tmp_path / "first", out=tmp_path / "second", dataset=federation(), model=Net)
    assert result.folder == tmp_path / "second"
    same(tmp_path / "whole", tmp_path / "second")
    assert before == {p: p.read_bytes() for p in (tmp_path / "first").rglob("[!.]*") if p.is_file()}
    with pytest.raises(UserError, match="exists already"):
        run(resume=tmp_path / "first", out=tmp_path / "second", dataset=federation(), model=Net)


def test_no_run_folder(tmp_path):
    with pytest.raises(UserError, match="is no run folder"):
        run(resume=tmp_path)


def test_one_at_a_time(tmp_path):
    execute(planned(rounds=1), tmp_path / "run")
    with RunFolder(tmp_path / "run").held(), pytest.raises(UserError, match="is in use"):
        execute(planned(rounds=2), tmp_path / "run", resume=True)


# --- faults --------------------------------------------------------------------------------------------------------


def failing(monkeypatch, at):
    """The disk fails at the so-manieth write, flush or rename, and from then on. Returns what counts them."""
    calls = 0

    def guard(function):
        def guarded(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(28, "No space left on device")
            return function(*arguments, **options)

        return guarded

    monkeypatch.setattr(files, "flush", guard(files.flush))
    monkeypatch.setattr(os, "replace", guard(os.replace))
    monkeypatch.setattr(RunFolder, "_append", guard(RunFolder._append))
    return lambda: calls


@pytest.mark.parametrize("method", ["fedala", "fedavg"])
def test_a_disk_that_fails_anywhere_loses_nothing(method, tmp_path, monkeypatch):
    """One run for every write, flush and rename there is, each failing at another; each goes on to the same end."""
    options = {"rounds": 2, "checkpoint_every": 1, "join_ratio": 0.5}
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
        {"shorter": data[:-1], "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "empty": b""}[how]
    )


@pytest.mark.parametrize("how", ["shorter", "flipped", "empty", "gone"])
@pytest.mark.parametrize("which", ["manifest", "server", "client"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(which, how, tmp_path):
    options = {"checkpoint_every": 1}
    execute(planned(**options), tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(planned(**options), tmp_path / "run", watcher=stop_after(3))
    folder = tmp_path / "run" / "checkpoint" / "0"
    newest, _ = sorted(folder.glob("*.json"), reverse=True)
    client = max(folder.glob("0-*"), key=lambda path: int(path.stem.split("-")[2]))
    victim = {"manifest": newest, "server": folder / "server-3.safetensors", "client": client}[which]
    victim.unlink() if how == "gone" else damaged(victim, how)
    said = []
    execute(planned(**options), tmp_path / "run", resume=True, watcher=Watcher(say=said.append))
    same(tmp_path / "whole", tmp_path / "run")
    if not (which == "manifest" and how == "gone"):
        assert "Looking for an earlier checkpoint" in said[0]


def test_a_damaged_manifest_before_the_last_harms_nothing(tmp_path):
    options = {"checkpoint_every": 1}
    execute(planned(**options), tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(planned(**options), tmp_path / "run", watcher=stop_after(3))
    _, older = sorted((tmp_path / "run" / "checkpoint" / "0").glob("*.json"), reverse=True)
    damaged(older, "shorter")
    said = []
    execute(planned(**options), tmp_path / "run", resume=True, watcher=Watcher(say=said.append))
    same(tmp_path / "whole", tmp_path / "run")
    assert said == []


def test_no_checkpoint_left(tmp_path):
    options = {"checkpoint_every": 1}
    with pytest.raises(Stopped):
        execute(planned(**options), tmp_path / "run", watcher=stop_after(2))
    for manifest in (tmp_path / "run" / "checkpoint" / "0").glob("*.json"):
        manifest.write_text("{}")
    with pytest.raises(UserError, match="is whole, so nothing can be resumed"):
        execute(planned(**options), tmp_path / "run", resume=True)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path):
    from dataclasses import replace

    from fedala.checkpoint import Checkpoint
    from fedala.clients import File

    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=2), tmp_path / "run", watcher=stop_after(2))
    [manifest] = (tmp_path / "run" / "checkpoint" / "0").glob("*.json")
    found = Checkpoint.unpack(manifest)
    for name in ("../../../secret.safetensors", "/etc/passwd", "0-0-1.safetensors\n", "server-1.safetensors/../x"):
        manifest.write_bytes(replace(found, server=File(name, found.server.digest)).pack())
        with pytest.raises(files.Damaged, match="it refers to"):
            Checkpoint.unpack(manifest)


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    seen = []

    def look(method, row):
        folder = tmp_path / "run" / "checkpoint" / "0"
        seen.append(sorted(path.name for path in folder.glob("*")) if folder.exists() else [])

    execute(planned(rounds=5, checkpoint_every=1), tmp_path / "run", watcher=Watcher(row=look))
    assert max(map(len, seen)) == 2 * (2 + len(SIZES))
    final = list((tmp_path / "run" / "checkpoint" / "0").iterdir())
    assert len(final) == 2 + len(SIZES)


def test_without_checkpoints_a_run_starts_over(tmp_path):
    execute(planned(), tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=0), tmp_path / "run", watcher=stop_after(2))
    assert not (tmp_path / "run" / "checkpoint").exists()
    execute(planned(checkpoint_every=0), tmp_path / "run", resume=True)
    same(tmp_path / "whole", tmp_path / "run")


def test_by_default_checkpoints_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    """A clock that a round moves by 3 s and writing a checkpoint by 1: due after 10 s, then after 100 times what one took."""
    from fedala import checkpoint

    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    kept = checkpoint.Checkpoints(tmp_path, "x")
    written = []
    for round in range(1, 200):
        now += 3
        if kept.due(round):
            written.append(now)
            kept._ended, kept._took = now + 1, 1.0
            now += 1
    assert written[0] == 12
    assert [b - a for a, b in pairwise(written[1:])] == [103.0] * (len(written) - 2)
    large = checkpoint.Checkpoints(tmp_path, "x", size=2**30)  # eight seconds, by a guess
    now += 799
    assert not large.due(1)
    now += 2
    assert large.due(1)
