"""Seeds and methods that are added to a run folder, as if it had had them from the beginning."""

import json
import os
import random
from pathlib import Path

import pytest
from corrupt.worlds import accuracies
from runs.test_kill import KILLS, Doomed
from runs.test_resume import federation, models_of, stop_after
from runs.test_resume import planned as plan_one
from small import Net

from fedala import run
from fedala.errors import UserError
from fedala.report.page import render_page
from fedala.report.runs import find_runs
from fedala.runs.config import Config
from fedala.runs.digests import Digests
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.resumable_options import change_config
from fedala.runs.tables import TABLES


def tables_of(path):
    """Return the rows of all tables by method and seed, without the seconds."""
    folder, tables = RunFolder(path), {}
    for name in TABLES:
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in folder.rows(name)]
        tables[name] = sorted(rows, key=lambda row: (row["method"], row["seed"], row["round"]))
    assert folder.list_unverified() == []
    return repr(tables)


def same(a, b):
    assert tables_of(a) == tables_of(b)
    assert models_of(a) == models_of(b)
    assert models_of(a)
    assert (a / "split.csv").read_bytes() == (b / "split.csv").read_bytes()
    assert accuracies(a / "summary.json") == accuracies(b / "summary.json")
    assert not list(b.rglob(".*.new"))


def lines_of(path):
    return {name: (path / name).read_text().splitlines() for name in ("history.csv", "clients.csv")}


def content(path):
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != ".lock"}


OPTIONS = {"rounds": 2, "lanes": "1", "join_ratio": 0.5}


def planned(methods, **options):
    """Plan a run of several methods, with ALA's short initial stage."""
    settings = {"fedala.max_epochs": 2} if "fedala" in methods else {}
    return plan_one(methods, **{"set": settings, **options})


