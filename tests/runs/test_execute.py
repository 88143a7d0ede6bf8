"""`fedala.run`: what is asked for is what is done, or it is refused before anything is written."""

import json
import shlex
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala import Config, UserError, run
from fedala.data import Dataset, federate, make_dataset
from fedala.methods import list_methods, make
from fedala.runs.folder import RunFolder
from fedala.runs.plan import plan
from fedala.runs.provenance import command
from fedala.simulation.rounds import Simulation


def small_dataset(samples=60, classes=3):
    random = np.random.default_rng(0)
    y = torch.from_numpy(np.arange(samples) % classes)
    x = torch.from_numpy(random.normal(size=(samples, 1, 6, 6)).astype(np.float32)) + y.view(
        -1, 1, 1, 1
    )
    return Dataset("small", x, y, classes)


QUICK = {"partition": "iid", "clients": 3, "rounds": 1, "lr": 0.1}


def test_own_data_and_model():
    result = run(method="fedala", dataset=small_dataset(), model=Net, **QUICK)
    assert set(result.models) == {(0, None), (0, 0), (0, 1), (0, 2)}
    assert result.config.model == "own"


def test_lanes_on_a_cpu_have_one_thread_each():
    """Threads within small operations wait for each other for longer than they work."""
    found = set()

    class Spy(nn.Linear):
        def forward(self, x):
            if torch._C._functorch.is_batchedtensor(self.weight):
                lanes = len(torch._C._functorch.get_unwrapped(self.weight))
                found.add((lanes, torch.get_num_threads()))
            return super().forward(x.flatten(1))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        data = small_dataset()
        run(method="fedavg", dataset=data, model=lambda: Spy(36, 3), device="cpu", **QUICK)
        assert {threads for lanes, threads in found if lanes == QUICK["clients"]} == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_models_of_a_result_are_each_their_own():
    models = run(method="fedala", dataset=small_dataset(), model=Net, **QUICK).models
    before = models[0, 1]["conv.weight"].clone()
    models[0, 0]["conv.weight"].zero_()
    assert torch.equal(models[0, 1]["conv.weight"], before)
    assert models[0, None]["conv.weight"].abs().sum() > 0


def test_the_command_of_a_summary_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    typed = ["fedala", "run", "--out", "my runs/it's $HOME", "--set", "fedala.layers=['a b']"]
    monkeypatch.setattr(sys, "argv", typed)
    run(method="fedavg", dataset=small_dataset(), model=Net, out=tmp_path / "run", **QUICK)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert shlex.split(summary["command"]) == typed


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: run(Config.from_values({"rounds": 1}), rounds=7), "either a Config or options"),
        (
            lambda: run(Config.from_values({"rounds": 1}), dataset="mnist"),
            "either a Config or options",
        ),
        (
            lambda: run(dataset=federate(small_dataset(), "iid", 3), partition="dir:0.1", rounds=1),
            "divided already",
        ),
        (
            lambda: run(method="fedala,fedavg+ala", dataset=small_dataset(), model=Net, **QUICK),
            "twice",
        ),
        (
            lambda: run(
                method="fedamp", dataset=small_dataset(), model=Net, join_ratio=0.5, **QUICK
            ),
            "every client",
        ),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


def test_a_method_that_cannot_take_the_model_refuses_before_anything_is_written(tmp_path):
    def one_layer():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    with pytest.raises(UserError):
        run(
            method="fedavg,fedrep",
            dataset=small_dataset(),
            model=one_layer,
            out=tmp_path / "run",
            **QUICK,
        )
    assert not list(tmp_path.iterdir())


def test_more_models_than_there_is_room_for_are_refused_and_need_not_be_kept(monkeypatch, tmp_path):
    one = sum(value.numel() * value.element_size() for value in Net().state_dict().values())
    monkeypatch.setattr("fedala.runs.room.free_memory", lambda: 6 * one)
    many = {**QUICK, "clients": 4}
    with pytest.raises(UserError, match="Keeping 4 models takes"):
        run(method="fedala", dataset=small_dataset(), model=Net, **many)
    result = run(method="fedala", dataset=small_dataset(), model=Net, save_models=False, **many)
    assert result.models == {}
    run(
        method="fedala",
        dataset=small_dataset(),
        model=Net,
        save_models=False,
        out=tmp_path / "run",
        **many,
    )
    assert not (tmp_path / "run" / "models").exists()


