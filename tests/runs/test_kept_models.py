"""The models of the best evaluation, and runs that stop early: what is kept is what was tested."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs.test_resume import federation, models_of, planned, rows_of, same, stop_after
from small import Net, assert_close, same_rows

from fedala import UserError, run
from fedala.data import Federation
from fedala.io import files
from fedala.records import HistoryRow
from fedala.report.runs import read_run
from fedala.runs.early_stopping import RunWatch, group_runs
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import Plan, plan
from fedala.runs.run_files import list_run_files

CLIENTS = range(5)
#: Rounds in which these tiny runs do not improve for long.
LONG = {"rounds": 12, "seeds": 3, "patience": 2, "set": {}}


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)


def score(data: Federation, load) -> float:
    """Return the accuracy over all test samples of each client's model, as a module."""
    correct = 0
    for client, rows in enumerate(data.test):
        model = Net().eval()
        model.load_state_dict(load(client))
        with torch.no_grad():
            output = model(data.dataset.x[rows])
        correct += (output.argmax(1) == data.dataset.y[rows]).sum().item()
    return correct / sum(map(len, data.test))


# --- the best models ------------------------------------------------------------------------------


@pytest.mark.parametrize("join_ratio", [1.0, 0.6])
@pytest.mark.parametrize("method", ["fedala", "ditto", "fedfomo", "pfedme"])
def test_the_best_models_are_those_that_were_tested(method, join_ratio, tmp_path):
    """Their accuracy, as modules on the test samples, is that of the best round: for each seed."""
    options = {"rounds": 5, "seeds": 2, "join_ratio": join_ratio, "lanes": "all"}
    result = execute(planned(method, **options), tmp_path / "run").methods[method]
    folder, data = RunFolder(tmp_path / "run"), federation()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"][method]
    assert summary["best_models"] == {"picked_by": "accuracy", "rounds": result.best_rounds}
    for seed in (0, 1):
        rows = [row for row in result.history if row.seed == seed]
        best = score(data, lambda client, seed=seed: folder.model(method, seed, client, best=True))
        last = score(data, lambda client, seed=seed: folder.model(method, seed, client))
        assert best == pytest.approx(max(row.accuracy for row in rows))
        assert best == pytest.approx(rows[result.best_rounds[seed]].accuracy)
        assert last == pytest.approx(rows[-1].accuracy)


def test_the_best_global_model_is_the_one_that_was_sent(tmp_path):
    data = federation()
    result = execute(planned("fedavg", rounds=6), tmp_path / "run").methods["fedavg"]
    best = RunFolder(tmp_path / "run").model("fedavg", 0, best=True)
    assert score(data, lambda client: best) == pytest.approx(result.best[0])
    assert {path.name for path in (tmp_path / "run" / "models" / "best").rglob("*.*")} == {
        "global.safetensors"
    }
    [round] = result.best_rounds
    assert 0 < round < 6, "the best round should not be the first or last for this to bite"
    # A run that was planned to end in the best round ends with the same model.
    execute(planned("fedavg", rounds=round), tmp_path / "shorter")
    assert_close(RunFolder(tmp_path / "shorter").model("fedavg", 0), best, 0)


def test_validation_samples_pick_if_there_are_any(tmp_path):
    data = federation()
    held_out = tuple(rows[::2] for rows in data.train)
    train = tuple(rows[1::2] for rows in data.train)
    split = Federation(data.dataset, train, data.test, held_out)
    config = planned("fedala", rounds=6).config
    result = execute(plan(config, split, Net), tmp_path / "run").methods["fedala"]
    assert result.picked_by == "accuracy_validation"
    column = [row.accuracy_validation for row in result.history]
    assert result.best_rounds == [int(np.argmax(column))]
    folder = RunFolder(tmp_path / "run")
    expected = result.history[result.best_rounds[0]].accuracy
    found = score(data, lambda client: folder.model("fedala", 0, client, best=True))
    assert found == pytest.approx(expected)


def make_split() -> Federation:
    data = federation()
    train, held_out = (tuple(rows[k::2] for rows in data.train) for k in (1, 0))
    return Federation(data.dataset, train, data.test, held_out)