def resumed(path, **options):
    """Resume as a user does, in Python."""
    return run(resume=path, dataset=federation(), model=Net, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run two methods with three seeds from the beginning."""
    path = tmp_path_factory.mktemp("whole") / "run"
    execute(planned("fedala,fedavg", **OPTIONS, seeds=3), path)
    return path


def test_added_seeds(whole, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala,fedavg", **OPTIONS, seeds=1), path)
    before = lines_of(path)
    said = []
    resumed(path, seeds=3, on_row=lambda method, row: said.append((method, row.seed)))
    same(whole, path)
    assert {seed for _, seed in said} == {1, 2}  # the first one was not run again
    for name, lines in lines_of(path).items():
        assert lines[: len(before[name])] == before[name]  # byte for byte, also the seconds
    assert RunFolder(path).config() == RunFolder(whole).config()
    assert "seeds: 1 → 3" in (path / "resumed.csv").read_text(encoding="utf-8")
    assert sorted(p.name for p in (path / "checkpoint").iterdir()) == [
        "0", "0-1", "1", "1-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    ["+ditto", " +Ditto ", "+fedala,+ditto", "+ditto,fedavg", "ditto,fedavg,fedavg+ala"],
)
def test_methods_are_added_behind_those_that_are_there(given):
    before = Config(method="fedala, fedavg")
    here = Path("x")
    assert change_config(before, {"method": given}, here).methods == ("fedala", "fedavg", "ditto")
    for same in ("fedavg,fedala", "+fedavg", "+FedAvg+ALA"):
        assert change_config(before, {"method": same}, here) == before


def test_added_methods(whole, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS, seeds=3), path)
    before = lines_of(path)
    said = []
    given = "fedavg,fedala"
    result = resumed(path, method=given, on_row=lambda method, row: said.append(method))
    same(whole, path)
    assert set(said) == {"fedavg"}
    assert list(result.methods) == ["fedala", "fedavg"]
    for name, lines in lines_of(path).items():
        assert lines[: len(before[name])] == before[name]
    assert RunFolder(path).config() == RunFolder(whole).config()
    again = content(path / "models")
    resumed(path, method=given)  # there is nothing left to add
    assert content(path / "models") == again


def test_seeds_and_methods_in_turn(whole, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS, seeds=1), path)
    for addition in ({"seeds": 2}, {"method": "+fedavg"}, {"seeds": 3}):
        result = resumed(path, **addition)
    same(whole, path)
    assert [len(one.best) for one in result.methods.values()] == [3, 3]


def test_several_lanes_agree_to_rounding(tmp_path):
    options = {"rounds": 2, "lanes": "all", "precision": "float64"}
    execute(planned("fedala", **options, seeds=3), tmp_path / "whole")
    execute(planned("fedala", **options, seeds=2), tmp_path / "parts")
    resumed(tmp_path / "parts", seeds=3)
    both = [RunFolder(tmp_path / name).history()["fedala"] for name in ("whole", "parts")]
    rows, others = (sorted(one, key=lambda row: (row.seed, row.round)) for one in both)
    assert len(rows) == 9
    for row, other in zip(rows, others, strict=True):
        assert (row.seed, row.round, row.accuracy) == (other.seed, other.round, other.accuracy)
        assert row.loss == pytest.approx(other.loss, rel=1e-10)


def test_an_interrupted_run_gets_seeds_and_continues(whole, tmp_path):
    path = tmp_path / "run"
    work = planned("fedala,fedavg", **OPTIONS, seeds=2)
    with pytest.raises(Stopped):
        execute(work, path, observer=stop_after(3))
    resumed(path, seeds=3)
    same(whole, path)


def test_more_rounds_for_every_batch(tmp_path):
    execute(planned("fedala,fedavg", **{**OPTIONS, "rounds": 3}, seeds=2), tmp_path / "whole")
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS, seeds=1), path)
    resumed(path, seeds=2, method="+fedavg")
    resumed(path, rounds=3)
    same(tmp_path / "whole", path)


def test_a_copy_leaves_the_folder_as_it_is(whole, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala,fedavg", **OPTIONS, seeds=2), path)
    before = content(path)
    resumed(path, seeds=3, out=tmp_path / "copy")
    same(whole, tmp_path / "copy")
    assert content(path) == before


@pytest.mark.parametrize("options", [{"keep_checkpoint": False}, {"checkpoint_every": 0}])
def test_a_finished_run_without_checkpoints_can_grow(whole, options, tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS, seeds=2, **options), path)
    resumed(path, seeds=3, method="+fedavg")
    same(whole, path)


def test_a_folder_of_an_older_version_can_grow(whole, tmp_path):
    """It has no digests; those of the version before have no word of additions."""
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS, seeds=2), path)
    record = json.loads((path / "digests.json").read_text())
    assert "origin" not in json.dumps(record)
    assert "batches" not in json.dumps(record)
    (path / "digests.json").unlink()
    resumed(path, seeds=3)
    resumed(path, method="+fedavg")
    same(whole, path)


def test_hyperparameters_of_an_added_method(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedavg", **OPTIONS), path)
    execute(planned("fedavg,fedprox", **OPTIONS, set={"fedprox.mu": 0.5}), tmp_path / "whole")
    with pytest.raises(UserError, match=r"would change set \("):
        resumed(path, method="+fedala", set={"fedavg.x": 1})
    resumed(path, method="+fedprox", set={"fedprox.mu": 0.5})
    same(tmp_path / "whole", path)
    with pytest.raises(UserError, match=r"would change set \("):
        resumed(path, set={"fedprox.mu": 0.7})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": 1}, "seeds is 1, and the run has 3 already"),
        ({"method": "fedavg"}, "method is fedavg, and the run has fedala, too"),
        ({"method": "+fedala,+x"}, "There is no method 'x'"),
        ({"method": "+"}, "method must name different methods"),
        ({"method": "+ditto", "rounds": 9}, "first with the one, then with the other"),
        ({"seeds": 4, "rounds": 9}, "first with the one, then with the other"),
        ({"seeds": 4, "lr": 0.2}, r"would change lr \(0\.1 → 0\.2\)"),
        ({"method": "+ditto", "set": {"fedala.eta": 0.5}}, r"would change set"),
        ({"seeds": 4, "seed": 1}, r"would change seed \("),
    ],
)
def test_what_cannot_be_added_changes_nothing(options, sentence, whole):
    before = content(whole)
    with pytest.raises(UserError, match=sentence):
        resumed(whole, **options)
    assert content(whole) == before


def test_other_data_are_refused_also_after_an_addition(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedavg", rounds=1), path)
    other = federation()
    other.dataset.x[0, 0, 0, 0] += 1
    for options in ({"seeds": 2}, {}, {"method": "+local"}):
        before = content(path)
        with pytest.raises(UserError, match="a run with other data"):
            run(resume=path, dataset=other, model=Net, **options)
        assert content(path) == before
        resumed(path, **options)


def test_a_changed_row_is_noticed_in_every_batch(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedavg", rounds=2), path)
    resumed(path, seeds=2)
    lines = (path / "history.csv").read_text().splitlines(keepends=True)
    for number in range(1, len(lines)):
        cells = lines[number].split(",")
        changed = ",".join([*cells[:3], "0.123", *cells[4:]])
        text = "".join([*lines[:number], changed, *lines[number + 1 :]])
        (path / "history.csv").write_text(text)
        with pytest.raises(UserError, match="are not those that the run wrote"):
            resumed(path)


def test_the_model_of_an_added_seed_is_written_again(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedala", **OPTIONS), path)
    resumed(path, seeds=2)
    before, rows = models_of(path), tables_of(path)
    (path / "models" / "fedala" / "seed-1" / "client-00001.safetensors").write_bytes(b"x")
    said = []
    execute(
        planned("fedala", **OPTIONS, seeds=2),
        path,
        resume=True,
        observer=RunObserver(on_message=said.append, on_row=lambda _, row: said.append(row.seed)),
    )
    assert [one for one in said if isinstance(one, int)] == [1]
    assert (models_of(path), tables_of(path)) == (before, rows)


# --- killed in the middle ------------------------------------------------------------------------


ADDITIONS = [{"seeds": 2}, {"method": "+local"}, {"seeds": 2, "method": "+local"}]


def attempt(path, options, doomed):
    """Add in a fork of this process; return whether it came to its end, and what it counted."""
    log = path.parent / "log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            doom = doomed()
            resumed(path, **options)
            log.write_text(str(doom.count))
            code = 0
        except BaseException as error:
            log.write_text(repr(error))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -9), log.read_text()
    return code == 0, int(log.read_text()) if code == 0 else 0


@pytest.mark.parametrize("addition", ADDITIONS, ids=["seeds", "methods", "both"])
def test_killed_while_adding(addition, tmp_path):
    options = {"rounds": 2, "lanes": "1", "checkpoint_every": 1}
    execute(planned("fedala", **options), tmp_path / "start")
    finished = lines_of(tmp_path / "start")
    copy(tmp_path / "start", tmp_path / "whole")
    ended, operations = attempt(tmp_path / "whole", addition, Doomed)
    assert ended
    rng = random.Random(1)
    for at in rng.sample(range(1, operations), max(2, KILLS // 4)):
        path = tmp_path / str(at)
        copy(tmp_path / "start", path)
        doom = (at, rng.random() < 0.5, rng.randrange(40))
        attempt(path, addition, lambda doom=doom: Doomed(*doom))
        has_begun = RunFolder(path).config() != RunFolder(tmp_path / "start").config()
        check_finished_part(path, finished)
        resumed(path)  # as the advice says, without any option
        if has_begun:
            same(tmp_path / "whole", path)
        else:
            same(tmp_path / "start", path)
            resumed(path, **addition)
            same(tmp_path / "whole", path)


def copy(source, target):
    with RunFolder(source).lock(), RunFolder(source).copy_to(target):
        pass


def check_finished_part(path, finished):
    """Nothing of what was there is lost, and a report can be made of it."""
    for name, lines in finished.items():
        assert (path / name).read_text().splitlines()[: len(lines)] == lines
    folder = RunFolder(path)
    assert folder.model("fedala", 0, 0)
    assert "FedALA" in render_page(find_runs([path]))


def test_stopped_while_adding_names_what_is_missing(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedavg,local", rounds=2), path)
    with pytest.raises(Stopped):
        execute(
            planned("fedavg,local", rounds=2, seeds=2),
            path,
            resume=True,
            observer=stop_after(1),
        )
    page = render_page(find_runs([path]))
    assert "FedAvg 0 of 2 rounds" in page
    assert "Local 1 of 2 seeds" in page


def test_batches_that_do_not_fit_the_config_are_damage(tmp_path):
    path = tmp_path / "run"
    execute(planned("fedavg", rounds=1), path)
    resumed(path, seeds=3)
    record = Digests.read(path)
    record.batches = [2, 2]
    (path / "digests.json").write_bytes(record.pack())
    with pytest.raises(UserError, match=r"digests\.json is damaged"):
        resumed(path)
