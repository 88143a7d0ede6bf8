"""Run folders of runs over ranks: checkpoints, resumes on other numbers, real processes."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ranks.threads import run_ranks
from runs.test_resume import planned, stop_after
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedala.cli import run as run_command
from fedala.cli.app import app
from fedala.errors import RunError, UserError
from fedala.ranks import launch, lead
from fedala.ranks.launch import check_devices
from fedala.ranks.lead import Leader, obey
from fedala.runs.build import build_task
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import Stopped
from fedala.simulation.client_states import ClientStates

OPTIONS = {"precision": "float64", "save_models": True, "save_best": True, "checkpoint_every": 1}


@pytest.fixture(autouse=True)
def one_build_at_a_time(monkeypatch):
    """Threads share torch's generator, which makes the initial models."""
    lock, build = threading.Lock(), lead.build_simulation

    def build_alone(*arguments, **options):
        with lock:
            return build(*arguments, **options)

    monkeypatch.setattr(lead, "build_simulation", build_alone)


def execute_on_ranks(ranks, make_plan, out, **options):
    """Execute a plan over ranks, in threads; with no ranks, in one process as usual."""
    if ranks == 0:
        return execute(make_plan(), out, **options)
    plans = [make_plan() for _ in range(ranks)]
    return run_ranks(
        ranks,
        lambda group: execute(plans[0], out, simulate=Leader(group).simulate, **options),
        lambda group: obey(group, begin=partial(lead._begin, group, plans[group.rank])),
    )


def read(folder):
    """Return the tables and models of a run folder, without seconds."""
    opened = RunFolder.open(folder)
    history = {
        method: [{k: v for k, v in row.columns().items() if k != "seconds"} for row in rows]
        for method, rows in opened.history().items()
    }
    models = {
        str(path.relative_to(folder)): load_file(path)
        for path in sorted((folder / "models").rglob("*.safetensors"))
    }
    return history, models