def test_the_loss_on_validation_samples_picks_if_it_is_asked_for(tmp_path):
    """It picks the kept models, the score that stands for the run, and when the run stops."""
    options = {"rounds": 12, "patience": 3, "pick_by": "loss", "lr": 0.5}
    checked = plan(replace(planned("fedavg").config, **options), make_split(), Net)
    result = execute(checked, tmp_path / "run").methods["fedavg"]
    losses = [row.loss_validation for row in result.history]
    best = int(np.argmin(losses))
    accuracies = [row.accuracy_validation for row in result.history]
    assert best != int(np.argmax(accuracies)), "the two should not agree for this to bite"
    assert (result.picked_by, result.best_rounds) == ("loss_validation", [best])
    assert result.validation_picked.tolist() == [result.history[best].accuracy]
    assert result.history[-1].round == best + 3 == result.stops[0]
    folder = RunFolder(tmp_path / "run")
    found = score(federation(), lambda client: folder.model("fedavg", 0, best=True))
    assert found == pytest.approx(result.history[best].accuracy)
    assert read_run(folder.path).results["fedavg"].validation_picked.tolist() == [found]
    with pytest.raises(Stopped):
        execute(checked, tmp_path / "again", observer=stop_after(2))
    execute(checked, tmp_path / "again", resume=True)
    same(folder.path, tmp_path / "again")


def test_the_loss_on_validation_samples_is_theirs(tmp_path):
    """A run that tests the held-out samples has their loss as its own."""
    data = make_split()
    config = replace(planned("fedavg", rounds=2).config, pick_by="loss")
    picked = execute(plan(config, data, Net), tmp_path / "picked").methods["fedavg"].history
    tested = replace(data, test=data.validation, validation=data.test)
    plain = (
        execute(plan(planned("fedavg", rounds=2).config, tested, Net), tmp_path / "plain")
        .methods["fedavg"]
        .history
    )
    assert [row.loss_validation for row in picked] == pytest.approx([row.loss for row in plain])
    assert all(row.loss_validation is None for row in plain)


def test_without_a_folder_they_are_in_the_result(tmp_path):
    options = {"method": "fedala", "rounds": 4, "batch_size": 4, "lr": 0.1, "seeds": 2}
    result = run(dataset=federation(), model=Net, **options)
    execute(planned("fedala", seeds=2), tmp_path / "run")
    assert result.best_models.keys() == {(s, c) for s in (0, 1) for c in (None, *CLIENTS)}
    for (seed, client), model in result.best_models.items():
        there = RunFolder(tmp_path / "run").model("fedala", seed, client, best=True)
        assert_close({n: v.double() for n, v in model.items()}, there, 1e-6)
    without = run(dataset=federation(), model=Net, save_best=False, **options)
    assert without.best_models == {}
    same_rows(without.history, result.history, 0)


@pytest.mark.parametrize("join_ratio", [1.0, 0.4])
def test_files_at_once_are_the_same(join_ratio, tmp_path, monkeypatch):
    """If memory is short, each improvement is written, and what it replaces is removed."""
    options = {"rounds": 5, "join_ratio": join_ratio, "checkpoint_every": 2, "save_best": True}
    execute(planned(**options), tmp_path / "memory")
    monkeypatch.setattr(Plan, "fits_best_models", property(lambda plan: False))
    seen = []

    def look(method, row):
        found = (tmp_path / "files" / "checkpoint" / "0").glob("best-*")
        seen.append({path.stem.rsplit("-", 1)[1] for path in found})

    observer = RunObserver(on_row=look)
    execute(planned(**options), tmp_path / "files", observer=observer)
    same(tmp_path / "memory", tmp_path / "files")
    assert seen[0] == {"0"}
    assert max(map(len, seen)) <= 3  # two checkpoints refer to theirs, and there is the present one
    auto = execute(planned(**{**options, "save_best": None}), tmp_path / "auto")
    assert auto.config.save_best is False
    without = {**options, "save_best": True, "checkpoint_every": 0}
    execute(planned(**without), tmp_path / "without")
    assert models_of(tmp_path / "without") == models_of(tmp_path / "memory")
    assert not (tmp_path / "without" / "checkpoint").exists()


def test_their_files_belong_to_the_run(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=1), path, observer=stop_after(3))
    assert list((path / "checkpoint").rglob("best-0-global-*.safetensors"))
    list_run_files(path)  # refuses a file that is not a run's
    execute(planned(checkpoint_every=1), path, resume=True)
    assert path / "models/best/fedala/seed-0/client-00004.safetensors" in list_run_files(path)[0]
    execute(planned(save_best=False), path, force=True)
    assert not (path / "models" / "best").exists()


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_damaged_best_model_is_noticed(damage, tmp_path):
    def spoil(path):
        model = path / "models/best/fedala/seed-0/client-00003.safetensors"
        data = model.read_bytes()
        model.unlink()  # its twin in the checkpoint stays
        if damage == "changed":
            model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(files.DamagedFile):
                RunFolder(path).model("fedala", 0, 3, best=True)

    execute(planned(), tmp_path / "whole")
    execute(planned(), tmp_path / "run")
    spoil(tmp_path / "run")
    said = []
    observer = RunObserver(on_message=said.append)
    execute(planned(), tmp_path / "run", resume=True, observer=observer)
    assert any("is gone or damaged" in sentence for sentence in said)
    same(tmp_path / "whole", tmp_path / "run")
    execute(planned(keep_checkpoint=False), tmp_path / "alone")
    spoil(tmp_path / "alone")
    with pytest.raises(files.DamagedFile, match="no checkpoint was kept"):
        execute(planned(keep_checkpoint=False), tmp_path / "alone", resume=True)