def test_the_folder_tells_who_holds_what_and_how_w_is_spread(tmp_path):
    federation = federate(small_dataset(), "dir:0.5", 3, validation=0.2)
    run(
        method="fedavg,fedala",
        dataset=federation,
        model=Net,
        rounds=45,
        lr=0.1,
        out=tmp_path / "run",
        save_models=False,
    )
    folder = RunFolder(tmp_path / "run")
    for part in ("train", "validation", "test"):
        counts = np.zeros((3, 3), dtype=int)
        for row in folder.rows("split.csv"):
            counts[row["client"], row["class"]] = row[part]
        np.testing.assert_array_equal(counts, federation.counts(part))
    rows = folder.rows("weights.csv")
    assert sorted({row["round"] for row in rows}) == [
        *range(0, 45, 3),
        45,
    ]  # about twenty times, and at the end
    assert {(row["method"], row["seed"], row["client"]) for row in rows} == {
        ("fedala", 0, k) for k in range(3)
    }
    for row in rows:
        assert sum(row[f"bin{k}"] for k in range(10)) == pytest.approx(1, abs=1e-5)
    run(
        method="fedala",
        dataset=federation,
        model=Net,
        rounds=1,
        record_weights=0,
        out=tmp_path / "off",
    )
    assert not (tmp_path / "off" / "weights.csv").exists()


def test_a_model_of_which_not_one_client_fits_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr("fedala.runs.plan.free_memory", lambda: 1_000)
    with pytest.raises(UserError, match=r"One client at a time takes about 0\.0 GiB"):
        run(method="fedala", dataset=small_dataset(), model=Net, **QUICK)


def test_more_state_than_there_is_disk_for_is_refused(monkeypatch, tmp_path):
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))
    arguments = {
        "dataset": small_dataset(),
        "model": Net,
        **QUICK,
        "out": tmp_path / "run",
        "save_models": False,
    }
    with pytest.raises(
        UserError,
        match=r"state of 3 clients takes \d+\.\d kB of disk, and there is room for 1\.0 kB"
        r".*checkpoint_every=0",
    ):
        run(method="fedala", **arguments)
    assert not list(tmp_path.iterdir())
    run(method="fedala", checkpoint_every=0, **arguments)


def test_every_method_compares():
    config = Config.from_values({"method": "all"})
    assert set(config.methods) == set(list_methods())
    assert {"fedala", "apple", "partialfed+ala"} <= set(config.methods)


def test_all_methods_are_those_that_options_and_model_allow():
    values = {"method": "all", "dataset": "digits", "clients": 3, "join_ratio": 0.5}
    settings = {"apple.mu": 0.2, "ditto.lam": 0.3}
    checked = plan(Config.from_values({**values, "set": settings}))
    refused = {"fedamp", "fedamp+ala", "apple", "fedbn", "fedbn+ala"}  # the CNN has no norms
    assert set(checked.config.methods) == set(list_methods()) - refused
    assert checked.config.set == {"ditto.lam": 0.3}
    assert len(checked.notes) == len(refused)
    assert "FedBN is left out: " in " ".join(checked.notes)
    with pytest.raises(UserError, match="FedAMP needs every client"):
        plan(Config.from_values({**values, "method": "fedamp,fedavg"}))
    assert not plan(Config.from_values({**values, "method": "fedavg"})).notes


def test_all_methods_are_those_that_the_targets_allow():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 4)), random.normal(size=(30, 1))
    values = {"method": "all", "clients": 3, "partition": "iid"}
    checked = plan(Config.from_values(values), make_dataset((x.astype("f4"), y.astype("f4"))))
    refused = {"fedrod", "fedproto", "fedpac", "gpfl"}  # they work with classes
    assert {name.partition("+")[0] for name in checked.config.methods}.isdisjoint(refused)
    assert {"feddbe", "fedcp", "moon", "ifca+ala"} <= set(checked.config.methods)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(2, 2)


def test_a_parameter_that_the_model_does_not_use_stays_as_it_is():
    task = ragged_task([9, 5], model=Unused())
    simulation = Simulation(make("fedavg"), task, start_of(task, Unused), rounds=2)
    list(simulation.run())
    before, after = simulation.initial[0], simulation.servers[0]["global"]
    # The mean of equal numbers may be rounded.
    unused = ("auxiliary.weight", "auxiliary.bias")
    assert_close({n: after[n] for n in unused}, {n: before[n] for n in unused}, 1e-15)
    assert not torch.equal(after["out.weight"], before["out.weight"])