def assert_same_folders(one, other):
    (history, models), (expected, expected_models) = read(one), read(other)
    assert history.keys() == expected.keys()
    for method, rows in history.items():
        for row, wanted in zip(rows, expected[method], strict=True):
            assert row == pytest.approx(wanted, abs=1e-10, nan_ok=True)
    assert models.keys() == expected_models.keys()
    assert models
    for name, model in models.items():
        for key, value in model.items():
            assert torch.allclose(value, expected_models[name][key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("method", "ratio", "options"),
    [
        ("fedala", 0.5, {}),
        ("fedavg,fedala", 1.0, {"seeds": 2}),
        ("fedala", 0.5, {"client_memory": 1e-9}),  # absent clients are in files
        # Not Adam, which turns the rounding of a gradient that is zero into steps.
        ("ditto+ala", 1.0, {"momentum": 0.9, "keep_optimizer": True}),
    ],
    ids=["half", "two methods, two seeds", "files", "kept optimisers"],
)
def test_resumed_on_another_number_of_ranks(tmp_path, method, ratio, options):
    make_plan = partial(planned, method, join_ratio=ratio, **OPTIONS, **options)
    execute(make_plan(), tmp_path / "whole")
    out = tmp_path / "parts"
    resume = False
    for ranks in (2, 3, 0):  # a process without ranks continues it, too
        with pytest.raises(Stopped):
            execute_on_ranks(ranks, make_plan, out, resume=resume, observer=stop_after(1))
        resume = True
    execute_on_ranks(4, make_plan, out, resume=True)
    assert_same_folders(out, tmp_path / "whole")


def test_a_sweep(tmp_path):
    make_plan = partial(
        planned, "fedala", rounds=2, sweep={"lr": [0.1, 0.05], "batch_size": [4, 5]}, **OPTIONS
    )
    execute(make_plan(), tmp_path / "one")
    execute_on_ranks(2, make_plan, tmp_path / "two")
    assert_same_folders(tmp_path / "two", tmp_path / "one")


def test_without_a_folder_the_models_are_in_the_result():
    make_plan = partial(planned, "fedala", join_ratio=0.5, precision="float64")
    one, two = (execute_on_ranks(ranks, make_plan, None) for ranks in (0, 2))
    [mine], [expected] = two.methods.values(), one.methods.values()
    assert mine.models.keys() == expected.models.keys()
    assert mine.best_models.keys() == expected.best_models.keys()
    for key, model in expected.models.items():
        for name, value in model.items():
            assert torch.allclose(mine.models[key][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("who", [0, 1])
def test_what_any_rank_refuses_is_refused(monkeypatch, who):
    def refuse(config, **options):
        if is_leader() == (who == 0):
            raise UserError("The data are not on this machine.")
        return planned("fedala")

    monkeypatch.setattr(lead, "plan", refuse)
    with pytest.raises(UserError, match="The data are not on this machine") as caught:
        run_ranks(2, lambda group: Leader(group).plan(Config()), lead._serve)
    assert str(caught.value).startswith("Rank 1 cannot take part: ") == (who == 1)


def test_rank_0_alone_rehearses(monkeypatch):
    found = {}

    def refuse(config, is_rehearsed=False):
        found[is_leader()] = is_rehearsed
        raise UserError("No.")

    monkeypatch.setattr(lead, "plan", refuse)
    with pytest.raises(UserError, match="No"):
        run_ranks(2, lambda group: Leader(group).plan(Config()), lead._serve)
    assert found == {True: False, False: True}


def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lead, "SECONDS_TO_SEE", 0.0)
    wait, seen = lead._wait_for_folder, []

    def look_elsewhere(folder):
        seen.append(folder)
        wait(tmp_path / "elsewhere")

    monkeypatch.setattr(lead, "_wait_for_folder", look_elsewhere)
    make_plan = partial(planned, "fedala", rounds=1)
    with pytest.raises(UserError, match=r"elsewhere is not on"):
        execute_on_ranks(2, make_plan, tmp_path / "run")
    assert seen == [tmp_path / "run"]
    execute_on_ranks(2, partial(make_plan, checkpoint_every=0), tmp_path / "other")


def is_leader():
    return threading.current_thread() is threading.main_thread()


def test_ranks_with_other_data_are_refused(monkeypatch):
    """The clients of the other rank would not be those that rank 0 plans with."""

    def make_plan(config, **options):
        made = planned("fedala")
        if is_leader():
            return made
        data = made.federation.dataset
        federation = replace(made.federation, dataset=replace(data, x=data.x + 1))
        return replace(made, federation=federation)

    monkeypatch.setattr(lead, "plan", make_plan)
    with pytest.raises(UserError, match="Rank 1 has another dataset or partition than rank 0"):
        run_ranks(2, lambda group: Leader(group).plan(Config()), lead._serve)


def test_initial_models_that_differ_between_ranks_are_refused(tmp_path):
    ranks = itertools.count()

    def make_plan():
        made, rank = planned("fedala"), next(ranks)

        def make_model():  # its numbers are those of its rank, not of torch's generator
            model = made.make_model()
            torch.nn.init.constant_(next(model.parameters()), rank)
            return model

        return replace(made, make_model=make_model)

    with pytest.raises(UserError, match="The initial model of rank 1 is not that of rank 0"):
        execute_on_ranks(2, make_plan, tmp_path / "x")


def test_a_rank_that_cannot_begin_says_why(monkeypatch, tmp_path):
    def refuse(*arguments):
        raise UserError("The model does not fit here.")

    monkeypatch.setattr(lead, "_begin", refuse)
    with pytest.raises(UserError, match="The model does not fit here"):
        execute_on_ranks(2, partial(planned, "fedala"), tmp_path / "x")


def test_a_full_disk_on_another_rank_is_told_as_in_one_process(monkeypatch, tmp_path):
    write = ClientStates.write

    def fail(self):
        if is_leader():
            return write(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ClientStates, "write", fail)
    make_plan = partial(planned, "fedala", **OPTIONS)
    with pytest.raises(RunError, match="cannot be written to any more: No space left on device"):
        execute_on_ranks(2, make_plan, tmp_path / "x")


def test_ranks_import_no_files_of_this_folder_that_the_program_does_not(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/somewhere/bin"])
    assert launch._python_options() == ["-P"]
    monkeypatch.setattr(sys, "path", [os.getcwd()])  # python -m fedala
    assert launch._python_options() == []


# --- real processes --------------------------------------------------------------------------

RUN = ["run", "--method", "fedala", "--model", "mlp", "--clients", "4", "--batch-size", "50",
       "--precision", "float64", "--device", "cpu", "--checkpoint-every", "1"]  # fmt: skip


def start(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "fedala", *RUN, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def find_ranks(parent):
    """Return the processes of a run, by rank."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    variables = dict(
                        one.partition(b"=")[::2] for one in file.read().split(b"\0") if one
                    )
                with open(f"/proc/{entry}/stat") as file:
                    is_child = int(file.read().rpartition(")")[2].split()[1]) == parent
            except OSError:
                continue
            if is_child and b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(entry)
    return found


def test_a_killed_rank_ends_the_run_and_another_number_of_processes_continues_it(tmp_path):
    out, whole = tmp_path / "parts", tmp_path / "whole"
    process = start("--rounds", 2000, "--out", out, "--devices", 2)
    wait_for(lambda: list((out / "checkpoint").rglob("[0-9]*.json")))
    ranks = find_ranks(process.pid)
    assert ranks.keys() == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "A process of this run has ended" in said
    assert f"fedala run --resume {out}" in said
    assert "Rank 1 was killed by signal 9." in said
    assert "Traceback" not in said
    newest = max(int(path.stem) for path in (out / "checkpoint").rglob("[0-9]*.json"))
    rounds = newest + 2
    # An own number of rounds for both, because nobody knows how far it got.
    runner = CliRunner()
    for more in (["--resume", str(out), "--rounds", str(rounds)],
                 [*RUN[1:], "--out", str(whole), "--rounds", str(rounds)]):  # fmt: skip
        result = runner.invoke(app, ["run", *more])
        assert result.exit_code == 0, result.output
    assert_same_folders(out, whole)


@pytest.mark.deployment
def test_a_mistake_is_one_sentence_from_rank_0(tmp_path):
    out = tmp_path / "x"
    process = start("--devices", 2, "--rounds", 2, "--partition", "nonsense", "--out", out)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.count("nonsense") == 1
    assert "Traceback" not in said
    assert not out.exists()


@pytest.mark.deployment
def test_a_signal_stops_all_ranks_after_their_round(tmp_path):
    out = tmp_path / "x"
    process = start("--rounds", 2000, "--out", out, "--devices", 2)
    wait_for(lambda: list((out / "checkpoint").rglob("[0-9]*.json")))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"Stopped after \d+ rounds of FedALA; to resume it", said)
    assert "Traceback" not in said


@pytest.mark.deployment
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    out = tmp_path / "x"
    process = start("--rounds", 2000, "--out", out, "--devices", 2)
    wait_for(lambda: list((out / "checkpoint").rglob("[0-9]*.json")))
    ranks = find_ranks(process.pid)
    process.kill()
    said, _ = process.communicate(timeout=60)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()))
    assert "Stopped after" in said


def start_by_torchrun(*arguments):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "fedala", *RUN, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.deployment
def test_ranks_that_torchrun_starts_again_resume_their_own_folder_alone(tmp_path):
    out = tmp_path / "x"
    process = start_by_torchrun("--rounds", 40, "--out", out)
    wait_for(lambda: list((out / "checkpoint").rglob("[0-9]*.json")))
    os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    rounds = [int(row.round) for row in RunFolder.open(out).history()["fedala"]]
    assert rounds == list(range(41))
    # A folder that an earlier command has made is refused, however often torchrun tries.
    process = start_by_torchrun("--rounds", 50, "--out", out)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("Error: ") >= 2
    assert len(RunFolder.open(out).history()["fedala"]) == 41


def test_numbers_of_devices_that_cannot_be(monkeypatch):
    with pytest.raises(UserError, match="at least 1"):
        check_devices(0, "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="the number of GPUs here is 2"):
        check_devices(3, "auto")
    check_devices(3, "cpu")


def test_the_device_of_a_config_file_counts(monkeypatch, tmp_path):
    """Any number of processes can share the cores, whatever GPUs are there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(run_command, "launch", lambda devices, arguments: 100 + devices)
    config = tmp_path / "config.toml"
    config.write_text('device = "cpu"')
    for more, code in (([], 2), (["--config", str(config)], 103)):
        result = CliRunner().invoke(app, ["run", "--devices", "3", *more])
        assert result.exit_code == code, result.output


def test_the_ranks_of_a_machine_share_its_memory():
    group = SimpleNamespace(local_size=4)
    for given, expected in ((1.0, 2**28), (1e-9, 0)):
        plan = planned("fedala", client_memory=given)
        task, _ = build_task(plan)
        assert lead._share_machine(group, plan, task)["client_memory"] == expected