def test_a_checkpoint_without_them_is_resumed_and_it_is_said(tmp_path):
    with pytest.raises(Stopped):
        execute(planned(save_best=False), tmp_path / "run", observer=stop_after(2))
    said = []
    observer = RunObserver(on_message=said.append)
    execute(planned(save_best=True), tmp_path / "run", resume=True, observer=observer)
    assert any("have not been kept; those of a better round will be" in one for one in said)


@pytest.mark.parametrize(
    "edit",
    [
        lambda entry: [entry[0], 7, *entry[2:]],
        lambda entry: [entry[0], entry[1], entry[2] + 1, *entry[3:]],
        lambda entry: ["worst", *entry[1:]],
        lambda entry: [*entry[:4], "", ""],
        lambda entry: [*entry[:4], "../../config.toml", entry[5]],
    ],
    ids=["run", "round", "kind", "nothing", "path"],
)
def test_a_manifest_that_no_run_wrote_is_refused(edit, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        execute(planned(checkpoint_every=2), path, observer=stop_after(2))
    manifest = path / "checkpoint" / "0" / "0000002.json"
    values = files.read_checksummed(manifest, "checkpoint", 2**20)
    values["kept"][0] = edit(values["kept"][0])
    manifest.write_bytes(files.pack_checksummed("checkpoint", values))
    with pytest.raises(files.DamagedFile, match=r"damaged|does not fit"):
        execute(planned(checkpoint_every=2), path, resume=True)


# --- early stopping -------------------------------------------------------------------------------


def row(round, accuracy, seed=0, validation=None):
    return HistoryRow(seed, round, accuracy, 0.0, accuracy, validation)


@pytest.mark.parametrize(
    ("accuracies", "patience", "end"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.3], 2, 4),  # the first of equals is the best
        ([0.1, 0.2, 0.2, 0.1, 0.3], 3, None),
        ([0.5, 0.4], 1, 2),
        ([float("nan"), float("nan"), 0.1], 2, 2),
        ([float("nan"), 0.0, 0.0], 2, None),
        ([0.3, 0.2, 0.1], None, None),
    ],
)
def test_when_a_run_stops(accuracies, patience, end):
    watch = RunWatch()
    ends = []
    for round, accuracy in enumerate(accuracies):
        watch.add(row(round, accuracy))
        ends.append(watch.is_over(patience))
    assert (ends.index(True) + 1 if any(ends) else None) == end


def test_validation_samples_decide_and_runs_are_apart():
    rows = [row(0, 0.1, 7, 0.5), row(0, 0.9, 8, 0.1), row(1, 0.2, 7, 0.4), row(1, 0.8, 8, 0.2)]
    first, second = group_runs(rows, [7, 8], 1)
    assert (first.is_over(1), second.is_over(1)) == (True, False)
    assert (first.best.round, second.best.round) == (0, 1)
    for bad in (row(2, 0.3, 7, 0.9), row(2, 0.3, 9)):
        with pytest.raises(ValueError, match="seed"):
            group_runs([*rows, bad], [7, 8], 1)


def stops_of(path, method="fedala"):
    return json.loads((path / "summary.json").read_text())["methods"][method].get(
        "stopped_after_round"
    )