class Dropping(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def test_a_model_that_draws_by_itself_runs_in_one_thread_and_repeats():
    def go():
        task = ragged_task([12, 9, 8, 5], model=Dropping())
        simulation = Simulation(
            make("fedavg"), task, start_of(task, Dropping), rounds=2, lanes=1, threads=3
        )
        assert simulation.transport.threads == 1
        return [evaluation.row.loss for evaluation in simulation.run()]

    assert go() == go()


def test_threads_and_files_together_lose_no_clients_state(monkeypatch):
    """A slow disk: states are on their way to files while other threads come for theirs."""
    import time

    from fedala.io import tensor_files

    def slowly(*args, save=tensor_files.save, **options):
        time.sleep(0.003)
        return save(*args, **options)

    monkeypatch.setattr(tensor_files, "save", slowly)
    sizes = [9, 5, 7, 12, 3, 8, 6, 4, 10, 11]
    options = {"rounds": 5, "join_ratio": 0.5, "lanes": 1}
    _, rows, models = simulate(
        "local", ragged_task(sizes), threads=3, client_memory=9000, **options
    )
    _, wanted, reference = simulate("local", ragged_task(sizes), **options)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in wanted], rel=1e-12)
    for key in reference:
        assert_close(models[key], reference[key], 1e-12)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["/usr/bin/fedala", "run", "--set", "a b=1"], "fedala run --set 'a b=1'"),
        (["/x/fedala/cli/app.py", "run"], "fedala run"),
        (["examples/cli.py", "5"], "examples/cli.py 5"),
    ],
)
def test_the_command_is_told_as_one_would_type_it(monkeypatch, typed, told):
    monkeypatch.setattr("sys.argv", typed)
    assert command() == told


class Drops(Net):
    """It reads a tensor's values, and holds a tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_model_that_needs_real_tensors_to_be_made():
    result = run(method="fedala", dataset=small_dataset(), model=Drops, **QUICK)
    assert result.history[-1].round == QUICK["rounds"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Net(2),
            r"turns 2 samples into a tensor of shape \(2, 2\); "
            r"it must give a score for each of the 3",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(7, 3)),
            r"cannot be run on samples of shape .*: mat1 and mat2",
        ),
        (lambda: nn.LSTM(6, 3), r"cannot be run on samples of shape|turns 2 samples into a tuple"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_work_starts(make, says, tmp_path):
    with pytest.raises(UserError, match=says):
        run(method="fedavg", dataset=small_dataset(), model=make, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fedala", "fedala.eta"),
        ("fedala", "ala.eta"),
        ("fedavg+ala", "fedala.eta"),
        ("fedavg+ala", "ala.eta"),
        ("ditto+ala", "ala.eta"),
        ("ditto+ala", "ditto.lam"),
        ("fedavg,ditto", "ditto.lam"),
    ],
)
def test_a_hyperparameter_of_a_method_of_the_run_is_taken(method, setting):
    options = {"method": method, "set": {setting: 0.5}, **QUICK}
    planned = plan(Config.from_values(options), small_dataset(), Net)
    assert planned.config.set == {setting: 0.5}


@pytest.mark.parametrize(
    ("method", "setting"),
    [("ditto", "ala.eta"), ("ditto+ala", "fedala.eta"), ("fedala", "ditto.lam")],
)
def test_a_hyperparameter_of_another_method_is_refused(method, setting):
    options = {"method": method, "set": {setting: 0.5}, **QUICK}
    with pytest.raises(UserError, match="is not among the methods of this run"):
        plan(Config.from_values(options), small_dataset(), Net)


def test_a_config_and_the_path_of_a_dataset_are_refused(tmp_path):
    with pytest.raises(UserError, match="either a Config or options"):
        run(Config(rounds=1), dataset=tmp_path / "own.npz")


def test_client_scores_are_those_of_the_last_evaluation():
    result = run(method="fedala", dataset=small_dataset(), model=Net, seeds=2, **QUICK)
    scores = result.methods["fedala"].client_scores
    last = {row.seed: row.accuracy for row in result.history}
    assert {seed: (own[:, 0].sum() / own[:, 2].sum()) for seed, own in scores.items()} == last