@pytest.mark.parametrize(("method", "join_ratio"), [("fedala", 1.0), ("fedavg", 0.6)])
def test_each_seed_stops_as_it_would_alone(method, join_ratio, tmp_path):
    options = {**LONG, "join_ratio": join_ratio, "lanes": "all", "precision": "float64"}
    result = execute(planned(method, **options), tmp_path / "all").methods[method]
    stops = stops_of(tmp_path / "all", method)
    assert len(set(stops)) > 1, "seeds should stop in different rounds for this test to bite"
    unstopped = execute(planned(method, **{**options, "patience": None}), tmp_path / "unstopped")
    for seed, stop in enumerate(stops):
        alone = execute(
            planned(method, **{**options, "seeds": 1, "seed": seed}), tmp_path / f"alone-{seed}"
        )
        rows = [row for row in result.history if row.seed == seed]
        same_rows(rows, alone.history, 1e-9)
        assert rows[-1].round == (options["rounds"] if stop is None else stop)
        same_rows(
            rows,
            [r for r in unstopped.methods[method].history if r.seed == seed][: len(rows)],
            1e-9,
        )
        # Its last models are those of a run that was planned to end there.
        end = {**options, "seeds": 1, "seed": seed, "patience": None, "rounds": rows[-1].round}
        execute(planned(method, **end), tmp_path / f"planned-{seed}")
        for client in (None, *(CLIENTS if method == "fedala" else ())):
            last = RunFolder(tmp_path / "all").model(method, seed, client)
            for other in (f"alone-{seed}", f"planned-{seed}"):
                there = RunFolder(tmp_path / other).model(method, seed, client)
                assert_close(last, there, 1e-9)
            best = RunFolder(tmp_path / "all").model(method, seed, client, best=True)
            there = RunFolder(tmp_path / f"alone-{seed}").model(method, seed, client, best=True)
            assert_close(best, there, 1e-9)
    clients = [(r["seed"], r["round"]) for r in RunFolder(tmp_path / "all").rows("clients.csv")]
    ends = {(seed, options["rounds"] if stop is None else stop) for seed, stop in enumerate(stops)}
    assert set(clients) == ends


@pytest.mark.parametrize("at", [1, 4])
def test_resumed_is_uninterrupted(at, tmp_path):
    options = {**LONG, "lanes": "all", "checkpoint_every": 1}
    execute(planned(**options), tmp_path / "whole")
    parts = tmp_path / "parts"
    with pytest.raises(Stopped):
        execute(planned(**options), parts, observer=stop_after(at))
    execute(planned(**options), parts, resume=True)
    same(tmp_path / "whole", parts)
    assert stops_of(parts) == stops_of(tmp_path / "whole")


def test_a_run_that_has_stopped_stays_so(tmp_path):
    """Resumed with nothing to do, with more rounds, and after its last models were lost."""
    options = {**LONG, "lanes": "all", "rounds": 40}
    execute(planned(**options), tmp_path / "whole")
    path = tmp_path / "run"
    execute(planned(**options), path)
    assert None not in stops_of(path)
    before = rows_of(path)
    execute(planned(**options), path, resume=True)
    same(tmp_path / "whole", path)
    execute(planned(**{**options, "rounds": 50}), path, resume=True)
    assert rows_of(path) == before
    (path / "models/fedala/seed-1/client-00002.safetensors").unlink()
    execute(planned(**{**options, "rounds": 50}), path, resume=True)
    same(tmp_path / "whole", path)
    lines = (path / "history.csv").read_text().splitlines(keepends=True)
    (path / "history.csv").write_text("".join(lines[:-1]))
    with pytest.raises(files.DamagedFile, match=r"history\.csv"):
        execute(planned(**{**options, "rounds": 50}), path, resume=True)


def test_more_rounds_than_at_first_are_as_if_planned(tmp_path):
    options = {**LONG, "lanes": "all"}
    execute(planned(**options), tmp_path / "whole")
    execute(planned(**{**options, "rounds": 4}), tmp_path / "parts")
    assert None in stops_of(tmp_path / "parts"), "a run should end as planned for this to bite"
    execute(planned(**options), tmp_path / "parts", resume=True)
    same(tmp_path / "whole", tmp_path / "parts")


def test_stopping_by_test_samples_is_said_to_be_optimistic(tmp_path):
    said = []
    observer = RunObserver(on_message=said.append)
    execute(planned(rounds=1, patience=1), tmp_path / "run", observer=observer)
    assert sum("optimistic" in sentence for sentence in said) == 1


def test_a_federation_keeps_the_best_global_model(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower.inprocess import RUN, build_federation, run_in_process

    _, federated = run_in_process(tmp_path, method="fedrep")
    simulated = run(dataset=build_federation(), model=Net, method="fedrep", lanes="1", **RUN)
    folder = RunFolder(tmp_path / "runs" / "fedala")
    there = folder.model("fedrep", RUN["seed"], best=True)
    assert_close(there, simulated.best_models[RUN["seed"], None], 1e-6)
    assert federated.methods["fedrep"].best_rounds == simulated.methods["fedrep"].best_rounds
    assert len(list((folder.path / "models" / "best").rglob("*.safetensors"))) == 1


@pytest.mark.parametrize("option", [{"patience": 3}, {"pick_by": "loss"}])
def test_a_federation_has_the_best_round_by_its_score_and_does_not_stop_early(option):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from fedala.flower.experiment import read_run_config

    [name] = option
    with pytest.raises(UserError, match=f"{name}.*federation|federation.*{name}"):
        read_run_config(option)
